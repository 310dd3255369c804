"""Two precisions: the right tokens get the better one, and what comes back is what either codec alone gives."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.compression.codec import CodecId
from kvstore.compression.codecs import CODECS
from kvstore.compression.differential import Differential, most_significant
from kvstore.compression.payload import Kept
from kvstore.errors import BadInputError
from tests.compression.codecs.scene import Groups, Stored, addresses, decode, shape

KEYS = CODECS[CodecId.Q8_Q4_CHANNEL]
VALUES = CODECS[CodecId.Q4_Q2_ROTATED]
KEPT = Kept(61, 4, 5)


def encoded(codec: object, groups: Groups, high: NDArray[np.bool_] | None, kept: Kept = KEPT) -> Stored:
    assert isinstance(codec, Differential)
    n_high = 0 if high is None else int(high[0, 0].sum())
    memory = np.zeros((groups.n, codec.stored_bytes(groups.plane, kept, n_high)), np.uint8)
    done = codec.encode(groups.plane, kept, groups.addresses, addresses(memory), threads=2, high=high)
    assert (done.sizes == memory.shape[1]).all()
    return Stored(memory, done.sizes, done.lost)


@pytest.fixture
def groups() -> Groups:
    return Groups(shape(dim=64), 3).fill("normal", 4)


@pytest.fixture
def high() -> NDArray[np.bool_]:
    significance = np.random.default_rng(0).random((3, 3, 61))
    return most_significant(significance, KEPT, 0.25)


def test_the_most_significant_are_chosen_head_by_head() -> None:
    significance = np.array([[[9, 1, 5, 5, 5, np.nan, 2, 9], [9, 0, 0, 1, 2, 3, 4, 9]]], np.float32)
    high = most_significant(significance, Kept(8, 1, 1), 0.5)
    assert [np.flatnonzero(head).tolist() for head in high[0]] == [[1, 2, 3], [3, 4, 5]]
    assert not most_significant(significance, Kept(8, 8), 0.5).size


def test_tokens_of_few_bits_are_off_by_more(groups: Groups, high: NDArray[np.bool_]) -> None:
    for codec in (KEYS, VALUES):
        back, good = decode(codec, groups.plane, encoded(codec, groups, high))
        assert good.all()
        error = np.abs(back.floats() - groups.floats())[:, :, :61]
        assert not error[:, :, :4].any()
        assert not error[:, :, 56:].any()
        rounded = error[:, :, 4:56]
        assert rounded[high].mean() * 3 < rounded[~high].mean()


def test_all_high_or_none_is_what_one_precision_gives(groups: Groups) -> None:
    """The other codec's codes lie at the same place, as nothing of the second precision is there."""
    for high, alone in ((np.ones((3, 3, 52), np.bool_), CodecId.Q8_CHANNEL), (None, CodecId.Q4_CHANNEL)):
        back, _ = decode(KEYS, groups.plane, encoded(KEYS, groups, high))
        plain, codec = Groups(groups.plane, 3), CODECS[alone]
        memory = np.zeros((3, codec.stored_bytes(groups.plane, KEPT)), np.uint8)
        sizes = codec.encode(groups.plane, KEPT, groups.addresses, addresses(memory)).sizes
        codec.decode(groups.plane, addresses(memory), sizes, plain.addresses)
        np.testing.assert_array_equal(back.memory, plain.memory)


def test_bits_that_say_otherwise_than_the_head_are_refused(groups: Groups, high: NDArray[np.bool_]) -> None:
    stored = encoded(KEYS, groups, high)
    stored.memory[1, -1] ^= 1
    stored.memory[2, -1] ^= 0x80  # behind the last token
    _, good = decode(KEYS, groups.plane, stored)
    assert good.tolist() == [True, False, False]
    stored.memory[0, 8:12] = 255
    assert not decode(KEYS, groups.plane, stored)[1].any()


def test_bad_input_is_named(groups: Groups, high: NDArray[np.bool_]) -> None:
    uneven = high.copy()
    uneven[0, 0] = False
    with pytest.raises(BadInputError, match="heads have from 0 to 13 high tokens; give each as many"):
        encoded(KEYS, groups, uneven)
    with pytest.raises(BadInputError, match=r"high is bool \(3, 3, 51\); give bool \[3, 3, 52\]"):
        encoded(KEYS, groups, high[:, :, :51])
    with pytest.raises(BadInputError, match="a share from 0 to 1"):
        most_significant(np.zeros((1, 1, 61)), KEPT, 1.5)
