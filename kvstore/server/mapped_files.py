"""What a process has mapped, by the word of the kernel: for those that can't say so themselves any more."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import select
from pathlib import Path

from kvstore.native import Mapping
from kvstore.tiers import memfd

_INODE = re.compile(rb"^\S+ \S+ \S+ \S+ +(\d+)", re.MULTILINE)
_PID = re.compile(rb"^Pid:\s*(\d+)", re.MULTILINE)


def mapped_inodes(pidfd: int) -> frozenset[int] | None:
    """Inodes of all files that the process behind ``pidfd`` has mapped; None if that can't be known.

    A file that was mapped all the while that this took is among them: the kernel promises as much for every
    address. May block, for as long as the process holds its own table of mappings. Never raises.
    """
    if not _kernel_tells():
        return None
    with contextlib.suppress(OSError):
        found = _PID.search(Path(f"/proc/self/fdinfo/{pidfd}").read_bytes())
        # The number as it is here; a client's own may be of another namespace. 0: it can't be seen from here.
        if found is not None and (pid := int(found[1])):
            inodes = _inodes(pid)
            # Only if it still lives was the number its own. Nothing at all comes for one whose first thread has ended.
            if inodes and not _has_ended(pidfd):
                return inodes
    return None


def _inodes(pid: int) -> frozenset[int]:
    return frozenset(map(int, _INODE.findall(Path(f"/proc/{pid}/maps").read_bytes())))


def _has_ended(pidfd: int) -> bool:
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(0))


@functools.cache
def _kernel_tells() -> bool:
    """Whether this kernel calls a memory file in ``maps`` what ``fstat`` does: a look at a mapping of our own."""
    try:
        fd = memfd.create("kvstore-look", memfd.PAGE_BYTES)
    except OSError:
        return False
    try:
        mapping = Mapping(fd, memfd.PAGE_BYTES, writable=False)
        inode = os.fstat(fd).st_ino
        there = inode in _inodes(os.getpid())
        del mapping
        return there and inode not in _inodes(os.getpid())
    except OSError:
        return False
    finally:
        os.close(fd)
