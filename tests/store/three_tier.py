"""A store with copies in HBM above DRAM and NVMe, on the simulated device, and clients that read there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvstore.device import PinnedBuffer, open_device
from kvstore.lease import Lease
from kvstore.promote import Promotion
from kvstore.store.hbm import HbmSetup
from kvstore.store.requests import Prompt
from kvstore.tiers.hbm import HbmTier
from tests.store.two_tier import KIB, Settings, TwoTierRig

BLOCK_BYTES = 4 * KIB
HBM_BLOCKS = 16


class ThreeTierRig(TwoTierRig):
    """16 blocks fit in HBM, 32 in DRAM. ``hbm_bytes_at`` reads as a client does that has regions open."""

    def __init__(
        self,
        directory: Path,
        settings: Settings | None = None,
        n_blocks: int = HBM_BLOCKS,
        promotion: Promotion | None = None,
    ) -> None:
        self.device = open_device("simulated", total_bytes=2 * n_blocks * BLOCK_BYTES)
        self.hbm = HbmTier(self.device, n_blocks * BLOCK_BYTES, region_bytes=4 * BLOCK_BYTES)
        self._host = PinnedBuffer(self.device, 64 * BLOCK_BYTES)
        self._stream = self.device.stream()
        promotion = promotion or Promotion(hits=2, queue_bytes_max=n_blocks * BLOCK_BYTES)
        self.setup = HbmSetup(self.device, self.hbm, promotion)
        super().__init__(directory, settings, hbm=self.setup)

    def close(self) -> None:
        self.store.check()
        self._host.close()
        assert self.store.hbm is not None
        self.store.hbm.close()
        super().close()

    def use(self, session: int, prompt: Prompt, first_block: int = 0, max_blocks: int = 0) -> Lease:
        """A lease of a client that reads HBM, once what it lacks has come up from NVMe."""
        load = self.store.begin_load(prompt, first_block, max_blocks, reads_hbm=True)
        if load is not None:
            self.settle()
        lease = self.store.lease(session, prompt, first_block, max_blocks, load=load, reads_hbm=True)
        if load is not None:
            self.store.end_load(load)
        return lease

    def promote(self, prompt: Prompt, session: int = 1) -> None:
        """Use a prompt once more, and let its blocks get to HBM."""
        lease = self.use(session, prompt)
        self.settle()
        self.store.release(session, lease.id)

    def in_hbm(self, prompt: Prompt) -> list[bool]:
        """Which of its stored blocks are in HBM; asks nothing of policy."""
        ids = self.store.index.match(prompt.root_key, prompt.path).ids
        return [bool(each) for each in self.store.index.resident(ids, 2)]

    def hbm_slots(self, lease: Lease) -> NDArray[np.int64]:
        """The slots that a lease was granted in HBM."""
        assert lease.hbm_slots is not None
        return lease.hbm_slots[lease.hbm_slots >= 0]

    def hbm_bytes_at(self, slots: NDArray[np.int64], size_bytes: int = BLOCK_BYTES) -> list[bytes]:
        """What lies in these slots now."""
        n = len(slots)
        rows = np.uint64(self._host.address) + np.arange(n, dtype=np.uint64) * np.uint64(size_bytes)
        sizes = np.full(n, size_bytes, np.uint64)
        self.device.copy_batch(rows, self.hbm.addresses(slots), sizes, self._stream)
        self.device.sync_stream(self._stream)
        return [self._host.array[at * size_bytes : (at + 1) * size_bytes].tobytes() for at in range(n)]

    def open_regions(self, session: int, slots: NDArray[np.int64]) -> None:
        """Take the handles of the regions of these slots, as a client does."""
        for region_id in sorted(set((slots >> 20).tolist())):
            self.store.share_hbm(session, self.hbm.region(region_id).tenant, region_id)
