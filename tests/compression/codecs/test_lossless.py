"""Every bit pattern comes back; damaged bytes are refused; KV-like data gets as small as it should."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.compression.codec import CodecId
from kvstore.compression.codecs import CODECS
from kvstore.compression.frame_format import PlaneKind
from kvstore.compression.payload import HEAD, Kept
from kvstore.errors import BadInputError
from tests.compression.codecs.scene import KINDS, Groups, Stored, decode, elements, encode, shape

BOTH = [CODECS[CodecId.BYTES], CODECS[CodecId.BYTES_CHANNEL]]


@settings(max_examples=40, deadline=None)
@given(
    number=st.integers(0, 1),
    dim=st.sampled_from([5, 64, 80]),
    dtype=st.sampled_from(["bfloat16", "float16", "float32"]),
    layout=st.sampled_from(["NHD", "HND"]),
    kind=st.sampled_from([PlaneKind.K, PlaneKind.V]),
    values=st.sampled_from(KINDS),
    tokens=st.integers(1, 64),
    threads=st.integers(1, 2),
)
def test_everything_comes_back(
    number: int, dim: int, dtype: str, layout: str, kind: PlaneKind, values: str, tokens: int, threads: int
) -> None:
    groups = Groups(shape(dim, 2, dtype, layout, kind), 3).fill(values, tokens)
    stored = encode(BOTH[number], groups, Kept(tokens, 4, 32), threads)
    assert not stored.lost.any()
    back, good = decode(BOTH[number], groups.plane, stored, threads)
    assert good.all()
    np.testing.assert_array_equal(back.rows()[:, :, :tokens], groups.rows()[:, :, :tokens])


def test_all_65536_bit_patterns_come_back() -> None:
    groups = Groups(shape(64, 4, page_tokens=256, pages=1), 1)
    groups.body[0, : 1 << 17] = np.arange(1 << 16, dtype=np.uint16).view(np.uint8)
    for codec in BOTH:
        back, _ = decode(codec, groups.plane, encode(codec, groups, Kept(256)))
        np.testing.assert_array_equal(back.rows(), groups.rows())


@pytest.mark.parametrize(("dim", "heads"), [(64, 3), (256, 1)])
@pytest.mark.parametrize("spread", [0.0, 0.5], ids=["alike", "spread"])
def test_kv_like_bfloat16_takes_10_of_14_bits(dim: int, heads: int, spread: float) -> None:
    """Normal values of channels whose scales differ by a factor of ``exp(spread)`` or so."""
    rng = np.random.default_rng(0)
    groups = Groups(shape(dim, heads, page_tokens=128, pages=1), 4)
    x = rng.standard_normal((4, groups.row // 2 // dim, dim)) * np.exp(spread * rng.standard_normal(dim))
    groups.body[:] = elements(x.astype(np.float32), "bfloat16").reshape(4, -1)
    for codec in BOTH:
        stored = encode(codec, groups, Kept(128))
        assert 4 * groups.plane.raw_bytes / float(stored.sizes.sum()) >= 1.4


def test_the_bytes_are_those_of_the_format() -> None:
    """Read back by hand: head, then low bytes and high ones of elements turned left by one."""
    groups = Groups(shape(16, 1, page_tokens=2, pages=1), 1)
    words = np.arange(1000, 1032, dtype=np.uint16)
    groups.body[0, :64] = words.view(np.uint8)
    stored = encode(CODECS[CodecId.BYTES_CHANNEL], groups, Kept(2))
    raw = stored.memory[0, : int(stored.sizes[0])].tobytes()
    assert struct.unpack_from("<IHHII", raw) == (2, 0, 0, 0, 0)
    by_channel = words.reshape(2, 16).T.ravel()
    turned = (by_channel << 1) | (by_channel >> 15)
    at = HEAD.itemsize
    for expected in (turned & 255, turned >> 8):
        (length,) = struct.unpack_from("<I", raw, at)
        body = raw[at + 4 : at + 4 + (length & 0x7FFFFFFF)]
        plain = body if length >> 31 else zstandard.decompress(body)
        assert plain == expected.astype(np.uint8).tobytes()
        at += 4 + len(body)
    assert at == len(raw)


def test_a_claim_of_much_memory_is_refused_before_it_is_taken() -> None:
    """A zstd frame that says that it holds a terabyte."""
    groups = Groups(shape(64, 1, pages=1), 1).fill("constant", 0)
    stored = encode(CODECS[CodecId.BYTES], groups, Kept(16))
    bomb = struct.pack("<IB", 0xFD2FB528, 0xE0) + struct.pack("<Q", 1 << 40) + b"\1\0\0"
    body = stored.memory[0, : HEAD.itemsize].tobytes() + struct.pack("<I", len(bomb)) + bomb
    damaged = Stored(np.frombuffer(body, np.uint8)[None].copy(), np.array([len(body)], np.uint64), stored.lost)
    _, good = decode(CODECS[CodecId.BYTES], groups.plane, damaged)
    assert not good.any()


def test_other_dtypes_are_stored_raw() -> None:
    with pytest.raises(BadInputError, match="codec BYTES takes bfloat16, float16, float32, not float8_e4m3"):
        CODECS[CodecId.BYTES].stored_bytes(shape(dtype="float8_e4m3"), Kept(1))
