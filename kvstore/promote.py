"""Promotion: blocks in DRAM that are used again and again get a copy in HBM, behind the back of whoever uses them.

A block is promoted at its n-th access by a client that reads HBM. It is pinned in DRAM while it waits, and while the
daemon's device copies it through pinned memory of the daemon's own, so that no memory of clients has to be registered.
The queue is bounded: what doesn't fit, finds no room or can't be copied is skipped and counted; a later access of the
block offers it again. Nobody waits for it.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore.clock import Clock
from kvstore.device import Device, PinnedBuffer
from kvstore.errors import KVStoreError
from kvstore.hbm_room import HbmRoom
from kvstore.jobs import Job, Jobs, Lane
from kvstore.logs import about
from kvstore.metrics import Counters
from kvstore.native import copy_batch
from kvstore.prefix_index.above import Above
from kvstore.prefix_index.block_table import DRAM, HBM, At, Ids
from kvstore.prefix_index.index import PrefixIndex
from kvstore.tiers.dram import DramTier
from kvstore.tiers.hbm import HbmTier

COPIES_MAX = 2
"""Batches that are copied or wait for it, so that the next one is ready when the device is."""
STAGING_BYTES = 8 << 20
HBM_SHARE, DRAM_SHARE = 4, 8
"""Of the tiers, such parts may wait to be promoted."""
RETRY_S = 30.0
"""So long after the device failed nothing is promoted, and so often one that was full is asked for more."""

log = logging.getLogger("kvstore.store")


@dataclass(frozen=True, slots=True)
class Promotion:
    """At which access a block is promoted, and how many bytes may wait for it.

    0 bytes: a quarter of HBM, at most an eighth of DRAM, where they are pinned, and 1 GiB.
    """

    hits: int = 2
    queue_bytes_max: int = 0

    def queue_bytes(self, hbm_bytes: int, dram_bytes: int) -> int:
        """The bound of the queue in force."""
        return self.queue_bytes_max or min(hbm_bytes // HBM_SHARE, dram_bytes // DRAM_SHARE, 1 << 30)


class Copier:
    """Copies from ordinary host memory to a device's. One thread at a time."""

    def __init__(self, device: Device, staging_bytes: int = STAGING_BYTES) -> None:
        """Raises DeviceError when the device has no stream or pins no memory."""
        self._device = device
        self._staging = PinnedBuffer(device, staging_bytes)
        self._stream = device.stream()

    def copy(self, dsts: NDArray[np.uint64], srcs: NDArray[np.uint64], size_bytes: int) -> None:
        """Copy ``size_bytes`` from each source to its destination. Blocks; raises DeviceError."""
        step_bytes = min(size_bytes, self._staging.size_bytes)
        n_steps = self._staging.size_bytes // step_bytes
        for offset in range(0, size_bytes, step_bytes):
            n_bytes = min(step_bytes, size_bytes - offset)
            for first in range(0, len(dsts), n_steps):
                part = slice(first, first + n_steps)
                n = len(dsts[part])
                staged = self._staging.address + np.arange(n, dtype=np.uint64) * np.uint64(n_bytes)
                copy_batch(staged, srcs[part] + np.uint64(offset), n_bytes)
                sizes = np.full(n, n_bytes, np.uint64)
                self._device.copy_batch(dsts[part] + np.uint64(offset), staged, sizes, self._stream)
                self._device.sync_stream(self._stream)

    def close(self) -> None:
        """Give the pinned memory back. No copy may be under way."""
        self._device.free_stream(self._stream)
        self._staging.close()


@dataclass(slots=True, eq=False)
class _Batch:
    """Blocks of one tenant and size on their way. ``run`` is the worker's part."""

    tenant: str
    size_bytes: int
    ids: Ids
    slots: NDArray[np.int64]
    srcs: NDArray[np.uint64]
    dsts: NDArray[np.uint64]
    copier: Copier
    error: str = ""

    def run(self) -> None:
        try:
            self.copier.copy(self.dsts, self.srcs, self.size_bytes)
        except (KVStoreError, OSError) as error:
            self.error = str(error)


class Promoter:
    """Copies to HBM over one index. Called on the store's thread only; see ``Job`` for the rest."""

    def __init__(
        self,
        index: PrefixIndex,
        above: Above,
        dram: DramTier,
        tier: HbmTier,
        copier: Copier,
        jobs: Jobs,
        counters: Counters,
        clock: Clock,
        promotion: Promotion,
    ) -> None:
        self._index = index
        self._above = above
        self._dram = dram
        self._tier = tier
        self._copier = copier
        self._jobs = jobs
        self._counters = counters
        self._clock = clock
        self._hits = promotion.hits
        self.queue_bytes_max = promotion.queue_bytes(tier.capacity_bytes, dram.capacity_bytes)
        self._room = HbmRoom(index, above, tier, counters)
        self._queue: deque[tuple[str, int, deque[int]]] = deque()
        self._queued_bytes = 0
        self._under_way: set[int] = set()
        self._batches: list[_Batch] = []
        self._paused_until_s = -np.inf
        self._ask_again_s = -np.inf
        self._closed = False
        self.has_work = False
        """Blocks were queued since the last ``pump``."""

    @property
    def suspended(self) -> bool:
        """Nothing is promoted for now, as the device failed."""
        return self._clock.now_s() < self._paused_until_s

    def used(self, tenant: str, size_bytes: int, ids: At) -> None:
        """A client that reads HBM has used these blocks, of one size, in prompt order; the access has been counted."""
        at = ids.astype(np.intp, copy=False)
        wanted = self._index.resident(at, DRAM) & ~self._index.resident(at, HBM)
        wanted &= self._index.table.hits[at] >= self._hits
        if not wanted.any() or self._closed:
            return
        new = [block for block in at[wanted].tolist() if block not in self._under_way]
        slot_bytes = self._tier.slot_bytes(size_bytes)
        room = max(self.queue_bytes_max - self._queued_bytes, 0) // slot_bytes
        room = room or int(not self._queued_bytes)  # one alone always may come
        if self.suspended or slot_bytes > self._tier.capacity_bytes:
            room = 0
        self._counters.add("hbm_skipped_blocks", len(new[room:]))
        new = new[:room]
        if new:
            self._index.pin(np.array(new, np.uint32))
            self._under_way.update(new)
            self._queued_bytes += len(new) * slot_bytes
            self._queue.append((tenant, size_bytes, deque(new)))
            self.has_work = True

    def pump(self) -> None:
        """Hand out what can be copied now."""
        self.has_work = False
        if self._queue and self._tier.device_is_full and self._clock.now_s() >= self._ask_again_s:
            self._ask_again_s = self._clock.now_s() + RETRY_S
            self._tier.ask_again()
        while self._queue and len(self._batches) < COPIES_MAX:
            tenant, size_bytes, blocks = self._queue[0]
            if not self._start(tenant, size_bytes, blocks):
                break
            if not blocks:
                self._queue.popleft()

    def _start(self, tenant: str, size_bytes: int, blocks: deque[int]) -> bool:
        """Copy the next of these blocks, or skip all of them where there is no room. False if room is to be waited
        for: ``pump`` again then."""
        slot_bytes = self._tier.slot_bytes(size_bytes)
        n = min(len(blocks), max(1, STAGING_BYTES // slot_bytes))
        slots = self._room.make(tenant, slot_bytes, n)
        must_wait = self._tier.awaits_memory
        if len(slots) < n and not must_wait:
            n_skipped = len(blocks) - len(slots)
            self._counters.add("hbm_no_room_blocks", n_skipped)
            self._leave(np.array([blocks.pop() for _ in range(n_skipped)], np.uint32), slot_bytes)
        if not len(slots):
            return not must_wait
        ids = np.array([blocks.popleft() for _ in slots], np.uint32)
        batch = _Batch(
            tenant, size_bytes, ids, slots,
            self._dram.addresses(self._index.slots(ids)), self._tier.addresses(slots), self._copier,
        )  # fmt: skip
        self._batches.append(batch)
        self._hold(batch, 1)
        self._jobs.append(Job(Lane.DEVICE, batch.run, lambda: self._finish(batch), len(ids) * size_bytes))
        return True

    def _finish(self, batch: _Batch) -> None:
        ids, slots = batch.ids, batch.slots
        self._batches.remove(batch)
        self._hold(batch, -1)
        if batch.error:
            self._counters.add("hbm_failed_blocks", len(ids))
            self.pause(f"{len(ids)} blocks can't be copied there: {batch.error}")
        # Its namespace may have been cleared meanwhile.
        good = self._above.may_join(ids) & ~self._index.hiding.is_hidden(ids) & (not batch.error)
        self._tier.commit(slots[good], ids[good].astype(np.int64))
        self._above.add(ids[good], slots[good])
        self._tier.free(slots[~good])
        self._counters.add("hbm_promoted_blocks", int(good.sum()))
        self._counters.add("hbm_promoted_bytes", int(good.sum()) * batch.size_bytes)
        self._leave(ids, self._tier.slot_bytes(batch.size_bytes))
        self.pump()

    def pause(self, reason: str) -> None:
        """The device failed: promote nothing for a while."""
        self._paused_until_s = self._clock.now_s() + RETRY_S
        self._counters.add("hbm_skipped_blocks", self._drop_queue())
        log.warning(
            "HBM: the device failed, it is not used for %.0f s: %s", RETRY_S, reason,
            extra=about("hbm_failed", pause_s=RETRY_S, error=reason),
        )  # fmt: skip

    def _hold(self, batch: _Batch, sign: int) -> None:
        """The slots of a copy on its way count for its tenant."""
        n_bytes = len(batch.slots) * self._tier.slot_bytes(batch.size_bytes)
        self._index.tenants.hold(self._index.tenants.number(batch.tenant), HBM, sign * n_bytes)

    def _leave(self, ids: Ids, slot_bytes: int) -> None:
        self._queued_bytes -= len(ids) * slot_bytes
        self._under_way.difference_update(ids.tolist())
        self._index.unpin(ids)

    def stop(self) -> None:
        """Promote nothing more, for good. What is being copied still comes in. Idempotent."""
        self._closed = True
        self._drop_queue()

    def _drop_queue(self) -> int:
        """Nothing that waits is promoted; returns how many blocks."""
        queue, self._queue = self._queue, deque()
        for _, size_bytes, blocks in queue:
            self._leave(np.array(blocks, np.uint32), self._tier.slot_bytes(size_bytes))
        return sum(len(blocks) for _, _, blocks in queue)

    # Facts ---------------------------------------------------------------------------------------

    def stats(self) -> dict[str, float]:
        """Gauges."""
        return {
            "copies": len(self._batches),
            "queued_blocks": len(self._under_way),
            "queued_bytes": self._queued_bytes,
            "suspended": float(self.suspended),
        }

    def pinned(self) -> list[At]:
        """What is pinned in the index for it, one entry a pin."""
        pins: list[At] = [np.array(blocks, np.uint32) for _, _, blocks in self._queue]
        return pins + [batch.ids for batch in self._batches]

    def reserved_slots(self) -> list[NDArray[np.int64]]:
        """Slots in HBM that are being copied to."""
        return [batch.slots for batch in self._batches]
