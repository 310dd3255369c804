"""Mistakes that are easily made in a kernel, each made in a copy of the source: what checks the kernels sees each."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore.device.copy_kernels import PageSide, table_of_pages, table_of_runs
from kvstore.device.cpu_build import compiled
from kvstore.device.kernels import SOURCE
from kvstore.device.on_cpu import CpuKernels
from kvstore.device.page_kernels import KeyPages, summarize_pages
from kvstore.device.simulated import SimulatedDevice
from kvstore.errors import DeviceError
from tests.device.kernels import references
from tests.device.kernels.arena import Arena
from tests.device.kernels.references import to_bits, to_float
from tests.device.kernels.test_copies import check
from tests.device.kernels.test_pages import scored

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is missing: kernels can't be compiled")

Broken = Callable[[str, str], Arena]


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Broken]:
    """Makes a device whose kernels have one text in place of another."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    arenas = []

    def make(old: str, new: str) -> Arena:
        text = SOURCE.read_text()
        assert text.count(old) == 1, f"{old!r} is not in the source just once"
        source = tmp_path / "broken.cu"
        source.write_text(text.replace(old, new))
        arenas.append(Arena(SimulatedDevice(launcher=CpuKernels(compiled(source)).launch)))
        return arenas[-1]

    yield make
    for arena in arenas:
        arena.close()


def copy_pages(arena: Arena) -> None:
    """From a page-first layout with heads first to a layer-first one with tokens first."""
    arena.clear()
    come_from = arena.put(np.random.default_rng(1).integers(0, 256, (3, 2, 4, 4, 48), np.uint8))
    to = arena.put(np.random.default_rng(2).integers(0, 256, (2, 12, 4, 48), np.uint8))
    planes = np.arange(2, dtype=np.uint64)
    table = table_of_pages(
        PageSide(planes * 12 * 192 + arena.address(to), np.zeros(1, np.int64), 12, 192, 48),
        PageSide(planes * 768 + arena.address(come_from), np.arange(3) * 1536, 4, 48, 192),
        11,
        4,
        48,
    )
    expected = arena.picture()
    source = arena.array(expected, come_from, (3, 2, 4, 4, 48), np.uint8)
    tokens = source.transpose(1, 0, 3, 2, 4).reshape(2, 12, 4, 48)
    arena.array(expected, to, (2, 12, 4, 48), np.uint8)[:, :11] = tokens[:, :11]
    check(arena, table, expected)


def copy_runs(arena: Arena) -> None:
    """Runs of three pieces, of which the last is not whole."""
    arena.clear()
    come_from = arena.put(np.random.default_rng(1).integers(0, 256, (2, 5, 1200), np.uint8))
    to = arena.put(np.random.default_rng(2).integers(0, 256, (2, 5, 1200), np.uint8))
    planes, offsets = np.arange(2, dtype=np.uint64) * 6000, np.arange(5) * 1200
    sizes = np.full(5, 1104, np.uint64)
    table = table_of_runs(planes + arena.address(to), planes + arena.address(come_from), offsets, offsets, sizes)
    expected = arena.picture()
    here, there = (arena.array(expected, begin, (2, 5, 1200), np.uint8) for begin in (to, come_from))
    here[:, :, :1104] = there[:, :, :1104]
    check(arena, table, expected)


def summarize(arena: Arena) -> None:
    """Whole and ragged pages."""
    arena.clear()
    keys = np.random.default_rng(3).normal(size=(3, 5, 2, 16)).astype(np.float32)
    rows = np.array([5, 3, 1], np.uint32)
    begin, row_table = arena.put(keys), arena.put(rows)
    pages = arena.put(np.arange(3, dtype=np.uint64) * 640 + arena.address(begin))
    room = [arena.put_room((3, 2, 16), np.float32) for _ in range(3)]
    expected = arena.picture()
    for place, values in zip(room, references.summaries(keys, rows), strict=True):
        arena.array(expected, place, (3, 2, 16), np.float32)[:] = values
    arena.upload()
    given = KeyPages(arena.address(pages), arena.address(row_table), 3, 2, 16, "float32", 128, 64)
    low, high, mean = (arena.address(place) for place in room)
    summarize_pages(arena.device, given, arena.stream, low=low, high=high, mean=mean)
    assert np.array_equal(arena.result(), expected)


def score(arena: Arena) -> None:
    """Queries in three tiles, pages that leave some warps of the last block without one."""
    rng = np.random.default_rng(5)
    keys, asked = rng.normal(size=(11, 3, 1, 576)).astype(np.float32), rng.normal(size=(1, 48, 576)).astype(np.float32)
    low, high, queries = (to_bits(each, "float16") for each in (keys.min(1), keys.max(1), asked))
    got = scored(arena, "float16", [low, high], queries, add=True)
    least, most, q = (to_float(each, "float16") for each in (low, high, queries))
    assert np.array_equal(got, references.scores(q, least, most, add=True))


def summarize_nothing(arena: Arena) -> None:
    """A page without rows: nothing is written."""
    arena.clear()
    begin, rows = arena.put(np.zeros((1, 1, 1, 8), np.uint16)), arena.put(np.zeros(1, np.uint32))
    pages, place = arena.put(np.array([arena.address(begin)], np.uint64)), arena.put_room((1, 1, 8), np.uint16)
    expected = arena.picture()
    arena.upload()
    given = KeyPages(arena.address(pages), arena.address(rows), 1, 1, 8, "float16", 16, 16)
    summarize_pages(arena.device, given, arena.stream, low=arena.address(place))
    assert np.array_equal(arena.result(), expected)


def round_ties(arena: Arena) -> None:
    _mean_of_neighbours(arena, "bfloat16", first=0x3F80)


def round_subnormals(arena: Arena) -> None:
    _mean_of_neighbours(arena, "float16", first=0x0380)


def _mean_of_neighbours(arena: Arena, dtype: str, first: int) -> None:
    arena.clear()
    values = np.arange(first, first + 128, dtype=np.uint16)
    keys = np.stack((values, values + np.uint16(1)))[None, :, None]
    begin, rows = arena.put(keys), arena.put(np.full(1, 2, np.uint32))
    pages, place = arena.put(np.array([arena.address(begin)], np.uint64)), arena.put_room((1, 1, 128), np.uint16)
    arena.upload()
    given = KeyPages(arena.address(pages), arena.address(rows), 1, 1, 128, dtype, 256, 256)
    summarize_pages(arena.device, given, arena.stream, mean=arena.address(place))
    got = arena.array(arena.result(), place, (1, 1, 128), np.uint16)
    mean = references.summaries(to_float(keys, dtype), np.full(1, 2, np.uint32))[2]
    assert np.array_equal(got, to_bits(mean, dtype))


def test_the_kernels_as_they_are_pass(arena: Arena) -> None:
    for run in (copy_pages, copy_runs, summarize, summarize_nothing, score, round_ties, round_subnormals):
        run(arena)


@pytest.mark.parametrize(
    ("old", "new", "run"),
    [
        ("token * token_bytes + head", "token * head_bytes + head", copy_pages),
        ("head * head_bytes);\n  }", "head * token_bytes);\n  }", copy_pages),
        ("planes[plane] + (Address)(starts[page]", "planes[0] + (Address)(starts[page]", copy_pages),
        ("first + (Address)(r * token_bytes)", "first + (Address)(r * head_bytes)", summarize),
        (
            "((Address)page * heads + head) * head_dim + channel",
            "((Address)page * heads) * head_dim + channel",
            summarize,
        ),
    ],
)
def test_a_wrong_stride_is_caught(broken: Broken, old: str, new: str, run: Callable[[Arena], None]) -> None:
    with pytest.raises(AssertionError):
        run(broken(old, new))


@pytest.mark.parametrize(
    "barrier",
    ["__syncthreads();  // all are done with the queries before", "__syncthreads();  // all of the tile is there"],
)
def test_a_missing_barrier_is_caught(broken: Broken, barrier: str) -> None:
    with pytest.raises(AssertionError):
        score(broken(barrier, ""))


def test_a_wrong_shuffle_mask_is_caught(broken: Broken) -> None:
    arena = broken("0xffffffffu, sum, apart", "0x0000ffffu, sum, apart")
    with pytest.raises(DeviceError, match="mask"):
        score(arena)


@pytest.mark.parametrize(
    ("old", "new", "run"),
    [
        ("if (inside < cursor.size_bytes())", "if (true)", copy_runs),
        ("if (n_rows == 0) continue;", "", summarize_nothing),
        ("if (page < n_pages && lane == 0) scores", "if (lane == 0) scores", score),
        ("r < n_rows; ++r", "r <= n_rows; ++r", summarize),
    ],
)
def test_what_goes_past_an_end_is_caught(broken: Broken, old: str, new: str, run: Callable[[Arena], None]) -> None:
    with pytest.raises((AssertionError, DeviceError)):
        run(broken(old, new))


@pytest.mark.parametrize(
    ("old", "new", "run"),
    [
        ("apart = 16; apart > 0", "apart = 8; apart > 0", score),
        ("magnitude < 0x38800000u", "magnitude < 0x38000000u", round_subnormals),
        ("+ 0x7fffu + (bits >> 16 & 1u)", "+ 0x8000u", round_ties),
        ("__fdiv_rn(sum[i], (float)n_rows)", "__fmul_rn(sum[i], 1.0f / (float)n_rows)", summarize),
    ],
)
def test_wrong_arithmetic_is_caught(broken: Broken, old: str, new: str, run: Callable[[Arena], None]) -> None:
    with pytest.raises(AssertionError):
        run(broken(old, new))
