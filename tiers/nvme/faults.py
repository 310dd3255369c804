"""A disk that misbehaves on order: errors, short transfers, delays, flipped bits, torn and withheld writes.

``FaultyFiles`` wraps other files. Each fault is asked for by a method, meets calls of one operation (a method of
``Files``) by count and by predicate, and counts what it did. A batch is met extent by extent, and an extent meets
at most one fault: the oldest that fits.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypedDict, Unpack

import numpy as np

from kvstore.tiers.nvme.files import SECTOR_BYTES, Extent, Files, Int64s, pieces_of
from kvstore.tiers.nvme.memory import Bytes, aligned, extent_of, gather, scatter, torn

Where = Callable[[str, Extent | None], bool]
"""Name of the file and the extent, if the operation has them (the name is ``""`` without a file)."""


class When(TypedDict, total=False):
    """Which fitting calls or extents meet a fault: the first one, if nothing is said."""

    after: int
    """So many pass before."""
    times: int | None
    """So many meet it; None: all until ``stop``."""
    where: Where | None


@dataclass(eq=False)
class Fault:
    """One order. ``hits`` counts the calls or extents that met it."""

    kind: str
    operation: str
    code: int = 0
    wait: Callable[[], object] | None = None
    after: int = 0
    times: int | None = 1
    where: Where | None = None
    hits: int = 0
    reached: threading.Event = field(default_factory=threading.Event)
    """Set as soon as the first call has met the fault; a stuck call then waits."""
    released: threading.Event = field(default_factory=threading.Event)

    def stop(self) -> None:
        """No further call meets it."""
        self.times = self.hits

    def release(self) -> None:
        """Let stuck calls go on; no further call is stuck."""
        self.stop()
        self.released.set()


class FaultyFiles(Files):
    """``inner`` with faults. ``counts["read.flip"]`` says how often which operation met what.

    What is random comes from ``seed``.
    """

    def __init__(self, inner: Files, seed: int = 0) -> None:
        self.inner = inner
        self.direct = inner.direct
        self.counts: Counter[str] = Counter()
        self._rng = np.random.default_rng(seed)
        self._faults: list[Fault] = []
        self._names: dict[int, str] = {}
        self._held: dict[str, list[tuple[int, Bytes]]] = {}
        self._lock = threading.RLock()

    # Orders

    def fail(self, operation: str, code: int, **when: Unpack[When]) -> Fault:
        """Nothing is done, and the result is ``-code`` or OSError with it (EIO, ENOSPC, ...)."""
        return self._order(Fault("fail", operation, code=code, **when))

    def shorten(self, operation: str, **when: Unpack[When]) -> Fault:
        """``read`` or ``write`` moves only some of the leading sectors, perhaps none, and says so."""
        return self._order(Fault("short", operation, **when))

    def delay(self, operation: str, wait: Callable[[], object], **when: Unpack[When]) -> Fault:
        """``wait`` is called first, on the thread of the call."""
        return self._order(Fault("slow", operation, wait=wait, **when))

    def stick(self, operation: str, **when: Unpack[When]) -> Fault:
        """The call does nothing until ``release`` of the fault, and then does what it was told."""
        return self._order(Fault("stuck", operation, **when))

    def flip(self, operation: str, **when: Unpack[When]) -> Fault:
        """One bit is wrong: in memory after a ``read``, or on the disk after a ``write``; nothing says so."""
        return self._order(Fault("flip", operation, **when))

    def tear(self, **when: Unpack[When]) -> Fault:
        """A ``write`` puts only some of its 512-byte pieces on the disk (never all), and claims to be done."""
        return self._order(Fault("torn", "write", **when))

    def hold(self, **when: Unpack[When]) -> Fault:
        """A ``write`` stays in the disk's memory until ``sync``; then what is held arrives in any order.

        Reads see it meanwhile. Of overlapping writes the later one still wins. See ``power_cut``.
        """
        return self._order(Fault("held", "write", **when))

    def power_cut(self) -> int:
        """Of the writes held now a random part arrives, and the rest is lost; returns how many were lost."""
        with self._lock:
            lost = 0
            for name in sorted(self._held):
                held = self._arrival_order(self._held.pop(name))
                n_arrive = int(self._rng.integers(0, len(held)))
                handle = self.inner.open(name)
                try:
                    self._put(handle, held[:n_arrive])
                finally:
                    self.inner.close(handle)
                lost += len(held) - n_arrive
            self.counts["write.lost"] += lost
            return lost

    def release_all(self) -> None:
        """End all faults; stuck calls go on. Held writes stay held until ``sync``."""
        with self._lock:
            for fault in self._faults:
                fault.release()
            self._faults.clear()

    # Files

    def create(self, name: str, size_bytes: int) -> int:
        self._meet("create", name)
        handle = self.inner.create(name, size_bytes)
        with self._lock:
            self._names[handle] = name
        return handle

    def open(self, name: str) -> int:
        self._meet("open", name)
        handle = self.inner.open(name)
        with self._lock:
            self._names[handle] = name
        return handle

    def size_bytes(self, handle: int) -> int:
        self._meet("size_bytes", self._name(handle))
        return self.inner.size_bytes(handle)

    def close(self, handle: int) -> None:
        self._meet("close", self._name(handle))
        with self._lock:
            self._names.pop(handle, None)
        self.inner.close(handle)

    def names(self) -> list[str]:
        self._meet("names", "")
        return self.inner.names()

    def remove(self, name: str) -> None:
        self._meet("remove", name)
        self.inner.remove(name)
        with self._lock:
            self._held.pop(name, None)

    def rename(self, old: str, new: str) -> None:
        self._meet("rename", old)
        self.inner.rename(old, new)
        with self._lock:
            self._held.pop(new, None)
            if old in self._held:
                self._held[new] = self._held.pop(old)
            for handle, name in self._names.items():
                if name == old:
                    self._names[handle] = new

    def read(self, handle: int, extents: Sequence[Extent]) -> Int64s:
        faults = self._meet_all("read", self._name(handle), extents)
        results = np.zeros(len(extents), dtype=np.int64)
        go: list[tuple[int, Extent]] = []
        for i, (extent, fault) in enumerate(zip(extents, faults, strict=True)):
            if fault is not None and fault.kind == "fail":
                results[i] = -fault.code
            elif (asked := self._asked(extent, fault)).buffers:
                go.append((i, asked))
        results[[i for i, _ in go]] = self.inner.read(handle, [asked for _, asked in go])
        with self._lock:
            for i, asked in go:
                self._show_held(self._name(handle), asked, int(results[i]))
                fault = faults[i]
                if fault is not None and fault.kind == "flip" and results[i] > 0:
                    part = asked.part(0, int(results[i]))
                    scatter(part, 0, self._flipped(gather(part)))
        return results

    def write(self, handle: int, extents: Sequence[Extent]) -> Int64s:
        name = self._name(handle)
        faults = self._meet_all("write", name, extents)
        results = np.zeros(len(extents), dtype=np.int64)
        go: list[tuple[int, Extent]] = []
        copies: list[Bytes] = []
        for i, (extent, fault) in enumerate(zip(extents, faults, strict=True)):
            kind = fault.kind if fault is not None else ""
            if fault is not None and kind == "fail":
                results[i] = -fault.code
                continue
            asked = self._asked(extent, fault)
            if kind in ("flip", "torn"):
                data = gather(asked)
                with self._lock:
                    data = self._flipped(data) if kind == "flip" else self._torn(handle, asked, data)
                copies.append(aligned(data))
                asked = extent_of(asked.offset, copies[-1])
            if self._keep_back(name, asked, kind == "held"):
                results[i] = asked.length_bytes
            elif asked.buffers:
                go.append((i, asked))
        results[[i for i, _ in go]] = self.inner.write(handle, [asked for _, asked in go])
        return results

    def sync(self, handle: int) -> None:
        name = self._name(handle)
        self._meet("sync", name)
        with self._lock:
            self._put(handle, self._arrival_order(self._held.pop(name, [])))
        self.inner.sync(handle)

    def sync_directory(self) -> None:
        self._meet("sync_directory", "")
        self.inner.sync_directory()

    def read_small(self, name: str) -> bytes:
        self._meet("read_small", name)
        return self.inner.read_small(name)

    def write_small(self, name: str, data: bytes) -> None:
        self._meet("write_small", name)
        self.inner.write_small(name, data)

    def disk_free_bytes(self) -> int:
        self._meet("disk_free_bytes", "")
        return self.inner.disk_free_bytes()

    def on_disk_bytes(self) -> int:
        self._meet("on_disk_bytes", "")
        return self.inner.on_disk_bytes()

    def catalog_committed(self) -> None:
        self._meet("catalog_committed", "")
        self.inner.catalog_committed()

    def end_threads(self) -> None:
        self.inner.end_threads()

    # Inside

    def _order(self, fault: Fault) -> Fault:
        on_bytes = fault.kind in ("short", "flip", "torn", "held")
        if not hasattr(Files, fault.operation) or (on_bytes and fault.operation not in ("read", "write")):
            raise ValueError(f"there is no {fault.operation!r} that could meet {fault.kind!r}")
        with self._lock:
            self._faults.append(fault)
        return fault

    def _name(self, handle: int) -> str:
        with self._lock:
            return self._names.get(handle, "")

    def _meet(self, operation: str, name: str) -> None:
        """For operations without extents: wait or raise as ordered."""
        fault = self._fitting(operation, name, None)
        if fault is not None:
            _pause(fault)
            if fault.kind == "fail":
                raise OSError(fault.code, f"ordered fault in {operation}", name)

    def _meet_all(self, operation: str, name: str, extents: Sequence[Extent]) -> list[Fault | None]:
        pieces_of(extents)  # refuses what the real files would refuse, before anything happens
        faults = [self._fitting(operation, name, extent) for extent in extents]
        for fault in dict.fromkeys(faults):
            if fault is not None:
                _pause(fault)
        return faults

    def _fitting(self, operation: str, name: str, extent: Extent | None) -> Fault | None:
        with self._lock:
            for fault in self._faults:
                if fault.operation != operation or (fault.times is not None and fault.hits >= fault.times):
                    continue
                if fault.where is not None and not fault.where(name, extent):
                    continue
                if fault.after > 0:
                    fault.after -= 1
                    continue
                fault.hits += 1
                self.counts[f"{operation}.{fault.kind}"] += 1
                return fault
        return None

    def _asked(self, extent: Extent, fault: Fault | None) -> Extent:
        if fault is None or fault.kind != "short":
            return extent
        with self._lock:
            n_sectors = int(self._rng.integers(0, extent.length_bytes // SECTOR_BYTES))
        return extent.part(0, n_sectors * SECTOR_BYTES)

    def _flipped(self, data: Bytes) -> Bytes:
        data[self._rng.integers(0, len(data))] ^= np.uint8(1 << self._rng.integers(0, 8))
        return data

    def _torn(self, handle: int, extent: Extent, data: Bytes) -> Bytes:
        """What lies on the disk, with some of the new pieces."""
        old = aligned(np.zeros_like(data))
        self.inner.read(handle, [extent_of(extent.offset, old)])
        return torn(self._rng, old, data)

    def _keep_back(self, name: str, extent: Extent, ordered: bool) -> bool:
        """Hold a write if that is ordered, or if it overlaps one that is held and so has to come after it."""
        with self._lock:
            held = self._held.get(name, [])
            if not ordered and not any(
                _overlap(extent.offset, extent.length_bytes, at, len(data)) for at, data in held
            ):
                return False
            self._held.setdefault(name, []).append((extent.offset, gather(extent)))
            return True

    def _show_held(self, name: str, extent: Extent, n_bytes: int) -> None:
        end = extent.offset + n_bytes
        for at, data in self._held.get(name, []):
            low, high = max(at, extent.offset), min(at + len(data), end)
            if low < high:
                scatter(extent, low - extent.offset, data[low - at : high - at])

    def _arrival_order(self, held: list[tuple[int, Bytes]]) -> list[tuple[int, Bytes]]:
        """Any order in which overlapping writes keep theirs."""
        waiting, order = list(held), []
        while waiting:
            free = [
                i
                for i, (at, data) in enumerate(waiting)
                if not any(_overlap(at, len(data), other, len(them)) for other, them in waiting[:i])
            ]
            order.append(waiting.pop(free[int(self._rng.integers(0, len(free)))]))
        return order

    def _put(self, handle: int, held: Sequence[tuple[int, Bytes]]) -> None:
        for at, data in held:
            copy = aligned(data)
            result = int(self.inner.write(handle, [extent_of(at, copy)])[0])
            if result != len(data):
                raise OSError(-min(result, 0), f"a held write of {len(data)} bytes came back with {result}")


def _pause(fault: Fault) -> None:
    fault.reached.set()
    if fault.kind == "slow" and fault.wait is not None:
        fault.wait()
    elif fault.kind == "stuck":
        fault.released.wait()


def _overlap(at: int, length: int, other: int, other_length: int) -> bool:
    return at < other + other_length and other < at + length
