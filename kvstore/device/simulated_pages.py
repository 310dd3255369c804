"""Pages of the simulated device: guarded memory, second mappings of shared memory, what is mapped where.

Plain system calls by addresses; nobody checks who uses the ranges.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

PAGE_BYTES = mmap.PAGESIZE

_NONE, _READ, _WRITE = 0, 1, 2
_SHARED, _PRIVATE, _FIXED, _ANONYMOUS, _NORESERVE = 0x01, 0x02, 0x10, 0x20, 0x4000
_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_word, _size, _int, _offset = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int64
_libc.mmap.restype = _libc.mremap.restype = _word
_libc.mmap.argtypes = (_word, _size, _int, _int, _int, _offset)
_libc.mremap.argtypes = (_word, _size, _size, _int, _word)
_libc.munmap.argtypes = (_word, _size)
_libc.mprotect.argtypes = (_word, _size, _int)
_libc.mincore.argtypes = (_word, _size, _word)


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of this process' memory with one protection. ``start`` and ``end`` are addresses."""

    start: int
    end: int
    readable: bool
    writable: bool
    shared: bool


def whole_pages(size_bytes: int) -> int:
    """``size_bytes`` rounded up to pages."""
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


def reserve(size_bytes: int) -> int:
    """Address of ``size_bytes`` (whole pages) that nothing else gets and nobody may touch. Raises OSError."""
    return _mapped(_libc.mmap(None, size_bytes, _NONE, _PRIVATE | _ANONYMOUS | _NORESERVE, -1, 0), size_bytes)


def map_file(fd: int, size_bytes: int, *, at: int | None = None, guarded: bool = False) -> int:
    """Map a file shared, over a reserved range if ``at`` says so; nobody may touch it if guarded. Raises OSError."""
    protection = _NONE if guarded else _READ | _WRITE
    flags = _SHARED | (_FIXED if at is not None else 0)
    return _mapped(_libc.mmap(at, size_bytes, protection, flags, fd, 0), size_bytes)


def give_up(address: int, size_bytes: int) -> None:
    """Let go of what is mapped, but keep the range reserved: whoever touches it later is stopped. Raises OSError."""
    flags = _PRIVATE | _ANONYMOUS | _NORESERVE | _FIXED
    _mapped(_libc.mmap(address, size_bytes, _NONE, flags, -1, 0), size_bytes)


def unmap(address: int, size_bytes: int) -> None:
    """Let go of a range altogether."""
    _libc.munmap(address, size_bytes)


def protect(address: int, size_bytes: int, *, read: bool, write: bool) -> None:
    """Say what this process may do with whole pages. Raises OSError."""
    if _libc.mprotect(address, size_bytes, (_READ if read else 0) | (_WRITE if write else 0)):
        raise _error(size_bytes)


def map_again(pieces: list[Piece]) -> int:
    """Map the memory of adjacent shared pieces at a second address, with the same protections. Raises OSError."""
    start, size_bytes = pieces[0].start, pieces[-1].end - pieces[0].start
    address = reserve(size_bytes)
    try:
        for piece in pieces:
            n_bytes = piece.end - piece.start
            # Of a shared mapping nothing is moved when the old size is 0: it is mapped once more.
            flags = _MREMAP_MAYMOVE | _MREMAP_FIXED
            _mapped(_libc.mremap(piece.start, 0, n_bytes, flags, address + piece.start - start), n_bytes)
    except OSError:
        unmap(address, size_bytes)
        raise
    return address


def is_mapped(address: int, size_bytes: int) -> bool:
    """Whether something is mapped on all of these pages. A look at two pages costs 1 us."""
    seen = (ctypes.c_ubyte * (size_bytes // PAGE_BYTES))()
    return not _libc.mincore(address, size_bytes, seen)


def pieces_of(address: int, size_bytes: int) -> list[Piece]:
    """What is mapped in a range, cut to it, in order; gaps are left out."""
    end = address + size_bytes
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, rights, _ = line.split(maxsplit=2)
        first, last = (int(part, 16) for part in span.split("-"))
        if first < end and address < last:
            piece = Piece(max(first, address), min(last, end), rights[0] == "r", rights[1] == "w", rights[3] == "s")
            found.append(piece)
    return found


def _mapped(result: int | None, size_bytes: int) -> int:
    if result is None or result == _FAILED:
        raise _error(size_bytes)
    return result


def _error(size_bytes: int) -> OSError:
    code = ctypes.get_errno()
    return OSError(code, f"{size_bytes} bytes of memory: {os.strerror(code)}")
