"""What rounding does to values: within half a step, and defined for every value there is."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvstore.compression.codec import CodecId
from kvstore.compression.codecs import CODECS
from kvstore.compression.frame_format import PlaneKind
from kvstore.compression.payload import HEAD, Kept
from kvstore.compression.quantize import Quantizer, backends
from kvstore.compression.quantize_numpy import encode_rows, packed, to_fp8, unpacked
from kvstore.compression.rotation import signs_of
from kvstore.errors import BadInputError
from kvstore.native.quantize import GROUP_ROWS, Scheme
from tests.compression.codecs.scene import Groups, decode, elements, encode, shape

QUANTIZERS = [codec for codec in CODECS.values() if isinstance(codec, Quantizer)]
BACKENDS = backends()

GOLDEN = {
    "Q8": "6a038cb6632b78d7",
    "Q4": "d88d31702afb8121",
    "Q2": "088244ca71156273",
    "Q8_ROTATED": "24e7efd5fa5dbb1a",
    "Q4_ROTATED": "0a89c515a3ab7298",
    "Q2_ROTATED": "53c35d7bea7074f4",
    "Q8_CHANNEL": "e620dea3396fe08f",
    "Q4_CHANNEL": "73eeccd8040841d3",
    "Q2_CHANNEL": "eedd272183cfd74f",
    "FP8": "d4fd183845fb1972",
}


def filled(values: NDArray[np.float32], dtype: str = "float32") -> Groups:
    """One page group whose K is these values, [tokens, heads, dim]."""
    tokens, heads, dim = values.shape
    groups = Groups(shape(dim=dim, heads=heads, dtype=dtype, page_tokens=tokens, pages=1), 1)
    groups.body[0, : groups.plane.part_bytes] = elements(values.astype(np.float32).ravel(), dtype)
    return groups


@settings(max_examples=60, deadline=None)
@given(
    codec=st.sampled_from(QUANTIZERS),
    dim=st.sampled_from([64, 80, 128, 256]),
    dtype=st.sampled_from(["bfloat16", "float16", "float32"]),
    layout=st.sampled_from(["NHD", "HND"]),
    kind=st.sampled_from([PlaneKind.K, PlaneKind.V]),
    seed=st.integers(0, 999),
)
def test_values_come_back_within_half_a_step(
    codec: Quantizer, dim: int, dtype: str, layout: str, kind: PlaneKind, seed: int
) -> None:
    """The step is (largest - smallest) / (2^bits - 1) of what shares numbers; exact tokens are exact."""
    groups = Groups(shape(dim, 2, dtype, layout, kind), 2).fill("normal", seed)
    kept = Kept(61, 4, 6)
    back, good = decode(codec, groups.plane, encode(codec, groups, kept))
    assert good.all()
    before, after = groups.floats()[:, :, :61], back.floats()[:, :, :61]
    np.testing.assert_array_equal(after[:, :, :4], before[:, :, :4])
    np.testing.assert_array_equal(after[:, :, 55:], before[:, :, 55:])
    x, y = before[:, :, 4:55].astype(np.float64), after[:, :, 4:55].astype(np.float64)
    largest = np.abs(x).max()
    rounding = largest * (2**-7 if dtype == "bfloat16" else 2**-9)  # of the numbers, and of the result
    if codec.scheme is Scheme.ROTATED:
        # All errors of a row together are at most those of its rotation, whose values have at most its length.
        length = np.sqrt((x**2).sum(axis=3))
        step = 2 * length / (2**codec.bits - 1)
        assert (np.sqrt(((x - y) ** 2).sum(axis=3)) <= (step / 2 + rounding) * np.sqrt(dim)).all()
        return
    if codec.scheme is Scheme.FP8:
        assert (np.abs(x - y) <= np.abs(x) * 2**-4 + largest * 2**-9 + rounding).all()
        return
    if codec.scheme is Scheme.CHANNEL:
        step = np.concatenate([np.ptp(x[:, :, i : i + GROUP_ROWS], axis=2) for i in (0, GROUP_ROWS)], axis=2)
        step = step.reshape(2, 2, 2, dim).repeat(GROUP_ROWS, axis=2)[:, :, :51] / (2**codec.bits - 1)
    else:
        step = np.ptp(x, axis=3, keepdims=True) / (2**codec.bits - 1)
    assert (np.abs(x - y) <= step / 2 + rounding).all()


def test_a_row_worked_out_by_hand() -> None:
    """0, 0.25 ... 3.75 at 4 bits: minimum 0, scale 0.25, so codes are 0 to 15, two to a byte."""
    row = np.arange(16, dtype=np.float32) * np.float32(0.25)
    codes, numbers, lost = encode_rows(row[None, None], Scheme.TOKEN, 4)
    assert codes[0, 0].tolist() == [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]
    assert numbers[0].tolist() == [0.0, 0.25]
    assert not lost


def test_halves_go_up() -> None:
    row = np.array([0.0, 15.0, *[2.5] * 7, *[3.5] * 7], np.float32)
    codes, _, _ = encode_rows(row[None, None], Scheme.TOKEN, 4)
    assert unpacked(codes, 4)[0, 0].tolist() == [0, 15, *[3] * 7, *[4] * 7]


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_packed_codes_come_back(bits: int) -> None:
    q = np.random.default_rng(0).integers(0, 1 << bits, (3, 5, 80), np.uint8)
    assert packed(q, bits).shape == (3, 5, 80 * bits // 8)
    np.testing.assert_array_equal(unpacked(packed(q, bits), bits), q)


def test_fp8_is_what_torch_makes() -> None:
    x = np.random.default_rng(0).standard_normal(100_000).astype(np.float32)
    x = np.clip(x * np.exp(np.random.default_rng(1).uniform(-12, 5, x.shape)), -448, 448).astype(np.float32)
    ties = np.arange(0, 64, dtype=np.float32) * np.float32(2**-10)
    x = np.concatenate((x, ties, -ties, np.array([448, -448, 0.0, -0.0], np.float32)))
    expected = torch.from_numpy(x).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    np.testing.assert_array_equal(to_fp8(x), expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("codec", [c for c in QUANTIZERS if c.scheme in (Scheme.TOKEN, Scheme.CHANNEL)])
def test_equal_values_come_back_exactly(codec: Quantizer, dtype: str, backend: str) -> None:
    chosen = Quantizer(codec.id, codec.scheme, codec.bits, backend=backend)
    values = np.full((40, 2, 64), -3.1415, np.float32)
    groups = filled(values, dtype)
    back, _ = decode(chosen, groups.plane, encode(chosen, groups, Kept(40)))
    np.testing.assert_array_equal(back.rows(), groups.rows())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("codec", QUANTIZERS)
def test_what_is_no_number_or_too_large_is_replaced_and_reported(codec: Quantizer, backend: str) -> None:
    """NaN counts as 0, infinities and what fp16 can't hold as its largest; only page groups with such are reported."""
    chosen = Quantizer(codec.id, codec.scheme, codec.bits, backend=backend)
    values = np.random.default_rng(0).standard_normal((64, 1, 64)).astype(np.float32)
    tame = filled(values)
    assert not encode(chosen, tame, Kept(64)).lost.any()
    replaced = {np.nan: 0.0, np.inf: 65504, -np.inf: -65504, 1e30: 65504, -70000: -65504}
    for strange, instead in replaced.items():
        values[9, 0, 7] = strange
        wild = encode(chosen, filled(values), Kept(64))
        assert wild.lost.all()
        values[9, 0, 7] = instead
        as_if = encode(chosen, filled(values), Kept(64))
        np.testing.assert_array_equal(wild.memory, as_if.memory)
        back, _ = decode(chosen, tame.plane, wild)
        assert np.isfinite(back.floats()).all()
        assert np.abs(back.floats()).max() <= 65504 * 8.01


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_largest_fp16_does_not_become_infinite(backend: str) -> None:
    values = np.full((32, 1, 64), 65504, np.float32)
    values[:, :, ::2] = -65504
    for codec in QUANTIZERS:
        chosen = Quantizer(codec.id, codec.scheme, codec.bits, backend=backend)
        groups = filled(values, "float16")
        back, _ = decode(chosen, groups.plane, encode(chosen, groups, Kept(32)))
        assert np.isfinite(back.floats()).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_rotation_that_leaves_the_range_is_reported(backend: str) -> None:
    """A row along a row of the matrix has all of its length in one place afterwards."""
    codec = Quantizer(CodecId.Q8_ROTATED, Scheme.ROTATED, 8, backend=backend)
    row = np.where(signs_of(64) > 0, np.float32(-60000), np.float32(60000))
    assert encode(codec, filled(np.tile(row, (16, 1, 1))), Kept(16)).lost.all()
    assert not encode(codec, filled(np.tile(row / 8, (16, 1, 1))), Kept(16)).lost.any()


def test_a_ragged_page_group_has_the_tokens_that_are_there() -> None:
    codec = CODECS[CodecId.Q4_CHANNEL]
    groups = Groups(shape(), 1).fill("normal", 0)
    stored = encode(codec, groups, Kept(33))
    assert int(stored.sizes[0]) == HEAD.itemsize + 3 * (33 * 32 + 2 * 64 * 4)
    back, good = decode(codec, groups.plane, stored)
    assert good.all()
    before, after = groups.floats()[:, :, :33], back.floats()[:, :, :33]
    assert np.abs(after - before).max() <= np.ptp(before, axis=2).max() / 30 * 1.02
    assert (back.rows()[:, :, 33:] == 0xA5).all()


def test_what_can_not_be_rounded_is_named() -> None:
    codec = CODECS[CodecId.Q8]
    with pytest.raises(BadInputError, match="head_dim is 72; codec Q8 takes multiples of 16 up to 1024: store it raw"):
        codec.stored_bytes(shape(dim=72), Kept(1))
    with pytest.raises(BadInputError, match="not float8_e4m3; store it raw"):
        codec.stored_bytes(shape(dtype="float8_e4m3"), Kept(1))
    with pytest.raises(BadInputError, match="tokens is 65; a page group of this shape has 64"):
        codec.stored_bytes(shape(), Kept(65))
    with pytest.raises(BadInputError, match="backend is 'gpu'"):
        encode(Quantizer(CodecId.Q8, Scheme.TOKEN, 8, backend="gpu"), Groups(shape(), 1), Kept(1))
    one, two = np.zeros(1, np.uint64), np.zeros(2, np.uint64)
    with pytest.raises(BadInputError, match="out is uint64"):
        codec.encode(shape(), Kept(1), one, two)


@pytest.mark.parametrize("backend", backends())
def test_bytes_are_those_of_the_first_release(backend: str) -> None:
    """What is on disks stays readable: the bytes of each codec never change."""
    plane = shape(dim=80, heads=2, dtype="float16")
    groups = Groups(plane, 1).fill("normal", 5)
    for codec in QUANTIZERS:
        stored = encode(Quantizer(codec.id, codec.scheme, codec.bits, backend=backend), groups, Kept(61, 4, 7))
        digest = hashlib.blake2b(stored.memory[0, : int(stored.sizes[0])].tobytes(), digest_size=8).hexdigest()
        assert (codec.id.name, digest) == (codec.id.name, GOLDEN.get(codec.id.name))
