"""What every kind of files must do, checked on the directory itself: unbuffered, buffered, and wrapped."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import resource
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import BadInputError
from kvstore.tiers.nvme.batch import CALL_BYTES, IOV_MAX
from kvstore.tiers.nvme.crash import CrashFiles
from kvstore.tiers.nvme.direct import DirectFiles
from kvstore.tiers.nvme.faults import FaultyFiles
from kvstore.tiers.nvme.files import SECTOR_BYTES, Extent, Files
from kvstore.tiers.nvme.memory import Bytes, aligned, extent_of, gather

_libc = ctypes.CDLL(None, use_errno=True)
S = SECTOR_BYTES

KINDS: dict[str, Callable[[Path], Files]] = {
    "direct": DirectFiles,
    "depth 1": lambda path: DirectFiles(path, depth=1),
    "faulty": lambda path: FaultyFiles(DirectFiles(path)),
    "crash": lambda path: CrashFiles(path, DirectFiles(path)),
}


@contextmanager
def mounted(kind: str, path: Path, options: str = "") -> Iterator[Path]:
    """A file system of its own, or the test is skipped."""
    path.mkdir()
    if _libc.mount(kind.encode(), str(path).encode(), kind.encode(), 0, options.encode() or None) != 0:
        pytest.skip(f"{kind} can't be mounted here: {os.strerror(ctypes.get_errno())}")
    try:
        yield path
    finally:
        assert _libc.umount2(str(path).encode(), 2) == 0


@pytest.fixture(params=[*KINDS, "buffered"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Files]:
    if request.param == "buffered":
        with mounted("ramfs", tmp_path / "ramfs") as path:
            yield DirectFiles(path)
    else:
        yield KINDS[request.param](tmp_path)


@pytest.fixture
def directory(files: Files) -> Path:
    while isinstance(files, FaultyFiles | CrashFiles):
        files = files.inner
    assert isinstance(files, DirectFiles)
    return files.directory


def random_bytes(length: int, seed: int = 0) -> Bytes:
    return aligned(np.random.default_rng(seed).integers(0, 256, length, dtype=np.uint8))


def nothing(length: int) -> Bytes:
    return aligned(np.zeros(length, dtype=np.uint8))


def test_a_new_file_has_its_size_its_room_and_zeros(files: Files, directory: Path) -> None:
    handle = files.create("a", 8 * S)
    assert files.size_bytes(handle) == (directory / "a").stat().st_size == 8 * S
    memory = random_bytes(8 * S)
    assert files.read(handle, [extent_of(0, memory)]).tolist() == [8 * S]
    assert not memory.any()
    files.close(handle)


def test_create_sets_room_aside(tmp_path: Path) -> None:
    files = DirectFiles(tmp_path)
    before_bytes = files.on_disk_bytes()
    files.close(files.create("a", 64 * S))
    assert (tmp_path / "a").stat().st_blocks * 512 >= 64 * S
    assert files.on_disk_bytes() - before_bytes >= 64 * S


def test_create_refuses_a_name_that_is_taken_and_leaves_the_file(files: Files, directory: Path) -> None:
    (directory / "a").write_bytes(b"old")
    with pytest.raises(FileExistsError):
        files.create("a", S)
    assert (directory / "a").read_bytes() == b"old"


def test_what_is_written_lies_in_the_file_and_is_read_back(files: Files, directory: Path) -> None:
    handle = files.create("a", 64 * S)
    data = random_bytes(16 * S)
    extents = [
        Extent(40 * S, ((data.ctypes.data, 3 * S), (data.ctypes.data + 8 * S, S))),
        Extent(4 * S, ((data.ctypes.data + 3 * S, 5 * S),)),
    ]
    assert files.write(handle, extents).tolist() == [4 * S, 5 * S]
    files.sync(handle)
    image = np.fromfile(directory / "a", dtype=np.uint8)
    expected = np.zeros(64 * S, dtype=np.uint8)
    expected[40 * S : 44 * S] = np.concatenate([data[: 3 * S], data[8 * S : 9 * S]])
    expected[4 * S : 9 * S] = data[3 * S : 8 * S]
    assert (image == expected).all()

    memory = nothing(16 * S)
    back = [
        Extent(4 * S, ((memory.ctypes.data, S), (memory.ctypes.data + 7 * S, 4 * S))),
        Extent(40 * S, ((memory.ctypes.data + 2 * S, 4 * S),)),
    ]
    assert files.read(handle, back).tolist() == [5 * S, 4 * S]
    assert (gather(back[0]) == expected[4 * S : 9 * S]).all()
    assert (gather(back[1]) == expected[40 * S : 44 * S]).all()
    assert not memory[S : 2 * S].any()
    files.close(handle)


def test_an_empty_batch_is_nothing(files: Files) -> None:
    handle = files.create("a", S)
    assert len(files.read(handle, [])) == len(files.write(handle, [])) == 0
    files.close(handle)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), whole_sectors=st.integers(1, 40), odd_bytes=st.integers(0, S - 1))
def test_random_batches_agree_with_a_bytearray(seed: int, whole_sectors: int, odd_bytes: int) -> None:
    """Any extents, pieces and order, neighbours among them, and a file that ends anywhere."""
    rng = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as folder:
        size_bytes = whole_sectors * S
        files = DirectFiles(Path(folder), depth=int(rng.integers(1, 5)))
        handle = files.create("a", size_bytes)
        model = bytearray(size_bytes)
        for _ in range(3):
            cuts = np.unique(rng.integers(0, whole_sectors + 1, 8))
            memory = aligned(rng.integers(0, 256, size_bytes, dtype=np.uint8))
            extents, at = [], 0
            for low, high in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True):
                pieces = [(memory.ctypes.data + (at + i) * S, S) for i in range(high - low)]
                extents.append(Extent(low * S, tuple(pieces)))
                at += high - low
            chosen = [extents[i] for i in rng.permutation(len(extents)) if rng.random() < 0.8]
            assert files.write(handle, chosen).tolist() == [extent.length_bytes for extent in chosen]
            for extent in chosen:
                model[extent.offset : extent.offset + extent.length_bytes] = gather(extent).tobytes()
        os.truncate(Path(folder) / "a", end := size_bytes - odd_bytes)
        n_sectors = rng.integers(1, 8, 6)
        starts = rng.integers(0, whole_sectors + 2, 6) * S
        memories = [nothing(int(n) * S) for n in n_sectors]
        wanted = [extent_of(int(start), memory) for start, memory in zip(starts, memories, strict=True)]
        results = files.read(handle, wanted)
        for start, memory, result in zip(starts.tolist(), memories, results.tolist(), strict=True):
            assert result == max(0, min(end - start, len(memory)))
            assert memory[:result].tobytes() == model[start : start + result]
        files.close(handle)


def test_neighbours_beyond_the_limits_of_one_call_arrive(files: Files) -> None:
    n_sectors = IOV_MAX * 2 + 300
    assert n_sectors * S > 2 * CALL_BYTES
    data, memory = random_bytes(n_sectors * S), nothing(n_sectors * S)
    handle = files.create("a", n_sectors * S)
    pieces = tuple((data.ctypes.data + i * S, S) for i in reversed(range(n_sectors)))
    assert files.write(handle, [Extent(0, pieces)]).tolist() == [n_sectors * S]
    singles = [extent_of(i * S, memory[i * S : (i + 1) * S]) for i in range(n_sectors)]
    assert (files.read(handle, singles) == S).all()
    assert (memory.reshape(-1, S) == data.reshape(-1, S)[::-1]).all()
    files.close(handle)


@pytest.mark.parametrize(
    ("offset", "address", "length"), [(512, 0, S), (0, 512, S), (0, 0, 512), (-S, 0, S), (0, 0, 0), (0, 0, -S)]
)
def test_parts_of_sectors_are_refused_before_anything_moves(
    files: Files, offset: int, address: int, length: int
) -> None:
    handle = files.create("a", 4 * S)
    data = random_bytes(4 * S)
    wrong = Extent(offset, ((data.ctypes.data + address, length),))
    for extent in (wrong, Extent(0, ())):
        with pytest.raises(BadInputError, match="multiples of 4096"):
            files.write(handle, [extent_of(2 * S, data[:S]), extent])
    memory = nothing(S)
    assert files.read(handle, [extent_of(2 * S, memory)]).tolist() == [S]
    assert not memory.any()
    files.close(handle)


def test_memory_that_cannot_be_used_costs_exactly_its_extent(files: Files) -> None:
    handle = files.create("a", 8 * S)
    data = random_bytes(8 * S)
    files.write(handle, [extent_of(0, data)])
    memory = nothing(8 * S)
    with mmap.mmap(-1, S, prot=mmap.PROT_READ) as fixed:
        read_only = np.frombuffer(fixed, dtype=np.uint8)
        extents = [extent_of(i * S, read_only if i == 3 else memory[i * S : (i + 1) * S]) for i in range(8)]
        results = files.read(handle, extents)
        assert results.tolist() == [-errno.EFAULT if i == 3 else S for i in range(8)]
        del read_only, extents
    expected = data.copy()
    expected[3 * S : 4 * S] = 0
    assert (memory == expected).all()
    files.close(handle)


@contextmanager
def file_size_limit(size_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_write_that_the_system_cuts_off_costs_exactly_the_extents_beyond(files: Files) -> None:
    handle = files.create("a", 8 * S)
    data, memory = random_bytes(8 * S), nothing(8 * S)
    with file_size_limit(5 * S):
        results = files.write(handle, [extent_of(i * S, data[i * S : (i + 1) * S]) for i in range(8)])
        crossing = files.write(handle, [extent_of(4 * S, data[4 * S : 7 * S])])
    assert results.tolist() == [S] * 5 + [-errno.EFBIG] * 3
    assert crossing.tolist() == [-errno.EFBIG]
    assert files.read(handle, [extent_of(0, memory)]).tolist() == [8 * S]
    assert (memory[: 5 * S] == data[: 5 * S]).all()
    assert not memory[5 * S :].any()
    files.close(handle)


def test_a_file_that_cannot_get_its_room_is_not_there(files: Files, directory: Path) -> None:
    with file_size_limit(4 * S), pytest.raises(OSError, match="File too large") as caught:
        files.create("a", 8 * S)
    assert caught.value.errno == errno.EFBIG
    assert caught.value.filename == str(directory / "a")
    assert files.names() == []
    files.close(files.create("a", 8 * S))


def test_a_full_disk_is_told_and_leaves_no_file(tmp_path: Path) -> None:
    with mounted("tmpfs", tmp_path / "small", "size=1m") as path:
        files = DirectFiles(path)
        room_bytes = files.disk_free_bytes()
        assert 0 < room_bytes <= 1 << 20
        with pytest.raises(OSError, match="No space") as caught:
            files.create("a", 2 << 20)
        assert caught.value.errno == errno.ENOSPC
        assert list(path.iterdir()) == []
        assert files.disk_free_bytes() == room_bytes

        files.write_small("small", b"old")
        filler = files.create("filler", files.disk_free_bytes() // S * S)
        with pytest.raises(OSError, match="No space"):
            files.write_small("small", bytes(1 << 16))
        assert files.read_small("small") == b"old"
        assert {entry.name for entry in path.iterdir()} == {"filler", "small"}
        assert DirectFiles(path).names() == ["filler", "small"], "a full disk can be opened"
        files.close(filler)


def test_a_disk_without_room_for_another_name_can_be_opened(tmp_path: Path) -> None:
    with mounted("tmpfs", tmp_path / "small", "size=1m,nr_inodes=3") as path:
        (path / "a").write_bytes(bytes(S))
        (path / "b").touch()
        with pytest.raises(OSError, match="No space"):
            (path / "c").touch()
        files = DirectFiles(path)
        handle = files.open("a")
        memory = random_bytes(S)
        assert files.read(handle, [extent_of(0, memory)]).tolist() == [S]
        assert not memory.any()
        files.close(handle)


def test_writes_to_a_full_disk_say_so(tmp_path: Path) -> None:
    with mounted("tmpfs", tmp_path / "small", "size=1m") as path:
        files = DirectFiles(path)
        (path / "sparse").touch()
        os.truncate(path / "sparse", 4 << 20)
        handle = files.open("sparse")
        data = random_bytes(2 << 20)
        parts = [extent_of(i << 16, data[i << 16 : (i + 1) << 16]) for i in range(32)]
        results = files.write(handle, parts)
        assert set(results.tolist()) == {1 << 16, -errno.ENOSPC}
        n_whole = int((results == 1 << 16).sum())
        assert results.tolist() == [1 << 16] * n_whole + [-errno.ENOSPC] * (32 - n_whole)
        memory = nothing(n_whole << 16)
        assert files.read(handle, [extent_of(0, memory)]).tolist() == [n_whole << 16]
        assert (memory == data[: n_whole << 16]).all()
        files.close(handle)


def test_names_are_what_lies_there(files: Files, directory: Path) -> None:
    (directory / "folder").mkdir()
    files.close(files.create("b", S))
    files.write_small("a", b"x")
    assert files.names() == ["a", "b"]
    files.rename("b", "c")
    assert files.names() == ["a", "c"]
    files.remove("a")
    assert files.names() == ["c"]
    files.sync_directory()
    assert sorted(entry.name for entry in directory.iterdir()) == ["c", "folder"]


def test_a_rename_takes_the_place_of_another_file_and_keeps_handles(files: Files) -> None:
    handle = files.create("a", 2 * S)
    files.close(files.create("b", S))
    data, memory = random_bytes(2 * S), nothing(2 * S)
    files.write(handle, [extent_of(0, data)])
    files.rename("a", "b")
    files.sync(handle)
    files.close(handle)
    again = files.open("b")
    assert files.read(again, [extent_of(0, memory)]).tolist() == [2 * S]
    assert (memory == data).all()
    files.close(again)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", "a\0"])
def test_names_that_lead_elsewhere_are_refused(files: Files, name: str) -> None:
    calls: list[Callable[[], object]] = [
        lambda: files.create(name, S),
        lambda: files.open(name),
        lambda: files.remove(name),
        lambda: files.read_small(name),
        lambda: files.write_small(name, b""),
        lambda: files.rename("a", name),
    ]
    files.close(files.create("a", S))
    for call in calls:
        with pytest.raises(BadInputError, match="is not the name of a file"):
            call()
    assert files.names() == ["a"]


def test_what_is_not_there_is_file_not_found(files: Files) -> None:
    for call in (files.open, files.remove, files.read_small, lambda name: files.rename(name, "b")):
        with pytest.raises(FileNotFoundError):
            call("a")


def test_small_files_are_replaced_whole(files: Files, directory: Path) -> None:
    files.write_small("a", b"first, and longer")
    files.write_small("a", b"second")
    assert files.read_small("a") == b"second" == (directory / "a").read_bytes()
    (directory / ".a.new").write_bytes(b"left by a crash, and longer")
    assert files.names() == ["a"]
    files.write_small("a", b"third")
    assert files.read_small("a") == b"third"
    assert [entry.name for entry in directory.iterdir()] == ["a"]


def test_on_disk_bytes_counts_all_that_lies_below(files: Files, directory: Path) -> None:
    before_bytes = files.on_disk_bytes()
    (directory / "folder").mkdir()
    (directory / "folder" / "data").write_bytes(bytes(100 * S))
    (directory / "link").symlink_to("/usr")
    added_bytes = sum(path.stat().st_blocks * 512 for path in (directory / "folder", directory / "folder" / "data"))
    assert files.on_disk_bytes() - before_bytes == added_bytes


def test_a_removed_file_lives_until_it_is_closed(files: Files) -> None:
    handle = files.create("a", S)
    data, memory = random_bytes(S), nothing(S)
    files.write(handle, [extent_of(0, data)])
    files.remove("a")
    assert files.names() == []
    assert files.read(handle, [extent_of(0, memory)]).tolist() == [S]
    assert (memory == data).all()
    files.close(handle)
