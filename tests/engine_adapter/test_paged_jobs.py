"""Loads and saves of paged engines that fail, end early or are too many: what is reported, what stays untouched."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvstore.client import Client
from kvstore.engine_adapter.counters import SharedCounters
from kvstore.engine_adapter.jobs import Job, Workers
from kvstore.engine_adapter.page_table import PageTable
from kvstore.engine_adapter.paged import LoadJob, PagedStore, RowRequest
from tests.engine_adapter.paged_engines import (
    DENSE,
    FAR_S,
    LAYERS,
    PAGES,
    Engine,
    far,
    handle_for,
    save_rows,
    stored_row,
    table_for,
)
from tests.engine_adapter.places import HERE, Place


def test_only_the_rows_that_failed_are_reported(client: Client, closing: list[PagedStore], place: Place) -> None:
    store, _, row, table = stored_row(client, closing, place)
    found = store.find([RowRequest(row), RowRequest(row), RowRequest(row)])
    # The second row has too few pages for its 19 tokens.
    pages = np.concatenate([table.row(0), np.setdiff1d(np.arange(PAGES), table.row(0))])
    batch = PageTable.of([0, 5, 7, 12], pages[:12], PAGES)
    job = store.load(found, batch, deadline_s=far())
    assert job.wait(far())
    assert job.failed_rows() == [1]
    assert "can't hold" in job.row_reasons[1]
    assert store.counters.snapshot()["load_failed_rows"] == 1


def test_a_load_past_its_deadline_touches_nothing(client: Client, closing: list[PagedStore], place: Place) -> None:
    store, engine, row, table = stored_row(client, closing, place)
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

    def _load_layer(self, job: LoadJob, layer: int, *args: Any) -> bool:
        if layer == self.layer:
            self.there.set()
            assert self.go.wait(FAR_S)
        return super()._load_layer(job, layer, *args)


def test_layers_are_ready_one_by_one_and_nothing_is_touched_after_a_cancel(
    client: Client, closing: list[PagedStore], place: Place, wait_until: Callable[[Callable[[], bool], str], None]
) -> None:
    _, engine, row, table = stored_row(client, closing, place)
    store = place.store(handle_for(client, DENSE), engine.kv, kind=StoppedAtLayer, layer=1)
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
    # The cancel waited for the layer that the processor copied, while a device was given no more; the last never began.
    assert job.over
    assert job.wait_layer(1, far()) == (place is HERE)
    assert job.failed_rows() == [0]
    assert not job.wait_layer(2, far())
    assert all(np.array_equal(a, b) for a, b in zip(last, engine.logical[2], strict=True))


@pytest.mark.parametrize("end", ["cancel", "deadline"])
def test_a_save_that_does_not_get_all_layers_shows_nothing(
    client: Client, closing: list[PagedStore], place: Place, end: str
) -> None:
    engine = Engine("SHD", 4, 1, place=place)
    store = place.store(handle_for(client, DENSE), engine.kv)
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
    other = place.store(handle_for(client, DENSE), engine.kv)
    closing.append(other)
    save_rows(other, [row], table_for(engine, [20], 1), chunk=20)
    assert other.find([request])[0].n_tokens == 19


def test_a_row_with_a_bad_page_table_is_not_stored_and_the_others_are(
    client: Client, closing: list[PagedStore], place: Place
) -> None:
    engine = Engine("2PTHD", 4, 1, place=place)
    store = place.store(handle_for(client, DENSE), engine.kv)
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


def test_counts_that_do_not_fit_are_refused(client: Client, closing: list[PagedStore], place: Place) -> None:
    store, _, row, table = stored_row(client, closing, place)
    found = store.find([RowRequest(row)])
    assert "2 rows were found" in store.load([*found, *found], table, deadline_s=far()).reason
    assert "0 writers" in store.save([], [row], table, deadline_s=far()).reason
