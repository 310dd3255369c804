"""Paged engines of every layout on a real daemon: saved chunk by chunk from one, loaded layer by layer into another."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvstore.client import Client, NamespaceHandle
from kvstore.engine_adapter.counters import SharedCounters
from kvstore.engine_adapter.engine_layout import EngineKV
from kvstore.engine_adapter.jobs import Job, Workers
from kvstore.engine_adapter.page_table import PageTable
from kvstore.engine_adapter.paged import LoadJob, PagedStore, RowRequest
from kvstore.errors import BadInputError
from kvstore.types import GroupKind, KVGroup, KVSpec, Namespace, Root

LAYERS, HEADS, DIM, PAGES = 3, 2, 8, 24
FAR_S = 60.0
DENSE = KVSpec(block_tokens=8, groups=(KVGroup(layers=LAYERS, kv_heads=HEADS, head_dim=DIM, dtype="float32"),))
LATENT = KVSpec(block_tokens=8, groups=(KVGroup(layers=LAYERS, head_dim=DIM, dtype="float32", kind=GroupKind.MLA),))

Values = NDArray[np.float32]
Make = Callable[..., Values]
Made = tuple[Sequence[Any], list[list[Values]]]


def far() -> float:
    return time.monotonic() + FAR_S


class Engine:
    """An engine's memory in some layout. ``logical[l][p]`` is a view [pages, page_tokens, heads, dim] of plane p."""

    def __init__(self, kind: str, page_tokens: int, seed: int, use_torch: bool = False) -> None:
        rng = np.random.default_rng(seed)

        def make(*shape: int) -> Values:
            return rng.standard_normal(shape, dtype=np.float32)

        def given(arrays: Sequence[Any]) -> list[Any]:
            def one(array: Any) -> Any:
                if isinstance(array, tuple):
                    return tuple(map(one, array))
                return torch.from_numpy(array) if use_torch else array

            return [one(array) for array in arrays]

        arrays, self.logical = {
            "2PTHD": self._planes_first, "PTHC": self._merged, "PHTC": self._merged_by_head, "SHD": self._slots,
            "2SLHD": self._page_first, "2PLTHD": self._page_first_direct, "2PHTLD": self._page_head,
            "PTD": self._latent,
        }[kind](make, page_tokens)  # fmt: skip
        self.page_tokens = page_tokens
        self.kv = EngineKV.of(given(arrays), kind, page_tokens if "S" in kind else None)

    @staticmethod
    def _planes_first(make: Make, t: int) -> Made:
        arrays = [make(2, PAGES, t, HEADS, DIM) for _ in range(LAYERS)]
        return arrays, [[a[0], a[1]] for a in arrays]

    @staticmethod
    def _merged(make: Make, t: int) -> Made:
        arrays = [make(PAGES, t, HEADS, 2 * DIM) for _ in range(LAYERS)]
        return arrays, [[a[..., :DIM], a[..., DIM:]] for a in arrays]

    @staticmethod
    def _merged_by_head(make: Make, t: int) -> Made:
        arrays = [make(PAGES, HEADS, t, 2 * DIM) for _ in range(LAYERS)]
        return arrays, [[x.transpose(0, 2, 1, 3) for x in (a[..., :DIM], a[..., DIM:])] for a in arrays]

    @staticmethod
    def _slots(make: Make, t: int) -> Made:
        arrays = [(make(PAGES * t, HEADS, DIM), make(PAGES * t, HEADS, DIM)) for _ in range(LAYERS)]
        return arrays, [[a.reshape(PAGES, t, HEADS, DIM) for a in pair] for pair in arrays]

    @staticmethod
    def _page_first(make: Make, t: int) -> Made:
        whole = make(2, PAGES * t, LAYERS, HEADS, DIM)
        paged = whole.reshape(2, PAGES, t, LAYERS, HEADS, DIM)
        return [whole], [[paged[i, :, :, layer] for i in range(2)] for layer in range(LAYERS)]

    @staticmethod
    def _page_first_direct(make: Make, t: int) -> Made:
        whole = make(2, PAGES, LAYERS, t, HEADS, DIM)
        return [whole], [[whole[i, :, layer] for i in range(2)] for layer in range(LAYERS)]

    @staticmethod
    def _page_head(make: Make, t: int) -> Made:
        whole = make(2, PAGES, HEADS, t, LAYERS, DIM)
        planes = whole.transpose(0, 4, 1, 3, 2, 5)
        return [whole], [[planes[i, layer] for i in range(2)] for layer in range(LAYERS)]

    @staticmethod
    def _latent(make: Make, t: int) -> Made:
        arrays = [make(PAGES, t, DIM) for _ in range(LAYERS)]
        return arrays, [[a[:, :, None, :]] for a in arrays]

    def tokens(self, layer: int, plane: int, pages: NDArray[np.int64], n: int) -> Values:
        """A copy of the first n tokens of a row, [n, heads, dim]."""
        view = self.logical[layer][plane][pages]
        return view.reshape(-1, *view.shape[2:])[:n]


DENSE_KINDS = ["2PTHD", "PTHC", "PHTC", "SHD", "2SLHD", "2PLTHD", "2PHTLD"]


def handle_for(client: Client, spec: KVSpec, layout: str = "NHD") -> NamespaceHandle:
    group = spec.groups[0]
    groups = (KVGroup(group.layers, group.kv_heads, group.head_dim, group.dtype, group.kind, layout),)
    return client.open(Namespace(model=f"paged {layout}", spec=KVSpec(spec.block_tokens, groups, 4)))


def table_for(engine: Engine, lengths: Sequence[int], seed: int) -> PageTable:
    """Pages in any order, none twice."""
    counts = [-(-n // engine.page_tokens) for n in lengths]
    pages = np.random.default_rng(seed).permutation(PAGES)[: sum(counts)]
    return PageTable.of(np.concatenate(([0], np.cumsum(counts))), pages, engine.kv.n_pages)


@pytest.fixture
def closing() -> Iterator[list[PagedStore]]:
    stores: list[PagedStore] = []
    yield stores
    for store in stores:
        store.close()


def save_rows(store: PagedStore, rows: list[NDArray[np.int64]], table: PageTable, chunk: int) -> None:
    requests = [RowRequest(row) for row in rows]
    writers = [store.writer(row, prefix) for row, prefix in zip(requests, store.find(requests), strict=True)]
    for start in range(0, max(map(len, rows)), chunk):
        job = store.save(writers, [row[start : start + chunk] for row in rows], table, deadline_s=far())
        for layer in range(LAYERS):
            job.layer_ready(layer)
        assert job.wait_copied(far())
        assert job.wait(far()), job.reason
    for writer in writers:
        writer.finish()


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(("source", "target"), list(zip(DENSE_KINDS, DENSE_KINDS[1:] + DENSE_KINDS[:1], strict=True)))
def test_what_one_layout_saved_another_loads(
    client: Client, closing: list[PagedStore], layout: str, source: str, target: str
) -> None:
    handle = handle_for(client, DENSE, layout)
    first, second = Engine(source, 4, 1), Engine(target, 3, 2, use_torch=True)
    rng = np.random.default_rng(3)
    rows = [rng.integers(0, 1000, n) for n in (21, 16, 5)]
    table = table_for(first, [len(row) for row in rows], 4)
    stores = [PagedStore(handle, engine.kv) for engine in (first, second)]
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


def test_latents_have_one_plane(client: Client, closing: list[PagedStore]) -> None:
    handle = handle_for(client, LATENT)
    first, second = Engine("PTD", 4, 1), Engine("PTD", 8, 2)
    row = np.arange(30)
    closing += [PagedStore(handle, first.kv), PagedStore(handle, second.kv, granularity_tokens=8)]
    table, there = table_for(first, [30], 1), table_for(second, [30], 2)
    save_rows(closing[0], [row], table, chunk=30)
    found = closing[1].find([RowRequest(row)])
    assert found[0].n_tokens == 24  # 29, cut to whole pages of the engine
    assert closing[1].load(found, there, deadline_s=far()).wait(far())
    for layer in range(LAYERS):
        assert np.array_equal(second.tokens(layer, 0, there.row(0), 24), first.tokens(layer, 0, table.row(0), 24))


def test_layers_with_a_window_are_loaded_where_they_look(client: Client, closing: list[PagedStore]) -> None:
    full = KVGroup(layers=2, kv_heads=HEADS, head_dim=DIM, dtype="float32")
    window = replace(full, layers=1, kind=GroupKind.SLIDING, window_tokens=5)
    handle = client.open_hybrid(Namespace("paged windows", KVSpec(8, (full, window), 4)))
    first, second = Engine("2PTHD", 4, 1), Engine("PTHC", 4, 2)
    rows = [np.arange(39), np.arange(100, 120)]
    closing += [PagedStore(handle, first.kv), PagedStore(handle, second.kv, granularity_tokens=4)]
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


def test_opaque_pages_go_whole(client: Client, closing: list[PagedStore]) -> None:
    spec = KVSpec(8, (KVGroup(layers=LAYERS, dtype="uint8", layout="opaque", page_bytes=100),), page_tokens=4)
    handle = client.open(Namespace(model="opaque", spec=spec))
    rng = np.random.default_rng(1)
    here = [rng.integers(0, 256, (PAGES, 100), dtype=np.uint8) for _ in range(LAYERS)]
    there = [np.zeros_like(layer) for layer in here]
    engines = [EngineKV.of(layers, "PX", page_tokens=4) for layers in (here, there)]
    closing += [PagedStore(handle, engine, granularity_tokens=4) for engine in engines]
    row = np.arange(24)
    save_rows(closing[0], [row], PageTable.of([0, 6], [5, 0, 9, 2, 7, 3], PAGES), chunk=12)
    found = closing[1].find([RowRequest(row)])
    assert found[0].n_tokens == 20
    assert closing[1].load(found, PageTable.of([0, 5], [1, 2, 3, 4, 6], PAGES), deadline_s=far()).wait(far())
    for mine, theirs in zip(there, here, strict=True):
        assert np.array_equal(mine[[1, 2, 3, 4, 6]], theirs[[5, 0, 9, 2, 7]])


def stored_row(client: Client, closing: list[PagedStore]) -> tuple[PagedStore, Engine, NDArray[np.int64], PageTable]:
    engine = Engine("2PTHD", 4, 1)
    store = PagedStore(handle_for(client, DENSE), engine.kv)
    closing.append(store)
    row = np.arange(20)
    table = table_for(engine, [20], 1)
    save_rows(store, [row], table, chunk=20)
    return store, engine, row, table


def test_only_the_rows_that_failed_are_reported(client: Client, closing: list[PagedStore]) -> None:
    store, _, row, table = stored_row(client, closing)
    found = store.find([RowRequest(row), RowRequest(row), RowRequest(row)])
    # The second row has too few pages for its 19 tokens.
    pages = table.row(0)
    batch = PageTable.of([0, 5, 7, 12], np.concatenate([pages, pages[:2], pages]), PAGES)
    job = store.load(found, batch, deadline_s=far())
    assert job.wait(far())
    assert job.failed_rows() == [1]
    assert "can't hold" in job.row_reasons[1]
    assert store.counters.snapshot()["load_failed_rows"] == 1


def test_other_identities_are_misses(client: Client, closing: list[PagedStore]) -> None:
    store, _, row, _ = stored_row(client, closing)
    requests = [RowRequest(row), RowRequest(row, Root(salt="a")), RowRequest(row[::-1])]
    assert [prefix.n_tokens for prefix in store.find(requests)] == [19, 0, 0]


def test_a_load_past_its_deadline_touches_nothing(client: Client, closing: list[PagedStore]) -> None:
    store, engine, row, table = stored_row(client, closing)
    before = [[plane.copy() for plane in layer] for layer in engine.logical]
    job = store.load(store.find([RowRequest(row)]), table, deadline_s=time.monotonic() - 1)
    assert not job.wait(far())
    assert (job.failed_rows(), job.reason) == ([0], "its deadline had passed")
    assert not job.wait_layer(0, far())
    assert all(
        np.array_equal(a, b) for x, y in zip(before, engine.logical, strict=True) for a, b in zip(x, y, strict=True)
    )


class StoppedAtLayer(PagedStore):
    """A store whose loads wait at a layer until they are let go: to look at a job in the middle."""

    def __init__(self, *args: Any, layer: int, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.layer, self.there, self.go = layer, threading.Event(), threading.Event()

    def _load_layer(self, job: LoadJob, layer: int, *args: Any) -> None:
        if layer == self.layer:
            self.there.set()
            assert self.go.wait(FAR_S)
        super()._load_layer(job, layer, *args)


def test_layers_are_ready_one_by_one_and_nothing_is_touched_after_a_cancel(
    client: Client, closing: list[PagedStore], wait_until: Callable[[Callable[[], bool], str], None]
) -> None:
    _, engine, row, table = stored_row(client, closing)
    store = StoppedAtLayer(handle_for(client, DENSE), engine.kv, layer=1)
    closing.append(store)
    job = store.load(store.find([RowRequest(row)]), table, deadline_s=far())
    assert store.there.wait(FAR_S)
    assert job.wait_layer(0, far())
    assert not job.wait_layer(1, time.monotonic())
    cancelled = threading.Thread(target=job.cancel)
    last = [plane.copy() for plane in engine.logical[2]]
    cancelled.start()
    wait_until(lambda: job.ending, "the cancel is under way")
    store.go.set()
    cancelled.join(FAR_S)
    # The cancel waited for the layer that was being copied; the last one was never begun.
    assert job.over
    assert job.wait_layer(1, far())
    assert job.failed_rows() == [0]
    assert not job.wait_layer(2, far())
    assert all(np.array_equal(a, b) for a, b in zip(last, engine.logical[2], strict=True))


@pytest.mark.parametrize("end", ["cancel", "deadline"])
def test_a_save_that_does_not_get_all_layers_shows_nothing(client: Client, closing: list[PagedStore], end: str) -> None:
    engine = Engine("SHD", 4, 1)
    store = PagedStore(handle_for(client, DENSE), engine.kv)
    closing.append(store)
    row = np.arange(20)
    request = RowRequest(row)
    writer = store.writer(request, store.find([request])[0])
    deadline_s = far() if end == "cancel" else time.monotonic() + 0.05
    job = store.save([writer], [row], table_for(engine, [20], 1), deadline_s=deadline_s)
    job.layer_ready(0)
    if end == "cancel":
        assert job.wait_layer(0, far())
        job.cancel()
    assert not job.wait(far())
    store.close()
    assert writer.reason == job.reason
    assert store.find([request])[0].n_tokens == 0
    # Its slots went back: the next may store them.
    other = PagedStore(handle_for(client, DENSE), engine.kv)
    closing.append(other)
    save_rows(other, [row], table_for(engine, [20], 1), chunk=20)
    assert other.find([request])[0].n_tokens == 19


def test_a_row_with_a_bad_page_table_is_not_stored_and_the_others_are(
    client: Client, closing: list[PagedStore]
) -> None:
    engine = Engine("2PTHD", 4, 1)
    store = PagedStore(handle_for(client, DENSE), engine.kv)
    closing.append(store)
    rows = [np.arange(16), np.arange(100, 116)]
    requests = [RowRequest(row) for row in rows]
    writers = [store.writer(row, prefix) for row, prefix in zip(requests, store.find(requests), strict=True)]
    table = PageTable.of([0, 2, 6], [0, 1, 2, 3, 4, 5], PAGES)
    job = store.save(writers, rows, table, deadline_s=far())
    job.layer_ready(LAYERS - 1)
    assert not job.wait(far())
    assert "can't hold" in job.reason
    assert [writer.n_stored for writer in writers] == [0, 2]
    assert [prefix.n_tokens for prefix in store.find(requests)] == [0, 15]


def test_no_more_jobs_wait_than_there_is_room_for() -> None:
    counters = SharedCounters()
    workers = Workers(1, 1, counters)
    running, go = threading.Event(), threading.Event()
    jobs = [Job(1, far()) for _ in range(3)]

    def run() -> None:
        running.set()
        assert go.wait(FAR_S)
        jobs[0].finish()

    workers.start(jobs[0], run)
    assert running.wait(FAR_S)
    workers.start(jobs[1], jobs[1].finish)
    workers.start(jobs[2], jobs[2].finish)
    assert jobs[2].over
    assert jobs[2].reason == "too many transfers wait already"
    go.set()
    assert jobs[0].wait(far())
    assert jobs[1].wait(far())
    workers.close()
    assert counters.snapshot() == {"jobs_refused": 1}
    late = Job(1, far())
    workers.start(late, late.finish)
    assert "shutdown" in late.reason


def test_an_error_in_a_thread_ends_its_job_only() -> None:
    counters = SharedCounters()
    workers = Workers(1, 4, counters)
    bad, good = Job(1, far()), Job(1, far())

    def run() -> None:
        raise ZeroDivisionError("a bug")

    workers.start(bad, run)
    workers.start(good, good.finish)
    assert not bad.wait(far())
    assert bad.reason == "ZeroDivisionError: a bug"
    assert good.wait(far())
    assert counters.snapshot() == {"errors": 1}
    workers.close()


def test_counts_that_do_not_fit_are_refused(client: Client, closing: list[PagedStore]) -> None:
    store, _, row, table = stored_row(client, closing)
    found = store.find([RowRequest(row)])
    assert "2 rows were found" in store.load([*found, *found], table, deadline_s=far()).reason
    assert "0 writers" in store.save([], [row], table, deadline_s=far()).reason


@pytest.mark.parametrize(
    ("tensors", "dims", "page_tokens", "said"),
    [
        ([], "PTHD", None, "no tensors"),
        ([np.zeros((2, 2))], "PT", None, "one of D, C and X"),
        ([np.zeros((2, 2))], "DD", None, "once at most"),
        ([np.zeros((2, 2, 2))], "PTHD", None, "does not have the dimensions"),
        ([np.zeros((4, 2))], "SD", None, "page_tokens is missing"),
        ([np.zeros((2, 2, 4))[:, :, ::2]], "PTD", None, "do not lie next to each other"),
        ([np.zeros((2, 2, 3))], "PTC", None, "no K and V"),
        ([np.zeros((2, 2, 3)), np.zeros((2, 4, 3))], "PTD", None, "differ"),
        ([torch.zeros(2, 2, 3, device="meta")], "PTD", None, "only host memory"),
    ],
)
def test_descriptions_that_can_not_be(tensors: list[Any], dims: str, page_tokens: int | None, said: str) -> None:
    with pytest.raises(BadInputError, match=said):
        EngineKV.of(tensors, dims, page_tokens)


@pytest.mark.parametrize(
    ("kind", "page_tokens", "spec", "said"),
    [
        ("PTD", 4, DENSE, r"layer 0 has \(planes, heads, bytes\) \(1, 1, 32\) in the engine, \(2, 2, 32\) in a block"),
        ("2PTHD", 4, KVSpec(8, (KVGroup(layers=2, kv_heads=2, head_dim=8),)), "3 layers, a block 2"),
    ],
)
def test_an_engine_must_be_what_the_namespace_says(
    client: Client, kind: str, page_tokens: int, spec: KVSpec, said: str
) -> None:
    handle = client.open(Namespace(model="other", spec=spec))
    with pytest.raises(BadInputError, match=said):
        PagedStore(handle, Engine(kind, page_tokens, 1).kv)


@pytest.mark.parametrize(
    ("indptr", "indices", "said"),
    [
        ([0, 2], [1], "must rise from 0"),
        ([], [], "must rise from 0"),
        ([0, 2, 1, 3], [1, 2, 3], "must rise from 0"),
        ([0, 1], [9], "page 9 is not one of the engine's 4"),
        ([0, 1], [-1], "page -1"),
        ([0, 1], [1.5], "give integers"),
    ],
)
def test_page_tables_that_can_not_be(indptr: list[int], indices: list[Any], said: str) -> None:
    with pytest.raises(BadInputError, match=said):
        PageTable.of(indptr, indices, 4)
