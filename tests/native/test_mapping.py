"""Shared mappings: whose life is whose, and pages filled ahead."""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import os
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.native import Mapping, huge_pages_note, mapping, populate

MIB = 1 << 20


@pytest.fixture
def fd() -> Iterator[int]:
    descriptor = os.memfd_create("kvstore-test")
    os.ftruncate(descriptor, 8 * MIB)
    yield descriptor
    os.close(descriptor)


def is_mapped(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= address < end:
            return "kvstore-test" in line
    return False


def flags_at(address: int) -> list[str]:
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            start, end = (int(part, 16) for part in first.split("-"))
            inside = start <= address < end
        elif inside and first == "VmFlags:":
            return line.split()[1:]
    return []


def test_two_mappings_share_bytes_and_a_reader_cannot_write(fd: int) -> None:
    writer, reader = Mapping(fd, MIB, writable=True), Mapping(fd, MIB, writable=False)
    writer.array()[:3] = (1, 2, 3)
    assert reader.array()[:4].tolist() == [1, 2, 3, 0]
    with pytest.raises(ValueError, match="read-only"):
        reader.array()[0] = 1


def test_offset(fd: int) -> None:
    Mapping(fd, MIB, writable=True).array()[8192] = 9
    assert Mapping(fd, 4096, writable=False, offset_bytes=8192).array()[0] == 9


def test_memory_goes_when_the_last_array_goes_and_only_then_others_are_told(fd: int) -> None:
    made = Mapping(fd, 4 * MIB, writable=True)
    address, told = made.address, list[tuple[str, bool]]()
    made.after_unmap = lambda: told.append(("after_unmap", is_mapped(address)))
    weakref.finalize(made, lambda: told.append(("finalize", is_mapped(address))))
    view = made.array()[100:200]
    del made
    gc.collect()
    assert is_mapped(address)
    view[:] = 5  # still usable
    assert told == []
    del view
    gc.collect()
    assert told == [("after_unmap", False), ("finalize", False)]


def test_a_refused_mapping_leaves_nothing_behind(fd: int) -> None:
    reading = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    before = len(Path("/proc/self/maps").read_text().splitlines())
    try:
        for size in (4096, 4 * MIB):
            with pytest.raises(OSError, match="can't map") as caught:
                Mapping(reading, size, writable=True)
            assert caught.value.errno == errno.EACCES
    finally:
        os.close(reading)
    assert len(Path("/proc/self/maps").read_text().splitlines()) <= before + 1  # the heap may have moved


@pytest.mark.parametrize("length", [0, -4096, 100])
def test_lengths_that_are_not_whole_pages(fd: int, length: int) -> None:
    with pytest.raises(ValueError, match=f"length_bytes is {length}"):
        Mapping(fd, length, writable=True)


def test_huge_pages_are_asked_for_where_a_whole_one_fits(fd: int) -> None:
    made = Mapping(fd, 5 * MIB, writable=True)
    assert made.address % (2 * MIB) == 0
    if "hg" not in flags_at(made.address):
        pytest.skip("this kernel knows no huge pages")
    assert "hg" in flags_at(made.address + 4 * MIB - 1)
    assert "hg" not in flags_at(made.address + 4 * MIB)


def huge_bytes_at(address: int) -> int:
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            inside = int(first.split("-")[0], 16) == address
        elif inside and first == "ShmemPmdMapped:":
            return int(line.split()[1]) << 10
    return 0


@pytest.fixture
def gathers() -> None:
    if not mapping._gathers():
        pytest.skip("this kernel makes no huge pages of shared memory")


@pytest.mark.usefixtures("gathers")
def test_filled_pages_become_huge_ones_and_keep_what_they_hold(fd: int) -> None:
    made = Mapping(fd, 5 * MIB, writable=True)
    made.array()[:] = 7
    assert made.gather(MIB, 3 * MIB)  # from 2 MiB on there is a whole one
    assert huge_bytes_at(made.address) in (0, 2 * MIB)
    assert made.gather()
    reader = Mapping(fd, 5 * MIB, writable=False)
    reader.populate()
    assert huge_bytes_at(reader.address) == 4 * MIB
    assert (reader.array() == 7).all()


def test_without_a_whole_huge_page_there_is_nothing_to_gather(fd: int) -> None:
    made = Mapping(fd, 5 * MIB, writable=True)
    assert made.gather(0, MIB)
    assert made.gather(MIB, 2 * MIB)
    assert huge_bytes_at(made.address) == 0


def test_pages_that_can_not_be_made_huge_are_told_of(fd: int) -> None:
    made = Mapping(fd, 2 * MIB, writable=True)
    os.ftruncate(fd, 0)  # no page is left to be one
    assert not made.gather()


def test_room_for_alignment_is_given_back(fd: int) -> None:
    def reserved_bytes() -> int:
        ranges = [
            line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines() if "---p" in line
        ]
        return sum(int(end, 16) - int(start, 16) for start, end in ranges)

    before = reserved_bytes()
    kept = [Mapping(fd, 4 * MIB + i * 4096, writable=False) for i in range(4)]
    assert reserved_bytes() == before
    assert all(made.address % (2 * MIB) == 0 for made in kept)


def test_inheritance_by_forked_children(fd: int) -> None:
    assert "dc" in flags_at(Mapping(fd, 4096, writable=False, inherit=False).address)
    kept = Mapping(fd, 4096, writable=False)
    assert "dc" not in flags_at(kept.address)


def test_shrink_unmaps_the_tail_only(fd: int) -> None:
    made = Mapping(fd, 4 * MIB, writable=True)
    address = made.address
    made.shrink(MIB)
    assert is_mapped(address)
    assert is_mapped(address + MIB - 1)
    assert not is_mapped(address + MIB)
    assert len(made.array()) == MIB
    for bad in (0, 2 * MIB, 4095):
        with pytest.raises(ValueError, match=f"length_bytes is {bad}"):
            made.shrink(bad)
    del made
    gc.collect()
    assert not is_mapped(address)


def test_populate_fills_pages_and_keeps_bytes(fd: int) -> None:
    made = Mapping(fd, 8 * MIB, writable=True)
    made.array()[5] = 77
    made.populate(0, MIB)
    assert os.fstat(fd).st_blocks * 512 == MIB
    made.populate(7 * MIB)
    assert os.fstat(fd).st_blocks * 512 == 2 * MIB
    made.populate()
    assert os.fstat(fd).st_blocks * 512 == 8 * MIB
    assert made.array()[5] == 77
    assert int(made.array().sum()) == 77
    populate(made.address, 0, write=True)


def test_populate_of_unmapped_memory_is_an_error(fd: int) -> None:
    made = Mapping(fd, MIB, writable=True)
    address = made.address
    made.shrink(4096)
    with pytest.raises(OSError, match="can't fill"):
        populate(address, MIB, write=True)


@pytest.mark.parametrize("writable", [True, False])
def test_old_kernels_have_every_page_touched(fd: int, writable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class OldKernel:
        def madvise(self, *_: int) -> int:
            ctypes.set_errno(errno.EINVAL)
            return -1

    Mapping(fd, MIB, writable=True).array()[4096] = 3
    made = Mapping(fd, MIB, writable=writable)
    monkeypatch.setattr(mapping, "_libc", OldKernel())
    made.populate()
    if writable:
        assert os.fstat(fd).st_blocks * 512 == MIB
    assert made.array()[4096] == 3


def test_others_run_while_pages_are_filled() -> None:
    """Another thread sees the file half full, which it never could if the call kept Python's lock."""
    size = 64 * MIB
    for _ in range(20):  # the observer may be off the processor for a whole call
        descriptor = os.memfd_create("kvstore-test")
        os.ftruncate(descriptor, size)
        thread = threading.Thread(target=Mapping(descriptor, size, writable=True).populate)
        thread.start()
        seen_half_done = False
        while thread.is_alive() and not seen_half_done:
            seen_half_done = 0 < os.fstat(descriptor).st_blocks * 512 < size
        thread.join()
        assert os.fstat(descriptor).st_blocks * 512 == size
        os.close(descriptor)
        if seen_half_done:
            return
    pytest.fail("no file was ever seen half full: the call holds the lock")


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ("always within_size advise [never] deny force\n", "is 'never'"),
        ("always within_size [advise] never deny force\n", ""),
        ("[always] within_size advise never deny force\n", ""),
        (None, "tells nothing"),
    ],
)
def test_note_on_huge_pages(text: str | None, note: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = tmp_path / "shmem_enabled"
    if text is not None:
        setting.write_text(text)
    monkeypatch.setattr(mapping, "_SHMEM_HUGE", setting)
    monkeypatch.setattr(mapping, "_gathers", lambda: False)
    assert note in huge_pages_note()
    assert bool(note) == bool(huge_pages_note())


def test_page_size_is_what_the_code_says() -> None:
    assert mapping.PAGE_BYTES == mmap.PAGESIZE
