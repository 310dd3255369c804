"""Memory of a device as regions, within a budget. Allocating and freeing wait for the device, so both may go on
elsewhere; what a device does not take back stays counted, as nobody knows what it still does there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvstore.errors import DeviceError, DeviceMemoryError
from kvstore.tiers.any_region import AnyRegion
from kvstore.tiers.source import SourceFacts

Later = Callable[[Callable[[], None], Callable[[], None]], None]
"""Calls the first, which never raises, on any thread, then the second on the tier's."""


class DeviceMemory(Protocol):
    """What is asked of the device: see ``kvstore.device.seam``."""

    def malloc(self, size_bytes: int) -> int: ...

    def free(self, address: int) -> None: ...

    def ipc_export(self, address: int) -> bytes: ...


def at_once(run: Callable[[], None], done: Callable[[], None]) -> None:
    """The caller waits. See ``Later``."""
    run()
    done()


class HbmRegion(AnyRegion):
    """``size_bytes`` of the device at ``address``. Nobody but the daemon writes it by right."""

    def __init__(self, memory: DeviceMemory, address: int, size_bytes: int, leave: Callable[[int, int], None]) -> None:
        """``leave(address, size_bytes)`` is told once when it is gone for everybody."""
        super().__init__(size_bytes)
        self._memory = memory
        self._start = address
        self._leave: Callable[[int, int], None] | None = leave
        self._handle = b""
        self.sealed = True

    @property
    def address(self) -> int:
        return self._start

    @property
    def handle(self) -> bytes:
        """By which another process opens it. Raises DeviceError."""
        if not self._handle:
            self._handle = self._memory.ipc_export(self._start)
        return self._handle

    def gone(self) -> None:
        leave, self._leave = self._leave, None
        if leave is not None:
            leave(self._start, self.size_bytes)


class _Malloc:
    """One allocation; ``address`` or ``error`` afterwards."""

    def __init__(self, memory: DeviceMemory, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.address = 0
        self.error: DeviceError | None = None
        self._memory = memory

    def run(self) -> None:
        try:
            self.address = self._memory.malloc(self.size_bytes)
        except DeviceError as error:
            self.error = error


class _Free:
    """One piece of memory on its way back."""

    def __init__(self, memory: DeviceMemory, address: int, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.error: DeviceError | None = None
        self._memory = memory
        self._address: int | None = address

    def run(self) -> None:
        """Idempotent."""
        address, self._address = self._address, None
        try:
            if address is not None:
                self._memory.free(address)
        except DeviceError as error:
            self.error = error


class HbmSource:
    """Regions within ``capacity_bytes`` of a device, each of whole ``grain_bytes``.

    ``later`` makes the calls that wait for the device. ``failed(reason)`` is told of each that failed, but for want of
    room.
    """

    def __init__(self, memory: DeviceMemory, capacity_bytes: int, grain_bytes: int) -> None:
        self.bound_bytes = capacity_bytes
        self.later: Later = at_once
        self.failed: Callable[[str], None] = lambda _: None
        self.full = False
        """The device had no room for a region: none is asked for until this is cleared, or one was given back."""
        self.lost_bytes = 0
        """What the device failed to take back: gone for good."""
        self._memory = memory
        self._grain_bytes = grain_bytes
        self._out_bytes = 0
        self._coming: _Malloc | None = None
        self._came: _Malloc | None = None
        self._leaving: set[_Free] = set()
        self._failure = ""

    @property
    def leaving_bytes(self) -> int:
        """What is on its way back to the device, and counts until it is there."""
        return sum(each.size_bytes for each in self._leaving)

    @property
    def is_waiting(self) -> bool:
        """Whether memory is on its way here or back: then ``obtain`` may give more afterwards."""
        return self._coming is not None or bool(self._leaving)

    @property
    def available_bytes(self) -> int:
        """What ``obtain`` can still give, at once or later, if the device has it."""
        return 0 if self.full else self.bound_bytes - self._out_bytes - self.leaving_bytes - self.lost_bytes

    def facts(self) -> SourceFacts:
        """The bytes now; raw are those that are no region's (any more)."""
        here = sum(each.size_bytes for each in (self._coming, self._came) if each is not None)
        return SourceFacts(self._out_bytes, here + self.leaving_bytes + self.lost_bytes, 0, self._failure)

    def obtain(self, wanted_bytes: int, unit_bytes: int, exact: bool = False, keep_bytes: int = 0) -> HbmRegion | None:
        """A region of at least one ``unit_bytes``, about ``wanted_bytes`` large, and not less if ``exact``; or None.

        None also if its memory has yet to come (``is_waiting``): ask again then.
        """
        grain_bytes = self._grain_bytes
        most_bytes = (self.available_bytes - keep_bytes) // grain_bytes * grain_bytes
        size_bytes = min(-(-wanted_bytes // grain_bytes) * grain_bytes, most_bytes)
        if size_bytes < (wanted_bytes if exact else unit_bytes) or self._coming is not None:
            return None
        if self._came is None:
            self._coming = asked = _Malloc(self._memory, size_bytes)
            self.later(asked.run, self._take)
        came, self._came = self._came, None
        if came is None:
            return None
        if came.size_bytes != size_bytes:  # it was for somebody who wants it no more
            self._leave(came.address, came.size_bytes)
            return self.obtain(wanted_bytes, unit_bytes, exact, keep_bytes)
        self._out_bytes += size_bytes
        return HbmRegion(self._memory, came.address, size_bytes, self._leave)

    def give_back(self, size_bytes: int) -> None:
        """A region from ``obtain`` is gone for everybody: its bytes are free as soon as the device has them."""
        self._out_bytes -= size_bytes

    def close(self) -> None:
        """Give back what is no region's, and wait for the device from here on. No call may be under way."""
        self.later = at_once
        came, self._came = self._came, None
        if came is not None:
            self._leave(came.address, came.size_bytes)
        for each in list(self._leaving):
            each.run()
            self._left(each)

    def _take(self) -> None:
        asked, self._coming = self._coming, None
        if asked is None:
            return
        if asked.error is None:
            self._came, self._failure = asked, ""
            return
        self._failure = f"no memory for a region of {asked.size_bytes} bytes: {asked.error}"
        if isinstance(asked.error, DeviceMemoryError):
            self.full = True
        else:
            self.failed(self._failure)

    def _leave(self, address: int, size_bytes: int) -> None:
        leaving = _Free(self._memory, address, size_bytes)
        self._leaving.add(leaving)
        self.later(leaving.run, lambda: self._left(leaving))

    def _left(self, leaving: _Free) -> None:
        if leaving not in self._leaving:
            return
        self._leaving.discard(leaving)
        if leaving.error is None:
            self.full = False
            return
        self.lost_bytes += leaving.size_bytes
        self._failure = f"{leaving.size_bytes} bytes can't be given back: {leaving.error}"
        self.failed(self._failure)
