"""The registry, sizes and ratios of formats, and damaged bytes under every codec."""

from __future__ import annotations

import os

import numpy as np
import pytest

from kvstore.compression.codec import Codec, CodecId
from kvstore.compression.codecs import CODECS, FORMATS, codec_of
from kvstore.compression.frame_format import CODEC_RAW, FrameError, PlaneKind
from kvstore.compression.payload import HEAD, Kept
from kvstore.compression.plane import PlaneShape
from kvstore.errors import BadInputError
from kvstore.types import GroupKind, KVGroup
from tests.compression.codecs.scene import Groups, Stored, decode, encode, shape

SHAPES = {"SmolLM2": KVGroup(layers=30, kv_heads=3, head_dim=64), "Gemma": KVGroup(layers=18, kv_heads=1, head_dim=256)}
RATIOS = {"k8v8": (1.85, 1.95), "k8v4": 2.25, "k8v4-k4v4": 2.85, "k8v4-k4v2": 3.25, "k4v2": 4.4, "fp8": 1.9}
DAMAGED = int(os.environ.get("KVSTORE_FUZZ_FRAMES", "600"))


def test_numbers_stay() -> None:
    """They are on disks: a new one is added here, none is changed."""
    assert [(codec.name, int(codec)) for codec in CodecId] == [
        ("RAW", 0),
        ("Q8", 1),
        ("Q4", 2),
        ("Q2", 3),
        ("Q8_ROTATED", 4),
        ("Q4_ROTATED", 5),
        ("Q2_ROTATED", 6),
        ("Q8_CHANNEL", 7),
        ("Q4_CHANNEL", 8),
        ("Q2_CHANNEL", 9),
        ("FP8", 10),
        ("BYTES", 11),
        ("BYTES_CHANNEL", 12),
        ("Q8_Q4_CHANNEL", 13),
        ("Q4_Q2_ROTATED", 14),
    ]
    assert list(CODECS) == sorted(CodecId)
    assert all(codec_of(number).id == number for number in CODECS)
    assert CodecId.RAW == CODEC_RAW


@pytest.mark.parametrize("number", [15, 200, 255, -1])
def test_an_unknown_number_is_a_frame_error(number: int) -> None:
    with pytest.raises(FrameError, match=f"codec {number}, which this release does not know"):
        codec_of(number)


@pytest.mark.parametrize(("name", "least"), RATIOS.items())
def test_ratios_with_all_metadata(name: str, least: float | tuple[float, float]) -> None:
    """Of 8k tokens in page groups of 256, each with its 24 bytes in a frame's table."""
    for i, group in enumerate(SHAPES.values()):
        k, v = (PlaneShape.of(group, kind, 256, 1) for kind in (PlaneKind.K, PlaneKind.V))
        stored = FORMATS[name].bytes_per_token(k, v, 8192) + 2 * 24 / 256
        ratio = 4 * group.kv_heads * group.head_dim / stored
        assert ratio >= (least[i] if isinstance(least, tuple) else least)


def test_a_format_keeps_the_ends_of_what_is_stored_exact() -> None:
    fmt = FORMATS["k8v4"]
    assert fmt.kept(0, 64, 200) == Kept(64, 4, 0)
    assert fmt.kept(64, 64, 200) == Kept(64)
    assert fmt.kept(128, 64, 200) == Kept(64, 0, 24)
    assert fmt.kept(192, 8, 200) == Kept(8, 0, 8)
    assert fmt.kept(0, 20, 20) == Kept(20, 4, 16)
    assert fmt.kept(0, 2, 2) == Kept(2, 2, 0)
    assert fmt.codec(PlaneKind.K).id is CodecId.Q8_CHANNEL
    assert fmt.codec(PlaneKind.V).id is CodecId.Q4_ROTATED


@pytest.mark.parametrize("codec", CODECS.values(), ids=lambda codec: codec.id.name)
def test_sizes_follow_from_the_shape(codec: Codec) -> None:
    groups = Groups(shape(), 3).fill("normal", 0)
    for kept in (Kept(64), Kept(37, 4, 7), Kept(3, 4, 32)):
        sizes = encode(codec, groups, kept).sizes
        room = codec.stored_bytes(groups.plane, kept)
        assert (sizes == room).all() if codec.is_fixed else (sizes <= room).all()


@pytest.mark.parametrize("codec", CODECS.values(), ids=lambda codec: codec.id.name)
def test_a_latent_is_a_plane_too(codec: Codec) -> None:
    latent = KVGroup(layers=1, head_dim=576, kind=GroupKind.MLA)
    groups = Groups(PlaneShape.of(latent, PlaneKind.WHOLE, 64, 1), 2).fill("normal", 0)
    back, good = decode(codec, groups.plane, encode(codec, groups, Kept(64)))
    assert good.all()
    assert np.corrcoef(back.floats().ravel(), groups.floats().ravel())[0, 1] > 0.6


@pytest.mark.parametrize("codec", CODECS.values(), ids=lambda codec: codec.id.name)
def test_damaged_bytes_are_refused_or_decoded_and_nothing_else_is_touched(codec: Codec) -> None:
    """Flipped bits, cut ends, heads and bodies of noise; intact ones of the same batch always come back."""
    rng = np.random.default_rng(int(codec.id))
    plane = shape(dim=16, heads=2, page_tokens=8, pages=2)
    n = 20
    groups = Groups(plane, n).fill("normal", 0)
    whole = encode(codec, groups, Kept(15, 2, 3))
    intact, _ = decode(codec, plane, whole)
    for _ in range(max(1, DAMAGED // n)):
        sizes, memory = whole.sizes.copy(), whole.memory.copy()
        for i in range(1, n):
            size = int(sizes[i])
            match rng.integers(0, 5):
                case 0:
                    memory[i, rng.integers(0, size)] ^= np.uint8(1 << rng.integers(0, 8))
                case 1:
                    sizes[i] = rng.integers(0, size)
                case 2:
                    memory[i, : HEAD.itemsize] = rng.integers(0, 256, HEAD.itemsize, np.uint8)
                case 3:
                    start = int(rng.integers(0, size))
                    memory[i, start:] = rng.integers(0, 256, memory.shape[1] - start, np.uint8)
                case 4:
                    memory[i, rng.integers(0, HEAD.itemsize)] = rng.integers(0, 40)
        back, good = decode(codec, plane, Stored(memory, sizes, whole.lost), threads=int(rng.integers(1, 3)))
        assert good[0]
        np.testing.assert_array_equal(back.memory[0], intact.memory[0])
        # Exact ones must be right or refused as long as their size and head are.
        cut = sizes < whole.sizes
        assert not (good & cut & np.bool_(codec.is_fixed)).any()


@pytest.mark.parametrize("codec", [c for c in CODECS.values() if c.id != CODEC_RAW], ids=lambda codec: codec.id.name)
def test_heads_that_contradict_themselves_are_refused(codec: Codec) -> None:
    groups = Groups(shape(), 6).fill("normal", 0)
    stored = encode(codec, groups, Kept(64, 64))
    heads = stored.memory[:, : HEAD.itemsize].copy().view(HEAD)[:, 0]
    heads["exact_last"][1] = 1
    heads["tokens"][2] = 0
    heads["tokens"][3] = 65
    heads["reserved"][4] = 1
    heads["for_codec"][5] = 1
    stored.memory[:, : HEAD.itemsize] = heads[:, None].view(np.uint8)
    _, good = decode(codec, groups.plane, stored)
    assert good.tolist() == [True, False, False, False, False, False]


def test_planes_that_there_are_not() -> None:
    with pytest.raises(BadInputError, match="has no rows to encode; store it raw"):
        PlaneShape.of(KVGroup(layers=1, dtype="uint8", layout="opaque", page_bytes=64), PlaneKind.WHOLE, 16, 1)
    with pytest.raises(BadInputError, match="has no plane WHOLE"):
        PlaneShape.of(KVGroup(layers=1, kv_heads=1, head_dim=64), PlaneKind.WHOLE, 16, 1)
    with pytest.raises(BadInputError, match="has no plane V"):
        PlaneShape.of(KVGroup(layers=1, head_dim=64, kind=GroupKind.MLA), PlaneKind.V, 16, 1)
    for wrong in ({"tokens": 0}, {"tokens": 1, "exact_first": -1}, {"tokens": 1, "exact_last": 1 << 16}):
        with pytest.raises(BadInputError):
            Kept(**wrong)
