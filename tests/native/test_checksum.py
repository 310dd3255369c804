"""Checksums of raw memory: the same by every way, and without Python's lock."""

from __future__ import annotations

import sys
import threading

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import BadInputError
from kvstore.native import checksum
from kvstore.native.checksum import backend, checksums

WAYS = ["batch", "single", "python"]


def choose(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "batch" and checksum._hash_batch is None:
        pytest.skip("the C part has no kv_hash_batch here")
    if way == "single":
        if checksum._hash_one is None:
            pytest.skip("the xxhash module hides its functions here")
        monkeypatch.setattr(checksum, "_hash_batch", None)
    elif way == "python":
        monkeypatch.setattr(checksum, "_hash_one", None)
    assert backend() == way


@pytest.mark.parametrize("way", WAYS)
def test_they_are_xxh3_of_any_piece(way: str) -> None:
    memory = np.random.default_rng(2).integers(0, 256, 300_000, dtype=np.uint8)
    data = memory.tobytes()
    sizes = st.one_of(st.integers(0, 600), st.integers(4000, 5000), st.integers(65500, 65600), st.just(200_000))

    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(pieces=st.lists(st.tuples(st.integers(0, 100_000), sizes), max_size=8))
    def run(pieces: list[tuple[int, int]]) -> None:
        starts = np.array([memory.ctypes.data + at for at, _ in pieces], np.uint64)
        result = checksums(starts, np.array([size for _, size in pieces], np.uint64))
        assert result.dtype == np.uint64
        assert result.tolist() == [xxhash.xxh3_64_intdigest(data[at : at + size]) for at, size in pieces]

    with pytest.MonkeyPatch.context() as patch:
        choose(way, patch)
        run()


@pytest.mark.parametrize("way", WAYS)
def test_strided_arrays_of_pieces(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    choose(way, monkeypatch)
    memory = np.arange(200, dtype=np.uint8)
    starts = np.uint64(memory.ctypes.data) + np.arange(20, dtype=np.uint64)
    sizes = np.arange(20, dtype=np.uint64)
    expected = [xxhash.xxh3_64_intdigest(memory[i : 2 * i].tobytes()) for i in range(0, 20, 3)]
    assert checksums(starts[::3], sizes[::3]).tolist() == expected


def test_other_arrays_are_refused() -> None:
    one, none = np.zeros(1, np.uint64), np.zeros(0, np.uint64)
    with pytest.raises(BadInputError, match="addresses is int64"):
        checksums(np.zeros(1, np.int64), one)
    with pytest.raises(BadInputError, match="sizes_bytes is uint64 \\(0,\\)"):
        checksums(one, none)
    with pytest.raises(BadInputError, match="sizes_bytes is uint64 \\(1, 1\\)"):
        checksums(one, one[None])


@pytest.mark.parametrize("way", ["batch", "single"])
def test_others_run_while_small_pieces_are_hashed(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread is ever asked to give the lock away here: others only run where it is let go of."""
    choose(way, monkeypatch)
    memory = np.zeros(16 << 10, np.uint8)
    starts = np.full(20_000, memory.ctypes.data, np.uint64)
    sizes = np.full(20_000, len(memory), np.uint64)
    waiting, go, ran = threading.Event(), threading.Event(), []

    def other() -> None:
        waiting.set()
        go.wait(60)
        ran.append(True)

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=other)
    thread.start()
    waiting.wait(60)
    try:
        sys.setswitchinterval(1000)
        go.set()
        checksums(starts, sizes)
        assert ran
    finally:
        sys.setswitchinterval(interval)
        thread.join(60)


def test_the_fast_ways_are_used_where_there_are_any() -> None:
    """On Linux with the wheels of xxhash its C function can be called directly; a change there would go unnoticed."""
    if not sys.platform.startswith("linux"):
        pytest.skip("only known for Linux")
    assert backend() != "python"
