"""What lies below DRAM: the NVMe tier, what moves blocks to it and from it, and what a restart finds there."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np

from kvstore.cleaner import Cleaner
from kvstore.clock import Clock
from kvstore.compression.frame import FrameLayout
from kvstore.errors import BadInputError
from kvstore.jobs import Jobs
from kvstore.lives import Lives
from kvstore.logs import about
from kvstore.metrics import Counters
from kvstore.offload import Offloader, WritePolicy
from kvstore.onboard import Onboarder
from kvstore.prefix_index.index import PrefixIndex
from kvstore.room import RoomMaker
from kvstore.store.namespaces import Namespaces, OpenNamespace
from kvstore.tiers.dram import DramTier
from kvstore.tiers.nvme.tier import NvmeTier

log = logging.getLogger("kvstore.store")

NAMESPACE_RETRY_S = 30.0
"""So long blocks of a namespace for which the NVMe directory had no room stay in DRAM, until that is asked again."""


@dataclass(frozen=True, slots=True)
class WriteBehind:
    """How blocks get to NVMe. ``hits`` goes with ``selective``; 0 bytes is a quarter of DRAM, at most 1 GiB."""

    policy: WritePolicy = WritePolicy.THROUGH
    hits: int = 2
    queue_bytes_max: int = 0
    io_timeout_s: float = 10.0

    def queue_bytes(self, dram_bytes: int) -> int:
        """The bound of the queue in force."""
        return self.queue_bytes_max or min(dram_bytes // 4, 1 << 30)


class Hierarchy:
    """The NVMe tier of a store, with its offloader and onboarder. Closing the tier is its owner's business."""

    def __init__(
        self,
        index: PrefixIndex,
        dram: DramTier,
        nvme: NvmeTier,
        room: RoomMaker,
        namespaces: Namespaces,
        jobs: Jobs,
        counters: Counters,
        clock: Clock,
        write: WriteBehind,
    ) -> None:
        self.nvme = nvme
        self._index = index
        self._namespaces = namespaces
        self._numbers: dict[int, int] = {}
        self._layouts: dict[int, FrameLayout | None] = {}
        self._unlisted: set[int] = set()
        self._retry_at_s = 0.0
        self._clock = clock
        self._lives = Lives(index, nvme, clock)
        self.onboarder = Onboarder(index, dram, nvme, room, self._layout, jobs, counters, clock, write.io_timeout_s)
        self.offloader = Offloader(
            index, dram, nvme, self._layout, self._number, self._lives, jobs, counters, clock,
            write.policy, write.hits, write.queue_bytes(dram.capacity_bytes), write.io_timeout_s,
        )  # fmt: skip
        self.cleaner = Cleaner(index, self.offloader, counters, dram.capacity_bytes)
        self._cleans = write.policy is WritePolicy.BACK

    def recover(self, now_s: float) -> int:
        """Take what the tier found on disk into the index, as blocks known by key; returns how many.

        Their namespaces need not be open: whoever opens one later finds its blocks.
        """
        found = self.nvme.recovered()
        ordinals = np.zeros(len(found.slots), np.uint32)
        known = np.zeros(len(found.slots), np.bool_)
        for number, (digest, description) in self.nvme.namespaces().items():
            mine = found.namespaces == number
            ordinals[mine] = self._namespaces.found(digest, description)
            known |= mine
        if not known.all():
            n_unknown = int((~known).sum())
            log.warning(
                "%d blocks on NVMe are of no known namespace: they go", n_unknown,
                extra=about("nvme_blocks_unknown", blocks=n_unknown),
            )  # fmt: skip
            self.nvme.free(found.slots[~known])
        ids = self._index.insert_cold(
            found.keys[known],
            found.parents[known],
            found.slots[known],
            found.payload_bytes[known],
            ordinals[known],
            now_s,
        )
        self._lives.found(ids, found.until_s[known])
        return len(ids)

    def tick(self, now_s: float) -> None:
        """Deadlines, retries and upkeep."""
        if self._unlisted and now_s >= self._retry_at_s:
            for ordinal in self._unlisted:
                del self._layouts[ordinal]
            self._unlisted.clear()
        self.onboarder.tick(now_s)
        self._lives.renew()
        self.offloader.tick(now_s)
        if self._cleans:
            self.cleaner.clean()

    def stats(self) -> tuple[dict[str, float], dict[str, str]]:
        """Gauges and facts in words, by name."""
        numbers: dict[str, float] = {}
        texts: dict[str, str] = {}
        parts = (("nvme", self.nvme), ("onboard", self.onboarder), ("offload", self.offloader))
        for prefix, part in parts:
            for name, value in part.stats().items():
                if isinstance(value, str):
                    texts[f"{prefix}_{name}"] = value
                else:
                    numbers[f"{prefix}_{name}"] = float(value)
        return numbers, texts

    def _layout(self, ordinal: int) -> FrameLayout | None:
        if ordinal not in self._layouts:
            self._layouts[ordinal] = self._storable(self._namespaces.by_ordinal(ordinal), ordinal)
        return self._layouts[ordinal]

    def _storable(self, opened: OpenNamespace, ordinal: int) -> FrameLayout | None:
        stored = opened.stored_as(ordinal)
        try:
            layout = FrameLayout.of(stored.spec, opened.namespace.row_bytes, stored.digest)
            self.nvme.free_slots(layout.frame_bytes)
        except BadInputError as error:
            log.warning(
                "blocks of namespace %s stay in DRAM: %s", opened.digest.hex(), error,
                extra=about("namespace_in_dram_only", namespace=opened.digest.hex(), error=str(error)),
            )  # fmt: skip
            return None
        return layout if self._is_listed(opened, ordinal) else None

    def _is_listed(self, opened: OpenNamespace, ordinal: int) -> bool:
        try:
            self._number(ordinal)
        except BadInputError as error:
            log.warning(
                "blocks of namespace %s stay in DRAM for now: %s", opened.digest.hex(), error,
                extra=about("namespace_unlisted", namespace=opened.digest.hex(), error=str(error)),
            )  # fmt: skip
            if not self._unlisted:
                self._retry_at_s = self._clock.now_s() + NAMESPACE_RETRY_S
            self._unlisted.add(ordinal)
            return False
        return True

    def _number(self, ordinal: int) -> int:
        number = self._numbers.get(ordinal)
        if number is None:
            stored = self._namespaces.by_ordinal(ordinal).stored_as(ordinal)
            number = self.nvme.name_namespace(stored.digest, stored.description)
            self._numbers[ordinal] = number
        return number
