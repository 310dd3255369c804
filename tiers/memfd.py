"""Anonymous memory files and the kernel's seals on them."""

from __future__ import annotations

import fcntl
import os

PAGE_BYTES = 4096

_MFD_CLOEXEC, _MFD_ALLOW_SEALING, _MFD_NOEXEC_SEAL = 0x1, 0x2, 0x8
_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_F_SEAL_SEAL, _F_SEAL_SHRINK, _F_SEAL_GROW, _F_SEAL_FUTURE_WRITE = 0x1, 0x2, 0x4, 0x10

READ_ONLY_SEALS = _F_SEAL_FUTURE_WRITE | _F_SEAL_SHRINK | _F_SEAL_GROW | _F_SEAL_SEAL


def create(name: str, size_bytes: int) -> int:
    """A new memory file of zeros, no page of it filled yet; the caller closes it. Raises OSError."""
    flags = _MFD_CLOEXEC | _MFD_ALLOW_SEALING
    try:
        fd = os.memfd_create(name, flags | _MFD_NOEXEC_SEAL)
    except OSError:
        fd = os.memfd_create(name, flags)  # kernels before 6.3
    try:
        os.ftruncate(fd, size_bytes)
    except OSError:
        os.close(fd)
        raise
    return fd


def seal_size(fd: int) -> None:
    """Nobody can shrink or grow it any more: a client that has the descriptor for writing could otherwise take
    pages away under the daemon, or take memory beyond the budget. Raises OSError."""
    fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW)


def seal_read_only(fd: int) -> None:
    """From now on nobody can map it writable, write to it or resize it, through any descriptor.

    Writable mappings that exist stay. An O_RDONLY descriptor would not do: it can be opened again through
    /proc. Raises OSError (EPERM) when it is sealed already.
    """
    fcntl.fcntl(fd, _F_ADD_SEALS, READ_ONLY_SEALS)


def is_read_only(fd: int) -> bool:
    """Whether the kernel enforces what ``seal_read_only`` asks for."""
    return fcntl.fcntl(fd, _F_GET_SEALS) & READ_ONLY_SEALS == READ_ONLY_SEALS
