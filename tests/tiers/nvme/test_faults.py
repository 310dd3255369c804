"""Each fault does what it says to the bytes on the disk or in memory, to whom it says, and is counted."""

from __future__ import annotations

import errno
import threading
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from kvstore.clock import ManualClock
from kvstore.tiers.nvme.direct import DirectFiles
from kvstore.tiers.nvme.faults import FaultyFiles
from kvstore.tiers.nvme.files import SECTOR_BYTES, Extent
from kvstore.tiers.nvme.memory import TORN_BYTES, Bytes, aligned, extent_of, torn

S = SECTOR_BYTES
N = 16
WAIT_S = 20.0


def random_bytes(length: int, seed: int = 0) -> Bytes:
    return aligned(np.random.default_rng(seed).integers(0, 256, length, dtype=np.uint8))


def parts(data: Bytes) -> list[Extent]:
    """One extent for every sector."""
    return [extent_of(i * S, data[i * S : (i + 1) * S]) for i in range(len(data) // S)]


class Disk:
    """One file of ``N`` sectors of known bytes behind a faulty seam."""

    def __init__(self, directory: Path, seed: int = 0) -> None:
        self.path = directory / "a"
        self.real = DirectFiles(directory)
        self.files = FaultyFiles(self.real, seed)
        self.handle = self.files.create("a", N * S)
        self.old = random_bytes(N * S, 100)
        assert (self.files.write(self.handle, parts(self.old)) == S).all()

    def image(self) -> Bytes:
        return np.fromfile(self.path, dtype=np.uint8)

    def read(self) -> tuple[list[int], Bytes]:
        memory = aligned(np.zeros(N * S, dtype=np.uint8))
        return self.files.read(self.handle, parts(memory)).tolist(), memory


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path)


def test_without_orders_nothing_happens(disk: Disk) -> None:
    results, memory = disk.read()
    assert results == [S] * N
    assert (memory == disk.old).all()
    assert (disk.image() == disk.old).all()
    assert not disk.files.counts


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_errors_meet_exactly_the_extents_they_are_for(disk: Disk, code: int) -> None:
    reading = disk.files.fail("read", code, after=2, times=3)
    writing = disk.files.fail("write", code, times=None, where=lambda _, extent: extent is None or extent[0] >= 9 * S)
    results, memory = disk.read()
    assert results == [S] * 2 + [-code] * 3 + [S] * (N - 5)
    assert (memory.reshape(-1, S)[2:5] == 0).all()
    assert (memory.reshape(-1, S)[5:] == disk.old.reshape(-1, S)[5:]).all()
    new = random_bytes(N * S)
    assert disk.files.write(disk.handle, parts(new)).tolist() == [S] * 9 + [-code] * (N - 9)
    assert (disk.image() == np.concatenate([new[: 9 * S], disk.old[9 * S :]])).all()
    assert (reading.hits, writing.hits) == (3, N - 9)
    assert disk.files.counts == {"read.fail": 3, "write.fail": N - 9}
    writing.stop()
    assert disk.files.write(disk.handle, parts(new)).tolist() == [S] * N


def test_every_other_operation_can_fail_and_then_has_done_nothing(disk: Disk, tmp_path: Path) -> None:
    files = disk.files
    files.write_small("small", b"old")
    calls = {
        "create": lambda: files.create("b", S),
        "open": lambda: files.open("a"),
        "size_bytes": lambda: files.size_bytes(disk.handle),
        "close": lambda: files.close(disk.handle),
        "names": files.names,
        "remove": lambda: files.remove("a"),
        "rename": lambda: files.rename("a", "b"),
        "sync": lambda: files.sync(disk.handle),
        "sync_directory": files.sync_directory,
        "read_small": lambda: files.read_small("small"),
        "write_small": lambda: files.write_small("small", b"new"),
        "disk_free_bytes": files.disk_free_bytes,
        "on_disk_bytes": files.on_disk_bytes,
        "catalog_committed": files.catalog_committed,
    }
    operations = {name for name in dir(FaultyFiles) if name in dir(DirectFiles) and not name.startswith("_")}
    assert operations - {"end_threads"} == {*calls, "read", "write"}, "a method of the seam without a case here"
    for operation, call in calls.items():
        files.fail(operation, errno.ENOSPC)
        with pytest.raises(OSError, match="ordered fault") as caught:
            call()
        assert caught.value.errno == errno.ENOSPC
        assert files.counts[f"{operation}.fail"] == 1
    assert files.names() == ["a", "small"]
    assert files.read_small("small") == b"old"
    assert disk.read()[0] == [S] * N
    for call in calls.values():
        if call is not calls["remove"] and call is not calls["close"]:
            call()
    assert files.names() == ["b", "small"]


def test_orders_that_no_call_can_meet_are_refused(disk: Disk) -> None:
    with pytest.raises(ValueError, match="'reed'"):
        disk.files.fail("reed", errno.EIO)
    with pytest.raises(ValueError, match="'sync'"):
        disk.files.flip("sync")


def test_a_predicate_sees_name_and_extent(disk: Disk) -> None:
    other = disk.files.create("b", N * S)
    disk.files.fail("read", errno.EIO, times=None, where=lambda name, _: name == "b")
    assert disk.read()[0] == [S] * N
    memory = random_bytes(S)
    assert disk.files.read(other, [extent_of(0, memory)]).tolist() == [-errno.EIO]
    disk.files.rename("b", "c")
    assert disk.files.read(other, [extent_of(0, memory)]).tolist() == [S]
    disk.files.close(other)


def test_short_transfers_move_the_leading_sectors_they_say(tmp_path: Path) -> None:
    lengths = set()
    for seed in range(20):
        disk = Disk(tmp_path, seed)
        disk.files.shorten("read")
        disk.files.shorten("write")
        memory = aligned(np.zeros(N * S, dtype=np.uint8))
        (n_read,) = disk.files.read(disk.handle, [extent_of(0, memory)]).tolist()
        assert 0 <= n_read < N * S
        assert n_read % S == 0
        assert (memory == np.where(np.arange(N * S) < n_read, disk.old, 0)).all()
        new = random_bytes(N * S, seed)
        (n_written,) = disk.files.write(disk.handle, [extent_of(0, new)]).tolist()
        assert 0 <= n_written < N * S
        assert (disk.image() == np.where(np.arange(N * S) < n_written, new, disk.old)).all()
        assert disk.files.counts == {"read.short": 1, "write.short": 1}
        lengths |= {n_read, n_written}
        disk.files.close(disk.handle)
        disk.files.remove("a")
    assert len(lengths) > 5


def test_a_slow_call_waits_on_what_it_is_given(disk: Disk) -> None:
    clock = ManualClock()
    disk.files.delay("read", lambda: clock.advance(3.0), after=1, times=2)
    disk.files.delay("sync", lambda: clock.advance(10.0))
    assert disk.read()[0] == [S] * N
    assert clock.now_s() == 3.0, "one batch waits once"
    disk.files.sync(disk.handle)
    disk.files.sync(disk.handle)
    assert clock.now_s() == 13.0
    assert disk.files.counts == {"read.slow": 2, "sync.slow": 1}


@pytest.mark.parametrize("operation", ["read", "write", "sync"])
def test_a_stuck_call_goes_on_when_released(disk: Disk, operation: str) -> None:
    fault = disk.files.stick(operation)
    memory, new = aligned(np.zeros(N * S, dtype=np.uint8)), random_bytes(N * S)
    results: list[list[int]] = []

    def call() -> None:
        if operation == "sync":
            disk.files.sync(disk.handle)
        else:
            move, data = (disk.files.read, memory) if operation == "read" else (disk.files.write, new)
            results.append(move(disk.handle, parts(data)).tolist())

    thread = threading.Thread(target=call)
    thread.start()
    try:
        assert fault.reached.wait(WAIT_S)
        assert disk.files.size_bytes(disk.handle) == N * S, "other calls go on"
        assert disk.read()[0] == [S] * N
        assert thread.is_alive()
        assert not memory.any()
        assert (disk.image() == disk.old).all()
    finally:
        fault.release()
        thread.join(WAIT_S)
    assert not thread.is_alive()
    assert results == ([] if operation == "sync" else [[S] * N])
    assert (memory == disk.old).all() == (operation == "read")
    assert (disk.image() == (new if operation == "write" else disk.old)).all()
    assert disk.files.counts == {f"{operation}.stuck": 1}
    call()
    assert fault.hits == 1, "a released fault meets nobody"


def test_a_released_fault_meets_nobody_even_if_it_was_for_all(disk: Disk) -> None:
    fault = disk.files.stick("sync", times=None)
    fault.release()
    disk.files.sync(disk.handle)
    assert fault.hits == 0
    assert not disk.files.counts


def test_release_all_ends_everything(disk: Disk) -> None:
    fault = disk.files.stick("read", times=None)
    disk.files.fail("sync", errno.EIO, times=None)
    thread = threading.Thread(target=disk.read)
    thread.start()
    assert fault.reached.wait(WAIT_S)
    disk.files.release_all()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    disk.files.sync(disk.handle)
    assert disk.read()[0] == [S] * N


def test_a_flip_changes_one_bit_of_what_is_read(disk: Disk) -> None:
    disk.files.flip("read", after=4, times=2)
    results, memory = disk.read()
    assert results == [S] * N
    changed = np.unpackbits(memory ^ disk.old).reshape(N, -1).sum(axis=1)
    assert changed.tolist() == [0] * 4 + [1, 1] + [0] * (N - 6)
    assert (disk.image() == disk.old).all()
    assert (disk.read()[1] == disk.old).all()
    assert disk.files.counts == {"read.flip": 2}


def test_a_flip_changes_one_bit_on_the_disk_and_none_in_memory(disk: Disk) -> None:
    disk.files.flip("write", after=4, times=2)
    new = random_bytes(N * S)
    before = new.copy()
    assert disk.files.write(disk.handle, parts(new)).tolist() == [S] * N
    assert (new == before).all()
    changed = np.unpackbits(disk.image() ^ new).reshape(N, -1).sum(axis=1)
    assert changed.tolist() == [0] * 4 + [1, 1] + [0] * (N - 6)
    assert (disk.read()[1] == disk.image()).all()
    assert disk.files.counts == {"write.flip": 2}


def test_a_torn_write_leaves_old_and_new_pieces_and_never_all(tmp_path: Path) -> None:
    n_new_pieces = []
    for seed in range(30):
        disk = Disk(tmp_path, seed)
        disk.files.tear()
        new = random_bytes(N * S, seed)
        assert disk.files.write(disk.handle, [extent_of(0, new)]).tolist() == [N * S]
        image = disk.image().reshape(-1, TORN_BYTES)
        is_new = (image == new.reshape(-1, TORN_BYTES)).all(axis=1)
        is_old = (image == disk.old.reshape(-1, TORN_BYTES)).all(axis=1)
        assert (is_new ^ is_old).all()
        n_new_pieces.append(int(is_new.sum()))
        assert disk.files.counts == {"write.torn": 1}
        disk.files.close(disk.handle)
        disk.files.remove("a")
    assert max(n_new_pieces) < N * S // TORN_BYTES
    assert len(set(n_new_pieces)) > 10


def test_of_two_pieces_never_both_arrive() -> None:
    old, new = random_bytes(TORN_BYTES + 8, 1), random_bytes(TORN_BYTES + 8, 2)
    seen = set()
    for seed in range(100):
        left = torn(np.random.default_rng(seed), old, new)
        pieces = [(left[place] == new[place]).all() for place in (slice(0, TORN_BYTES), slice(TORN_BYTES, None))]
        seen.add(tuple(pieces))
    assert seen == {(False, False), (True, False), (False, True)}


def test_held_writes_are_seen_but_reach_the_disk_at_sync(disk: Disk) -> None:
    disk.files.hold(after=3, times=4)
    new = random_bytes(N * S)
    assert disk.files.write(disk.handle, parts(new)).tolist() == [S] * N
    expected = new.copy()
    expected[3 * S : 7 * S] = disk.old[3 * S : 7 * S]
    assert (disk.image() == expected).all()
    results, memory = disk.read()
    assert results == [S] * N
    assert (memory == new).all()
    new_again = new.copy()
    new[:] = 0
    disk.files.rename("a", "b")
    disk.files.sync(disk.handle)
    assert (np.fromfile(disk.path.with_name("b"), dtype=np.uint8) == new_again).all()
    assert disk.files.counts == {"write.held": 4}


def test_of_overlapping_held_writes_the_last_one_wins(tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    for seed in range(10):
        disk = Disk(tmp_path, seed)
        disk.files.hold(times=20)
        expected = disk.old.copy()
        for i in range(30):
            low = int(rng.integers(0, N))
            high = int(rng.integers(low + 1, N + 1))
            data = random_bytes((high - low) * S, i)
            assert disk.files.write(disk.handle, [extent_of(low * S, data)]).tolist() == [len(data)]
            expected[low * S : high * S] = data
            assert (disk.read()[1] == expected).all()
        disk.files.sync(disk.handle)
        assert (disk.image() == expected).all()
        disk.files.close(disk.handle)
        disk.files.remove("a")


def test_a_power_cut_keeps_any_part_of_the_held_writes(tmp_path: Path) -> None:
    seen = set()
    for seed in range(40):
        disk = Disk(tmp_path, seed)
        disk.files.hold(times=None)
        new = random_bytes(N * S, seed)
        disk.files.write(disk.handle, parts(new))
        n_lost = disk.files.power_cut()
        is_new = (disk.image() == new).reshape(N, S).all(axis=1)
        is_old = (disk.image() == disk.old).reshape(N, S).all(axis=1)
        assert (is_new ^ is_old).all()
        assert n_lost == is_old.sum() == disk.files.counts["write.lost"] > 0
        assert (disk.read()[1] == disk.image()).all()
        seen.add(tuple(is_new.tolist()))
        disk.files.close(disk.handle)
        disk.files.remove("a")
    assert len(seen) > 20
    in_order = [all(a >= b for a, b in pairwise(arrived)) for arrived in seen]
    assert not all(in_order), "later writes arrived before earlier ones"
    assert disk.files.power_cut() == 0


def test_a_held_write_that_the_disk_refuses_fails_the_sync(disk: Disk) -> None:
    inner = FaultyFiles(disk.real)
    outer = FaultyFiles(inner)
    handle = outer.open("a")
    outer.hold()
    data = random_bytes(S)
    assert outer.write(handle, [extent_of(0, data)]).tolist() == [S]
    inner.fail("write", errno.EIO)
    with pytest.raises(OSError, match="held write") as caught:
        outer.sync(handle)
    assert caught.value.errno == errno.EIO
    outer.close(handle)


def test_the_same_seed_does_the_same(tmp_path: Path) -> None:
    images = []
    data = random_bytes(N * S)
    for _ in range(2):
        disk = Disk(tmp_path, 5)
        disk.files.tear(times=2)
        disk.files.flip("write")
        disk.files.write(disk.handle, parts(data))
        images.append(disk.image())
        disk.files.close(disk.handle)
        disk.files.remove("a")
    assert (images[0] == images[1]).all()
