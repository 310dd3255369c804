"""Shared mappings of a descriptor, and filling their pages ahead of use, without Python's lock.

``mmap.mmap`` would keep a second descriptor for every mapping and hold the lock while pages are filled;
a tier has thousands of mappings, and fills pages while others work.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

PAGE_BYTES = 4096
HUGE_PAGE_BYTES = 2 << 20

_PROT_NONE, _PROT_READ, _PROT_WRITE = 0, 1, 2
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS, _MAP_NORESERVE = 0x01, 0x02, 0x10, 0x20, 0x4000
_MADV_DONTFORK, _MADV_HUGEPAGE, _MADV_POPULATE_READ, _MADV_POPULATE_WRITE, _MADV_COLLAPSE = 10, 14, 22, 23, 25
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

_SHMEM_HUGE = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


def huge_pages_note() -> str:
    """Empty when memfd mappings get huge pages, by themselves or by ``Mapping.gather``; otherwise why they don't."""
    if _gathers():
        return ""
    try:
        text = _SHMEM_HUGE.read_text()
    except OSError as error:
        return f"the kernel tells nothing about huge pages for shared memory ({error.strerror})"
    setting = text.partition("[")[2].partition("]")[0]
    if setting in ("always", "within_size", "advise", "force"):
        return ""
    return f"{_SHMEM_HUGE} is '{setting}'; 'advise' would give the tier huge pages"


def _gathers() -> bool:
    """Whether a memory file of one huge page becomes one when told to."""
    try:
        fd = os.memfd_create("kvstore-trial", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, HUGE_PAGE_BYTES)
            trial = Mapping(fd, HUGE_PAGE_BYTES, writable=True, inherit=False)
            trial.populate()
            return trial.gather()
        finally:
            os.close(fd)
    except OSError:
        return False


def populate(address: int, length_bytes: int, write: bool) -> None:
    """Fill the page tables of a mapped range, so that later accesses don't fault. Contents stay.

    ``address`` must lie on a page. Blocks without Python's lock, about 1 ms a MiB for pages that don't
    exist yet. Kernels before 5.14 lack the call: there every page is touched instead. Raises OSError
    (ENOMEM, EFAULT, ...) when the pages can't be had.
    """
    if length_bytes <= 0:
        return
    advice = _MADV_POPULATE_WRITE if write else _MADV_POPULATE_READ
    while _libc.madvise(address, length_bytes, advice) != 0:
        code = ctypes.get_errno()
        if code == errno.EINVAL:
            _touch(address, length_bytes, write)
            return
        if code not in (errno.EINTR, errno.EAGAIN):
            raise OSError(code, f"can't fill {length_bytes} bytes of pages: {os.strerror(code)}")


def _touch(address: int, length_bytes: int, write: bool) -> None:
    pages = bytes_at(address, length_bytes)[::PAGE_BYTES]
    if write:
        # An atomic add of nothing would be ideal; the owner must not write these bytes meanwhile.
        np.bitwise_or(pages, 0, out=pages)
    else:
        int(pages.max())


def bytes_at(address: int, length_bytes: int) -> NDArray[np.uint8]:
    """The memory at an address as uint8 ``[length_bytes]``; the caller answers for it being mapped."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * length_bytes).from_address(address))


class Mapping:
    """``length_bytes`` of a descriptor mapped shared from ``offset_bytes``; read-only unless ``writable``.

    Mappings of at least a huge page start on the boundary of one and ask for huge pages, which is a
    wish: see ``huge_pages_note``. With ``inherit=False`` a forked child does not have the mapping.

    The memory is unmapped when neither this object nor an array from ``array()`` is left, and then
    ``after_unmap`` is called, if set, on whatever thread let go of it last. Raises OSError when the kernel
    refuses (EPERM or EACCES for a writable mapping of a sealed region).
    """

    __slots__ = ("__weakref__", "_pid", "address", "after_unmap", "length_bytes", "writable")

    def __init__(
        self, fd: int, length_bytes: int, *, writable: bool, offset_bytes: int = 0, inherit: bool = True
    ) -> None:
        self.after_unmap: Callable[[], None] | None = None
        self.length_bytes = 0
        self._pid = os.getpid()
        if length_bytes <= 0 or length_bytes % PAGE_BYTES:
            raise ValueError(f"length_bytes is {length_bytes}; it must be a positive multiple of {PAGE_BYTES}")
        self.address = _map_aligned(fd, length_bytes, offset_bytes, writable)
        self.length_bytes = length_bytes
        self.writable = writable
        # A huge page past the last whole one would hold more memory than the region has bytes.
        whole_bytes = length_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        if whole_bytes:
            _libc.madvise(self.address, whole_bytes, _MADV_HUGEPAGE)
        if not inherit:
            _libc.madvise(self.address, length_bytes, _MADV_DONTFORK)

    def __del__(self, munmap: Callable[[int, int], int] = _libc.munmap) -> None:
        # Not a weakref.finalize: those of other owners would run before it, while the memory is mapped.
        # A forked child may not have the range: something else may lie there by now.
        if self.length_bytes and os.getpid() == self._pid:
            munmap(self.address, self.length_bytes)
            if self.after_unmap is not None:
                self.after_unmap()

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {
            "version": 3,
            "typestr": "|u1",
            "shape": (self.length_bytes,),
            "data": (self.address, not self.writable),
        }

    def array(self) -> NDArray[np.uint8]:
        """All bytes as uint8 ``[length_bytes]``, without a copy; the array keeps the mapping alive."""
        return np.asarray(self)

    def populate(self, start_bytes: int = 0, length_bytes: int | None = None) -> None:
        """Fill the pages of a part (whole pages; all by default); see ``populate``."""
        rest_bytes = self.length_bytes - start_bytes
        n_bytes = rest_bytes if length_bytes is None else min(length_bytes, rest_bytes)
        populate(self.address + start_bytes, n_bytes, self.writable)

    def gather(self, start_bytes: int = 0, length_bytes: int | None = None) -> bool:
        """Make huge pages of those whose pages are all filled in a part (all by default); contents stay.

        Copies walk through fewer page tables then, and readers have nothing to fill: ``populate`` of 64 MiB takes
        0.1 ms instead of 14. The kernel does it (Linux 6.1) unless huge pages of shared memory are denied, also
        where its setting is ``never``, and whoever reads or writes meanwhile. False if it did not do all of them.
        Blocks without Python's lock, for about 1 ms a MiB unless they are huge already.
        """
        end_bytes = self.length_bytes if length_bytes is None else min(start_bytes + length_bytes, self.length_bytes)
        first_bytes = -(-start_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        whole_bytes = (end_bytes - first_bytes) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        if whole_bytes <= 0:
            return True
        failed: int = _libc.madvise(self.address + first_bytes, whole_bytes, _MADV_COLLAPSE)
        return not failed

    def shrink(self, length_bytes: int) -> None:
        """Unmap the tail. No array of this mapping may be in use."""
        if not 0 < length_bytes <= self.length_bytes or length_bytes % PAGE_BYTES:
            raise ValueError(f"length_bytes is {length_bytes}; it must be whole pages up to {self.length_bytes}")
        tail_bytes = self.length_bytes - length_bytes
        if tail_bytes:
            _libc.munmap(self.address + length_bytes, tail_bytes)
        self.length_bytes = length_bytes


def _unmap(pid: int, address: int, length_bytes: int) -> None:
    # In a forked child the range may not have been inherited: something else may lie there by now.
    if os.getpid() == pid:
        _libc.munmap(address, length_bytes)


def _mmap(address: int | None, length_bytes: int, protection: int, flags: int, fd: int, offset: int) -> int:
    result = _libc.mmap(address, length_bytes, protection, flags, fd, offset)
    if result == _MAP_FAILED or result is None:
        code = ctypes.get_errno()
        raise OSError(code, f"can't map {length_bytes} bytes: {os.strerror(code)}")
    return int(result)


def _map_aligned(fd: int, length_bytes: int, offset_bytes: int, writable: bool) -> int:
    """Map on a huge page's boundary: room for it is set aside first, then the mapping replaces that."""
    protection = _PROT_READ | (_PROT_WRITE if writable else 0)
    if length_bytes < HUGE_PAGE_BYTES:
        return _mmap(None, length_bytes, protection, _MAP_SHARED, fd, offset_bytes)
    room_bytes = length_bytes + HUGE_PAGE_BYTES
    room = _mmap(None, room_bytes, _PROT_NONE, _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE, -1, 0)
    start = -(-room // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    try:
        _mmap(start, length_bytes, protection, _MAP_SHARED | _MAP_FIXED, fd, offset_bytes)
    except OSError:
        _libc.munmap(room, room_bytes)
        raise
    if start > room:
        _libc.munmap(room, start - room)
    end, room_end = start + length_bytes, room + room_bytes
    if room_end > end:
        _libc.munmap(end, room_end - end)
    return start
