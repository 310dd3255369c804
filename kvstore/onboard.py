"""Onboarding: blocks that lie on NVMe only are read into DRAM slots, once for all who wait for them.

A block is read straight into the slot where it will be served from, compared with the checksums and keys
of its frame, and becomes visible only then. What can't be read or does not verify is a miss for exactly
that block: its copy is quarantined, and whoever computes it again stores it anew.

Reads go out in batches, the blocks of a request in the order of its prompt, so that waiting for a part of
them pays off. A read that does not return counts as failed for those who wait once its time is up, and
nothing new is read before it has returned: the disk is stuck.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.clock import Clock
from kvstore.compression.frame import FrameLayout
from kvstore.errors import IntegrityError
from kvstore.jobs import Job, Jobs, Lane
from kvstore.load_time import LoadTime
from kvstore.logs import about
from kvstore.metrics import Counters
from kvstore.native import aligned_bytes, row_addresses
from kvstore.prefix_index.block_table import DRAM, NVME, At, Ids
from kvstore.prefix_index.index import PrefixIndex
from kvstore.prefix_index.rivals import Rivals
from kvstore.room import PendingReclaim, RoomMaker
from kvstore.tiers.dram import DAEMON_WRITER, DramTier
from kvstore.tiers.nvme.jobs import ReadJob
from kvstore.tiers.nvme.tier import NvmeTier
from kvstore.waiting import Awaited, Waiters

READS_MAX = 4
READ_BYTES_MAX = 8 << 20
ROOM_WAIT_S = 0.1
"""How long blocks wait for clients to unmap what was retired for them, as a reservation does."""
ROOM_COMES_S = 2.0
"""The same while somebody waits for the blocks. Without room on its way nobody waits long: two requests that hold
half of DRAM each would wait for one another."""

PENDING, REFUSED, NO_ROOM, LATE = "pending", "refused", "no_room", "late"
UNREADABLE, CORRUPT = "unreadable", "corrupt"
MISSED_BY_LOADS = (PENDING, REFUSED, NO_ROOM, LATE, UNREADABLE, CORRUPT)
"""Why a block that lies on NVMe was not there for a request: it is on its way; too much was waiting, or the disk was
stuck; DRAM had no room; the disk took too long, could not read it, or gave other bytes."""

log = logging.getLogger("kvstore.store")

_FIRST_GUESS_S, _FIRST_GUESS_BYTES_PER_S = 1e-3, 1e9


@dataclass(slots=True)
class _Room:
    """See ``lease.RoomRequest``: slots that the daemon itself is going to fill."""

    tenant: str
    slot_bytes: int
    n_wanted: int
    writer: int = DAEMON_WRITER
    evict_bytes_left: int = -1
    leaving_bytes_before: int = 0
    moved: bool = False
    spares_own: bool = False
    rivals: Callable[[], Rivals] | None = None
    n_declined: int = 0


@dataclass(slots=True, eq=False)
class _Group:
    """Blocks of one request that are to be read, in prompt order."""

    tenant: str
    layout: FrameLayout
    ids: deque[int]
    since_s: float
    queued_bytes: int
    """What had to be read until all of it is there when it came: it, and what was before it."""
    n_reads: int = 0
    """Batches of it on their way."""
    room: _Room | None = None
    room_since_s: float = 0.0


@dataclass(slots=True, eq=False)
class _Reading:
    """A batch on its way. ``run`` is the worker's part."""

    group: _Group
    ids: Ids
    slots: NDArray[np.int64]
    nvme_slots: NDArray[np.int64]
    layout: FrameLayout
    headers: NDArray[np.uint8]
    payloads: NDArray[np.uint64]
    keys: NDArray[np.uint8]
    parents: NDArray[np.uint8]
    job: ReadJob
    since_s: float
    n_bytes: int
    verified: NDArray[np.bool_] = field(init=False)
    n_reads: int = 0
    late: bool = False

    def __post_init__(self) -> None:
        self.verified = np.zeros(len(self.ids), np.bool_)

    def run(self) -> None:
        self._read()
        if not self.verified.all():
            self._read()  # what failed may have been of the moment: a block is given up after the second time only

    def _read(self) -> None:
        self.n_reads += 1
        self.job.run()
        self.verified = self.layout.verify(self.headers, self.payloads, self.keys, self.parents)


class Part(NamedTuple):
    """Blocks of one namespace (its number in the block table), in prompt order, none of them in DRAM."""

    namespace: int
    read_ids: At


class Load(Awaited):
    """What one request waits for. ``read_ids`` were not in DRAM; ``eta_s`` is the guess made when it began."""

    def __init__(self, ids: At, waiting: Iterable[int], read_ids: At, eta_s: float, begun_s: float) -> None:
        super().__init__(ids, waiting)
        self.read_ids = read_ids
        self.eta_s = eta_s
        self.begun_s = begun_s

    def why(self, block: int | None = None) -> str:
        """Why this block (or any, if none is named) was not there for the request; one of ``MISSED_BY_LOADS``."""
        if block in self.waiting or (block is None and self.waiting):
            return PENDING
        if block is None:
            return next(iter(self.failed.values()), REFUSED)
        return self.failed.get(block, REFUSED)


class Onboarder:
    """Reads from NVMe to DRAM over one index. Called on the store's thread only; see ``Job`` for the rest."""

    def __init__(
        self,
        index: PrefixIndex,
        dram: DramTier,
        nvme: NvmeTier,
        room: RoomMaker,
        layout_of: Callable[[int], FrameLayout | None],
        jobs: Jobs,
        counters: Counters,
        clock: Clock,
        io_timeout_s: float,
    ) -> None:
        """``layout_of``: the frames of a namespace, by its number in the block table."""
        self._index = index
        self._dram = dram
        self._nvme = nvme
        self._room = room
        self._layout_of = layout_of
        self._jobs = jobs
        self._counters = counters
        self._clock = clock
        self._io_timeout_s = io_timeout_s
        self._queue_bytes_max = dram.capacity_bytes // 2
        self._groups: deque[_Group] = deque()
        self._reads: list[_Reading] = []
        self._under_way: set[int] = set()
        self._waiters = Waiters()
        self._loads: set[Load] = set()
        self._queued_bytes = 0
        self.load_time = LoadTime(_FIRST_GUESS_S, _FIRST_GUESS_BYTES_PER_S)
        """From the request to the last block, of what is read and of what is before it."""
        self._closed = False

    @property
    def stuck(self) -> bool:
        """A read has not returned in its time. Nothing is read until it has."""
        return any(reading.late for reading in self._reads)

    # Requests ------------------------------------------------------------------------------------

    def begin(self, tenant: str, ids: At, parts: Sequence[Part]) -> Load:
        """Start reading what nobody reads yet of these parts, one after the other.

        Blocks that can't be queued are not waited for. The load pins all ``ids`` until ``end``.
        """
        layouts = [self._layout_of(part.namespace) for part in parts]
        if None in layouts:
            namespace = parts[layouts.index(None)].namespace
            raise IntegrityError(f"blocks of namespace {namespace} lie on NVMe, which has no frames for them")
        self._index.pin(ids)
        begun_s = self._clock.now_s()
        waiting: list[int] = []
        for part, layout in zip(parts, layouts, strict=True):
            if layout is not None:
                waiting += self._queue(tenant, layout, part.read_ids.tolist())
        read_ids = parts[0].read_ids if len(parts) == 1 else np.concatenate([part.read_ids for part in parts])
        load = Load(ids, waiting, read_ids, self.load_time.expected_s(self._queued_bytes), begun_s)
        self._waiters.add(load, waiting)
        self._loads.add(load)
        self.pump()
        return load

    def _queue(self, tenant: str, layout: FrameLayout, wanted: list[int]) -> list[int]:
        """Queue blocks as far as there is room; returns those that are under way then."""
        if self.stuck or self._closed:
            return []
        new = [block for block in wanted if block not in self._under_way]
        room = max(self._queue_bytes_max - self._queued_bytes, 0) // layout.frame_bytes
        room = room or int(not self._queued_bytes)  # one alone always may come
        if len(new) > room:
            self._counters.add("onboard_refused_blocks", len(new) - room)
            new = new[:room]
        if new:
            self._index.pin(np.array(new, np.uint32))
            self._under_way.update(new)
            self._queued_bytes += len(new) * layout.frame_bytes
            self._groups.append(_Group(tenant, layout, deque(new), self._clock.now_s(), self._queued_bytes))
        return [block for block in wanted if block in self._under_way]

    def end(self, load: Load) -> None:
        """The request has what it got, or waits no longer. Idempotent; the reading itself goes on."""
        if load in self._loads:
            self._loads.remove(load)
            self._waiters.remove(load)
            self._index.unpin(load.ids)

    def close(self) -> None:
        """Read nothing more into DRAM, for good: who waits goes on. What is on its way still comes in. Idempotent."""
        self._closed = True
        for group in list(self._groups):
            self._refuse(group)

    # Progress ------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Hand out what can be read now."""
        n_waiting = 0
        while n_waiting < len(self._groups) and len(self._reads) < READS_MAX and not self.stuck:
            if self._advance(self._groups[0]):
                n_waiting = 0
            else:
                n_waiting += 1
                self._groups.rotate(-1)

    def tick(self, now_s: float) -> None:
        """Let those go on who wait for a read that has not returned in its time."""
        for reading in self._reads:
            if not reading.late and now_s - reading.since_s > self._io_timeout_s:
                reading.late = True
                self._counters.add("onboard_late_reads")
                self._waiters.settle(reading.ids.tolist(), LATE)
        for group in list(self._groups):
            if self.stuck or now_s - group.since_s > self._io_timeout_s:
                self._refuse(group)
        self.pump()

    def _advance(self, group: _Group) -> bool:
        """Read the next blocks of a group; False if it has no room yet.

        It tries again for a while if somebody waits for it; room that isn't there soon is not worth a fight.
        """
        now_s = self._clock.now_s()
        n = min(len(group.ids), max(1, READ_BYTES_MAX // group.layout.frame_bytes))
        if group.room is None:
            slot_bytes = self._dram.slot_bytes(group.layout.payload_bytes)
            group.room, group.room_since_s = _Room(group.tenant, slot_bytes, n), now_s
        room = group.room
        pending = self._room.make(room)
        if pending is not None:
            self._jobs.append(Job(Lane.READ, pending.copy, lambda: self._moved(pending)))
            return False
        n_free = self._dram.free_slots(DAEMON_WRITER, room.tenant, room.slot_bytes)
        may_come = self._room.pending is not None or self._room.is_coming(room)
        if n_free < n and may_come and now_s - group.room_since_s < ROOM_WAIT_S:
            return False
        slots = self._room.allocate(room)
        if len(slots):
            group.room = None  # not before: what may be evicted for one attempt is all that goes while it waits
            self._start(group, np.array([group.ids.popleft() for _ in slots], np.uint32), slots)
            if not group.ids:
                self._groups.remove(group)
            return True
        patience_s = (ROOM_COMES_S if may_come else ROOM_WAIT_S) if group.ids[0] in self._waiters else 0.0
        if now_s - group.room_since_s >= patience_s:
            self._counters.add("onboard_no_room_blocks", len(group.ids))
            self._give_up(group, NO_ROOM)
        return False

    def _moved(self, pending: PendingReclaim) -> None:
        self._room.finish(pending)
        self.pump()

    def _start(self, group: _Group, ids: Ids, slots: NDArray[np.int64]) -> None:
        table, layout = self._index.table, group.layout
        at = ids.astype(np.intp)
        headers = aligned_bytes(len(ids) * layout.header_bytes).reshape(len(ids), layout.header_bytes)
        payloads = self._dram.addresses(slots)
        nvme_slots = table.nvme_slot[at]
        n_bytes = len(ids) * layout.frame_bytes
        job = self._nvme.begin_read(
            nvme_slots, row_addresses(headers), payloads, layout.header_bytes, layout.frame_bytes - layout.header_bytes
        )
        reading = _Reading(
            group, ids, slots, nvme_slots, layout, headers, payloads, table.key[at], self._index.parent_keys(ids), job,
            self._clock.now_s(), n_bytes,
        )  # fmt: skip
        self._reads.append(reading)
        self._hold(reading, 1)
        group.n_reads += 1
        self._jobs.append(Job(Lane.READ, reading.run, lambda: self._finish(reading), n_bytes))

    def _finish(self, reading: _Reading) -> None:
        ids, slots, index = reading.ids, reading.slots, self._index
        self._reads.remove(reading)
        self._hold(reading, -1)
        arrived = self._nvme.finish_read(reading.job)
        good = arrived & reading.verified
        # A client may have stored the same block again meanwhile, or had all of its namespace cleared.
        fresh = good & ~index.resident(ids, DRAM) & ~index.hiding.is_hidden(ids)
        self._dram.commit(slots[fresh], ids[fresh].astype(np.int64))
        index.add_dram(ids[fresh], slots[fresh])
        self._dram.free(slots[~fresh])
        if reading.n_reads > 1:
            self._counters.add("onboard_repeated_reads")
        bad = ~good & index.resident(ids, NVME) & (index.table.nvme_slot[ids.astype(np.intp)] == reading.nvme_slots)
        if bad.any():
            n_unreadable, n_corrupt = int((bad & ~arrived).sum()), int((bad & arrived).sum())
            self._counters.add("onboard_unreadable_blocks", n_unreadable)
            self._counters.add("onboard_corrupt_blocks", n_corrupt)
            log.warning(
                "NVMe: %d blocks can't be read, %d are not what was written: they go", n_unreadable, n_corrupt,
                extra=about("nvme_blocks_lost", unreadable=n_unreadable, corrupt=n_corrupt),
            )  # fmt: skip
            self._waiters.settle(ids[bad & ~arrived].tolist(), UNREADABLE)
            self._waiters.settle(ids[bad & arrived].tolist(), CORRUPT)
            self._nvme.quarantine(index.break_nvme(ids[bad]))
        n_good = int(good.sum())
        self._counters.add("onboarded_blocks", n_good)
        self._counters.add("onboarded_bytes", n_good * reading.layout.payload_bytes)
        self._learn(reading.group)
        self._leave(ids, reading.n_bytes)
        self.pump()

    def _hold(self, reading: _Reading, sign: int) -> None:
        """The slots of a read on its way count for its tenant."""
        tenant, n_bytes = self._held_for(reading)
        self._index.tenants.hold(self._index.tenants.number(tenant), DRAM, sign * n_bytes)

    def _held_for(self, reading: _Reading) -> tuple[str, int]:
        return reading.group.tenant, len(reading.slots) * self._dram.slot_bytes(reading.layout.payload_bytes)

    def held(self) -> list[tuple[str, int]]:
        """Slots that are being read into: a tenant and their bytes, for each read."""
        return [self._held_for(reading) for reading in self._reads]

    def _learn(self, group: _Group) -> None:
        """A batch of it is there: how long did all of it take, if that was the last one?"""
        group.n_reads -= 1
        if not group.n_reads and not group.ids:
            self.load_time.observe(group.queued_bytes, self._clock.now_s() - group.since_s)

    def _refuse(self, group: _Group) -> None:
        self._counters.add("onboard_refused_blocks", len(group.ids))
        self._give_up(group, REFUSED)

    def _give_up(self, group: _Group, why: str) -> None:
        """What is left of a group is not read."""
        self._groups.remove(group)
        self._waiters.settle(group.ids, why)
        self._leave(np.array(group.ids, np.uint32), len(group.ids) * group.layout.frame_bytes)

    def _leave(self, ids: Ids, n_bytes: int) -> None:
        self._queued_bytes -= n_bytes
        self._under_way.difference_update(ids.tolist())
        self._index.unpin(ids)
        self._waiters.settle(ids.tolist())

    # Facts ---------------------------------------------------------------------------------------

    def expected(self, parts: Iterable[Part]) -> tuple[float, float]:
        """How long it would take to read these if they were asked for now, in seconds, and how true that is.

        The second is ``LoadTime.error``. Begins nothing. Infinite while the disk is stuck.
        """
        n_bytes = self._queued_bytes
        for part in parts:
            layout = self._layout_of(part.namespace)
            if layout is not None:
                n_bytes += int((~self.are_under_way(part.read_ids)).sum()) * layout.frame_bytes
        return math.inf if self.stuck else self.load_time.expected_s(n_bytes), self.load_time.error

    def are_under_way(self, ids: At) -> NDArray[np.bool_]:
        """Which of these are being read, or wait to be."""
        if not self._under_way:
            return np.zeros(ids.shape, np.bool_)
        return np.isin(ids, np.fromiter(self._under_way, np.int64, len(self._under_way)))

    def stats(self) -> dict[str, float]:
        """Gauges."""
        return {
            "reads": len(self._reads),
            "waiting_blocks": len(self._under_way),
            "queued_bytes": self._queued_bytes,
            "bytes_per_s": self.load_time.bytes_per_s,
            "stuck": float(self.stuck),
        }

    def pinned(self) -> list[At]:
        """What is pinned in the index for it, one entry a pin."""
        pins: list[At] = [np.array(group.ids, np.uint32) for group in self._groups]
        return pins + [reading.ids for reading in self._reads] + [load.ids for load in self._loads]

    def reserved_slots(self) -> list[NDArray[np.int64]]:
        """DRAM slots that are being read into."""
        return [reading.slots for reading in self._reads]
