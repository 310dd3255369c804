"""What names weights, configs and adapters (that what differs never hits: test_cases.py)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from vllm.lora.request import LoRARequest

from kvstore.engine_adapter.counters import SharedCounters
from kvstore.engine_adapter.vllm.guard import Guard
from kvstore.engine_adapter.vllm.loras import LoraIdentities
from kvstore.engine_adapter.vllm.weights import config_digest, weights_id
from kvstore.errors import ConfigError
from tests.engines.models import make_lora


def test_weights_are_told_apart_by_every_byte(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(bytes(100))
    (tmp_path / "b.bin").write_bytes(bytes(50))
    (tmp_path / "readme.txt").write_bytes(b"1")
    known = {weights_id(str(tmp_path), None, "auto")}
    (tmp_path / "readme.txt").write_bytes(b"2")
    assert weights_id(str(tmp_path), None, "auto") in known
    for name, content in (
        ("a.safetensors", bytes(99) + b"\1"),
        ("a.safetensors", bytes(101)),
        ("c.safetensors", b""),
        ("b.bin", b""),
    ):
        (tmp_path / name).write_bytes(content)
        found = weights_id(str(tmp_path), None, "auto")
        assert found not in known
        known.add(found)


@pytest.mark.parametrize(
    ("model", "load_format", "why"),
    [("{tmp}", "auto", "no weights"), ("{tmp}", "dummy", "at random"), ("no/such-model", "auto", "hub's cache")],
)
def test_weights_without_identity_are_refused(tmp_path: Path, model: str, load_format: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"{why}.*weights_id"):
        weights_id(model.format(tmp=tmp_path), None, load_format)


def test_a_commit_names_weights_of_the_hub() -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    assert weights_id("some/model", commit, "auto") == f"hub some/model@{commit}"


def test_a_config_says_what_a_model_computes() -> None:
    class Config:
        def __init__(self, **facts: Any) -> None:
            self._facts = facts

        def to_dict(self) -> dict[str, Any]:
            return self._facts

    plain = config_digest(Config(rope_theta=1e4, layers=[1, 2]), [])
    assert config_digest(Config(layers=[1, 2], rope_theta=1e4, _name_or_path="/elsewhere"), []) == plain
    assert config_digest(Config(rope_theta=2e4, layers=[1, 2]), []) != plain
    assert config_digest(Config(rope_theta=1e4, layers=[1, 2]), [("dtype", "half")]) != plain


def test_adapters_that_change_under_the_engine_are_left_alone(llama: Path, tmp_path: Path) -> None:
    path = make_lora(tmp_path / "adapter", llama, 1)
    counters = SharedCounters()
    loras = LoraIdentities(Guard(counters))
    request = LoRARequest("it", 1, str(path))
    known = loras.of(request)
    assert known == loras.of(request) == LoraIdentities(Guard(counters)).of(request)
    assert loras.of(None) == ""
    assert loras.of(LoRARequest("it", 1, str(tmp_path / "not-there"))) is None
    assert loras.of(LoRARequest("it", 1, str(path), load_inplace=True)) is None
    weights = path / "adapter_model.safetensors"
    at = weights.stat()
    os.utime(weights, ns=(at.st_atime_ns, at.st_mtime_ns + 1))
    assert loras.of(request) is None
    assert LoraIdentities(Guard(counters)).of(request) == known
