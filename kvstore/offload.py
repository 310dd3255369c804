"""Offloading: DRAM blocks are written to NVMe behind the back of whoever stored them.

    through       every block, once it is committed
    selective     a block at its n-th access
    back          what the eviction policy would give up next, ahead of its eviction

A block never goes without its ancestors, and they go first. While it waits it stays in DRAM, pinned and
readable. The queue is bounded: what doesn't fit, or can't be written now, is skipped and counted; a later
access of the block offers it again. Nobody who stores a block waits for the disk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import StrEnum
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvstore.clock import Clock
from kvstore.compression.frame import FrameLayout, FrameRow
from kvstore.errors import IntegrityError
from kvstore.jobs import Job, Jobs, Lane
from kvstore.lives import Lives
from kvstore.metrics import Counters
from kvstore.native import aligned_bytes
from kvstore.nvme_room import NvmeRoom
from kvstore.offload_batch import Part, Writing
from kvstore.offload_skips import Skips
from kvstore.persist import Persist
from kvstore.prefix_index.admission import outlasting
from kvstore.prefix_index.block_table import DRAM, NO_PARENT, NVME, At, Ids
from kvstore.prefix_index.history import Unwritten
from kvstore.prefix_index.index import PrefixIndex
from kvstore.tiers.dram import DramTier
from kvstore.tiers.nvme.compaction import CompactJob
from kvstore.tiers.nvme.tier import NvmeTier
from kvstore.waiting import Waiters

WRITES_MAX = 3
"""Batches on their way to the disk. Measured against fio: two reach .67 to .94 of its durable writes, three .86 to
1.04, four hardly more."""
UNNAMED_MAX = 2 * WRITES_MAX
"""Batches with those that are on the disk and wait for their names, which come in order: the disk goes on meanwhile."""
WRITE_BYTES_MAX = 32 << 20


class WritePolicy(StrEnum):
    """When a block is written to NVMe; see the module."""

    THROUGH = "through"
    BACK = "back"
    SELECTIVE = "selective"


class Offloader:
    """Writes DRAM blocks to NVMe. Called on the store's thread only; see ``Job`` for the rest."""

    def __init__(
        self,
        index: PrefixIndex,
        dram: DramTier,
        nvme: NvmeTier,
        layout_of: Callable[[int], FrameLayout | None],
        number_of: Callable[[int], int],
        lives: Lives,
        jobs: Jobs,
        counters: Counters,
        clock: Clock,
        policy: WritePolicy,
        hits: int,
        queue_bytes_max: int,
        io_timeout_s: float,
    ) -> None:
        """``layout_of``, ``number_of``: frames and catalog number of a namespace, by its number in the block table.

        No frames: blocks of that namespace can't lie on NVMe.
        ``hits``: at which access ``selective`` writes.
        """
        self._index = index
        self._dram = dram
        self._nvme = nvme
        self._layout_of = layout_of
        self._number_of = number_of
        self._lives = lives
        self._jobs = jobs
        self._counters = counters
        self._skips = Skips(index, counters)
        self._room = NvmeRoom(index, nvme, counters)
        self._clock = clock
        self._policy = policy
        self._hits = hits
        self.queue_bytes_max = queue_bytes_max
        self._io_timeout_s = io_timeout_s
        self._queue: deque[int] = deque()
        self._pending: dict[int, int] = {}
        """Blocks queued or being written, each with its parent (or NO_PARENT), pinned as it must stay for it."""
        self._pending_bytes = 0
        self._writes: deque[Writing] = deque()
        self._waiters = Waiters()
        self._persists: dict[Persist, None] = {}
        self._compacting: CompactJob | None = None
        self.has_work = False
        """Blocks were queued since the last ``pump``: it is called once whoever stored them has its answer."""

    @property
    def suspended(self) -> bool:
        """Nothing can be written for now: the disk is full, failing or stuck."""
        return not (self._nvme.may_write and self._writes_in_time)

    @property
    def _writes_in_time(self) -> bool:
        return not any(writing.late for writing in self._writes)

    @property
    def has_much_room(self) -> bool:
        """Whether writing ahead would take nobody's place in the queue."""
        return not self.suspended and self._pending_bytes <= self.queue_bytes_max // 2

    def short_of(self, ids: Ids) -> int:
        """How many frames NVMe would have to give up for these blocks, taken to be of one size."""
        storable = [block for block in ids.tolist() if self._fits_layout(block)]
        return self._nvme.short_of(self._frame_bytes(storable[0]), len(storable)) if storable else 0

    @property
    def writes_hidden(self) -> bool:
        """Whether blocks that nobody finds any more are just being written: names of theirs may yet come."""
        return any(bool(self._index.hiding.is_hidden(writing.ids).any()) for writing in self._writes)

    @property
    def idle(self) -> bool:
        """Nothing waits to be written, no name to be changed."""
        return not self._pending and self._compacting is None

    # What to write -------------------------------------------------------------------------------

    def accessed(self, ids: At) -> None:
        """One access of a path, in this order, has been counted."""
        if self._policy is WritePolicy.BACK or not len(ids):
            return
        table, at = self._index.table, ids.astype(np.intp)
        wanted = self._index.resident(ids, DRAM) & ~self._index.resident(ids, NVME)
        if self._policy is WritePolicy.SELECTIVE:
            wanted &= table.hits[at] >= self._hits
        if wanted.any():
            new = np.array([block for block in ids[wanted].tolist() if block not in self._pending], np.uint32)
            kept = outlasting(self._index, new, self.short_of(new), NVME)
            if len(kept) < len(new):
                self._skips.add(np.setdiff1d(new, kept).tolist(), Unwritten.DECLINED)
            self.add(kept)

    def add(self, ids: Ids) -> None:
        """Queue blocks and those of their ancestors that are not on NVMe; skip and count what does not fit."""
        chain = self._index.chain_unpersisted(ids)
        new = [block for block in chain.tolist() if block not in self._pending]
        if not new:
            return
        storable = [block for block in new if self._fits_layout(block)]
        if len(storable) < len(new):
            self._skips.add(sorted(set(new) - set(storable)), Unwritten.UNSUITABLE)
            new = storable
        if self.suspended:
            self._skips.add(new, Unwritten.SUSPENDED)
            return
        n_taken = self._take(new)
        # Those behind the first that does not fit may be its children: they can't be written before it.
        self._skips.add(new[n_taken:], Unwritten.QUEUE_FULL)
        self.has_work |= n_taken > 0

    def _take(self, blocks: list[int]) -> int:
        """Queue blocks up to the first that does not fit (one alone always does); returns how many."""
        n = 0
        for block in blocks:
            frame_bytes = self._frame_bytes(block)
            if self._pending_bytes and self._pending_bytes + frame_bytes > self.queue_bytes_max:
                break
            self._pending_bytes += frame_bytes
            n += 1
        blocks = blocks[:n]
        ids = np.array(blocks, np.uint32)
        parents = self._index.table.parent[ids]
        self._index.pin(ids)
        self._index.pin_each(parents[parents != NO_PARENT])
        self._pending.update(zip(blocks, parents.tolist(), strict=True))
        self._queue.extend(blocks)
        return n

    def begin_persist(self, ids: Ids) -> Persist:
        """Have blocks of one path written whatever the policy; pins them until ``end_persist``.

        What finds no room in the queue now is queued as room comes, as long as somebody waits for it.
        """
        self._index.pin(ids)
        unwritten = self._index.chain_unpersisted(ids[self._index.resident(ids, DRAM)]).tolist()
        persist = Persist(ids, unwritten, late := self._lives.await_names(ids))
        self._waiters.add(persist, late)
        self._persists[persist] = None
        self.pump()
        return persist

    def end_persist(self, persist: Persist) -> None:
        """Nobody waits for it any more. Idempotent; the writing goes on."""
        if persist in self._persists:
            del self._persists[persist]
            self._waiters.remove(persist)
            self._index.unpin(persist.ids)

    def n_durable(self, persist: Persist) -> int:
        """How many of its leading blocks are durable now."""
        return self.n_leading(persist.ids) if persist.n_durable is None else persist.n_durable()

    def n_leading(self, ids: At) -> int:
        """How many leading ones of these blocks lie on NVMe, each with the life that it has."""
        durable = self._index.resident(ids, NVME) & ~self._lives.is_late(ids)
        return int(durable.argmin()) if not durable.all() else len(durable)

    def why_not_durable(self, persist: Persist) -> str:
        """What keeps its other blocks from being durable, in words; empty if all are."""
        if self.n_durable(persist) == persist.n_blocks:
            return ""
        if not persist.done:
            return f"{persist.n_waiting} blocks are still being written"
        if not self._fits_layout(int(persist.ids[0])):
            return "blocks of this namespace can't lie on NVMe: the daemon's log says why"
        if self.suspended:
            return f"nothing can be written for now: NVMe is {self._nvme.health if self._writes_in_time else 'stuck'}"
        return "NVMe has no room for the others, they are not in DRAM any more, or just got a longer life"

    # Progress ------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Hand out what can be written now."""
        self.has_work = False
        if self.suspended:
            self._drop_queue()
        said = self._lives.take_said(given_up=self.suspended)
        self._waiters.settle(block for block in said if block not in self._pending)
        for persist in list(self._persists):
            if persist.rest:
                self._feed(persist)
        while self._queue and self._may_start() and self._start():
            pass
        if self._compacting is None and (job := self._nvme.begin_compact()) is not None:
            self._compacting = job
            self._jobs.append(Job(Lane.WRITE, job.run, self._compacted))

    def renew_lives(self) -> None:
        """Have names changed that are to say longer lives; not ``idle`` until all have been, or can't be for now."""
        self._lives.renew()
        self.pump()

    def _may_start(self) -> bool:
        n_writing = sum(not each.written for each in self._writes)
        return n_writing < WRITES_MAX and len(self._writes) < UNNAMED_MAX

    def _feed(self, persist: Persist) -> None:
        """Queue what it still wants, as far as there is room; give that up if it can't be written."""
        table, rest = self._index.table, persist.rest
        parent = int(table.parent[rest[0]])
        above = parent == NO_PARENT or parent in self._pending or self._index.resident(np.array([parent]), NVME).all()
        if self.suspended or not above or not self._fits_layout(rest[0]):
            gone, persist.rest = rest, deque()
            for block in gone:
                persist.settle(block)
            return
        there = self._index.resident(np.array(rest, np.uint32), NVME)
        for block, written in zip(list(rest), there.tolist(), strict=True):
            if written:
                persist.settle(block)
            elif block in self._pending or self._take([block]):
                self._waiters.add(persist, [block])
            else:
                break
            rest.popleft()

    def tick(self, now_s: float) -> None:
        """Let those go on who wait for a write that has not returned in its time."""
        for writing in self._writes:
            if not writing.late and now_s - writing.since_s > self._io_timeout_s:
                writing.late = True
                self._counters.add("offload_late_writes")
                self._waiters.settle(writing.ids.tolist())
        self.pump()

    def _start(self) -> bool:
        """Send the next batch; False if it has to wait for the tier to gather free room.

        What a tenant has in the queue is skipped if all that could go for it on NVMe is in use (not least by being the
        ancestors of what is queued).
        """
        parts: list[Part] = []
        n_bytes = 0
        while self._queue and n_bytes < WRITE_BYTES_MAX:
            run, layout = self._next_run(WRITE_BYTES_MAX - n_bytes)
            if not run:
                continue
            namespace = int(self._index.table.namespace[run[0]])
            slots = self._room.make(namespace, layout.frame_bytes, len(run))
            rest = run[len(slots) :]
            self._queue.extendleft(reversed(rest))
            if len(slots):
                parts.append(self._part(np.array(run[: len(slots)], np.uint32), slots, layout))
                n_bytes += len(slots) * layout.frame_bytes
            if rest and self._room.may_come(namespace, layout.frame_bytes):
                break
            if rest:
                self._drop_queue(self._index.tenants.owner(namespace))
        if not parts:
            return False
        job = self._nvme.begin_write(
            np.concatenate([part.slots for part in parts]),
            np.concatenate([part.keys for part in parts]),
            np.concatenate([part.parents for part in parts]),
            np.concatenate([np.full(len(part.ids), part.number, np.uint32) for part in parts]),
            np.concatenate([np.full(len(part.ids), part.layout.payload_bytes, np.uint32) for part in parts]),
            [pieces for part in parts for pieces in part.buffers()],
            np.concatenate([part.firsts for part in parts]),
            self._lives.until_s(np.concatenate([part.ids for part in parts])),
        )
        writing = Writing(parts, job, self._clock.now_s(), n_bytes)
        self._writes.append(writing)
        self._jobs.append(Job(Lane.WRITE, writing.run, lambda: self._written(writing), n_bytes))
        return True

    def _next_run(self, most_bytes: int) -> tuple[list[int], FrameLayout]:
        """Take blocks of one namespace from the head of the queue; none of them if they were all to go."""
        namespaces = self._index.table.namespace
        namespace = int(namespaces[self._queue[0]])
        layout = self._layout(namespace)
        most = max(1, most_bytes // layout.frame_bytes)
        run: list[int] = []
        while self._queue and len(run) < most and namespaces[self._queue[0]] == namespace:
            run.append(self._queue.popleft())
        hidden = self._index.hiding.is_hidden(np.array(run, np.uint32))
        if hidden.any():  # nobody wants them any more
            self._settle([block for block, gone in zip(run, hidden.tolist(), strict=True) if gone])
            run = [block for block, gone in zip(run, hidden.tolist(), strict=True) if not gone]
        return run, layout

    def _part(self, ids: Ids, slots: NDArray[np.int64], layout: FrameLayout) -> Part:
        table, at = self._index.table, ids.astype(np.intp)
        return Part(
            layout,
            self._number_of(int(table.namespace[at[0]])),
            ids,
            slots,
            table.key[at],
            self._index.parent_keys(ids),
            table.parent[at] == NO_PARENT,
            [FrameRow(*row) for row in self._index.frame_rows(ids)],
            self._nvme.log_seqs(slots),
            aligned_bytes(len(ids) * layout.header_bytes).reshape(len(ids), layout.header_bytes),
            self._dram.addresses(table.slot[at]),
        )

    def _written(self, writing: Writing) -> None:
        """Data is on disk or has failed. Names follow in the order in which the batches began."""
        writing.written = True
        for each in self._writes:
            if not each.written:
                break
            if not each.naming:
                each.naming = True
                self._jobs.append(Job(Lane.CATALOG, each.job.name, partial(self._named, each)))
        self.pump()

    def _named(self, writing: Writing) -> None:
        self._writes.remove(writing)
        for part in writing.parts:
            self._room.settled(int(self._index.table.namespace[part.ids[0]]), part.layout.frame_bytes, len(part.ids))
        finished = self._nvme.finish_write(writing.job)
        live = finished.copy()
        # The copy of an ancestor may have broken meanwhile.
        live[live] = joins = self._index.may_join_nvme(writing.ids[live])
        self._nvme.free(writing.slots[finished][~joins], soon=True)
        self._index.add_nvme(writing.ids[live], writing.slots[live])
        n_live = int(live.sum())
        self._counters.add("offloaded_blocks", n_live)
        self._counters.add("offloaded_bytes", writing.n_bytes if n_live == len(live) else 0)
        self._counters.add("offload_failed_blocks", len(live) - n_live)
        self._settle(writing.ids.tolist())
        self.pump()

    def _compacted(self) -> None:
        if self._compacting is not None:
            lost = self._nvme.finish_compact(self._compacting)
            self._compacting = None
            if len(lost):
                self._lose(lost)
        self.pump()

    def _lose(self, slots: NDArray[np.int64]) -> None:
        """These frames can't be read. Looks at the whole table."""
        table = self._index.table
        ids = np.flatnonzero(np.isin(table.nvme_slot[: table.n_used], slots)).astype(np.uint32)
        self._nvme.quarantine(self._index.break_nvme(ids[self._index.resident(ids, NVME)]))

    def _drop_queue(self, tenant: int | None = None) -> None:
        """Skip what waits, or what waits of one tenant."""
        if not self._queue:
            return
        ids = np.array(self._queue, np.uint32)
        goes = np.ones(len(ids), np.bool_) if tenant is None else self._index.tenants.owners(ids) == tenant
        self._queue = deque(ids[~goes].tolist())
        self._skips.add(ids[goes].tolist(), Unwritten.SUSPENDED)
        self._settle(ids[goes].tolist())

    def _settle(self, blocks: list[int]) -> None:
        """These blocks are no longer pending, for better or worse. Who waits for a name goes on waiting."""
        self._pending_bytes -= sum(map(self._frame_bytes, blocks))
        parents = np.array([self._pending.pop(block) for block in blocks], np.uint32)
        self._index.unpin(np.array(blocks, np.uint32))
        self._index.unpin_each(parents[parents != NO_PARENT])
        late = set(self._lives.await_names(np.array(blocks, np.uint32)))
        self._waiters.settle(block for block in blocks if block not in late)

    def _fits_layout(self, block: int) -> bool:
        table = self._index.table
        layout = self._layout_of(int(table.namespace[block]))
        return layout is not None and layout.payload_bytes == int(table.size_bytes[block])

    def _frame_bytes(self, block: int) -> int:
        return self._layout(int(self._index.table.namespace[block])).frame_bytes

    def _layout(self, namespace: int) -> FrameLayout:
        layout = self._layout_of(namespace)
        if layout is None:
            raise IntegrityError(f"blocks of namespace {namespace} were queued, but can't lie on NVMe")
        return layout

    # Facts ---------------------------------------------------------------------------------------

    def stats(self) -> dict[str, float]:
        """Gauges."""
        return {
            "writes": len(self._writes),
            "queued_blocks": len(self._queue),
            "pending_blocks": len(self._pending),
            "pending_bytes": self._pending_bytes,
            "suspended": float(self.suspended),
        }

    def pinned(self) -> list[At]:
        """What is pinned in the index for it, one entry a pin."""
        parents = np.array(list(self._pending.values()), np.uint32)
        pins: list[At] = [np.array(list(self._pending), np.uint32), parents[parents != NO_PARENT]]
        return pins + [persist.ids for persist in self._persists]
