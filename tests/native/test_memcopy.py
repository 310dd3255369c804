"""Copies between raw addresses, by every way this machine has."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvstore.errors import BadInputError
from kvstore.native import backend, copy_batch, memcopy

WAYS = ["best", "portable", "numpy"]


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    choose(request.param, monkeypatch)
    return str(request.param)


def choose(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "numpy":
        monkeypatch.setattr(memcopy, "_copy", None)
    elif memcopy._copy is None:
        pytest.skip("the C part is not built here")
    elif way == "portable":
        monkeypatch.setattr(memcopy, "_level", 0)


def addresses(array: NDArray[np.uint8], offsets: list[int]) -> NDArray[np.uint64]:
    return np.array([array.ctypes.data + offset for offset in offsets], np.uint64)


@st.composite
def batches(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """Blocks as (gap before the destination, offset of the source, size)."""
    size = st.one_of(st.integers(0, 200), st.integers(3900, 4400), st.integers(9000, 20000))
    return draw(st.lists(st.tuples(st.integers(0, 130), st.integers(0, 300), size), max_size=8))


def check_batch(blocks: list[tuple[int, int, int]], threads: int, streaming: bool) -> None:
    rng = np.random.default_rng(len(blocks) * 31 + threads)
    source = rng.integers(0, 256, 300 + 20000, dtype=np.uint8)
    total = sum(gap + size for gap, _, size in blocks) + 64
    target = rng.integers(0, 256, total, dtype=np.uint8)
    expected, position, starts = bytearray(target.tobytes()), 0, []
    for gap, offset, size in blocks:
        position += gap
        starts.append(position)
        expected[position : position + size] = source.tobytes()[offset : offset + size]
        position += size
    copy_batch(
        addresses(target, starts),
        addresses(source, [offset for _, offset, _ in blocks]),
        np.array([size for _, _, size in blocks], np.uint64),
        threads,
        streaming,
    )
    assert target.tobytes() == bytes(expected)


@pytest.mark.parametrize("chosen", WAYS)
@pytest.mark.parametrize("streaming", [True, False])
def test_any_sizes_and_alignments_give_the_bytes_and_touch_nothing_else(chosen: str, streaming: bool) -> None:
    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(blocks=batches(), threads=st.integers(1, 3))
    def run(blocks: list[tuple[int, int, int]], threads: int) -> None:
        check_batch(blocks, threads, streaming)

    with pytest.MonkeyPatch.context() as patch:
        choose(chosen, patch)
        patch.setattr(memcopy, "_THREAD_LEAST_BYTES", 1)  # so that small batches are split too
        run()


@pytest.mark.parametrize("threads", [1, 2, 3, 40])
def test_one_size_for_all_blocks_split_inside_them(way: str, threads: int) -> None:
    rng = np.random.default_rng(5)
    size = (1 << 20) + 4096 + 17
    source = rng.integers(0, 256, 3 * size, dtype=np.uint8)
    target = np.zeros(3 * size + 1, np.uint8)
    # The blocks change places, so that a wrong pairing shows.
    copy_batch(addresses(target, [1, 1 + size, 1 + 2 * size]), addresses(source, [2 * size, 0, size]), size, threads)
    assert target[0] == 0
    expected = np.concatenate((source[2 * size :], source[:size], source[size : 2 * size]))
    assert np.array_equal(target[1:], expected)


def test_nothing_to_copy(way: str) -> None:
    none = np.zeros(0, np.uint64)
    copy_batch(none, none, 4096, threads=2)
    copy_batch(none, none, none)
    # Addresses of empty blocks are not touched.
    copy_batch(np.zeros(2, np.uint64), np.zeros(2, np.uint64), 0)


def test_strided_arrays_of_addresses(way: str) -> None:
    source, target = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)
    every = addresses(target, [0, 1, 10, 11, 20, 21])
    copy_batch(every[::2], addresses(source, [0, 9, 10, 9, 20, 9])[::2], np.array([5, 9, 6, 9, 7, 9], np.uint64)[::2])
    assert target[:5].tolist() == [0, 1, 2, 3, 4]
    assert target[10:16].tolist() == [10, 11, 12, 13, 14, 15]
    assert target[20:27].tolist() == [20, 21, 22, 23, 24, 25, 26]
    assert not target[27:].any()


@pytest.mark.parametrize(
    ("dst", "src", "sizes", "threads", "words"),
    [
        (np.zeros(2, np.int64), np.zeros(2, np.uint64), 1, 1, "dst_addresses"),
        (np.zeros(2, np.uint64), np.zeros((2, 1), np.uint64), 1, 1, "src_addresses"),
        (np.zeros(2, np.uint64), np.zeros(3, np.uint64), 1, 1, "2 destinations but 3 sources"),
        (np.zeros(2, np.uint64), np.zeros(2, np.uint64), np.zeros(1, np.uint64), 1, "1 sizes for 2 blocks"),
        (np.zeros(2, np.uint64), np.zeros(2, np.uint64), np.zeros(2, np.int64), 1, "sizes"),
        (np.zeros(2, np.uint64), np.zeros(2, np.uint64), -1, 1, "-1"),
        (np.zeros(2, np.uint64), np.zeros(2, np.uint64), 1, 0, "threads is 0"),
    ],
)
def test_bad_input_is_named(
    dst: NDArray[np.uint64],
    src: NDArray[np.uint64],
    sizes: NDArray[np.uint64] | int,
    threads: int,
    words: str,
) -> None:
    with pytest.raises(BadInputError, match=words):
        copy_batch(dst, src, sizes, threads)


def test_the_environment_can_choose_numpy() -> None:
    command = [sys.executable, "-c", "import kvstore.native as n; print(n.backend())"]
    environment = {**os.environ, "KVSTORE_NATIVE": "0"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == "numpy"


def test_backend_names_what_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert backend() in ("avx512", "avx2", "portable", "numpy")
    monkeypatch.setattr(memcopy, "_copy", None)
    assert backend() == "numpy"


def test_streaming_uses_the_best_level_and_its_absence_none(monkeypatch: pytest.MonkeyPatch) -> None:
    levels: list[int] = []
    monkeypatch.setattr(memcopy, "_copy", lambda *arguments: levels.append(arguments[-1]))
    monkeypatch.setattr(memcopy, "_level", 2)
    one = np.zeros(1, np.uint64)
    copy_batch(one, one, 4096)
    copy_batch(one, one, 4096, streaming=False)
    assert levels == [2, -1]


def test_others_run_while_bytes_are_copied(way: str) -> None:
    """Another thread sees the copy half done, which it never could if the call kept Python's lock."""
    size = 64 << 20
    source, target = np.full(size, 7, np.uint8), np.zeros(size, np.uint8)
    to, from_ = addresses(target, [0]), addresses(source, [0])
    for _ in range(20):  # the observer may be off the processor for a whole copy
        target[:] = 0
        thread = threading.Thread(target=copy_batch, args=(to, from_, size))
        thread.start()
        seen_half_done = False
        while thread.is_alive() and not seen_half_done:
            seen_half_done = bool(target[-1] == 0 and target[0] == 7)
        thread.join()
        assert np.array_equal(target, source)
        if seen_half_done:
            return
    pytest.fail("no copy was ever seen half done: the call holds the lock")
