"""What lies above DRAM: the HBM tier, and what brings copies of blocks there."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore.clock import Clock
from kvstore.device import Device
from kvstore.errors import BadInputError, KVStoreError
from kvstore.jobs import Job, Jobs, Lane
from kvstore.logs import about
from kvstore.metrics import Counters
from kvstore.prefix_index.block_table import At
from kvstore.prefix_index.index import PrefixIndex
from kvstore.promote import Copier, Promoter, Promotion
from kvstore.tiers.dram import DramTier
from kvstore.tiers.hbm import HbmTier

log = logging.getLogger("kvstore.store")


@dataclass(frozen=True, slots=True)
class HbmSetup:
    """A device, a tier in its memory, and which blocks come there. Both belong to the store from then on."""

    device: Device
    tier: HbmTier
    promotion: Promotion


class Hbm:
    """The HBM tier of a store. Called on the store's thread only."""

    def __init__(
        self, index: PrefixIndex, dram: DramTier, setup: HbmSetup, jobs: Jobs, counters: Counters, clock: Clock
    ) -> None:
        """Raises BadInputError for an index that knows of no such tier, DeviceError if the device can't copy."""
        if index.above is None:
            raise BadInputError("there is an HBM tier and the index knows of none: make it with hbm=True")
        self.tier = setup.tier
        self.device = setup.device
        self.above = index.above
        self.above.places = setup.tier
        self._jobs = jobs
        self._copier = Copier(setup.device)
        self.promoter = Promoter(
            index, self.above, dram, setup.tier, self._copier, jobs, counters, clock, setup.promotion
        )
        self.tier.make_calls(self._later, self.promoter.pause)

    @property
    def serves(self) -> bool:
        """Whether readers are told of copies here: not for a while after the device failed."""
        return not self.promoter.suspended

    def slots(self, ids: At) -> NDArray[np.int64]:
        """Where the copies of these blocks lie, -1 where there is none."""
        return self.above.slots(ids)

    def stats(self) -> tuple[dict[str, float], dict[str, str]]:
        """Gauges and facts in words, by name."""
        numbers: dict[str, float] = {"hbm_blocks": float(self.above.n), "hbm_held_blocks": float(self.above.n_held)}
        texts = {"hbm_device": f"{self.device.facts.name} ({self.device.facts.uuid})"}
        for name, value in (self.tier.stats() | self.promoter.stats()).items():
            if isinstance(value, str):
                texts[f"hbm_{name}"] = value
            else:
                numbers[f"hbm_{name}"] = float(value)
        return numbers, texts

    def close(self) -> None:
        """Give everything back to the device, as far as it takes it. No copy may be under way."""
        for close in (self._copier.close, self.tier.close, self.device.close):
            try:
                close()
            except KVStoreError as error:
                log.warning("HBM: the device failed at the end: %s", error, extra=about("hbm_failed", error=str(error)))

    def _later(self, run: Callable[[], None], done: Callable[[], None]) -> None:
        def finish() -> None:
            done()
            self.promoter.pump()

        self._jobs.append(Job(Lane.DEVICE, run, finish))
