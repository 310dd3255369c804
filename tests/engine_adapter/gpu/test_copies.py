"""Runs cut, ordered and packed: every byte once, nothing beyond the bounds."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvstore.engine_adapter.gpu.copies import ALIGNMENT_BYTES, PADDING_BYTES, Copies, Orders, packed
from kvstore.engine_adapter.moving import Copy
from tests.engine_adapter.gpu.scene import runs_of

MEMORY_BYTES = 600


@st.composite
def copies(draw: st.DrawFn) -> Copies:
    """Runs that may lie in one another in host memory, in any order, in two regions that adjoin."""
    n = draw(st.integers(1, 12))
    sizes = [draw(st.integers(1, 90)) for _ in range(n)]
    host = [draw(st.integers(0, MEMORY_BYTES - size)) for size in sizes]
    device = np.concatenate(([0], np.cumsum(sizes)[:-1])) + draw(st.integers(0, 40))
    made = Copies.of([Copy(runs_of(device, host, sizes), 10_000, 1000)], to_device=True)
    split = np.uint64(1000 + draw(st.integers(0, MEMORY_BYTES)))
    whole = (made.host + made.sizes <= split) | (made.host >= split)
    chosen = made.chosen(whole)
    return Copies(chosen.host, chosen.device, chosen.sizes, (chosen.host >= split).astype(np.int64))


def pairs(made: Copies) -> list[tuple[int, int]]:
    """Which byte goes where, each as often as it does."""
    found = []
    for host, device, size in zip(made.host.tolist(), made.device.tolist(), made.sizes.tolist(), strict=True):
        found += [(host + i, device + i) for i in range(size)]
    return sorted(found)


@given(copies(), st.integers(1, 200), st.integers(1, 5))
def test_pieces_are_bounded_and_have_every_byte_once(made: Copies, more_bytes: int, runs_max: int) -> None:
    bytes_max = PADDING_BYTES + more_bytes
    parts = list(made.pieces(bytes_max, runs_max))
    assert sorted(pair for part in parts for pair in pairs(part)) == pairs(made)
    for part in parts:
        assert 0 < len(part) <= runs_max
        assert (part.sizes > 0).all()
        assert packed(part).n_bytes <= bytes_max
        assert_packed(part)


@given(copies())
def test_packed_bytes_are_those_of_the_runs(made: Copies) -> None:
    if len(made):
        assert_packed(made)


def assert_packed(made: Copies) -> None:
    packing = packed(made)
    memory = np.random.default_rng(1).integers(0, 256, MEMORY_BYTES, dtype=np.uint8)
    staged: NDArray[np.int64] = np.full(packing.n_bytes, -1, np.int64)
    for start, offset, size in zip(packing.starts, packing.offsets, packing.sizes, strict=True):
        there = slice(int(offset), int(offset + size))
        assert (staged[there] == -1).all(), "spans overlap"
        staged[there] = memory[int(start) - 1000 : int(start) - 1000 + int(size)]
        assert int(offset) % ALIGNMENT_BYTES == int(start) % ALIGNMENT_BYTES
    for host, at, size in zip(made.host, packing.at, made.sizes, strict=True):
        expected = memory[int(host) - 1000 : int(host) - 1000 + int(size)]
        assert (staged[int(at) : int(at + size)] == expected).all()


def test_what_adjoins_is_one_span_but_not_across_regions() -> None:
    made = Copies.of([Copy(runs_of([0, 10, 20], [10, 0, 20], [10, 10, 10]), 100, 200)], to_device=True)
    assert made.host.tolist() == [200, 210, 220]
    assert made.device.tolist() == [110, 100, 120]
    assert packed(made).sizes.tolist() == [30]
    apart = Copies(made.host, made.device, made.sizes, np.array([0, 0, 1]))
    assert packed(apart).sizes.tolist() == [20, 10]


@given(st.integers(0, 2**32), st.integers(1, 4), st.booleans())
def test_an_order_is_found_once_for_layers_that_are_alike(seed: int, n_planes: int, to_device: bool) -> None:
    rng = np.random.default_rng(seed)
    runs = [runs_of(rng.permutation(9) * 10, rng.permutation(9) * 10, rng.integers(1, 11, 9)) for _ in range(2)]
    orders: Orders = {}
    for layer in range(4):
        # The last layer's planes lie otherwise: its order is another one.
        apart = 100 if layer < 3 else 7
        copies = [
            Copy(runs[i % 2], layer * 1000 + i * apart, layer * 3000 + (n_planes - i) * apart) for i in range(n_planes)
        ]
        made = Copies.of(copies, to_device=to_device, orders=orders)
        assert pairs(made) == pairs(Copies.of(copies, to_device=to_device))
        assert (np.diff(made.host.astype(np.int64)) >= 0).all()
    assert len(orders) <= 2


def test_a_store_is_ordered_by_its_destinations() -> None:
    made = Copies.of([Copy(runs_of([10, 0], [0, 10], [10, 10]), 200, 100)], to_device=False)
    assert (made.host.tolist(), made.device.tolist()) == ([200, 210], [110, 100])
