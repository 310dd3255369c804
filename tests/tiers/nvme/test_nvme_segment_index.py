"""A segment's head and entries: what was written is read; anything else is nothing."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.tiers.nvme.names import RECORD, intact, items, place_keys
from kvstore.tiers.nvme.names import seal as seal_names
from kvstore.tiers.nvme.segment_index import DAMAGED, ENTRY, FOREIGN, head_page, log_seq_of, read_entries, seal

UUID = bytes(range(16))


def some_entries(n: int, log_seq: int, seed: int = 0) -> np.ndarray[tuple[int], np.dtype[np.void]]:
    raw = np.random.default_rng(seed).integers(0, 256, n * ENTRY.itemsize, dtype=np.uint8)
    entries = raw.view(ENTRY).copy()
    seal(entries, log_seq)
    return entries


def test_head_round_trip() -> None:
    for log_seq in (1, 1 << 24, (1 << 62) + 12345):
        page = head_page(UUID, 7, log_seq)
        assert len(page) == 4096
        assert log_seq_of(page, UUID, 7) == log_seq
        assert log_seq_of(page, UUID, 8) == FOREIGN
        assert log_seq_of(page, UUID[::-1], 7) == FOREIGN
    assert log_seq_of(np.zeros(4096, np.uint8), UUID, 0) == DAMAGED


def test_every_flipped_bit_of_a_head_is_noticed() -> None:
    page = head_page(UUID, 3, 99 << 24)
    for bit in range(40 * 8):
        page[bit // 8] ^= 1 << bit % 8
        assert log_seq_of(page, UUID, 3) == DAMAGED, f"bit {bit}"
        page[bit // 8] ^= 1 << bit % 8
    assert log_seq_of(page, UUID, 3) == 99 << 24


def test_entries_round_trip_and_those_of_another_life_are_not_taken() -> None:
    old, new = some_entries(20, 5, 1), some_entries(7, 6, 2)
    index = np.zeros(2 * 4096, np.uint8)
    index[: 20 * 64] = old.view(np.uint8)
    index[: 7 * 64] = new.view(np.uint8)
    assert (read_entries(index, 6) == new).all()
    assert (read_entries(index, 5) == old[7:]).all()
    assert len(read_entries(index, 7)) == 0
    assert len(read_entries(np.zeros(4096, np.uint8), 5)) == 0


def test_every_flipped_bit_of_an_entry_is_noticed() -> None:
    entry = some_entries(1, 42, 3)
    index = np.zeros(4096, np.uint8)
    for bit in range(64 * 8):
        index[:64] = entry.view(np.uint8)
        index[bit // 8] ^= 1 << bit % 8
        assert len(read_entries(index, 42)) == 0, f"bit {bit}"


@settings(deadline=None)
@given(st.binary(max_size=300), st.integers(0, 4095))
def test_odd_bytes_are_no_entries(data: bytes, at: int) -> None:
    index = np.zeros(4096, np.uint8)
    data = data[: 4096 - at]
    index[at : at + len(data)] = np.frombuffer(data, np.uint8)
    assert len(read_entries(index, 1)) == 0
    assert log_seq_of(index, UUID, 0) == -1


def test_every_flipped_bit_of_a_name_is_noticed() -> None:
    records = np.zeros(1, RECORD)
    raw = records.view(np.uint8).reshape(-1)
    raw[:] = np.random.default_rng(4).integers(0, 256, len(raw))
    seal_names(records)
    assert intact(records).all()
    for bit in range(8 * len(raw)):
        raw[bit // 8] ^= 1 << bit % 8
        assert not intact(records).any(), f"bit {bit}"
        raw[bit // 8] ^= 1 << bit % 8


def test_keys_of_places_are_in_order_of_writing() -> None:
    seqs, pages = np.array([1, 1, 2, 1 << 30, 1 << 30], np.int64), np.array([7, 256, 2, 3, 65536], np.int64)
    keys = place_keys(seqs, pages)
    assert keys == sorted(keys)
    records = np.zeros(5, RECORD)
    records["place"]["log_seq"], records["place"]["page"] = seqs, pages
    assert [key for key, _ in items(records)] == keys
    assert {len(value) for _, value in items(records)} == {64}
