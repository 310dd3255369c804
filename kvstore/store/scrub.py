"""Checking a running store, a few blocks at a time: its tables against each other, frames on NVMe against their names.

A frame is read by a worker into memory of its own and compared there. A bad one is read twice; then it is quarantined,
as if somebody had asked for it. Blocks in use are checked as well as others, and nobody waits for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvstore.compression.frame import inspect, verify_frame
from kvstore.errors import IntegrityError
from kvstore.jobs import Job, Lane
from kvstore.logs import about
from kvstore.native import aligned_bytes
from kvstore.prefix_index.block_table import DRAM, HIDDEN, NVME, Ids
from kvstore.store.store import Store
from kvstore.tiers.dram import SlotState
from kvstore.tiers.nvme.jobs import ReadJob
from kvstore.tiers.nvme.layout import PAGE_BYTES
from kvstore.tiers.nvme.tier import FrameState, NvmeTier

BLOCKS_MAX, BYTES_MAX = 2048, 16 << 20
"""Checked at once: blocks, and bytes of their frames (one frame may always be)."""
BLOCKS_PER_STEP = 16

log = logging.getLogger("kvstore.store")


@dataclass(slots=True, eq=False)
class Scrub:
    """Frames that are being read and compared. ``done`` when that is over; then the counts are there."""

    ids: Ids
    slots: NDArray[np.int64]
    sizes: NDArray[np.int64]
    keys: NDArray[np.uint8]
    memory: NDArray[np.uint8]
    job: ReadJob
    good: NDArray[np.bool_] = field(init=False)
    done: bool = False
    n_corrupt: int = 0
    n_unreadable: int = 0
    n_gone: int = 0
    """Frames that were given up by the tier before they were read."""
    _callbacks: list[Callable[[], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.good = np.zeros(len(self.ids), np.bool_)

    def on_done(self, callback: Callable[[], None]) -> None:
        """Call this when it is done."""
        self._callbacks.append(callback)

    def run(self) -> None:
        """The worker's part: read and compare, what is bad a second time."""
        for _ in range(2):
            self.job.run()
            starts = np.cumsum(self.sizes) - self.sizes
            for i, (start, size) in enumerate(zip(starts.tolist(), self.sizes.tolist(), strict=True)):
                frame = memoryview(self.memory[start : start + size])  # type: ignore[arg-type]
                facts = inspect(frame) if self.job.arrived[i] else None
                self.good[i] = facts is not None and facts.key == self.keys[i].tobytes() and verify_frame(frame)
            if self.good.all():
                return

    def ended(self) -> None:
        """It is done: whoever waits goes on."""
        self.done = True
        for callback in self._callbacks:
            callback()


class Scrubber:
    """Checks over one store. Called on its thread only; see ``Job`` for the rest."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def slice_from(self, first: int) -> Ids:
        """Living blocks from id ``first`` on, so many as are checked at once."""
        table = self._store.index.table
        first = min(first, table.n_used)
        span = table.state[first : min(first + BLOCKS_MAX, table.n_used)]
        ids = (np.flatnonzero(span) + first).astype(np.uint32)
        hierarchy = self._store.hierarchy
        if hierarchy is None or not len(ids):
            return ids
        on_nvme = self._store.index.resident(ids, NVME)
        sizes = np.zeros(len(ids), np.int64)
        sizes[on_nvme] = hierarchy.nvme.frame_bytes(self._store.index.nvme_slots(ids[on_nvme]))
        n = int(np.searchsorted(np.cumsum(sizes), BYTES_MAX, side="right"))
        return ids[: max(n, 1)]

    def begin(self, ids: Ids) -> Scrub | None:
        """Have the frames of these blocks read and compared; None if none of them has one."""
        index, hierarchy = self._store.index, self._store.hierarchy
        if hierarchy is None:
            return None
        ids = ids[index.resident(ids, NVME) & (index.table.state[ids] != HIDDEN)]
        if not len(ids):
            return None
        nvme, slots = hierarchy.nvme, index.nvme_slots(ids)
        sizes = np.maximum(nvme.frame_bytes(slots), PAGE_BYTES)
        memory = aligned_bytes(int(sizes.sum()))
        at = (int(memory.ctypes.data) + np.cumsum(sizes) - sizes).astype(np.uint64)
        job = nvme.begin_read(slots, at, at + np.uint64(PAGE_BYTES), PAGE_BYTES, sizes - PAGE_BYTES)
        scrub = Scrub(ids, slots, sizes, index.table.key[ids.astype(np.intp)], memory, job)
        self._store.jobs.append(Job(Lane.READ, scrub.run, lambda: self._finish(scrub, nvme), int(sizes.sum())))
        return scrub

    def contradictions(self, ids: Ids, out: list[str]) -> Iterator[None]:
        """Put what contradicts what in the tables about these blocks into ``out``, a few blocks at a time."""
        for start in range(0, len(ids), BLOCKS_PER_STEP):
            part = ids[start : start + BLOCKS_PER_STEP]
            part = part[self._store.index.table.state[part] != 0]  # some may have left since the step before
            for told in (self._store.index.contradictions(part), self._against_tiers(part)):
                try:
                    out.extend(told)
                except IntegrityError as error:  # so much so that it can't be looked at
                    out.append(str(error))
            yield

    def _against_tiers(self, ids: Ids) -> Iterator[str]:
        index, dram, hierarchy = self._store.index, self._store.dram, self._store.hierarchy
        here = ids[index.resident(ids, DRAM)]
        slots = index.slots(here)
        wrong = (dram.states(slots) != SlotState.LIVE) | (dram.tags(slots) != here)
        yield from (f"block {block} has a slot in DRAM that is another's" for block in here[wrong].tolist())
        if hierarchy is None:
            return
        there = ids[index.resident(ids, NVME)]
        nvme_slots = index.nvme_slots(there)
        live = hierarchy.nvme.states(nvme_slots) == FrameState.LIVE
        yield from (f"block {block} has a place on NVMe that is free" for block in there[~live].tolist())
        there = there[live]
        distinct, which = np.unique(nvme_slots[live], return_inverse=True)
        wrong = (hierarchy.nvme.keys(distinct)[which.reshape(-1)] != index.table.key[there]).any(axis=1)
        yield from (f"block {block} has a place on NVMe that is another's" for block in there[wrong].tolist())

    def _finish(self, scrub: Scrub, nvme: NvmeTier) -> None:
        index, counters = self._store.index, self._store.counters
        arrived = nvme.finish_read(scrub.job)
        # What has left, or lies elsewhere by now, is nobody's business any more.
        same = (index.table.nvme_slot[scrub.ids.astype(np.intp)] == scrub.slots) & index.resident(scrub.ids, NVME)
        bad = ~scrub.good & same
        scrub.n_unreadable, scrub.n_corrupt = int((bad & ~arrived).sum()), int((bad & arrived).sum())
        scrub.n_gone = int((~scrub.good & ~same).sum())
        counters.add("scrubbed_frames", len(scrub.ids) - scrub.n_gone)
        counters.add("scrub_corrupt_blocks", scrub.n_corrupt)
        counters.add("scrub_unreadable_blocks", scrub.n_unreadable)
        if bad.any():
            log.warning(
                "NVMe: %d blocks can't be read, %d are not what was written: they go",
                scrub.n_unreadable,
                scrub.n_corrupt,
                extra=about("nvme_blocks_lost", unreadable=scrub.n_unreadable, corrupt=scrub.n_corrupt),
            )
            nvme.quarantine(index.break_nvme(scrub.ids[bad]))
        scrub.ended()
