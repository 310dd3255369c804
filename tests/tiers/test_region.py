"""One region: its seals as the kernel enforces them, its life, its memory."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.errors import IntegrityError
from kvstore.native import Mapping, huge_pages_note
from kvstore.native.mapping import _libc
from kvstore.tiers import memfd
from kvstore.tiers.region import DAEMON_WRITER, Region

SIZE = 64 << 10


@pytest.fixture
def region() -> Iterator[Region]:
    made = Region(SIZE)
    yield made
    made.close()


def reopened(region: Region) -> int:
    """The descriptor as somebody else may get it: opened again for reading and writing."""
    return os.open(f"/proc/self/fd/{region.fd}", os.O_RDWR)


def test_before_the_seal_the_writer_maps_and_after_it_nobody_can(region: Region) -> None:
    region.assign(3, 7, "a", 4096)
    assert not region.sealed
    theirs = mmap.mmap(region.fd, SIZE)
    region.seal()
    region.seal()
    region.check()
    fd = reopened(region)
    try:
        for descriptor in (fd, region.fd):
            with pytest.raises(PermissionError):
                mmap.mmap(descriptor, SIZE)
            with pytest.raises(PermissionError):
                Mapping(descriptor, SIZE, writable=True)
            with pytest.raises(PermissionError):
                os.pwrite(descriptor, b"x", 0)
            with pytest.raises(PermissionError):
                os.ftruncate(descriptor, SIZE // 2)
            with pytest.raises(PermissionError):
                os.ftruncate(descriptor, SIZE * 2)
            with pytest.raises(PermissionError):
                fcntl.fcntl(descriptor, 1033, 0x1)
        reading = mmap.mmap(fd, SIZE, prot=mmap.PROT_READ)
    finally:
        os.close(fd)
    # Mappings from before the seal still work: the writer's and the daemon's.
    theirs[10:13] = b"abc"
    region.array[20] = 9
    assert reading[10:13] == b"abc"
    assert reading[20] == 9
    theirs.close()
    reading.close()


def test_a_reader_cannot_make_its_mapping_writable(region: Region) -> None:
    region.assign(1, DAEMON_WRITER, "a", 4096)
    reader = Mapping(region.fd, SIZE, writable=False)
    _libc.mprotect.argtypes = _libc.madvise.argtypes
    assert _libc.mprotect(reader.address, SIZE, 3) == -1


def test_no_hole_can_be_punched_after_the_seal(region: Region) -> None:
    region.array[:] = 1
    region.assign(1, DAEMON_WRITER, "a", 4096)
    punch_hole_keep_size = 0x3
    assert _libc.fallocate(region.fd, punch_hole_keep_size, 0, 0, 4096) != 0
    assert region.array[0] == 1


def test_the_daemons_own_are_sealed_at_once_and_orphans_at_the_latest(region: Region) -> None:
    region.assign(1, DAEMON_WRITER, "a", 4096)
    assert memfd.is_read_only(region.fd)
    other = Region(SIZE)
    other.assign(2, 5, "a", 4096)
    assert not memfd.is_read_only(other.fd)
    other.orphan()
    assert other.writer is None
    assert memfd.is_read_only(other.fd)
    other.close()


def test_descriptors_are_not_inherited(region: Region) -> None:
    assert not os.get_inheritable(region.fd)


def test_a_raw_region_shrinks_and_grows_and_keeps_its_filled_pages(region: Region) -> None:
    region.populate(SIZE)
    region.resize(SIZE // 2)
    assert os.fstat(region.fd).st_size == SIZE // 2
    assert os.fstat(region.fd).st_blocks * 512 == SIZE // 2
    assert region.populated_bytes == SIZE // 2
    region.resize(SIZE * 2)
    assert os.fstat(region.fd).st_blocks * 512 == SIZE // 2
    assert len(region.array) == SIZE * 2
    region.array[-1] = 1
    region.assign(1, 7, "a", 8192)
    assert region.n_slots == SIZE * 2 // 8192
    with pytest.raises(IntegrityError, match="already"):
        region.resize(SIZE)
    with pytest.raises(IntegrityError, match="already"):
        region.assign(2, 8, "a", 4096)


def test_populate_goes_on_where_it_stopped(region: Region) -> None:
    region.populate(16 << 10)
    region.populate(16 << 10)
    assert region.populated_bytes == 32 << 10 == os.fstat(region.fd).st_blocks * 512
    region.populate(1 << 20)
    assert region.populated_bytes == SIZE == os.fstat(region.fd).st_blocks * 512


def test_closing_gives_the_descriptor_and_the_memory_back() -> None:
    made = Region(SIZE)
    made.populate(SIZE)
    fd, address = made.fd, made.address
    made.close()
    made.close()
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        os.fstat(fd)
    assert not any(line.startswith(f"{address:x}-") for line in Path("/proc/self/maps").read_text().splitlines())
    with pytest.raises(IntegrityError, match="closed"):
        _ = made.array


def test_check_sees_seals_and_sizes_that_are_not_as_said(region: Region) -> None:
    region.assign(1, 7, "a", 4096)
    region.check()
    region.sealed = True
    with pytest.raises(IntegrityError, match="seals"):
        region.check()
    region.sealed = False
    region.mappers.add(8)
    with pytest.raises(IntegrityError, match="not sealed but clients"):
        region.check()
    region.mappers.clear()
    for size in (SIZE * 2, 0):  # nobody, the writer included, can resize what the daemon maps and counts
        with pytest.raises(PermissionError):
            os.ftruncate(region.fd, size)
    region.size_bytes = SIZE * 2
    with pytest.raises(IntegrityError, match="bytes"):
        region.check()
    region.size_bytes = SIZE


def test_kernels_without_the_noexec_seal(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.memfd_create

    def old(name: str, flags: int) -> int:
        if flags & 0x8:
            raise OSError(errno.EINVAL, "unknown flag")
        return real(name, flags)

    monkeypatch.setattr(os, "memfd_create", old)
    fd = memfd.create("kvstore-test", 4096)
    memfd.seal_read_only(fd)
    assert memfd.is_read_only(fd)
    os.close(fd)


def test_no_descriptor_leaks_when_the_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, size: int) -> None:
        raise OSError(errno.EFBIG, "File too large")

    monkeypatch.setattr(os, "ftruncate", refuse)
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(OSError, match="too large"):
        memfd.create("kvstore-test", 1 << 20)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_what_it_fills_are_huge_pages_where_they_can_be_had() -> None:
    if huge_pages_note():
        pytest.skip("this kernel makes no huge pages of shared memory")
    region = Region(4 << 20)
    try:
        region.populate(2 << 20)
        region.populate(2 << 20)
        reader = Mapping(region.fd, 4 << 20, writable=False)
        reader.populate()
        mapped = Path("/proc/self/smaps").read_text().split(f"{reader.address:x}-", 1)[1]
        assert int(mapped.split("ShmemPmdMapped:", 1)[1].split()[0]) << 10 == 4 << 20
    finally:
        region.close()
