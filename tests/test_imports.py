"""Imports go downward only. The table is the drawing of docs/ARCHITECTURE.md; modules are named in failures."""

from __future__ import annotations

import ast
from pathlib import Path

import kvstore

PACKAGE = Path(kvstore.__file__).parent

LEAVES = {
    "types", "errors", "shards", "hybrid", "hints", "config", "clock", "metrics", "tokens", "native", "logs", "version",
    "load_time", "recompute", "facts",
}  # fmt: skip
SIBLINGS = {"prefix_index", "tiers", "compression", "device", "plan"}
OFFLOADING = {"offload", "lives", "persist", "jobs"}
ALLOWED: dict[str, set[str]] = {
    **dict.fromkeys(LEAVES, LEAVES),
    **dict.fromkeys(SIBLINGS, LEAVES),
    "wire": LEAVES,
    "http": LEAVES,
    "lease": LEAVES | {"prefix_index"},
    "room": LEAVES | SIBLINGS | {"lease"},
    "jobs": LEAVES,
    "waiting": LEAVES,
    "onboard": LEAVES | SIBLINGS | {"lease", "room", "jobs", "waiting"},
    "offload_batch": LEAVES | SIBLINGS,
    "nvme_room": LEAVES | SIBLINGS,
    "hbm_room": LEAVES | SIBLINGS,
    "promote": LEAVES | SIBLINGS | {"jobs", "hbm_room"},
    "cleaner": LEAVES | SIBLINGS | {"offload"},
    "lives": LEAVES | SIBLINGS,
    "persist": LEAVES | SIBLINGS | {"waiting"},
    "offload_skips": LEAVES | SIBLINGS,
    "offload": LEAVES
    | SIBLINGS
    | {"lease", "jobs", "waiting", "offload_batch", "offload_skips", "nvme_room", "lives", "persist"},
    "holder": LEAVES,
    "takeover": LEAVES | SIBLINGS | {"holder"},
    "store": LEAVES | SIBLINGS | OFFLOADING | {"cleaner", "lease", "room", "onboard", "takeover", "promote"},
    "server": LEAVES
    | SIBLINGS
    | OFFLOADING
    | {"lease", "room", "onboard", "takeover", "promote", "store", "wire", "http"},
    "client": LEAVES | {"wire"},
    "embedded": LEAVES | SIBLINGS | {"server", "client"},
    "engine_adapter": LEAVES | {"client", "device", "compression", "plan"},
    "bench": LEAVES | SIBLINGS | {"client", "embedded", "engine_adapter"},
    "cli": LEAVES | SIBLINGS | {"lease", "store", "server", "wire", "client", "engine_adapter", "bench"},
}


def modules() -> list[tuple[str, Path]]:
    """Dotted name below ``kvstore`` and file of every module; symlinked folders are followed."""
    found = []
    for folder in [PACKAGE, *sorted(path for path in PACKAGE.iterdir() if path.is_dir())]:
        pattern = "*.py" if folder == PACKAGE else "**/*.py"
        found += [
            (path.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", "."), path)
            for path in sorted(folder.glob(pattern))
        ]
    return found


def imports_of(path: Path) -> set[str]:
    """Parts of this package that a module imports anywhere, also inside functions and for type checking."""
    parts = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} uses a relative import"
            names = [
                f"{node.module}.{alias.name}" if node.module == "kvstore" else str(node.module) for alias in node.names
            ]
        parts |= {name.split(".")[1] for name in names if name.startswith("kvstore.") and "__" not in name}
    return parts


def test_imports_go_downward_only() -> None:
    wrong = []
    seen = set()
    for name, path in modules():
        part = name.split(".")[0]
        if part == "__init__":
            continue
        seen.add(part)
        assert part in ALLOWED, f"{name}: say in ALLOWED where this part stands"
        wrong += [f"{name} imports {target}" for target in sorted(imports_of(path) - {part} - ALLOWED[part])]
    assert not wrong, "; ".join(wrong)
    assert {"prefix_index", "tiers", "store", "server", "client", "bench", "cli"} <= seen


def test_there_are_no_cycles_between_modules() -> None:
    graph: dict[str, set[str]] = {}
    names = {name.removesuffix(".__init__") for name, _ in modules()}
    for name, path in modules():
        targets = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("kvstore."):
                base = node.module.removeprefix("kvstore.")
                inner = {f"{base}.{alias.name}" for alias in node.names} & names
                targets |= inner or {base}
        graph[name.removesuffix(".__init__")] = targets
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, "cycle: " + " -> ".join((*trail, name))
        if name in done:
            return
        for target in graph.get(name, ()):
            visit(target, (*trail, name))
        done.add(name)

    for name in graph:
        if name != "__init__":
            visit(name, ())


def test_file_names_say_one_thing() -> None:
    """Most modules stay below 400 lines; one that outgrows its name is to be split."""
    long = [
        f"{name} ({n})"
        for name, path in modules()
        if (n := len(path.read_text().splitlines())) > 450 and "_pb2" not in name
    ]
    assert not long, ", ".join(long)
