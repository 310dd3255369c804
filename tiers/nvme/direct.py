"""Files on a real disk, past the page cache.

A batch goes to the disk as vectored calls (``batch``) on a few threads, of which the caller's is one. That was chosen
by measurement: ext4 with O_DIRECT, a file of 4 GiB, batches of 32 MiB in a memfd's memory, two cores shared with
other work. Ratios are medians of interleaved pairs against fio (io_uring on the same file, same block size and
depth 8; writes in sequence with fdatasync every 32 MiB). Three runs: 5 pairs of 256 MiB each, 5 pairs of 1 GiB,
9 pairs of 768 MiB at a load of 7. Pairs of one run differ by up to a factor of 2.

    block size        64 KiB          256 KiB      1 MiB           4 MiB
    read at random    .88 .79 .63     1.12 - .87   1.28 1.12 .88   1.19 - .94
    write and sync    1.26 .85 2.0    .92 - 1.18   .97 .86 .92     1.07 - .91

* **Depth**, reads against depth 8 in the same run: 1 is .8-.9 (.5-.7 at a load of 13), 4 is .9-1 (.8-.9), 16 the
  same within noise. Sequential writes gain about a tenth from 1 to 8.
* **Joining neighbours** into one call: 1.9 times as fast as 64 KiB at random places (load of 13); the calls are what
  small blocks cost here.
* **io_uring** through ``liburing`` from PyPI, reads: 1.05 of these threads at 64 KiB, 1.03 at 1 MiB; with an eventfd
  1.07 and 1.01; writes the same within noise. It holds Python's lock while it waits (tried: no other thread ran
  during 40 batches) and takes no addresses. Not worth it.
* **os.preadv** on memoryviews is as fast as ctypes within noise, but wants an object for every piece of memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import stat
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from kvstore.logs import about
from kvstore.tiers.nvme.batch import Batch, VectoredCall, preadv, pwritev
from kvstore.tiers.nvme.files import SECTOR_BYTES, Extent, Files, Int64s, plain_name
from kvstore.tiers.nvme.helpers import Helpers

DEPTH = 8
"""Calls of all batches together that are on their way to the disk; each batch has at least one."""

SMALL_BYTES_MAX = 64 << 20
"""No small file is larger."""

log = logging.getLogger("kvstore.nvme")

_PROBE = ".direct.probe"
_NEW = ".new"

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class DirectFiles(Files):
    """Files in ``directory``, which must exist. Handles are file descriptors.

    ``direct`` says whether the page cache is bypassed. Where the file system can't do that, reads and writes are
    buffered, and pages are dropped from the cache after use.
    """

    def __init__(self, directory: Path, depth: int = DEPTH) -> None:
        """Raises OSError if the directory is missing or can't be written to (a full disk is no error)."""
        self.directory = directory
        self.direct = True
        self.direct = self._probe()
        if not self.direct:
            log.warning(
                "the file system of %s knows no direct I/O: reads and writes go through the page cache", directory,
                extra=about("nvme_buffered", directory=str(directory)),
            )  # fmt: skip
        self._helpers = Helpers(max(depth - 1, 1))
        self._depth = depth

    def create(self, name: str, size_bytes: int) -> int:
        path = self._path(name)
        handle = self._open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            _set_aside(handle, size_bytes)
        except OSError as error:
            os.close(handle)
            path.unlink()
            raise OSError(error.errno, os.strerror(error.errno or 0), str(path)) from error
        return handle

    def open(self, name: str) -> int:
        return self._open(self._path(name), os.O_RDWR)

    def size_bytes(self, handle: int) -> int:
        return os.fstat(handle).st_size

    def close(self, handle: int) -> None:
        os.close(handle)

    def names(self) -> list[str]:
        with os.scandir(self.directory) as entries:
            return sorted(
                entry.name
                for entry in entries
                if entry.is_file(follow_symlinks=False) and entry.name != _PROBE and not _is_temporary(entry.name)
            )

    def remove(self, name: str) -> None:
        self._path(name).unlink()

    def rename(self, old: str, new: str) -> None:
        self._path(old).rename(self._path(new))

    def read(self, handle: int, extents: Sequence[Extent]) -> Int64s:
        results = self._move(preadv, handle, extents)
        if not self.direct:
            for extent in extents:
                os.posix_fadvise(handle, extent.offset, extent.length_bytes, os.POSIX_FADV_DONTNEED)
        return results

    def write(self, handle: int, extents: Sequence[Extent]) -> Int64s:
        return self._move(pwritev, handle, extents)

    def sync(self, handle: int) -> None:
        os.fdatasync(handle)
        if not self.direct:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)

    def sync_directory(self) -> None:
        directory = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def read_small(self, name: str) -> bytes:
        handle = os.open(self._path(name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(handle, "rb") as file:
            facts = os.fstat(handle)
            if not stat.S_ISREG(facts.st_mode):
                raise OSError(errno.EINVAL, "it is no plain file", name)
            if facts.st_size > SMALL_BYTES_MAX:
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), name)
            return file.read()

    def write_small(self, name: str, data: bytes) -> None:
        path = self._path(name)
        new = self.directory / f".{name}{_NEW}"
        try:
            new.unlink(missing_ok=True)
            with new.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            new.replace(path)
        except OSError:
            new.unlink(missing_ok=True)
            raise
        self.sync_directory()

    def disk_free_bytes(self) -> int:
        room = os.statvfs(self.directory)
        return room.f_bavail * room.f_frsize

    def on_disk_bytes(self) -> int:
        total_bytes = _allocated_bytes(self.directory)
        for folder, folders, files in os.walk(self.directory):
            total_bytes += sum(_allocated_bytes(Path(folder) / name) for name in (*folders, *files))
        return total_bytes

    def catalog_committed(self) -> None:
        return

    def end_threads(self) -> None:
        self._helpers.rest()

    def _path(self, name: str) -> Path:
        return self.directory / plain_name(name)

    def _open(self, path: Path, flags: int) -> int:
        if self.direct:
            try:
                return os.open(path, flags | os.O_DIRECT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            except OSError as error:
                # Only a file system without O_DIRECT says so; it may have made the file before it did.
                if error.errno != errno.EINVAL:
                    raise
                self.direct = False
                flags &= ~os.O_EXCL
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)

    def _probe(self) -> bool:
        """Whether a sector can be written unbuffered here. A full disk leaves the question to the first open."""
        path = self.directory / _PROBE
        try:
            handle = self._open(path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                return True
            raise
        try:
            with mmap.mmap(-1, SECTOR_BYTES) as sector:
                os.pwrite(handle, sector, 0)
        except OSError as error:
            return self.direct and error.errno != errno.EINVAL
        finally:
            os.close(handle)
            path.unlink()
        return self.direct

    def _move(self, call: VectoredCall, handle: int, extents: Sequence[Extent]) -> Int64s:
        batch = Batch(extents)
        work = partial(batch.work, call, handle)
        helpers = [self._helpers.submit(work) for _ in range(min(self._depth, batch.n_calls) - 1)]
        try:
            work()
        finally:
            # Nothing is left to take: those that were queued behind another batch needn't begin.
            for helper in helpers:
                if not helper.cancel():
                    helper.result()
        return batch.results


def _set_aside(handle: int, size_bytes: int) -> None:
    """Give the file its size and its room; where the file system can't set room aside, only its size."""
    while size_bytes and _libc.fallocate(handle, 0, 0, size_bytes) != 0:
        code = ctypes.get_errno()
        if code == errno.EOPNOTSUPP:
            os.ftruncate(handle, size_bytes)
            return
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


def _is_temporary(name: str) -> bool:
    return name.startswith(".") and name.endswith(_NEW)


def _allocated_bytes(path: Path) -> int:
    with contextlib.suppress(FileNotFoundError):  # removed meanwhile
        facts = path.lstat()
        if stat.S_ISREG(facts.st_mode) or stat.S_ISDIR(facts.st_mode):
            return facts.st_blocks * 512
    return 0
