"""The tier's budget and its store of raw regions, filled with pages ahead of use by a thread.

Every byte of every region that exists counts, from before it is made until after it is gone: raw ones,
assigned ones, and retired ones that a client still maps. The sum never exceeds the capacity.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass

from kvstore.logs import about
from kvstore.native import numa
from kvstore.tiers.memfd import PAGE_BYTES
from kvstore.tiers.region import Region

CHUNK_BYTES = 2 << 20
"""Pages filled in one call: whoever needs the region at once waits for one call at most."""

log = logging.getLogger("kvstore.dram")

STARTERS = 2
"""Raw regions of the size of a writer's first one, kept ready where the capacity is worth it."""


@dataclass(frozen=True, slots=True)
class SourceFacts:
    """Bytes at one moment. ``failure`` is the last reason why memory could not be had, or empty."""

    out_bytes: int
    raw_bytes: int
    raw_prefaulted_bytes: int
    failure: str


class RegionSource:
    """Makes regions within ``capacity_bytes``. One thread calls it; its own thread fills pages."""

    def __init__(
        self,
        capacity_bytes: int,
        region_bytes: int,
        starter_bytes: int,
        prefault: bool,
        adopted_bytes: int = 0,
        numa_node: int | None = None,
        unsealed: bool = False,
    ) -> None:
        """``adopted_bytes`` are out already. They may exceed the capacity: then nothing is made until they don't.

        Pages come from ``numa_node``, or from others where it is full or can't be chosen, which is logged.
        """
        self.capacity_bytes = capacity_bytes
        self._adopted_bytes = adopted_bytes
        self._region_bytes = region_bytes
        self._starter_bytes = starter_bytes
        self._numa_node = numa_node
        self._unsealed = unsealed
        self._n_starters = STARTERS if capacity_bytes >= 16 * starter_bytes and starter_bytes < region_bytes else 0
        self._changed = threading.Condition()
        # All below belongs to the lock.
        self._out_bytes = adopted_bytes
        self._raw: list[Region] = []
        self._filling: Region | None = None
        self._obtaining = False
        self._failure = ""
        self._stopped = not prefault
        self._thread: threading.Thread | None = None
        if prefault:
            self._thread = threading.Thread(target=self._fill_ahead, name="kvstore-prefault", daemon=True)
            self._thread.start()

    @property
    def bound_bytes(self) -> int:
        """What is out and raw never exceeds this."""
        return max(self.capacity_bytes, self._adopted_bytes)

    @property
    def available_bytes(self) -> int:
        """What ``obtain`` can still give: the bytes of raw regions and those of none."""
        with self._changed:
            return max(self.capacity_bytes - self._out_bytes, 0)

    def facts(self) -> SourceFacts:
        """The bytes now."""
        with self._changed:
            filled_bytes = sum(region.populated_bytes for region in self._raw)
            return SourceFacts(self._out_bytes, self._raw_bytes(), filled_bytes, self._failure)

    def obtain(self, wanted_bytes: int, unit_bytes: int, exact: bool = False, keep_bytes: int = 0) -> Region | None:
        """A raw region for the caller, a whole number of ``unit_bytes`` and about ``wanted_bytes`` large.

        Prefers one whose pages are filled, down to half as large as wanted, unless ``exact``. Smaller too
        when the budget ends, of which ``keep_bytes`` are to stay; None when it has no room for one unit or the
        system has no memory. Waits for one chunk of pages at most.
        """
        with self._changed:
            self._obtaining = True  # the thread must not take the budget that raw regions give up here
            try:
                room_bytes = max(self.capacity_bytes - self._out_bytes - keep_bytes, 0)
                wanted_bytes = min(wanted_bytes, room_bytes) // unit_bytes * unit_bytes
                return self._obtain(wanted_bytes, unit_bytes, exact) if wanted_bytes else None
            except OSError as error:
                self._failure = f"no memory for a region of {wanted_bytes} bytes: {error}"
                return None
            finally:
                self._obtaining = False
                self._changed.notify_all()

    def give_back(self, size_bytes: int) -> None:
        """A region from ``obtain`` is gone for everybody: its bytes are free again."""
        with self._changed:
            self._out_bytes -= size_bytes
            self._changed.notify_all()

    def wait_prefaulted(self, timeout_s: float) -> bool:
        """Wait until nothing is left to fill. False when it takes longer, or filling has stopped short."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._is_filled(), timeout_s)
            return self._is_filled()

    def close(self) -> None:
        """Stop the thread (waits for one chunk) and drop the raw regions. Idempotent."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        with self._changed:
            for region in self._raw:
                region.close()
            self._raw.clear()

    def after_fork(self) -> None:
        """In a forked child: drop the raw regions, without the lock that a thread which is not here may hold."""
        for region in self._raw:
            region.close()

    # -- obtaining; the lock is held ------------------------------------------------------------

    def _raw_bytes(self) -> int:
        return sum(region.size_bytes for region in self._raw)

    def _spare_bytes(self) -> int:
        return self.capacity_bytes - self._out_bytes - self._raw_bytes()

    def _obtain(self, wanted_bytes: int, unit_bytes: int, exact: bool) -> Region:
        chosen = self._choose(wanted_bytes, unit_bytes, exact)
        if chosen is not None:
            size_bytes = min(wanted_bytes, chosen.size_bytes // unit_bytes * unit_bytes)
            return self._claim(chosen, size_bytes)
        largest = max(self._raw, key=lambda region: region.size_bytes, default=None)
        if largest is None or self._spare_bytes() >= wanted_bytes:
            return self._make_out(wanted_bytes)
        others = [region for region in self._raw if region is not largest]
        for region in sorted(others, key=lambda region: region.size_bytes):
            if self._spare_bytes() + largest.size_bytes >= wanted_bytes:
                break
            self._drop(region)
        return self._claim(largest, wanted_bytes)

    def _choose(self, wanted_bytes: int, unit_bytes: int, exact: bool) -> Region | None:
        """The raw region to use as it is or smaller; None when fresh or larger memory is better."""
        large = [region for region in self._raw if region.size_bytes >= wanted_bytes]
        if large:
            best = min(large, key=lambda region: region.size_bytes)
            # Cutting a large region down throws filled pages away: fresh memory instead, while there is some.
            wasteful = best.size_bytes > 2 * wanted_bytes and self._spare_bytes() >= wanted_bytes
            return None if wasteful else best
        least_bytes = wanted_bytes if exact else max(unit_bytes, wanted_bytes // 2)
        rest = [region for region in self._raw if region.size_bytes >= least_bytes]
        return max(rest, key=lambda region: region.size_bytes, default=None)

    def _claim(self, region: Region, size_bytes: int) -> Region:
        before_bytes = region.size_bytes
        self._raw.remove(region)
        self._out_bytes += max(before_bytes, size_bytes)
        self._wait_until_idle(region)
        try:
            region.resize(size_bytes)
        except OSError:
            region.close()
            self._out_bytes -= max(before_bytes, size_bytes)
            raise
        if size_bytes > before_bytes:
            self._place(region)
        self._out_bytes -= max(before_bytes, size_bytes) - size_bytes
        return region

    def _drop(self, region: Region) -> None:
        self._wait_until_idle(region)
        region.close()
        self._raw.remove(region)

    def _wait_until_idle(self, region: Region) -> None:
        self._changed.wait_for(lambda: self._filling is not region)

    def _make_out(self, size_bytes: int) -> Region:
        region = self._make(size_bytes)
        self._out_bytes += size_bytes
        return region

    def _make(self, size_bytes: int) -> Region:
        region = Region(size_bytes, unsealed=self._unsealed)
        self._place(region)
        return region

    def _place(self, region: Region) -> None:
        """Before pages are filled: those that exist stay where they are."""
        if self._numa_node is None:
            return
        try:
            numa.prefer_node(region.address, region.size_bytes, self._numa_node)
        except OSError as error:
            log.warning(
                "the DRAM tier can't be placed on NUMA node %d: %s; its memory goes where the kernel puts it",
                self._numa_node, error.strerror, extra=about("placing_failed", node=self._numa_node, errno=error.errno),
            )  # fmt: skip
            self._numa_node = None

    # -- the thread -----------------------------------------------------------------------------

    def _is_filled(self) -> bool:
        unfilled = any(region.populated_bytes < region.size_bytes for region in self._raw)
        return not unfilled and self._spare_bytes() < PAGE_BYTES

    def _fill_ahead(self) -> None:
        while True:
            with self._changed:
                self._filling = None
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._stopped or not (self._obtaining or self._is_filled()))
                if self._stopped:
                    return
                try:
                    self._filling = region = self._next_unfilled()
                except OSError as error:
                    self._stop_filling(error)
                    return
            try:
                region.populate(CHUNK_BYTES)
            except OSError as error:
                with self._changed:
                    self._stop_filling(error)
                return

    def _next_unfilled(self) -> Region:
        for region in self._raw:
            if region.populated_bytes < region.size_bytes:
                return region
        starters = sum(region.size_bytes == self._starter_bytes for region in self._raw)
        size_bytes = self._starter_bytes if starters < self._n_starters else self._region_bytes
        region = self._make(min(size_bytes, self._spare_bytes() // PAGE_BYTES * PAGE_BYTES))
        self._raw.append(region)
        return region

    def _stop_filling(self, error: OSError) -> None:
        self._failure = f"pages are no longer filled ahead: {error}"
        self._filling = None
        self._stopped = True
        self._changed.notify_all()
