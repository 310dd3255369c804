"""Paged engines of every layout on a real daemon: saved chunk by chunk from one, loaded layer by layer into another."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvstore.client import Client
from kvstore.engine_adapter.engine_layout import EngineKV
from kvstore.engine_adapter.page_table import PageTable
from kvstore.engine_adapter.paged import PagedStore, RowRequest
from kvstore.types import GroupKind, KVGroup, KVSpec, Namespace, Root
from tests.engine_adapter.paged_engines import (
    DENSE,
    DENSE_KINDS,
    DIM,
    HEADS,
    LATENT,
    LAYERS,
    PAGES,
    Engine,
    far,
    handle_for,
    save_rows,
    stored_row,
    table_for,
)
from tests.engine_adapter.places import Place


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(("source", "target"), list(zip(DENSE_KINDS, DENSE_KINDS[1:] + DENSE_KINDS[:1], strict=True)))
def test_what_one_layout_saved_another_loads(
    client: Client, closing: list[PagedStore], place: Place, layout: str, source: str, target: str
) -> None:
    handle = handle_for(client, DENSE, layout)
    first, second = Engine(source, 4, 1, place=place), Engine(target, 3, 2, use_torch=True, place=place)
    rng = np.random.default_rng(3)
    rows = [rng.integers(0, 1000, n) for n in (21, 16, 5)]
    table = table_for(first, [len(row) for row in rows], 4)
    stores = [place.store(handle, engine.kv) for engine in (first, second)]
    closing += stores
    save_rows(stores[0], rows, table, chunk=6)
    requests = [RowRequest(row) for row in rows]
    found = stores[1].find(requests)
    assert [prefix.n_tokens for prefix in found] == [20, 15, 4]
    there = table_for(second, [len(row) for row in rows], 5)
    # The second row has its first 7 tokens already: they must stay as they are.
    before = second.tokens(0, 0, there.row(1), 7)
    job = stores[1].load(found, there, deadline_s=far(), first_tokens=[0, 7, 0])
    for layer in range(LAYERS):
        assert job.wait_layer(layer, far())
    assert job.wait(far())
    assert job.failed_rows() == []
    for r, prefix in enumerate(found):
        for layer in range(LAYERS):
            for plane in range(2):
                expected = first.tokens(layer, plane, table.row(r), prefix.n_tokens)
                got = second.tokens(layer, plane, there.row(r), prefix.n_tokens)
                start = 7 if r == 1 else 0
                assert np.array_equal(got[start:], expected[start:]), (r, layer, plane)
    assert np.array_equal(second.tokens(0, 0, there.row(1), 7), before)


def test_latents_have_one_plane(client: Client, closing: list[PagedStore], place: Place) -> None:
    handle = handle_for(client, LATENT)
    first, second = Engine("PTD", 4, 1, place=place), Engine("PTD", 8, 2, place=place)
    row = np.arange(30)
    closing += [place.store(handle, first.kv), place.store(handle, second.kv, granularity_tokens=8)]
    table, there = table_for(first, [30], 1), table_for(second, [30], 2)
    save_rows(closing[0], [row], table, chunk=30)
    found = closing[1].find([RowRequest(row)])
    assert found[0].n_tokens == 24  # 29, cut to whole pages of the engine
    assert closing[1].load(found, there, deadline_s=far()).wait(far())
    for layer in range(LAYERS):
        assert np.array_equal(second.tokens(layer, 0, there.row(0), 24), first.tokens(layer, 0, table.row(0), 24))


def test_layers_with_a_window_are_loaded_where_they_look(
    client: Client, closing: list[PagedStore], place: Place
) -> None:
    full = KVGroup(layers=2, kv_heads=HEADS, head_dim=DIM, dtype="float32")
    window = replace(full, layers=1, kind=GroupKind.SLIDING, window_tokens=5)
    handle = client.open_hybrid(Namespace("paged windows", KVSpec(8, (full, window), 4)))
    first, second = Engine("2PTHD", 4, 1, place=place), Engine("PTHC", 4, 2, place=place)
    rows = [np.arange(39), np.arange(100, 120)]
    closing += [place.store(handle, first.kv), place.store(handle, second.kv, granularity_tokens=4)]
    table, there = (table_for(engine, [39, 20], seed) for seed, engine in enumerate((first, second)))
    save_rows(closing[0], rows, table, chunk=13)
    requests = [RowRequest(row) for row in rows]
    found = closing[1].find(requests)
    assert [prefix.n_tokens for prefix in found] == [36, 16]
    before = [second.tokens(2, 0, there.row(row), 39) for row in range(2)]
    assert closing[1].load(found, there, deadline_s=far()).wait(far())
    for row, (n, window_from) in enumerate(((36, 24), (16, 8))):
        for layer in range(LAYERS):
            for plane in range(2):
                expected = first.tokens(layer, plane, table.row(row), n)
                got = second.tokens(layer, plane, there.row(row), n)
                start = window_from if layer == 2 else 0
                assert np.array_equal(got[start:], expected[start:]), (row, layer, plane)
        assert np.array_equal(second.tokens(2, 0, there.row(row), window_from), before[row][:window_from])


def test_opaque_pages_go_whole(client: Client, closing: list[PagedStore], place: Place) -> None:
    spec = KVSpec(8, (KVGroup(layers=LAYERS, dtype="uint8", layout="opaque", page_bytes=100),), page_tokens=4)
    handle = client.open(Namespace(model="opaque", spec=spec))
    rng = np.random.default_rng(1)
    here = [rng.integers(0, 256, (PAGES, 100), dtype=np.uint8) for _ in range(LAYERS)]
    there = [np.zeros_like(layer) for layer in here]
    engines = [EngineKV.of([place.hold(layer) for layer in layers], "PX", page_tokens=4) for layers in (here, there)]
    closing += [place.store(handle, engine, granularity_tokens=4) for engine in engines]
    row = np.arange(24)
    save_rows(closing[0], [row], PageTable.of([0, 6], [5, 0, 9, 2, 7, 3], PAGES), chunk=12)
    found = closing[1].find([RowRequest(row)])
    assert found[0].n_tokens == 20
    assert closing[1].load(found, PageTable.of([0, 5], [1, 2, 3, 4, 6], PAGES), deadline_s=far()).wait(far())
    place.refresh()
    for mine, theirs in zip(there, here, strict=True):
        assert np.array_equal(mine[[1, 2, 3, 4, 6]], theirs[[5, 0, 9, 2, 7]])


def test_other_identities_are_misses(client: Client, closing: list[PagedStore], place: Place) -> None:
    store, _, row, _ = stored_row(client, closing, place)
    requests = [RowRequest(row), RowRequest(row, Root(salt="a")), RowRequest(row[::-1])]
    assert [prefix.n_tokens for prefix in store.find(requests)] == [19, 0, 0]
