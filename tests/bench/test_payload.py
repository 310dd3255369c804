"""Payload bytes: they follow from the key, and every change of key, place or byte shows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvstore.bench.payload import Payload, mix, prefix_keys
from kvstore.errors import BadInputError

KEYS = st.integers(0, (1 << 64) - 1)
SIZES = st.sampled_from([1, 7, 8, 13, 64, 4096, 4099])


def key_array(*keys: int) -> NDArray[np.uint64]:
    return np.array(keys, dtype=np.uint64)


def make(payload: Payload, *keys: int) -> NDArray[np.uint8]:
    out = np.zeros((len(keys), payload.block_bytes), dtype=np.uint8)
    payload.fill(key_array(*keys), out)
    return out


@settings(max_examples=60, deadline=None)
@given(size=SIZES, keys=st.lists(KEYS, min_size=1, max_size=6), seed=st.integers(0, 1000))
def test_blocks_match_their_own_keys_in_any_batch(size: int, keys: list[int], seed: int) -> None:
    payload, again = Payload(size, seed), Payload(size, seed)
    blocks = make(payload, *keys)
    assert payload.count_mismatches(blocks, key_array(*keys)) == 0
    for block, key in zip(blocks, keys, strict=True):
        assert np.array_equal(make(again, key)[0], block)


@settings(max_examples=60, deadline=None)
@given(size=SIZES, key=KEYS, at=st.integers(0, 5000), flip=st.integers(1, 255))
def test_any_changed_byte_is_a_mismatch(size: int, key: int, at: int, flip: int) -> None:
    payload = Payload(size)
    block = make(payload, key)
    block[0, at % size] ^= flip
    assert payload.count_mismatches(block, key_array(key)) == 1


@settings(max_examples=60, deadline=None)
@given(left=KEYS, right=KEYS)
def test_another_key_changes_every_word(left: int, right: int) -> None:
    if left == right:
        return
    words = make(Payload(4096), left, right).view(np.uint64)
    assert np.all(words[0] != words[1])


def test_words_of_a_block_differ_from_each_other() -> None:
    words = make(Payload(64 << 10), 5).view(np.uint64)[0]
    assert len(np.unique(words)) == len(words)


def test_another_seed_gives_other_bytes() -> None:
    assert not np.array_equal(make(Payload(64, seed=1), 5), make(Payload(64, seed=2), 5))


def test_mismatching_blocks_are_counted_one_by_one() -> None:
    payload = Payload(100)
    blocks = make(payload, 1, 2, 3, 4)
    blocks[[1, 3], [0, 99]] ^= 1
    assert payload.count_mismatches(blocks, key_array(1, 2, 3, 4)) == 2
    assert payload.count_mismatches(blocks[::-1].copy(), key_array(1, 2, 3, 4)) == 4


def test_a_segment_depends_on_its_own_key_only() -> None:
    payload = Payload(8 * 32, segments=4)
    keys = key_array(1, 2, 3, 4).reshape(1, 4)
    left, right = np.empty((1, 256), np.uint8), np.empty((1, 256), np.uint8)
    payload.fill(keys, left)
    keys[0, 2] = 9
    payload.fill(keys, right)
    same = (left == right).reshape(4, 64)
    assert same[[0, 1, 3]].all()
    assert not same[2].all()
    masks = payload.masks(keys)[0]
    assert payload.matches(left[0], masks, 2)
    assert not payload.matches(left[0], masks, 3)
    assert payload.matches(right[0], masks)


def test_leading_segments_only_ignores_what_follows() -> None:
    payload = Payload(256, segments=4)
    block = np.zeros((1, 256), np.uint8)
    keys = key_array(1, 2, 3, 4).reshape(1, 4)
    payload.fill(keys, block)
    block[0, 128] ^= 1
    assert payload.matches(block[0], payload.masks(keys)[0], 2)
    assert not payload.matches(block[0], payload.masks(keys)[0], 3)


def test_mix_has_no_collisions_and_spreads_one_bit() -> None:
    inputs = np.arange(1 << 16, dtype=np.uint64)
    assert len(np.unique(mix(inputs))) == 1 << 16
    changed = mix(inputs) ^ mix(inputs ^ np.uint64(1))
    bits = np.unpackbits(changed.view(np.uint8)).mean()
    assert 0.49 < bits < 0.51


@settings(max_examples=80, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=12),
    other=st.lists(st.integers(0, 3), max_size=12),
)
def test_prefix_keys_are_equal_exactly_when_the_prefixes_are(tokens: list[int], other: list[int]) -> None:
    left = prefix_keys(np.array(tokens, dtype=np.uint32)).tolist()
    right = prefix_keys(np.array(other, dtype=np.uint32)).tolist()
    for n, key in enumerate(left, 1):
        for m, another in enumerate(right, 1):
            assert (key == another) == (tokens[:n] == other[:m])


def test_prefix_keys_of_a_prefix_are_a_prefix() -> None:
    tokens = np.random.default_rng(0).integers(0, 1 << 32, 1000, dtype=np.uint32)
    assert np.array_equal(prefix_keys(tokens)[:300], prefix_keys(tokens[:300]))


def test_sizes_that_can_not_be_cut_are_refused() -> None:
    with pytest.raises(BadInputError, match="block_bytes is 100"):
        Payload(100, segments=16)
    with pytest.raises(BadInputError, match="block_bytes is 0"):
        Payload(0)
    with pytest.raises(BadInputError, match="2 keys a block"):
        Payload(64).masks(key_array(1, 2).reshape(1, 2))
