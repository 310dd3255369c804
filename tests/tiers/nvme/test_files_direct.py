"""How the real files go about it: unbuffered, in parallel, without Python's lock, going on after interruptions."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from kvstore.tiers.nvme import batch
from kvstore.tiers.nvme.batch import Batch, preadv, pwritev
from kvstore.tiers.nvme.direct import DirectFiles
from kvstore.tiers.nvme.files import SECTOR_BYTES, Extent
from kvstore.tiers.nvme.memory import Bytes, aligned, extent_of

S = SECTOR_BYTES
WAIT_S = 20.0


def random_bytes(length: int, seed: int = 0) -> Bytes:
    return aligned(np.random.default_rng(seed).integers(0, 256, length, dtype=np.uint8))


@pytest.fixture
def files(tmp_path: Path) -> DirectFiles:
    return DirectFiles(tmp_path, depth=4)


class Scripted:
    """The real call, but first the answers given: an errno, or a limit of iovecs that makes it come back short."""

    def __init__(self, real: batch.VectoredCall, *answers: int) -> None:
        self.real = real
        self.answers = list(answers)
        self.offsets: list[int] = []

    def __call__(self, fd: int, iovecs: int, n: int, offset: int) -> int:
        self.offsets.append(offset)
        answer = self.answers.pop(0) if self.answers else n
        if answer < 0:
            ctypes.set_errno(-answer)
            return -1
        return self.real(fd, iovecs, min(n, answer), offset)


def test_files_are_opened_past_the_page_cache(files: DirectFiles) -> None:
    if not files.direct:
        pytest.skip("the file system of the temporary folder has no O_DIRECT")
    created = files.create("a", S)
    opened = files.open("a")
    for handle in (created, opened):
        assert fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_DIRECT
        assert fcntl.fcntl(handle, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        files.close(handle)
    assert files.names() == ["a"], "the probe is gone"


def test_without_unbuffered_access_it_says_so_and_works(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mount = ctypes.CDLL(None, use_errno=True).mount
    path = tmp_path / "ramfs"
    path.mkdir()
    if mount(b"ramfs", str(path).encode(), b"ramfs", 0, None) != 0:
        pytest.skip("ramfs can't be mounted here")
    try:
        files = DirectFiles(path)
        assert not files.direct
        assert "no direct I/O" in caplog.text
        assert files.names() == []
        handle = files.create("a", 4 * S)
        assert not fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_DIRECT
        data, memory = random_bytes(4 * S), random_bytes(4 * S, 1)
        assert files.write(handle, [extent_of(0, data)]).tolist() == [4 * S]
        files.sync(handle)
        assert files.read(handle, [extent_of(0, memory)]).tolist() == [4 * S]
        assert (memory == data).all()
        files.close(handle)
    finally:
        ctypes.CDLL(None).umount2(str(path).encode(), 2)


def test_a_directory_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        DirectFiles(tmp_path / "missing")


def test_neighbours_become_one_call_and_others_do_not() -> None:
    data = random_bytes(16 * S)

    def calls(*sectors: int) -> int:
        return Batch([extent_of(sector * S, data[i * S : (i + 1) * S]) for i, sector in enumerate(sectors)]).n_calls

    assert calls(3) == 1
    assert calls(0, 1, 2, 3) == 1
    assert calls(3, 1, 2, 0) == 1
    assert calls(0, 1, 3, 4) == 2
    assert calls(0, 2, 4) == 3
    assert calls(5, 5) == 2
    big = random_bytes(batch.CALL_BYTES)
    assert Batch([extent_of(i * len(big), big) for i in range(3)]).n_calls == 3


@pytest.mark.parametrize("answers", [(-errno.EINTR,), (-errno.EINTR, -errno.EINTR, 2, -errno.EINTR), (1, 1, 1), (3,)])
def test_interrupted_and_short_calls_go_on(files: DirectFiles, answers: tuple[int, ...]) -> None:
    data, memory = random_bytes(8 * S), random_bytes(8 * S, 1)
    handle = files.create("a", 8 * S)
    for real, bytes_in_memory in ((pwritev, data), (preadv, memory)):
        pieces = [(bytes_in_memory.ctypes.data + i * S, S) for i in range(8)]
        work = Batch([Extent(0, tuple(pieces[:5])), Extent(5 * S, tuple(pieces[5:]))])
        assert work.n_calls == 1
        call = Scripted(real, *answers)
        work.work(call, handle)
        assert work.results.tolist() == [5 * S, 3 * S]
        assert not call.answers, "all of the script was played"
    assert (memory == data).all()
    files.close(handle)


def test_an_error_costs_its_extent_only_and_is_told(files: DirectFiles) -> None:
    handle = files.create("a", 8 * S)
    memory = random_bytes(8 * S)
    work = Batch([extent_of(i * S, memory[i * S : (i + 1) * S]) for i in range(4)])
    call = Scripted(preadv, -errno.EIO, 1, -errno.EIO)
    work.work(call, handle)
    assert work.results.tolist() == [S, -errno.EIO, S, S]
    assert call.offsets == [0, 0, S, 2 * S, 3 * S]
    short = Batch([extent_of(i * S, memory[i * S : (i + 1) * S]) for i in range(4)])
    call = Scripted(preadv, 3)
    short.work(call, handle)
    assert short.results.tolist() == [S] * 4
    assert call.offsets == [0, 3 * S], "what has arrived isn't asked for again"
    assert files.read(handle + 1000, [extent_of(0, memory)]).tolist() == [-errno.EBADF]
    files.close(handle)


def test_a_file_that_ends_within_a_sector_is_read_to_its_end(files: DirectFiles, tmp_path: Path) -> None:
    data = random_bytes(3 * S)
    (tmp_path / "a").write_bytes(data[: 2 * S + 700].tobytes())
    handle = files.open("a")
    memory = aligned(np.zeros(4 * S, dtype=np.uint8))
    extents = [extent_of(i * S, memory[i * S : (i + 1) * S]) for i in range(4)]
    assert files.read(handle, extents).tolist() == [S, S, 700, 0]
    assert (memory[: 2 * S + 700] == data[: 2 * S + 700]).all()
    files.close(handle)


def test_calls_run_side_by_side_up_to_the_depth(files: DirectFiles) -> None:
    """Each call waits for three others: with less than four at a time none would come back."""
    handle = files.create("a", 32 * S)
    together = threading.Barrier(4)

    def call(fd: int, iovecs: int, n: int, offset: int) -> int:
        together.wait(WAIT_S)
        return preadv(fd, iovecs, n, offset)

    memory = random_bytes(8 * S)
    extents = [extent_of(4 * i * S, memory[i * S : (i + 1) * S]) for i in range(8)]
    assert (files._move(call, handle, extents) == S).all()
    files.close(handle)


def test_a_batch_does_not_wait_for_another_one_that_is_stuck(files: DirectFiles) -> None:
    handle = files.create("a", 32 * S)
    let_go = threading.Event()
    inside = threading.Semaphore(0)

    def stuck(fd: int, iovecs: int, n: int, offset: int) -> int:
        inside.release()
        assert let_go.wait(WAIT_S)
        return preadv(fd, iovecs, n, offset)

    memory = random_bytes(8 * S)
    extents = [extent_of(4 * i * S, memory[i * S : (i + 1) * S]) for i in range(8)]
    first = threading.Thread(target=files._move, args=(stuck, handle, extents))
    first.start()
    try:
        for _ in range(4):
            assert inside.acquire(timeout=WAIT_S)
        data = random_bytes(8 * S, 1)
        others = [extent_of(4 * i * S, data[i * S : (i + 1) * S]) for i in range(8)]
        assert (files.write(handle, others) == S).all()
        assert not let_go.is_set()
    finally:
        let_go.set()
        first.join(WAIT_S)
    assert not first.is_alive()
    assert (memory == data).all()
    files.close(handle)


@contextmanager
def lock_only_given_up_freely() -> Iterator[None]:
    """Python's lock changes hands only where its holder lets go of it by itself."""
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    try:
        yield
    finally:
        sys.setswitchinterval(before_s)


@pytest.mark.parametrize("operation", ["preadv", "pwritev", "sync"])
def test_others_run_while_the_disk_works(files: DirectFiles, operation: str) -> None:
    memory = random_bytes(4 << 20)
    handle = files.create("a", len(memory))
    batches = [Batch([extent_of(0, memory)]) for _ in range(200)]
    call = pwritev if operation == "pwritev" else preadv
    others_ran = threading.Event()
    ready = threading.Lock()

    def other() -> None:
        with ready:
            others_ran.set()

    ready.acquire()
    thread = threading.Thread(target=other)
    thread.start()
    with lock_only_given_up_freely():
        ready.release()  # gives the other something to do, but not Python's lock
        assert not others_ran.is_set()
        for work in batches:
            if operation == "sync":
                files.sync(handle)
            else:
                work.work(call, handle)
            if others_ran.is_set():
                break
        ran = others_ran.is_set()
    thread.join(WAIT_S)
    assert ran
    files.close(handle)


def test_many_threads_share_files(files: DirectFiles) -> None:
    handle = files.create("a", 4 * 64 * S)
    failures: list[str] = []

    def work(part: int) -> None:
        rng = np.random.default_rng(part)
        for _ in range(12):
            data, memory = aligned(rng.integers(0, 256, 64 * S, dtype=np.uint8)), random_bytes(64 * S)
            places = [part * 64 + int(i) for i in rng.permutation(64)]
            writes = [extent_of(place * S, data[i * S : (i + 1) * S]) for i, place in enumerate(places)]
            reads = [extent_of(place * S, memory[i * S : (i + 1) * S]) for i, place in enumerate(places)]
            if (files.write(handle, writes) != S).any() or (files.read(handle, reads) != S).any():
                failures.append(f"part {part}: not all moved")
            if (data != memory).any():
                failures.append(f"part {part}: other bytes")

    threads = [threading.Thread(target=work, args=(part,)) for part in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert failures == []
    files.close(handle)
