"""Staged reads and writes: blocks of the store into pages on a device, and pages into blocks.

Copies are given to the device and go on behind the caller. So what they read and write is kept (``keep``, ``hold``)
until an event says that they are over: a slot of the store can't be used again before that, whatever becomes of the
lease, of the job or of the daemon, and whatever the clock says. What a lease gave counts only if it was unchanged after
the copies.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from kvstore.client import Lease
from kvstore.client.hbm import HbmHeld
from kvstore.device.seam import Device
from kvstore.engine_adapter.counters import SharedCounters
from kvstore.engine_adapter.gpu.choice import Choice, Route
from kvstore.engine_adapter.gpu.copies import Copies, Orders
from kvstore.engine_adapter.gpu.events import EventPool
from kvstore.engine_adapter.gpu.in_hbm import InHbm
from kvstore.engine_adapter.gpu.lane import Lane, LaneSizes
from kvstore.engine_adapter.gpu.pinned_regions import PinnedRegions
from kvstore.engine_adapter.gpu.rings import Piece
from kvstore.engine_adapter.moving import Copy, always
from kvstore.engine_adapter.parts import held_of
from kvstore.errors import BadInputError, DeviceError
from kvstore.logs import about
from kvstore.plan.ways import Direction

_LOG = logging.getLogger(__name__)


class StagedMoves:
    """See ``moving.Moves``. Of one job; made by ``begin``."""

    def __init__(self, staged: _Staged, lane: Lane) -> None:
        self._staged, self._lane = staged, lane
        self._device, self._events = staged.device, staged.events
        self._end = self._events.take()
        self._marks: list[int] = []
        self._after: deque[int] = deque()
        self._kept: list[object] = []
        self._leases: list[Lease] = []
        self._to_finish: list[Piece] = []
        self._orders: Orders = {}
        self._in_hbm = InHbm()
        self._hbm: list[HbmHeld] = []
        self._settling = threading.Lock()
        self._unsettled = False
        self._watch = _Watch(lane)

    def keep(self, *things: object) -> None:
        """See ``Moves``."""
        self._kept += things

    def keep_hbm(self, held: HbmHeld) -> None:
        """See ``Moves``. Raises BadInputError for blocks that were opened with another device."""
        if held.device is not self._device:
            raise BadInputError("these blocks in HBM were opened with another device: give Client.use_hbm this one")
        self._hbm.append(held)
        self._in_hbm.add((held,))

    def hold(self, lease: Lease, n_parts: int = 1) -> None:
        """Keep the blocks of a lease, also those in HBM, and ask it at the end.

        Raises EndedError if its right has ended already.
        """
        if len(lease.hbm):
            self.keep_hbm(lease.hold_hbm())
        for part in range(n_parts):
            held = held_of(lease, part)
            self._kept += [held[i] for i in np.flatnonzero(held.addresses).tolist()]
        self._leases.append(lease)

    def after(self, stream: int | None) -> None:
        """See ``Moves``."""
        if stream is not None:
            event = self._events.take()
            self._device.record(event, stream)
            self._after.append(event)

    def copy(self, copies: Sequence[Copy], going: Callable[[], bool] = always) -> bool:
        """See ``Moves``. Raises DeviceError if the device fails: part of it may be under way then."""
        made = Copies.of(copies, to_device=self._lane.direction is Direction.LOAD, orders=self._orders)
        if not len(made):
            return going()
        in_hbm = self._in_hbm.which(made)
        self._watch.begin(alone=self._staged.unsettled <= {self} and not in_hbm.any())
        self._unsettled = True
        self._staged.unsettled.add(self)
        while self._after:
            event = self._after.popleft()
            self._watch.waited |= not self._device.query(event)
            self._device.wait_event(self._lane.stream, event)
            self._events.give_back(event)
        given, routes = self._lane.give(made, self._end, self._to_finish, going, in_hbm)
        self._watch.note(made, routes, given)
        return given

    def mark(self) -> int | None:
        """See ``Moves``."""
        mark = self._events.take()
        self._marks.append(mark)
        self._device.record(mark, self._lane.stream)
        return mark

    def sync(self, mark: int | None) -> None:
        """See ``Moves``."""
        if mark is not None and self._unsettled:
            self._device.sync_event(mark)

    def reached(self, mark: int | None) -> bool:
        """See ``Moves``."""
        return mark is None or not self._unsettled or self._device.query(mark)

    def let_wait(self, stream: int, mark: int | None) -> None:
        """See ``Moves``."""
        if mark is not None and self._unsettled:
            self._device.wait_event(stream, mark)

    def settle(self) -> None:
        """See ``Moves``."""
        if self._unsettled:
            under_way = not self._device.query(self._end)
            self._device.sync_event(self._end)
            if under_way:
                self._watch.over(self._staged.choice)
        with self._settling:
            while self._to_finish:
                self._lane.finish(self._to_finish[-1])
                self._to_finish.pop()
            self._unsettled = False
            self._staged.unsettled.discard(self)
            self._kept = []
            self._in_hbm = InHbm()
            # Others may record these from here on. Who still waits for one of them here waits for more, that is all.
            self._events.give_back(*self._marks, *self._after)
            self._marks = []
            self._after.clear()

    def finish(self) -> str:
        """``settle``, and why what was copied can't be used: empty if it can. Does not raise."""
        try:
            self.settle()
        except DeviceError as error:
            return str(error)
        leases, self._leases = self._leases, []
        hbm, self._hbm = self._hbm, []
        if not all(lease.unchanged() for lease in leases) or not all(held.vouched() for held in hbm):
            self._staged.counters.add("unvouched_reads")
            return "the lease ended, or a slot changed, while it was read"
        return ""

    def __del__(self) -> None:
        # What is not settled is kept by ``unsettled``: so nothing records this event any more.
        self._events.give_back(self._end, *self._after)


class _Watch:
    """How long copies took, if that tells anything: one route, nothing else on the lane, nothing waited for."""

    def __init__(self, lane: Lane) -> None:
        self.waited = False
        self._lane = lane
        self._n_calls = self._n_calls_before = 0
        self._begun_s = 0.0
        self._n_bytes = self._n_runs = 0
        self._routes: set[Route] = set()

    def begin(self, *, alone: bool) -> None:
        """A copy is about to be given, while no others are under way if ``alone``."""
        self.waited |= not alone
        if not self._n_calls:
            self._begun_s, self._n_calls_before = time.perf_counter(), self._lane.n_calls
        self._n_calls += 1

    def note(self, copies: Copies, routes: set[Route], given: bool) -> None:
        """It was, or a part of it."""
        self.waited |= not given
        self._n_bytes += copies.n_bytes
        self._n_runs += len(copies)
        self._routes |= routes

    def over(self, choice: Choice) -> None:
        """All is over, just now."""
        alone = self._lane.n_calls - self._n_calls_before == self._n_calls
        if alone and not self.waited and len(self._routes) == 1:
            (route,) = self._routes
            took_s = time.perf_counter() - self._begun_s
            choice.observe(route, self._lane.direction, self._n_bytes, self._n_runs, took_s)


class _Staged:
    """Lanes of one direction, taken in turn. Any thread."""

    _DIRECTION: Direction

    def __init__(
        self,
        device: Device,
        pinned: PinnedRegions,
        choice: Choice,
        *,
        lanes: int = 1,
        sizes: LaneSizes | None = None,
        counters: SharedCounters | None = None,
        events: EventPool | None = None,
    ) -> None:
        self.device, self.choice = device, choice
        self.counters = counters or SharedCounters()
        self.events = events or EventPool(device)
        self._own_events = events is None
        self.unsettled: set[StagedMoves] = set()
        """Jobs whose copies may be under way: kept, with all that they keep, until they are settled."""
        self._lanes = [
            Lane(device, pinned, self._DIRECTION, choice, sizes or LaneSizes(), self.counters) for _ in range(lanes)
        ]
        self._turn = itertools.count()

    def begin(self) -> StagedMoves:
        """The copies of one job."""
        return StagedMoves(self, self._lanes[next(self._turn) % len(self._lanes)])

    def close(self) -> None:
        """Wait for the device and give everything back. No job may be begun or go on.

        A device that failed gives nothing back: what its copies may still use stays as it is while this process lives.
        """
        try:
            for moves in list(self.unsettled):
                moves.settle()
            for lane in self._lanes:
                lane.close()
            if self._own_events:
                self.events.close()
        except DeviceError as error:
            _FOR_EVER.append(self)
            _LOG.error("a device failed with copies under way", extra=about("device_failed", reason=str(error)))


_FOR_EVER: list[_Staged] = []


class StagedReader(_Staged):
    """From blocks of the store, wherever in host memory, into pages on the device.

    ``lanes`` jobs go on side by side, each through memory of ``sizes``. The device itself reads registered regions.
    """

    _DIRECTION = Direction.LOAD


class StagedWriter(_Staged):
    """From pages on the device into reserved slots, or other host memory. Commit only after ``settle``."""

    _DIRECTION = Direction.STORE
