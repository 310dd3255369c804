"""The daemon's memory as a device sees it: mapped regions registered once, each on its own, in the background.

Registering takes some 0.3 ms a MiB. So transfers never wait for it: what they find not registered (yet, or because the
device can't) goes through pinned memory of our own. Who needs addresses for kernels waits for just those regions.
A region is unregistered before it is unmapped, as it is kept until then; and never while somebody uses it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kvstore.clock import Clock, SystemClock
from kvstore.device.checked import check_process
from kvstore.device.seam import Device
from kvstore.engine_adapter.counters import SharedCounters
from kvstore.errors import DeviceError, KVStoreError
from kvstore.logs import about
from kvstore.native import Mapping

_LOG = logging.getLogger(__name__)

Addresses = NDArray[np.uint64]

RETRY_S = 10.0
"""So long after a refusal a region is registered when it is next asked for: there may be memory for it again."""


@dataclass(slots=True, eq=False)
class _Region:
    """A mapping that is registered, or is to be."""

    mapping: Mapping
    device_address: int = 0
    """0 until it is registered."""
    refused: str = ""
    retry_s: float = 0.0
    """When to try once more, if ``refused``; of the clock."""
    leaving: bool = False
    n_users: int = 0


@dataclass(frozen=True, slots=True)
class _Table:
    """The registered regions by address, uint64 ``[n]`` each, ascending."""

    starts: Addresses
    ends: Addresses
    shifts: Addresses
    """What to add to a host address, modulo 2^64, for the device's."""
    regions: tuple[_Region, ...]


_NOTHING = np.empty(0, np.uint64)
_EMPTY = _Table(_NOTHING, _NOTHING, _NOTHING, ())


class Use:
    """Regions that stay registered until ``end``; also a context. ``mapped``, uint64 ``[n]``: where what was asked for
    lies for kernels, 0 where it is not registered; ``regions``, int64 ``[n]``, tells apart in which it lies."""

    def __init__(
        self, owner: PinnedRegions, mapped: Addresses, regions: NDArray[np.int64], used: list[_Region]
    ) -> None:
        self.mapped, self.regions = mapped, regions
        self._owner = owner
        self._used = used

    @property
    def whole(self) -> bool:
        """Whether all of it is registered."""
        return bool(self.mapped.all())

    def end(self) -> None:
        """The addresses are not used from here on by anything that is yet to be given to the device. Idempotent."""
        used, self._used = self._used, []
        self._owner.end_use(used)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()


class PinnedRegions:
    """See the module. A ``MappingListener``: give it to ``Client.watch_mappings``, of several clients if need be.

    Methods may be called from any thread. ``close`` before the device is closed. In a forked child nothing is
    registered, and nothing is to be done: it is all the parent's.
    """

    def __init__(self, device: Device, counters: SharedCounters, clock: Clock | None = None) -> None:
        self._pid = os.getpid()
        self._device = device
        self._counters = counters
        self._clock = clock or SystemClock()
        self._state = threading.Condition()
        self._regions: dict[int, _Region] = {}
        """By address."""
        self._table = _EMPTY
        self._to_register: deque[_Region] = deque()
        self._to_retry: list[_Region] = []
        self._to_unregister: deque[_Region] = deque()
        self._busy: _Region | None = None
        self._closed = False
        self._thread: threading.Thread | None = None

    @property
    def registered_bytes(self) -> int:
        """What is registered now."""
        table = self._table
        return int((table.ends - table.starts).sum())

    # As a listener -------------------------------------------------------------------------------

    def mapped(self, mapping: Mapping) -> None:
        """See ``MappingListener``."""
        if self._is_forked():
            return
        region = _Region(mapping)
        with self._state:
            if self._closed or mapping.address in self._regions:
                return
            self._regions[mapping.address] = region
            if not mapping.writable and not self._device.facts.can_register_read_only:
                region.refused = "this device can't register memory that is mapped read-only"
                self._counters.add("pin_refused_regions")
                return
            self._to_register.append(region)
            self._work()

    def leaving(self, mapping: Mapping) -> None:
        """See ``MappingListener``."""
        if self._is_forked():
            return
        with self._state:
            region = self._regions.get(mapping.address)
            if region is not None and region.mapping is mapping:
                self._leave(region)

    def let_go(self) -> None:
        """See ``MappingListener``. Waits for the device to be done with them."""
        if self._is_forked():
            return
        with self._state:
            for region in list(self._regions.values()):
                self._leave(region)
            self._state.wait_for(lambda: self._busy is None and not any(r.n_users == 0 for r in self._to_unregister))

    # For transfers -------------------------------------------------------------------------------

    def use(self, addresses: Addresses, sizes: NDArray[np.uint64]) -> Use:
        """Where bytes of host memory lie for kernels, as far as they are registered now. Does not block."""
        if self._is_forked():
            return Use(self, np.zeros(len(addresses), np.uint64), np.full(len(addresses), -1, np.int64), [])
        with self._state:
            self._retry()
            table = self._table
            which, mapped = self._look_up(table, addresses, sizes)
            regions = [table.regions[i] for i in np.unique(which[which >= 0])]
            for region in regions:
                region.n_users += 1
        return Use(self, mapped, which.astype(np.int64), regions)

    def use_all(self, addresses: Addresses, sizes: NDArray[np.uint64], deadline_s: float) -> Use:
        """As ``use``, after waiting (until ``deadline_s``, monotonic) for regions that are being registered.

        Raises DeviceError, with the reason, if not all can be had.
        """
        check_process(self._pid)
        with self._state:
            self._retry()
            waited_for = self._pending(addresses)
            for region in reversed(waited_for):  # first, and in their order
                if region in self._to_register:
                    self._to_register.remove(region)
                    self._to_register.appendleft(region)
            self._state.wait_for(
                lambda: self._closed or all(r.device_address or r.refused or r.leaving for r in waited_for),
                max(deadline_s - time.monotonic(), 0.0),
            )
            use = self.use(addresses, sizes)
            if use.whole:
                return use
            refused = next((r.refused for r in self._covering(addresses) if r.refused), "")
        use.end()
        raise DeviceError(
            f"{int((use.mapped == 0).sum())} of {len(addresses)} blocks can't be read by the device in place: "
            f"{refused or 'their memory is not registered'}; read them through staging instead"
        )

    def end_use(self, regions: list[_Region]) -> None:
        """For ``Use``."""
        if self._is_forked():
            return
        with self._state:
            for region in regions:
                region.n_users -= 1
            if any(region.leaving for region in regions):
                self._state.notify_all()

    def close(self) -> None:
        """Unregister everything, users or not, and end the thread. Idempotent. The device must still be there."""
        if self._is_forked():
            return
        with self._state:
            for region in list(self._regions.values()):
                self._leave(region)
                region.n_users = 0
            self._closed = True
            self._state.notify_all()
        if self._thread is not None:
            self._thread.join()

    # Inside --------------------------------------------------------------------------------------

    def _is_forked(self) -> bool:
        """Whether this is a child, where the lock may be held by a thread that is not there."""
        return os.getpid() != self._pid

    @staticmethod
    def _look_up(table: _Table, addresses: Addresses, sizes: NDArray[np.uint64]) -> tuple[NDArray[np.intp], Addresses]:
        """Index of the region of each address (-1: none), and the address for kernels (0: none)."""
        if not len(table.starts):
            return np.full(len(addresses), -1, np.intp), np.zeros(len(addresses), np.uint64)
        which = np.searchsorted(table.starts, addresses, "right") - 1
        at = np.maximum(which, 0)
        inside = (which >= 0) & (addresses + sizes <= table.ends[at])
        mapped = np.where(inside, addresses + table.shifts[at], np.uint64(0))
        return np.where(inside, which, -1), mapped

    def _covering(self, addresses: Addresses) -> list[_Region]:
        """The regions, registered or not, that any of these addresses lie in."""
        regions = [self._regions[start] for start in sorted(self._regions)]
        starts = np.array([r.mapping.address for r in regions], np.uint64)
        which = np.unique(np.searchsorted(starts, addresses, "right") - 1)
        return [regions[i] for i in which.tolist() if i >= 0]

    def _pending(self, addresses: Addresses) -> list[_Region]:
        return [r for r in self._covering(addresses) if not (r.device_address or r.refused or r.leaving)]

    def _leave(self, region: _Region) -> None:
        """Have it unregistered; or forgotten at once, if it is not registered."""
        if region.leaving:
            return
        region.leaving = True
        del self._regions[region.mapping.address]
        if region in self._to_register:
            self._to_register.remove(region)
        elif region in self._to_retry:
            self._to_retry.remove(region)
        elif region.device_address or region is self._busy:
            self._to_unregister.append(region)
            self._make_table()
            self._work()

    def _retry(self) -> None:
        """What was refused long enough ago is registered, before it is asked for."""
        due = [region for region in self._to_retry if region.retry_s <= self._clock.now_s()]
        for region in due:
            self._to_retry.remove(region)
            region.refused = ""
            self._to_register.append(region)
        if due:
            self._work()

    def _make_table(self) -> None:
        regions = sorted(
            (r for r in self._regions.values() if r.device_address), key=lambda region: region.mapping.address
        )
        starts = np.array([r.mapping.address for r in regions], np.uint64)
        sizes = np.array([r.mapping.length_bytes for r in regions], np.uint64)
        shifts = np.array([r.device_address for r in regions], np.uint64) - starts
        self._table = _Table(starts, starts + sizes, shifts, tuple(regions))

    def _work(self) -> None:
        """There is something for the thread to do."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvstore-pin", daemon=True)
            self._thread.start()
        self._state.notify_all()

    def _run(self) -> None:
        while True:
            with self._state:
                self._busy = None
                self._state.notify_all()
                self._state.wait_for(
                    lambda: self._next_to_unregister() is not None or self._to_register or self._closed
                )
                leaving = self._next_to_unregister()
                if leaving is not None:
                    self._to_unregister.remove(leaving)
                    region = leaving
                elif self._to_register:
                    region = self._to_register.popleft()
                else:
                    return
                self._busy = region
            if leaving is not None:
                self._unregister(region)
            else:
                self._register(region)
            del region, leaving  # the mapping goes with the last that has it, before it is said to be gone

    def _next_to_unregister(self) -> _Region | None:
        return next((region for region in self._to_unregister if not region.n_users), None)

    def _register(self, region: _Region) -> None:
        mapping, address = region.mapping, 0
        refused = ""
        try:
            address = self._device.host_register(mapping.address, mapping.length_bytes, read_only=not mapping.writable)
        except KVStoreError as error:
            refused = str(error)
            if not region.retry_s:  # what happens again is not said again
                self._counters.add("pin_refused_regions")
                _LOG.warning(
                    "a region can't be registered with the device: its blocks are copied once more",
                    extra=about("pin_refused", reason=refused),
                )
        with self._state:
            region.device_address, region.refused = address, refused
            if refused:
                region.retry_s = self._clock.now_s() + RETRY_S
                if not region.leaving:
                    self._to_retry.append(region)
            if address:
                self._counters.add("pinned_regions")
                if not region.leaving:
                    self._make_table()
            elif region in self._to_unregister:
                self._to_unregister.remove(region)

    def _unregister(self, region: _Region) -> None:
        try:
            self._device.host_unregister(region.mapping.address)
        except KVStoreError as error:
            # It may be used by the device as long as this process lives: so it stays mapped.
            self._counters.add("unpin_failed_regions")
            _FOR_EVER.append(region)
            _LOG.error(
                "a region can't be unregistered from the device; it stays mapped",
                extra=about("unpin_failed", reason=str(error)),
            )


_FOR_EVER: list[_Region] = []
