"""Which copies of which blocks there are, by the model: what may come, what may go, and what must not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from tests.store.oracle import Key, keys_of, orphans, parent_of


class Copies(NamedTuple):
    """Blocks with a copy in each tier, at one time."""

    dram: frozenset[Key] = frozenset()
    nvme: frozenset[Key] = frozenset()


@dataclass(frozen=True)
class Event:
    """What has just happened, as far as it may bring copies or cost some."""

    committed: frozenset[Key] = frozenset()
    """Blocks that a client has just stored and that were not in DRAM."""
    finished: bool = False
    """A job has been taken in: blocks may have come up from NVMe, or got their names there."""


class CopyBook:
    """The copies as the store shows them from look to look. Each difference must be explained."""

    BROKEN: ClassVar = ("onboard_unreadable_blocks", "onboard_corrupt_blocks", "unreadable_frames")
    """The last is of the tier itself, when it moves frames."""
    COUNTERS: ClassVar = (
        "evicted_blocks",
        "nvme_evicted_blocks",
        *BROKEN,
        "onboarded_blocks",
        "offloaded_blocks",
    )

    def __init__(self) -> None:
        self.now = Copies()
        self.suspect: set[Key] = set()
        """Blocks whose copy on NVMe was damaged, or could not be read; nobody may lose a copy there otherwise."""
        self.broke: set[Key] = set()
        """Blocks that ever lost a copy that way. What follows them is on NVMe without them."""
        self._counts: dict[str, int] = dict.fromkeys(self.COUNTERS, 0)

    @property
    def dram(self) -> frozenset[Key]:
        return self.now.dram

    @property
    def nvme(self) -> frozenset[Key]:
        return self.now.nvme

    @property
    def stored(self) -> frozenset[Key]:
        return self.now.dram | self.now.nvme

    def restart(self, now: Copies, counts: Mapping[str, int]) -> None:
        """Another daemon, which has found this."""
        self.now = now
        self._counts = dict(counts)

    def observe(self, now: Copies, event: Event, counts: Mapping[str, int], protected: set[Key]) -> None:
        """Take over what is there now. AssertionError for what could not come or must not have gone."""
        before, self.now = self.now, now
        rose = {name: counts[name] - self._counts[name] for name in self.COUNTERS}
        self._counts = dict(counts)
        self._check_gains(before, event, rose)
        self._check_losses_of_dram(before, event, rose, protected)
        self._check_losses_of_nvme(before, event, rose, protected)
        gone = (before.dram | before.nvme) - self.stored
        followed = {above for key in self.stored for above in keys_of(key)[:-1]}
        assert not (gone & followed) - self.broke, "a block left and its descendants stayed"
        assert not orphans(self.stored, self.stored) - self._below_broken(self.stored)

    def _check_gains(self, before: Copies, event: Event, rose: Mapping[str, int]) -> None:
        up, down = self.dram - before.dram, self.nvme - before.nvme
        assert event.committed <= self.dram, "a block that was committed is not there"
        onboarded = up - event.committed
        assert len(onboarded) <= rose["onboarded_blocks"]
        assert onboarded <= before.nvme, "a block came from nowhere"
        assert len(down) <= rose["offloaded_blocks"]
        assert down <= before.dram, "a block was named on NVMe that nobody had in DRAM"
        assert not orphans(down, self.nvme), "a block is on NVMe before its parent"
        if not event.finished:
            assert not onboarded
            assert not down

    def _check_losses_of_dram(self, before: Copies, event: Event, rose: Mapping[str, int], protected: set[Key]) -> None:
        lost = before.dram - self.dram
        assert not lost & protected, "a block in use was evicted from DRAM"
        assert not {parent_of(key) for key in self.dram} & lost, "a block was evicted from DRAM before what follows it"
        assert len(lost) <= rose["evicted_blocks"]
        if not event.finished:  # else a block may have come and gone at once
            assert len(lost) == rose["evicted_blocks"]

    def _check_losses_of_nvme(self, before: Copies, event: Event, rose: Mapping[str, int], protected: set[Key]) -> None:
        lost = before.nvme - self.nvme
        n_broken = sum(rose[name] for name in self.BROKEN)
        evicted = lost - self.suspect
        assert not evicted & protected, "a block in use was evicted from NVMe"
        assert len(evicted) <= rose["nvme_evicted_blocks"]
        assert len(lost) <= rose["nvme_evicted_blocks"] + n_broken
        assert n_broken <= len(lost & self.suspect), "a good copy was taken for a bad one"
        assert not {parent_of(key) for key in self.nvme} & evicted, "a block was evicted from NVMe before its children"
        if not event.finished:
            assert len(lost) == rose["nvme_evicted_blocks"] + n_broken
        self.broke |= lost & self.suspect
        self.suspect -= lost
        assert not orphans(self.nvme, self.nvme) - self._below_broken(self.nvme)

    def _below_broken(self, keys: frozenset[Key]) -> set[Key]:
        return {key for key in keys if parent_of(key) in self.broke}
