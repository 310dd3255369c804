"""The Triton kernels, interpreted on the CPU, against the definition of attention in float64."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvstore.engine_adapter.attention import Part
from tests.engine_adapter.attention.conftest import Child
from tests.engine_adapter.attention.scenes import Bytes, make_scene

RAGGED = [37, 0, 16, 130, 1]
DIMS = [64, 80, 128, 256]
LATENT = {"kv_heads": 1, "key_dim": 576, "latent_value_dim": 512}


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("key_dim", DIMS)
def test_every_head_dim_and_dtype(interpreter: Child, key_dim: int, dtype: str, splits: int) -> None:
    order = "HND" if key_dim == 80 else "NHD"
    assert not interpreter.ask(
        "agrees", seed=key_dim, n_tokens=RAGGED, splits=splits, dtype=dtype, key_dim=key_dim, order=order
    )


@pytest.mark.parametrize(("group", "kv_heads"), [(1, 3), (2, 2), (5, 1), (8, 2), (16, 1), (40, 1)])
def test_every_number_of_query_heads_for_a_kv_head(interpreter: Child, group: int, kv_heads: int) -> None:
    assert not interpreter.ask("agrees", seed=group, n_tokens=RAGGED, group=group, kv_heads=kv_heads, splits=2)


@pytest.mark.parametrize(("dtype", "group"), [("bfloat16", 16), ("float16", 40)])
def test_a_latent_is_key_and_value(interpreter: Child, dtype: str, group: int) -> None:
    assert not interpreter.ask("agrees", seed=3, n_tokens=[70, 0, 33], dtype=dtype, group=group, splits=2, **LATENT)


@pytest.mark.parametrize("page_tokens", [1, 3, 16, 64, 100])
def test_every_size_of_pages(interpreter: Child, page_tokens: int) -> None:
    assert not interpreter.ask("agrees", seed=4, n_tokens=[101, 64, 65, 0], page_tokens=page_tokens, splits=2)


@pytest.mark.parametrize("alignment", [2, 8])
def test_pages_that_are_not_aligned(interpreter: Child, alignment: int) -> None:
    assert not interpreter.ask("agrees", seed=5, n_tokens=RAGGED, alignment=alignment)


def test_tokens_before_the_first_are_not_seen(interpreter: Child) -> None:
    assert not interpreter.ask("agrees", seed=6, n_tokens=[90, 40, 7], first_tokens=[33, 40, 6], splits=2)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize(("window", "sinks"), [(20, 0), (20, 4), (1, 64), (500, 3), (33, 70)])
def test_windows_and_sinks(interpreter: Child, window: int, sinks: int, splits: int) -> None:
    assert not interpreter.ask("windowed", seed=7, n_tokens=[200, 21, 70, 1], window=window, sinks=sinks, splits=splits)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_far_apart(interpreter: Child, dtype: str) -> None:
    assert not interpreter.ask("agrees", seed=8, n_tokens=RAGGED, dtype=dtype, key_dim=128, strong=True, splits=3)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("n_excluded", [3, 64, 150])
def test_whole_tiles_of_logits_that_are_minus_infinity(interpreter: Child, n_excluded: int, splits: int) -> None:
    # 16 query heads: rows of padding would be 0 times infinity, of which numpy warns.
    asked: dict[str, Any] = {"seed": 13, "n_tokens": [300, 64, 130, 1], "group": 16, "kv_heads": 1}
    assert not interpreter.ask("agrees", n_excluded=n_excluded, splits=splits, **asked)


@pytest.mark.parametrize("splits", [1, 2, 5, 9])
def test_splits_merge_to_the_whole_and_nothing_else_is_written(interpreter: Child, splits: int) -> None:
    asked: dict[str, Any] = {"seed": 9, "n_tokens": [300, 0, 70, 65], "splits": splits, "group": 3}
    assert not interpreter.ask("parts_agree", as_float32=True, key_dim=80, **asked)
    # Products of 16 bits, as they are compiled: numpy has those of float16.
    assert not interpreter.ask("parts_agree", as_float32=False, key_dim=64, **asked)


@pytest.mark.parametrize("extra", [{}, LATENT | {"group": 16}])
def test_pages_in_another_mapping_of_the_same_memory(interpreter: Child, extra: dict[str, int]) -> None:
    assert not interpreter.ask("agrees", seed=10, n_tokens=RAGGED, mapped=True, splits=2, **extra)


@pytest.fixture
def shared_file() -> Iterator[Path]:
    fd = os.memfd_create("pages")
    yield Path(f"/proc/{os.getpid()}/fd/{fd}")
    os.close(fd)


def test_pages_that_another_process_wrote(interpreter: Child, shared_file: Path) -> None:
    size = 0

    def memory(n_bytes: int) -> tuple[Bytes, int, Any]:
        nonlocal size
        size = n_bytes
        os.truncate(shared_file, n_bytes)
        writer = np.memmap(shared_file, np.uint8, "r+")
        return writer, 0, writer

    n_tokens = [100, 17]
    scene = make_scene(11, n_tokens, dtype="bfloat16", memory=memory)
    layout = scene.pages.layout
    rows = scene.pages.addresses.tolist()
    indptr = scene.pages.indptr.tolist()
    names = ("page_tokens", "kv_heads", "key_dim", "value_dim", "token_stride", "head_stride", "value_offset")
    found = interpreter.ask(
        "from_another_process",
        file=str(shared_file),
        n_bytes=size,
        rows=[rows[begin:end] for begin, end in pairwise(indptr)],
        n_tokens=n_tokens,
        q=scene.q.double().tolist(),
        dtype="bfloat16",
        layout={name: getattr(layout, name) for name in names},
    )
    assert not scene.disagreement(Part(*(torch.tensor(each, dtype=torch.float64) for each in found)))


PLANTED = {
    "a wrong stride": ("rows += kv_head.to(tl.int64) * head_stride", "rows += kv_head.to(tl.int64) * token_stride"),
    "K for V": ("value_rows = rows + value_offset", "value_rows = rows + 0"),
    "a missing term of the lse": ("(most + tl.log2(divisor))", "tl.log2(divisor)"),
    "a lse of another base": (" * 0.6931471805599453", ""),
    "an output that was not scaled down": ("output = output * faded[:, None]", "output = output"),
    "a sum that was not scaled down": ("total = total * faded", "total = total"),
    "tokens that are not there": (
        'tl.where(is_visible[None, :], logits * scale_log2, float("-inf"))',
        "logits * scale_log2",
    ),
    "the table of the request before": ("addresses + tl.load(indptr + request)", "addresses"),
    "weights of the merge relative to something else": (
        'tl.where(most == float("-inf"), 0.0, most)',
        'tl.where(most == float("-inf"), 0.0, most + 1.0)',
    ),
    "a merge that forgets a split": ("for i in range(n_splits)", "for i in range(n_splits - 1)"),
    "padding heads that are written": ("tl.store(lses + row, lse, mask=is_head)", "tl.store(lses + row, lse)"),
    "16-bit weights alone": ("output = tl.dot(low, values, output)", "output = output"),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bugs_are_caught(interpreter: Child, bug: str) -> None:
    asked = {"seed": 12, "n_tokens": [150, 0, 70, 37], "splits": 2, "kv_heads": 3, "group": 3, "as_float32": False}
    old, new = PLANTED[bug]
    assert not interpreter.ask("parts_agree", **asked)
    assert interpreter.ask("planted", old=old, new=new, asked="parts_agree", arguments=asked)
