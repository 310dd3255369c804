"""A store over DRAM and a real NVMe directory, whose disk can be made to fail, and whose power can be cut."""

from __future__ import annotations

import random
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from kvstore.clock import ManualClock
from kvstore.compression.frame import inspect, verify_frame
from kvstore.lease import Lease
from kvstore.store.hbm import HbmSetup
from kvstore.store.hierarchy import WriteBehind
from kvstore.store.requests import LeaseLimits, Prompt
from kvstore.tiers.nvme.crash import CrashFiles, Mode
from kvstore.tiers.nvme.direct import DirectFiles
from kvstore.tiers.nvme.faults import FaultyFiles
from kvstore.tiers.nvme.layout import Geometry
from kvstore.tiers.nvme.tier import NvmeTier
from tests.store.job_runner import JobRunner
from tests.store.rig import Rig

KIB = 1 << 10
MIB = 1 << 20
CATALOG = "catalog"


def nvme_bytes_for(n_segments: int, segment_bytes: int = 64 * KIB) -> int:
    """A capacity with room for so many segments."""
    capacity_bytes = n_segments * segment_bytes
    while Geometry(capacity_bytes, segment_bytes).n_segments < n_segments:
        capacity_bytes += segment_bytes // 4
    return capacity_bytes


@dataclass(frozen=True)
class Sizes:
    """32 blocks of 4 KiB in DRAM and 63 on NVMe, unless said otherwise."""

    dram_bytes: int = 128 * KIB
    region_bytes: int = 32 * KIB
    starter_bytes: int = 8 * KIB
    nvme_bytes: int = nvme_bytes_for(12)
    segment_bytes: int = 64 * KIB


@dataclass(frozen=True)
class Settings:
    """What a store is made with, and made with again after a restart."""

    sizes: Sizes = Sizes()
    write: WriteBehind = field(default_factory=lambda: WriteBehind(queue_bytes_max=MIB))
    limits: LeaseLimits | None = None
    recovery: str = "normal"
    durability: bool = False
    """Keep account of what a power cut would leave; in memory."""
    policy: str = "lru"


class TwoTierRig(Rig):
    """``files`` takes orders for faults. ``jobs`` are run when a test says so."""

    def __init__(
        self,
        directory: Path,
        settings: Settings | None = None,
        clock: ManualClock | None = None,
        seed: int = 0,
        hbm: HbmSetup | None = None,
    ) -> None:
        self.directory = directory
        self.settings = settings or Settings()
        clock = clock or ManualClock(1000.0)
        sizes = self.settings.sizes
        directory.mkdir(exist_ok=True)
        real = DirectFiles(directory, depth=2)
        self.power = CrashFiles(directory, real) if self.settings.durability else None
        self.files = FaultyFiles(self.power or real, seed)
        if self.power is not None:
            self.power.set_catalog_copier(self._copy_catalog)
        self.nvme = NvmeTier(
            directory, sizes.nvme_bytes, inspect, self.files, self.settings.recovery, sizes.segment_bytes, clock,
            verify_frame,
        )  # fmt: skip
        super().__init__(
            sizes.dram_bytes, sizes.region_bytes, sizes.starter_bytes, self.settings.limits, clock, self.nvme,
            self.settings.write, hbm, self.settings.policy,
        )  # fmt: skip
        self.jobs = JobRunner(self.store)
        self.ended = False

    def close(self) -> None:
        super().close()
        self.nvme.close()
        self.ended = True

    def abandon(self) -> None:
        """End it as it is, jobs and all, as a dying process would."""
        self.files.release_all()
        self.nvme._ledger.take_removal()  # closing in order would still write these
        self.nvme.close()
        self.dram.close()
        self.ended = True

    def killed(self, recovery: str = "") -> Self:
        """The process dies and another one opens the same directory."""
        self.abandon()
        return self.reopened(self.directory, recovery)

    def power_cut(self, target: Path, mode: Mode, seed: int = 0, recovery: str = "") -> Self:
        """The power goes now; another process opens what the disk has kept. The directory is moved to ``target``."""
        assert self.power is not None
        self.power.materialize(target, mode, seed)
        self.abandon()
        shutil.rmtree(self.directory)
        return self.reopened(target, recovery)

    def settle(self, dice: random.Random | None = None) -> None:
        """Let everything that is under way come to its end: jobs, clients that are to unmap, retries."""
        for _ in range(8):
            self.jobs.all(dice)
            self.unmap_retired()
            self.clock.advance(0.2)
            self.store.tick()
        self.jobs.all(dice)

    def read(self, session: int, prompt: Prompt, first_block: int = 0, max_blocks: int = 0) -> Lease:
        """Lease after whatever lies on NVMe has come up, as a client does that waits."""
        load = self.store.begin_load(prompt, first_block, max_blocks)
        if load is not None:
            self.settle()
        lease = self.store.lease(session, prompt, first_block, max_blocks, load=load)
        if load is not None:
            self.store.end_load(load)
        return lease

    def persist(self, prompt: Prompt) -> int:
        """Have the stored prefix written; returns how many leading blocks are durable then."""
        persist = self.store.begin_persist(prompt)
        if persist is None:
            return 0
        self.settle()
        n_durable = self.store.n_durable(persist)
        self.store.end_persist(persist)
        return n_durable

    def reopened(self, directory: Path, recovery: str = "") -> Self:
        """Another process on a directory, with the same settings."""
        settings = replace(self.settings, recovery=recovery or "normal")
        return type(self)(directory, settings, self.clock)

    def _copy_catalog(self, target: str) -> None:
        # Called on the thread that has just committed, the only one that writes to it.
        shutil.copy(self.directory / CATALOG / "data.mdb", target)
