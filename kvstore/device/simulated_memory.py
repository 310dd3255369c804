"""What the simulated device may touch: its own memory, opened memory of other processes, registered host memory."""

from __future__ import annotations

import ctypes
import os
import secrets
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvstore.device import simulated_pages as pages
from kvstore.device.simulated_ipc import Handle, memory_name
from kvstore.device.simulated_pages import PAGE_BYTES, Piece
from kvstore.errors import BadInputError, DeviceError, DeviceMemoryError

POISON = 0xFF
"""What new memory is full of: a NaN in every floating-point type, and an address that nobody has."""

_ALIGNMENT_BYTES = 256
_REMEMBERED = 256
"""Freed ranges that are kept out of use, so that an old address is told from a new one."""


@dataclass(slots=True, eq=False)
class Range:
    """Addresses that copies may name. ``inner`` is where this process reaches the bytes of ``start``."""

    start: int
    size_bytes: int
    inner: int
    writable: bool = True
    on_device: bool = True
    alias: int = 0
    """Where kernels find ``start``; the same address for device memory."""
    pieces: list[Piece] = field(default_factory=list)
    """Pages to open while kernels run, with what these may do there."""
    fd: int = -1
    nonce: bytes = b""
    opened: int = 0
    """How often another process' memory was opened here; 0 for own memory."""

    @property
    def end(self) -> int:
        return self.start + self.size_bytes


class Memory:
    """The ranges. Changes are made under the device's lock, when no work is under way that uses them.

    ``guarded``: the addresses that device memory and shared host memory have on the device can be touched by nobody
    except kernels; host code that does gets a SIGSEGV. Copies go by a second mapping.
    """

    def __init__(self, total_bytes: int, guarded: bool, can_register_read_only: bool) -> None:
        self._total_bytes = total_bytes
        self._guarded = guarded
        self._can_register_read_only = can_register_read_only
        self._used_bytes = 0
        self._ranges: dict[int, Range] = {}
        self._sorted: list[Range] = []
        self._starts: NDArray[np.uint64] = np.zeros(0, np.uint64)
        self._ends = self._inners = self._starts
        self._freed: deque[tuple[int, int]] = deque()

    # Device memory -----------------------------------------------------------------------------------

    def malloc(self, size_bytes: int) -> int:
        """Poisoned memory; its end (but for alignment) is that of a page, and nobody may touch the page behind."""
        rounded_bytes = -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        if self._used_bytes + rounded_bytes > self._total_bytes:
            raise DeviceMemoryError(
                f"the simulated device has {self._total_bytes - self._used_bytes} of {self._total_bytes} bytes left, "
                f"not {size_bytes}: free some, or open it with a larger total_bytes"
            )
        nonce = secrets.token_bytes(16)
        file_bytes = pages.whole_pages(rounded_bytes)
        fd = os.memfd_create(memory_name(nonce), os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, file_bytes)
            made = self._map(fd, file_bytes, file_bytes - rounded_bytes, size_bytes)
        except OSError as error:
            os.close(fd)
            raise DeviceMemoryError(f"this machine has no room for simulated device memory: {error}") from error
        made.fd, made.nonce = fd, nonce
        ctypes.memset(made.inner, POISON, size_bytes)
        self._used_bytes += rounded_bytes
        self._add(made)
        return made.start

    def free(self, address: int) -> None:
        """End device memory. Those who opened it elsewhere keep it."""
        freed = self._exactly(address, "free", "malloc", lambda r: r.on_device and not r.opened)
        os.close(freed.fd)
        self._used_bytes -= -(-freed.size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        self._unmap(freed)

    def handle_of(self, address: int) -> bytes:
        """A handle for another process."""
        made = self._exactly(address, "ipc_export", "malloc", lambda r: r.on_device and not r.opened)
        offset_bytes = made.start - made.pieces[0].start
        return Handle(os.getpid(), made.fd, made.size_bytes, offset_bytes, made.nonce).pack()

    def open(self, packed: bytes) -> int:
        """Memory by its handle, at an address of its own. Opening it again gives the same one."""
        handle = Handle.unpack(packed)
        known = next((r for r in self._sorted if r.opened and r.nonce == handle.nonce), None)
        if known is not None:
            known.opened += 1
            return known.start
        fd = handle.open_file()
        try:
            made = self._map(fd, os.fstat(fd).st_size, handle.offset_bytes, handle.size_bytes)
        except OSError as error:
            raise DeviceError(f"memory of process {handle.pid} can't be mapped: {error}") from error
        finally:
            os.close(fd)
        made.nonce, made.opened = handle.nonce, 1
        self._add(made)
        return made.start

    def close(self, address: int) -> None:
        """Undo one ``open``."""
        opened = self._exactly(address, "ipc_close", "ipc_open", lambda r: bool(r.opened))
        opened.opened -= 1
        if not opened.opened:
            self._unmap(opened)

    # Host memory -------------------------------------------------------------------------------------

    def register(self, address: int, size_bytes: int, read_only: bool) -> int:
        """Let copies use host memory. Of shared memory kernels get another address than the host's."""
        other = next((r for r in self._sorted if r.start < address + size_bytes and address < r.end), None)
        if other is not None:
            what = "is the device's own" if other.on_device else "overlaps what is registered"
            raise BadInputError(
                f"host memory at {address:#x} of {size_bytes} bytes {what} ({other.start:#x}, {other.size_bytes} bytes)"
            )
        if read_only and not self._can_register_read_only:
            raise DeviceError(
                "this device can't register host memory as read-only (can_register_read_only); copy through memory of "
                "your own"
            )
        found = pages.pieces_of(address, size_bytes)
        if sum(piece.end - piece.start for piece in found) != size_bytes or not all(p.readable for p in found):
            raise BadInputError(
                f"host memory at {address:#x} of {size_bytes} bytes is not mapped as a whole, or not readable"
            )
        if not read_only and not all(piece.writable for piece in found):
            raise BadInputError(f"host memory at {address:#x} is mapped read-only; register it with read_only=True")
        alias = address
        if all(piece.shared for piece in found):
            try:
                alias = pages.map_again(found)
                if self._guarded:
                    pages.protect(alias, size_bytes, read=False, write=False)
            except OSError as error:
                raise DeviceError(f"host memory at {address:#x} can't be mapped for kernels: {error}") from error
        by = alias - address
        pieces = [Piece(p.start + by, p.end + by, p.readable, p.writable and not read_only, p.shared) for p in found]
        self._add(Range(address, size_bytes, address, not read_only, False, alias, pieces if by else []))
        return alias

    def unregister(self, address: int) -> None:
        """Undo ``register``."""
        ended = self._exactly(address, "host_unregister", "host_register", lambda r: not r.on_device)
        self._remove(ended)
        if ended.alias != ended.start:
            pages.unmap(ended.alias, ended.size_bytes)

    # Uses --------------------------------------------------------------------------------------------

    def reach(
        self, addresses: NDArray[np.uint64], sizes: NDArray[np.uint64], write: bool
    ) -> tuple[NDArray[np.uint64], list[Range]]:
        """Where this process reaches the bytes, uint64 ``[n]``, and what ranges they lie in. Sizes are positive.

        Raises BadInputError for the first that lies outside of a range, or may not be written.
        """
        if not len(addresses):
            return addresses, []
        at = np.searchsorted(self._starts, addresses, "right").astype(np.int64) - 1
        inside = at >= 0
        if len(self._starts):
            room = self._ends[at] - addresses
            inside &= (addresses < self._ends[at]) & (sizes <= room)
        if not inside.all():
            bad = int(np.argmin(inside))
            raise BadInputError(self._why_not(int(addresses[bad]), int(sizes[bad])))
        used = [self._sorted[i] for i in np.unique(at).tolist()]
        for r in used:
            if write and not r.writable:
                raise BadInputError(f"host memory at {r.start:#x} was registered read-only; the device can't write it")
        return self._inners[at] + (addresses - self._starts[at]), used

    def check_argument(self, address: int) -> None:
        """Raise BadInputError for an address that a kernel can't use."""
        for r in self._sorted:
            if r.alias <= address < r.alias + r.size_bytes:
                return
        raise BadInputError(f"a kernel is told of address {address:#x}: {self._why_not(address, 1)}")

    @contextmanager
    def open_to_kernels(self) -> Iterator[None]:
        """All that kernels may touch can be touched meanwhile, also by mistaken host code."""
        closed = [piece for r in self._sorted for piece in r.pieces] if self._guarded else []
        for piece in closed:
            pages.protect(piece.start, piece.end - piece.start, read=piece.readable, write=piece.writable)
        try:
            yield
        finally:
            for piece in closed:
                pages.protect(piece.start, piece.end - piece.start, read=False, write=False)

    def give_all_back(self) -> None:
        """End every range."""
        for r in list(self._sorted):
            if not r.on_device:
                self.unregister(r.start)
            elif r.opened:
                r.opened = 1
                self.close(r.start)
            else:
                self.free(r.start)
        while self._freed:
            pages.unmap(*self._freed.popleft())

    # Inside ------------------------------------------------------------------------------------------

    def _map(self, fd: int, file_bytes: int, offset_bytes: int, size_bytes: int) -> Range:
        """Map a file with an untouchable page before and behind it."""
        room = pages.reserve(file_bytes + 2 * PAGE_BYTES)
        first = room + PAGE_BYTES
        try:
            pages.map_file(fd, file_bytes, at=first, guarded=self._guarded)
            inner = pages.map_file(fd, file_bytes) if self._guarded else first
        except OSError:
            pages.unmap(room, file_bytes + 2 * PAGE_BYTES)
            raise
        start = first + offset_bytes
        piece = Piece(first, first + file_bytes, readable=True, writable=True, shared=True)
        return Range(start, size_bytes, inner + offset_bytes, alias=start, pieces=[piece])

    def _unmap(self, r: Range) -> None:
        self._remove(r)
        first, file_bytes = r.pieces[0].start, r.pieces[0].end - r.pieces[0].start
        if r.inner != r.start:
            pages.unmap(r.inner - (r.start - first), file_bytes)
        pages.give_up(first, file_bytes)
        self._freed.append((first - PAGE_BYTES, file_bytes + 2 * PAGE_BYTES))
        if len(self._freed) > _REMEMBERED:
            pages.unmap(*self._freed.popleft())

    def _add(self, r: Range) -> None:
        self._ranges[r.start] = r
        self._sort()

    def _remove(self, r: Range) -> None:
        del self._ranges[r.start]
        self._sort()

    def _sort(self) -> None:
        self._sorted = sorted(self._ranges.values(), key=lambda r: r.start)
        self._starts = np.array([r.start for r in self._sorted], np.uint64)
        self._ends = np.array([r.end for r in self._sorted], np.uint64)
        self._inners = np.array([r.inner for r in self._sorted], np.uint64)

    def _exactly(self, address: int, call: str, maker: str, fits: Callable[[Range], bool]) -> Range:
        r = self._ranges.get(address)
        if r is None or not fits(r):
            raise BadInputError(f"{call} of {address:#x}, which no {maker} gave, or which was given back already")
        return r

    def _why_not(self, address: int, size_bytes: int) -> str:
        for r in self._sorted:
            if r.start <= address < r.end and address + size_bytes > r.end:
                return f"{size_bytes} bytes at {address:#x} reach {address + size_bytes - r.end} bytes too far"
            if r.alias != r.start and r.alias <= address < r.alias + r.size_bytes:
                return f"{address:#x} is what kernels call host memory at {r.start:#x}; copies take the host's address"
            if r.alias != r.start and r.start <= address < r.end:
                return f"{address:#x} is the host's address; for kernels it is {address - r.start + r.alias:#x}"
        if any(start <= address < start + size for start, size in self._freed):
            return f"{address:#x} lies in device memory that was freed, or closed"
        return f"{address:#x} is neither device memory nor registered host memory; host_register it first"
