"""C at every level gives the bytes of numpy, whatever the values, shapes and stored bytes."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.compression.codecs import CODECS
from kvstore.compression.differential import Differential, most_significant
from kvstore.compression.frame_format import PlaneKind
from kvstore.compression.payload import Kept
from kvstore.compression.plane import PlaneShape
from kvstore.compression.quantize import NUMPY, Quantizer, backends
from tests.compression.codecs.scene import KINDS, Groups, Stored, addresses, decode, encode, shape

QUANTIZERS = [codec for codec in CODECS.values() if isinstance(codec, Quantizer)]
DIFFERENTIALS = [codec for codec in CODECS.values() if isinstance(codec, Differential)]
NATIVE = [backend for backend in backends() if backend != NUMPY]

pytestmark = pytest.mark.skipif(not NATIVE, reason="the C part is not built here")

shapes = st.builds(
    shape,
    dim=st.sampled_from([16, 48, 64, 80, 128, 192, 256, 576]),
    heads=st.integers(1, 3),
    dtype=st.sampled_from(["bfloat16", "float16", "float32"]),
    layout=st.sampled_from(["NHD", "HND"]),
    kind=st.sampled_from([PlaneKind.K, PlaneKind.V]),
    page_tokens=st.sampled_from([1, 16, 40]),
    pages=st.integers(1, 3),
)


@st.composite
def scenes(draw: st.DrawFn) -> tuple[Groups, Kept]:
    plane: PlaneShape = draw(shapes)
    groups = Groups(plane, draw(st.integers(1, 2))).fill(draw(st.sampled_from(KINDS)), draw(st.integers(0, 999)))
    kept = Kept(draw(st.integers(1, plane.tokens)), draw(st.integers(0, 5)), draw(st.integers(0, 40)))
    return groups, kept


def with_backend(codec: Any, backend: str) -> Any:
    return dataclasses.replace(codec, backend=backend)


@settings(max_examples=60, deadline=None)
@given(scene=scenes(), codec=st.sampled_from(QUANTIZERS), threads=st.integers(1, 3))
def test_every_level_encodes_and_decodes_as_numpy_does(
    scene: tuple[Groups, Kept], codec: Quantizer, threads: int
) -> None:
    groups, kept = scene
    expected = encode(with_backend(codec, NUMPY), groups, kept)
    expected_back, _ = decode(with_backend(codec, NUMPY), groups.plane, expected)
    for backend in NATIVE:
        stored = encode(with_backend(codec, backend), groups, kept, threads)
        np.testing.assert_array_equal(stored.memory, expected.memory)
        np.testing.assert_array_equal(stored.lost, expected.lost)
        back, good = decode(with_backend(codec, backend), groups.plane, stored, threads)
        assert good.all()
        np.testing.assert_array_equal(back.memory, expected_back.memory)


@settings(max_examples=30, deadline=None)
@given(scene=scenes(), codec=st.sampled_from(QUANTIZERS), seed=st.integers(0, 999))
def test_every_level_decodes_any_bytes_alike(scene: tuple[Groups, Kept], codec: Quantizer, seed: int) -> None:
    """Codes and numbers of random bits, infinities and NaN among the numbers."""
    groups, kept = scene
    stored = encode(codec, groups, kept)
    noise = np.random.default_rng(seed).integers(0, 256, stored.memory.shape, np.uint8)
    stored.memory[:, 16:] = noise[:, 16:]
    expected, good = decode(with_backend(codec, NUMPY), groups.plane, stored)
    assert good.all()
    for backend in NATIVE:
        back, _ = decode(with_backend(codec, backend), groups.plane, stored)
        np.testing.assert_array_equal(back.memory, expected.memory)


@settings(max_examples=30, deadline=None)
@given(scene=scenes(), codec=st.sampled_from(DIFFERENTIALS), share=st.floats(0, 1), seed=st.integers(0, 999))
def test_every_level_finds_the_rows_of_both_precisions(
    scene: tuple[Groups, Kept], codec: Differential, share: float, seed: int
) -> None:
    groups, kept = scene
    plane = groups.plane
    significance = np.random.default_rng(seed).random((groups.n, plane.heads, kept.tokens))
    high = most_significant(significance, kept, share)
    results = []
    for backend in backends():
        chosen = with_backend(codec, backend)
        memory = np.zeros((groups.n, codec.stored_bytes(plane, kept, round(share * kept.rounded))), np.uint8)
        done = chosen.encode(plane, kept, groups.addresses, addresses(memory), high=high)
        stored = Stored(memory, done.sizes, done.lost)
        back, good = decode(chosen, plane, stored)
        assert good.all()
        results.append((memory, back.memory))
    for memory, back_memory in results[1:]:
        np.testing.assert_array_equal(memory, results[0][0])
        np.testing.assert_array_equal(back_memory, results[0][1])


def test_others_run_while_rows_are_rounded() -> None:
    """Another thread sees the work half done, which it never could if the call kept Python's lock."""
    groups = Groups(shape(dim=128, heads=8, pages=4), 96).fill("normal", 0)
    codec, kept = CODECS[1], Kept(64)
    memory = np.zeros((groups.n, codec.stored_bytes(groups.plane, kept)), np.uint8)
    for _ in range(50):  # the observer may be off the processor for a whole call
        memory[:, 16:] = 0
        args = (groups.plane, kept, groups.addresses, addresses(memory))
        thread = threading.Thread(target=codec.encode, args=args)
        thread.start()
        seen_half_done = False
        while thread.is_alive() and not seen_half_done:
            seen_half_done = bool(memory[0, -2:].any() and not memory[-1, -2:].any())
        thread.join()
        if seen_half_done:
            return
    pytest.fail("no batch was ever seen half done: the call holds the lock")
