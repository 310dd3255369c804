"""The Triton kernels compiled for GPUs that aren't there: nothing spilled, and rows loaded 16 bytes at a time."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine_adapter.attention.conftest import Child

ARCHITECTURES = [80, 90, 100]
SHARED_BYTES_MAX = 99 << 10
LATENT = {"key_dim": 576, "latent_value_dim": 512, "page_tokens": 64}


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("key_dim", [64, 80, 128, 256])
def test_every_head_dim_without_spills(compiler: Child, arch: int, key_dim: int) -> None:
    for group in (8, 32):
        found = compiler.ask("compiled", arch=arch, dtype="bfloat16", group=group, key_dim=key_dim)
        _check(found, group)
        assert found["wide"]
        assert not found["narrow"]


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("key_dim", [80, 256])
def test_float32_without_spills(compiler: Child, arch: int, key_dim: int) -> None:
    for group in (8, 32):
        _check(compiler.ask("compiled", arch=arch, dtype="float32", group=group, key_dim=key_dim), group)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("options", [{"has_sinks": True}, {"is_aligned": False}], ids=str)
def test_sinks_and_unaligned_pages_without_spills(compiler: Child, arch: int, options: dict[str, bool]) -> None:
    shapes: list[dict[str, Any]] = [{"key_dim": 128, "group": 4}, LATENT | {"group": 16}]
    for shape in shapes:
        found = compiler.ask("compiled", arch=arch, dtype="float16", **shape, **options)
        _check(found, shape)
        # A wide load of what is not aligned is a fault.
        assert bool(found["narrow" if "is_aligned" in options else "wide"])
        assert not found["wide" if "is_aligned" in options else "narrow"]


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("dtype", "group"), [("bfloat16", 16), ("bfloat16", 128), ("float16", 16)])
def test_latents_without_spills(compiler: Child, arch: int, dtype: str, group: int) -> None:
    _check(compiler.ask("compiled", arch=arch, dtype=dtype, group=group, **LATENT), group)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_merge_without_spills(compiler: Child, arch: int) -> None:
    for value_dim, splits in ((80, 2), (512, 64)):
        _check(compiler.ask("compiled_merge", arch=arch, value_dim=value_dim, splits=splits), value_dim)


def test_spills_are_seen(compiler: Child) -> None:
    """With a tiling that is too large for the registers."""
    found = compiler.ask(
        "compiled", arch=90, dtype="float16", group=16, key_dim=256, is_aligned=False, tiling=[16, 64, 4]
    )
    assert found["spilled_bytes"] > 0


def test_a_missing_hint_is_seen(compiler: Child) -> None:
    asked = {"arch": 90, "dtype": "bfloat16", "group": 8, "key_dim": 128}
    found = compiler.ask("planted", old=" tl.multiple_of(rows, 16)", new=" rows", asked="compiled", arguments=asked)
    assert found["narrow"]


def _check(found: dict[str, int], shape: object) -> None:
    assert found["spilled_bytes"] == 0, (found, shape)
    assert found["shared_bytes"] <= SHARED_BYTES_MAX, (found, shape)
