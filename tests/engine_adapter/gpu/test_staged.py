"""Staged copies go on behind their caller: what waits for what, what is kept, what a cancel leaves, what is bounded."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from kvstore.device.simulated import SimulatedDevice
from kvstore.engine_adapter.gpu.choice import Route
from kvstore.engine_adapter.gpu.lane import LaneSizes
from kvstore.engine_adapter.gpu.rings import HostRing
from kvstore.engine_adapter.gpu.staged import StagedMoves
from kvstore.engine_adapter.moving import Copy
from kvstore.errors import BadInputError, DeviceError
from tests.engine_adapter.gpu.scene import FAR_S, Bytes, Scene, one, region, runs_of, scene

LAYER_BYTES, LAYERS = 3000, 4
ROUTES = [*Route, None]
"""By every route; through pinned memory of our own with None."""


def random(seed: int, n_bytes: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, n_bytes, dtype=np.uint8)


def takes_one(left: Iterator[int]) -> bool:
    return next(left, None) is not None


def layers_on_their_way(on_device: Scene, route: Route | None) -> tuple[StagedMoves, Bytes, int]:
    """The moves, what lies in host memory, and where it comes to."""
    values = random(1, LAYER_BYTES * LAYERS)
    mapping = region(len(values), values)
    if route is not None:
        on_device.registered(mapping)
    moves = on_device.reader(route or Route.DIRECT).begin()
    moves.keep(mapping)
    there = on_device.upload(np.zeros(len(values), np.uint8))
    for layer in range(LAYERS):
        at = layer * LAYER_BYTES
        assert moves.copy(one(there + at, mapping.address + at, LAYER_BYTES))
        moves.mark()
    return moves, values, there


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("waits", [True, False])
def test_a_missing_wait_between_layers_is_a_wrong_answer(on_device: Scene, route: Route | None, waits: bool) -> None:
    device = on_device.device
    moves, values, there = layers_on_their_way(on_device, route)
    engine = device.stream()
    seen = device.malloc(len(values))
    for layer, mark in enumerate(moves._marks):
        if waits:
            moves.let_wait(engine, mark)
        at = layer * LAYER_BYTES
        device.copy(seen + at, there + at, LAYER_BYTES, engine)  # as a layer's attention reads its pages
    device.sync_stream(engine)
    assert (on_device.download(seen, len(values)) == values).all() == waits
    moves.settle()
    device.free_stream(engine)


def test_layers_come_one_by_one(on_device: Scene) -> None:
    moves, values, there = layers_on_their_way(on_device, Route.DIRECT)
    moves.sync(moves._marks[1])
    assert not moves.reached(moves._marks[3])
    came = on_device.download(there, len(values))
    assert (came[: 2 * LAYER_BYTES] == values[: 2 * LAYER_BYTES]).all()
    assert not came[3 * LAYER_BYTES :].any(), "the last layer came before anybody waited for it"
    moves.settle()
    assert (on_device.download(there, len(values)) == values).all()


def test_copies_come_after_what_the_engine_was_doing(on_device: Scene) -> None:
    """Pages that are loaded may still be read by what the engine's stream was given before."""
    device = on_device.device
    values, old = random(1, 4096), random(2, 4096)
    mapping = on_device.registered(region(4096, values))
    there, seen, engine = on_device.upload(old), device.malloc(4096), device.stream()
    moves = on_device.reader(Route.DIRECT).begin()
    for at in range(0, 4096, 512):  # more than a look at an event brings forward
        device.copy(seen + at, there + at, 512, engine)
    moves.after(engine)
    moves.copy(one(there, mapping.address, 4096))
    moves.settle()
    assert (on_device.download(there, 4096) == values).all()
    assert (on_device.download(seen, 4096) == old).all()


@pytest.mark.parametrize("route", ROUTES)
def test_a_cancel_at_any_point_leaves_what_was_not_given_as_it_was(on_device: Scene, route: Route | None) -> None:
    n_runs, run_bytes = 24, 700
    values = random(1, n_runs * run_bytes)
    mapping = region(len(values), values)
    if route is not None:
        on_device.registered(mapping)
    reader = on_device.reader(route or Route.DIRECT, LaneSizes(piece_bytes=4096, pieces=2, table_runs=4))
    offsets = np.arange(n_runs) * run_bytes
    copies = runs_of(np.random.default_rng(2).permutation(offsets), offsets, [run_bytes] * n_runs)
    counts = []
    for allowed in range(40):
        there = on_device.upload(np.zeros(len(values), np.uint8))
        moves = reader.begin()
        left = iter(range(allowed))
        given = moves.copy([Copy(copies, there, mapping.address)], partial(takes_one, left))
        moves.settle()
        came = on_device.download(there, len(values))
        whole = 0
        for to, come_from in zip(copies.to.tolist(), copies.come_from.tolist(), strict=True):
            run = came[to : to + run_bytes]
            assert (run == values[come_from : come_from + run_bytes]).all() or not run.any()
            whole += bool(run.any())
        assert given == (whole == n_runs)
        counts.append(whole)
        on_device.device.free(there)
        if given:
            break
    assert counts[0] == 0
    assert counts[-1] == n_runs
    assert counts == sorted(counts)
    assert len(set(counts)) > 3, "it was cancelled in between"


@pytest.mark.parametrize("route", ROUTES)
def test_a_store_cancelled_at_any_point_leaves_the_slots_else_as_they_were(
    on_device: Scene, route: Route | None
) -> None:
    n_runs, run_bytes = 24, 700
    values = random(1, n_runs * run_bytes)
    pages = on_device.upload(values)
    writer = on_device.writer(route or Route.STAGED, LaneSizes(piece_bytes=4096, pieces=2, table_runs=4))
    offsets = np.arange(n_runs) * run_bytes
    for allowed in range(60):
        slots = region(len(values))
        if route is not None:
            on_device.registered(slots)
        left = iter(range(allowed))
        moves = writer.begin()
        moves.keep(slots)
        given = moves.copy([Copy(runs_of(offsets, offsets, [run_bytes] * n_runs), slots.address, pages)],
                           partial(takes_one, left))  # fmt: skip
        moves.settle()
        came = slots.array()[: len(values)]
        assert (came[came != values] == 0).all(), "bytes that nobody sent"
        if given:
            assert (came == values).all()
            return
    pytest.fail("it was never given to its end")


def test_a_job_that_broke_off_writes_nothing_later(on_device: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """What came through memory of our own is copied on before the slots are let go of, though the job failed."""
    values = random(1, 16 << 10)
    pages, slots = on_device.upload(values), region(16 << 10)
    writer = on_device.writer(Route.DIRECT)
    moves = writer.begin()
    copy_batch, calls = on_device.device.copy_batch, []

    def breaks(*arguments: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise DeviceError("no more")
        copy_batch(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(on_device.device, "copy_batch", breaks)
        with pytest.raises(DeviceError, match="no more"):
            moves.copy(one(slots.address, pages, len(values)))
    moves.settle()
    assert slots.array().any()
    slots.array()[:] = 0  # somebody else's from here on
    other = region(16 << 10)
    later = writer.begin()
    later.copy(one(other.address, pages, len(values)))
    later.settle()
    assert (other.array() == values).all()
    assert not slots.array().any()


@pytest.mark.parametrize("route", ROUTES)
def test_staging_is_bounded(route: Route | None) -> None:
    """A hundred times what staging holds goes through it; the device has room for nothing more."""
    values = random(1, 800 << 10)
    sizes = LaneSizes(piece_bytes=4096, pieces=2, table_runs=16)
    with scene(total_bytes=len(values) + (16 << 10)) as on_device:
        mapping = region(len(values), values)
        if route is not None:
            on_device.registered(mapping)
        moves = on_device.reader(route or Route.STAGED, sizes).begin()
        there = on_device.device.malloc(len(values))
        offsets = np.arange(0, len(values), 512)
        mixed = np.random.default_rng(1).permutation(offsets)
        assert moves.copy([Copy(runs_of(offsets, mixed, [512] * len(mixed)), there, mapping.address)])
        moves.settle()
        expected = values.reshape(-1, 512)[mixed // 512].reshape(-1)
        assert (on_device.download(there, len(values)) == expected).all()
        taken = on_device.counters.snapshot()
        assert taken[f"load_{route or Route.STAGED}_bytes"] == len(values)
        assert "load_no_room_bytes" not in taken


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("start", "n_bytes"), [(512, 1024), (3000, 3000), (5000, 1000), (0, 6144)])
def test_rows_that_share_blocks_may_share_a_run_longer_than_a_piece(
    on_device: Scene, route: Route | None, start: int, n_bytes: int
) -> None:
    """One row has all in one run, the other a part of it."""
    piece_bytes, long_bytes = 4096, 6144
    values = random(1, long_bytes)
    mapping = region(len(values), values)
    if route is not None:
        on_device.registered(mapping)
    there = on_device.upload(np.zeros(2 * long_bytes, np.uint8))
    rows = [runs_of([0], [0], [long_bytes]), runs_of([long_bytes], [start], [n_bytes])]
    moves = on_device.reader(route or Route.STAGED, LaneSizes(piece_bytes=piece_bytes)).begin()
    moves.keep(mapping)
    assert moves.copy([Copy(row, there, mapping.address) for row in rows])
    assert moves.finish() == ""
    came = on_device.download(there, 2 * long_bytes)
    assert (came[:long_bytes] == values).all()
    assert (came[long_bytes:][:n_bytes] == values[start : start + n_bytes]).all()
    assert not came[long_bytes + n_bytes :].any()


def test_pinned_memory_is_not_used_again_before_the_copy_from_it_is_over(
    on_device: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted bug: who takes a piece does not wait for its last use. Then earlier runs get later ones' bytes."""
    values = random(1, 64 << 10)
    mapping = region(len(values), values)  # not registered
    for planted in (False, True):
        there = on_device.upload(np.zeros(len(values), np.uint8))
        moves = on_device.reader(Route.DIRECT).begin()
        with monkeypatch.context() as patch:
            if planted:
                patch.setattr(HostRing, "take_for_host", lambda ring: ring._turn())
            moves.copy(one(there, mapping.address, len(values)))
            moves.settle()
        assert (on_device.download(there, len(values)) == values).all() != planted


def test_a_store_reads_pages_after_the_engine_wrote_them(on_device: Scene) -> None:
    device = on_device.device
    values = random(1, 4096)
    pages, engine = on_device.upload(np.zeros(4096, np.uint8)), device.stream()
    computed = on_device.upload(values)
    slots = on_device.registered(region(4096))
    for waits in (False, True):
        device.fill(pages, 0, 4096, engine)
        device.sync_stream(engine)
        for at in range(0, 4096, 512):
            device.copy(pages + at, computed + at, 512, engine)
        moves = on_device.writer(Route.DIRECT).begin()
        if waits:
            moves.after(engine)
        moves.copy(one(slots.address, pages, 4096))
        moves.settle()
        assert (slots.array() == values).all() == waits
        device.sync_stream(engine)


@pytest.mark.parametrize("route", ROUTES)
def test_nothing_is_in_the_slot_before_settle(on_device: Scene, route: Route | None) -> None:
    """Who committed then would show other bytes."""
    values = random(1, 4096)
    pages, slots = on_device.upload(values), region(4096)
    if route is not None:
        on_device.registered(slots)
    moves = on_device.writer(route or Route.DIRECT).begin()
    moves.copy(one(slots.address, pages, 4096))
    assert not slots.array().any()
    moves.settle()
    assert (slots.array() == values).all()


@pytest.mark.parametrize("route", list(Route))
def test_what_adjoins_in_two_regions_is_not_moved_as_one(on_device: Scene, route: Route) -> None:
    """Regions may lie next to each other; a device takes no copy from two registrations."""
    values = random(1, 16384)
    whole = region(16384, values)
    for half in range(2):
        piece = SimpleNamespace(address=whole.address + half * 8192, length_bytes=8192, writable=True)
        on_device.registered(cast("Any", piece))
    there = on_device.upload(np.zeros(16384, np.uint8))
    offsets = np.arange(0, 16384, 1024)
    copies = runs_of(offsets[::-1], offsets, [1024] * 16)
    moves = on_device.reader(route, LaneSizes(piece_bytes=64 << 10)).begin()
    assert moves.copy([Copy(copies, there, whole.address)])
    assert moves.finish() == ""
    assert (on_device.download(there, 16384) == values.reshape(-1, 1024)[::-1].reshape(-1)).all()
    assert "load_bounced_bytes" not in on_device.counters.snapshot()
    # One run that lies in both can't be read by the device: it goes through memory of our own.
    moves = on_device.reader(route).begin()
    assert moves.copy(one(there, whole.address, 16384))
    assert moves.finish() == ""
    assert (on_device.download(there, 16384) == values).all()
    assert on_device.counters.snapshot()["load_bounced_bytes"] == 16384


def test_what_is_kept_lives_until_the_copies_are_over_and_no_longer(on_device: Scene) -> None:
    class Kept:
        def __init__(self, gone: threading.Event) -> None:
            self.gone = gone

        def __del__(self) -> None:
            self.gone.set()

    gone = threading.Event()
    mapping = on_device.registered(region(4096, random(1, 4096)))
    there = on_device.device.malloc(4096)
    reader = on_device.reader(Route.DIRECT)
    moves = reader.begin()
    moves.keep(Kept(gone))
    moves.copy(one(there, mapping.address, 4096))
    del moves  # and nobody else has them
    assert not gone.is_set()
    (left,) = reader.unsettled
    left.settle()
    assert gone.is_set()
    assert not reader.unsettled


def test_jobs_share_a_lane_from_several_threads(on_device: Scene) -> None:
    values = random(1, 64 << 10)
    mapping = region(len(values), values)
    reader = on_device.reader(Route.STAGED, lanes=2)
    places = [on_device.upload(np.zeros(len(values), np.uint8)) for _ in range(6)]
    failures: list[Any] = []

    def load(there: int) -> None:
        try:
            moves = reader.begin()
            for at in range(0, len(values), 8 << 10):
                moves.copy(one(there + at, mapping.address + at, 8 << 10))
            assert moves.finish() == ""
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=load, args=(there,)) for there in places]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(FAR_S)
    assert not failures
    for there in places:
        assert (on_device.download(there, len(values)) == values).all()


def test_a_device_that_fails_is_a_reason_and_keeps_what_it_may_use() -> None:
    def broken(*_: Any) -> None:
        raise DeviceError("an illegal address was met")

    made = Scene(SimulatedDevice(total_bytes=16 << 20, launcher=broken))
    mapping = made.registered(region(4096))
    reader = made.reader(Route.KERNEL)
    moves = reader.begin()
    moves.keep(mapping)
    moves.copy(one(made.device.malloc(4096), mapping.address, 4096))
    assert "illegal address" in moves.finish()
    assert moves._kept == [mapping]
    assert moves in reader.unsettled
    reader.close()  # says so in the log, and raises nothing


def test_addresses_that_are_not_the_devices_are_refused(on_device: Scene) -> None:
    mapping = on_device.registered(region(4096))
    moves = on_device.reader(Route.DIRECT).begin()
    with pytest.raises(BadInputError):
        moves.copy(one(mapping.address + (1 << 30), mapping.address, 4096))
    assert moves.finish() == ""
