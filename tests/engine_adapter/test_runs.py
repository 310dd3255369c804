"""The one offset calculation: random layouts, page tables and token ranges against numpy's own indexing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.engine_adapter.block_layout import BlockLayout
from kvstore.engine_adapter.runs import Pages, Strides, copy_runs, plan_runs
from kvstore.errors import BadInputError
from kvstore.types import GroupKind, KVGroup, KVSpec
from tests.engine_adapter.oracle import as_blocks, random_kv
from tests.engine_adapter.strategies import EnginePlane, specs

ORDERS = [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)]


@given(specs(), st.integers(0, 2**32), st.sampled_from(ORDERS), st.integers(1, 6), st.integers(0, 3), st.data())
def test_blocks_into_engine_pages_and_back_equal_numpy(
    spec: KVSpec, seed: int, order: tuple[int, ...], page_tokens: int, padding: int, data: st.DataObject
) -> None:
    rng = np.random.default_rng(seed)
    n_tokens = data.draw(st.integers(1, 4 * spec.block_tokens))
    first = data.draw(st.integers(0, n_tokens - 1))
    n_moved = data.draw(st.integers(0, n_tokens - first))
    engine_first = data.draw(st.integers(0, 2 * page_tokens))
    kv = random_kv(rng, spec, n_tokens)
    blocks = as_blocks(spec, kv)
    layout = BlockLayout.of(spec)
    # Blocks lie anywhere, as slots do.
    places = rng.permutation(len(blocks) + 2)[: len(blocks)]
    memory = rng.integers(0, 256, (len(blocks) + 2, spec.block_bytes), dtype=np.uint8)
    memory[places] = blocks
    starts = memory.ctypes.data + places.astype(np.int64) * spec.block_bytes
    n_pages = -(-(engine_first + n_moved) // page_tokens)
    table = (rng.permutation(n_pages + 2)[:n_pages] + 1).astype(np.int64)
    back = np.array(memory)
    back_starts = back.ctypes.data + places.astype(np.int64) * spec.block_bytes
    back[places] = 0xAA
    for layer, place in enumerate(layout.layers):
        for plane, offset in enumerate(place.planes):
            engine = EnginePlane(rng, order, n_pages + 2, page_tokens, place.heads, place.unit_bytes, padding)
            expected = engine.memory.copy()
            view = expected[..., : place.unit_bytes].transpose(*np.argsort(order), 3)
            for i in range(n_moved):
                page, inside = divmod(engine_first + i, page_tokens)
                view[table[page], inside] = kv[layer][plane, first + i]
            there = engine.pages(table, engine_first)
            runs = plan_runs(there, layout.pages(layer, starts, first), n_moved, place.heads, place.unit_bytes)
            copy_runs(runs, engine.address, offset)
            assert (engine.memory == expected).all()
            runs = plan_runs(layout.pages(layer, back_starts, first), there, n_moved, place.heads, place.unit_bytes)
            copy_runs(runs, offset, engine.address)
    untouched = [np.full_like(layer, 0xAA) for layer in kv]
    for mine, full in zip(untouched, kv, strict=True):
        mine[:, first : first + n_moved] = full[:, first : first + n_moved]
    assert (back[places] == as_blocks(spec, untouched, filler=0xAA)).all()


def test_neighbours_on_both_sides_are_one_run() -> None:
    spec = KVSpec(block_tokens=8, groups=(KVGroup(layers=1, kv_heads=2, head_dim=4, dtype="int8", layout="NHD"),))
    layout = BlockLayout.of(spec)
    blocks = layout.pages(0, np.array([0, 1000], np.int64), 0)
    # The engine's pages 5 and 6 follow each other in memory, and hold 4 tokens each in the block's own order.
    engine = Pages(np.array([5 * 32, 6 * 32, 9 * 32, 10 * 32], np.int64), 4, Strides(8, 4))
    runs = plan_runs(engine, blocks, 16, 2, 4)
    assert runs.to.tolist() == [160, 288]
    assert runs.come_from.tolist() == [0, 1000]
    assert runs.sizes.tolist() == [64, 64]


def test_an_opaque_page_is_copied_whole_or_not_at_all() -> None:
    spec = KVSpec(
        block_tokens=8, page_tokens=4,
        groups=(KVGroup(layers=2, dtype="uint8", layout="opaque", page_bytes=100),),
    )  # fmt: skip
    layout = BlockLayout.of(spec)
    assert [place.planes for place in layout.layers] == [(0,), (200,)]
    pages = layout.pages(1, np.array([1000], np.int64), 4)
    runs = plan_runs(Pages(np.array([0], np.int64), 1, Strides(100, 100)), pages, layout.units(1, 4), 1, 100)
    assert (runs.to.tolist(), runs.come_from.tolist(), runs.sizes.tolist()) == ([0], [1100], [100])
    with pytest.raises(BadInputError, match="3 tokens are no whole number of opaque pages of 4 tokens"):
        layout.units(1, 3)


def test_a_side_without_room_is_named() -> None:
    row = Pages(np.array([0], np.int64), 4, Strides(1, 1), first_token=2)
    room = Pages(np.array([0], np.int64), 8, Strides(1, 1))
    with pytest.raises(
        BadInputError, match=r"1 pages of 4 tokens can't hold 3 tokens from token 2 on \(the side 'to'\)"
    ):
        plan_runs(row, room, 3, 1, 1)
    with pytest.raises(BadInputError, match="the side 'come_from'"):
        plan_runs(room, row, 3, 1, 1)


def test_states_have_no_tokens() -> None:
    group = KVGroup(layers=1, kind=GroupKind.STATE)
    with pytest.raises(BadInputError, match="opaque"):
        BlockLayout.of(KVSpec(block_tokens=4, groups=(group,)))
