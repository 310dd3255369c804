"""The package as it is imported: names it brings, and what is said where something is missing."""

from __future__ import annotations

import builtins
import subprocess
import sys
from typing import Any

import pytest

import kvstore


def test_everything_at_once_leaves_pythons_own_names_alone() -> None:
    here: dict[str, Any] = {}
    exec("from kvstore import *", here)  # noqa: S102 - only allowed in a module
    assert not {name for name in here if not name.startswith("__")} & set(dir(builtins))
    assert here["Client"] is kvstore.Client
    assert "open" in dir(kvstore)
    assert kvstore.open.__module__ == "kvstore.embedded"


@pytest.mark.parametrize(
    ("adapter", "missing", "says"),
    [
        ("transformers", "torch", "needs torch, which is not installed: pip install '.[transformers]' in a checkout"),
        ("transformers", "transformers", "needs transformers, which is not installed: pip install '.[transformers]'"),
        ("attention", "torch", "needs torch, which is not installed: pip install '.[torch]' in a checkout"),
        ("vllm", "torch", "which is not installed: install kvstored (pip install . in a checkout) where vLLM is"),
        ("vllm", "vllm", "which is not installed: install kvstored (pip install . in a checkout) where vLLM is"),
    ],
)
def test_an_adapter_says_what_it_lacks(adapter: str, missing: str, says: str) -> None:
    program = f"import sys; sys.modules[{missing!r}] = None; import kvstore.engine_adapter.{adapter}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"ImportError: kvstore.engine_adapter.{adapter} ")
    assert says in last
