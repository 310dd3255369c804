"""Every name of CUDA and NVML that this project uses exists in NVIDIA's packages, which need no GPU for that."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

import kvstore

PACKAGE = Path(kvstore.__file__).parent
FOLDERS = [PACKAGE, *(path.resolve() for path in PACKAGE.iterdir() if path.is_symlink())]
CUPY = re.compile(r"cupy(\.\w+)+")
PATTERN = re.compile(r"(cuda|cu|nvrtc)[A-Z]\w+|CUDA_(ERROR|SUCCESS)\w*|CU_[A-Z]\w+|nvml[A-Z]\w+|NVML_\w+")
MODULES = ("cuda.bindings.runtime", "cuda.bindings.driver", "cuda.bindings.nvrtc", "pynvml")


def names_used() -> dict[str, str]:
    """Each name as an attribute or as a whole text, with a place where it is used."""
    used: dict[str, str] = {}
    for path in sorted({file.resolve() for folder in FOLDERS for file in folder.rglob("*.py")}):
        for node in ast.walk(ast.parse(path.read_text())):
            name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "value", None)
            if isinstance(name, str) and PATTERN.fullmatch(name):
                used.setdefault(name, f"{path.name}:{getattr(node, 'lineno', '?')}")
    return used


def names_known() -> set[str]:
    """All names of the modules, members of their enumerations and fields of their structures."""
    known = set()
    for module in map(importlib.import_module, MODULES):
        for name, value in vars(module).items():
            known.add(name)
            known.update(getattr(value, "__members__", ()))
            known.update(field for field, *_ in getattr(value, "_fields_", ()))
    return known


def test_every_name_exists() -> None:
    used, known = names_used(), names_known()
    assert {"cudaMemcpyBatchAsync", "cuLaunchKernel", "nvrtcCompileProgram", "cudaErrorMemoryAllocation"} <= set(used)
    assert not {name: place for name, place in used.items() if name not in known}


def test_every_name_of_cupy_exists() -> None:
    """cupy can be imported without a driver, and knows what it has."""
    used = set()
    for path in (file.resolve() for folder in FOLDERS for file in folder.rglob("*.py")):
        tree = ast.parse(path.read_text())
        used |= {text for node in ast.walk(tree) if CUPY.fullmatch(text := _dotted(node))}
    assert "cupy.asarray" in used
    cupy = importlib.import_module("cupy")
    for name in used:
        found = cupy
        for part in name.split(".")[1:]:
            assert hasattr(found, part), name
            found = getattr(found, part)


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


@pytest.mark.parametrize(
    ("made", "fields"),
    [
        ("cudaMemcpyAttributes", ("srcAccessOrder",)),
        ("cudaIpcMemHandle_t", ("getPtr",)),
        ("cudaDeviceProp", ("name", "uuid", "totalGlobalMem", "major", "minor")),
    ],
)
def test_structures_have_the_fields(made: str, fields: tuple[str, ...]) -> None:
    structure = getattr(importlib.import_module("cuda.bindings.runtime"), made)()
    assert all(hasattr(structure, field) for field in fields)
