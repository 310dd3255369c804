"""What workers write to a segment: the head until it is durable, and entries that no other batch takes back."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.native import aligned_bytes
from kvstore.tiers.nvme.direct import DirectFiles
from kvstore.tiers.nvme.faults import FaultyFiles
from kvstore.tiers.nvme.files import Extent
from kvstore.tiers.nvme.incarnation import Incarnation, SegmentFile
from kvstore.tiers.nvme.layout import FRAME_BYTES_MIN, Geometry
from kvstore.tiers.nvme.segment_index import ENTRY, Entries, head_page, log_seq_of, read_entries

PAGE = 4096
UUID = bytes(16)
SEQ = 5 << 24


def some_entries(n: int, seed: int) -> Entries:
    raw = np.random.default_rng(seed).integers(0, 256, n * ENTRY.itemsize, dtype=np.uint8)
    return raw.view(ENTRY).copy()


class Disk:
    """A segment of 1 MiB: 3 index pages, 252 pages of frames."""

    def __init__(self, directory: Path) -> None:
        self.geometry = Geometry(1 << 24, 1 << 20)
        self.path = directory / "segment-00000000"
        self.files = FaultyFiles(DirectFiles(directory))
        self.memory = aligned_bytes(2 * PAGE)
        self.incarnation = Incarnation(
            self.files,
            SegmentFile(self.files, self.path.name, 1 << 20),
            head_page(UUID, 0, SEQ),
            self.geometry.index_pages,
            SEQ,
        )

    def frame(self, number: int) -> Extent:
        at = (self.geometry.index_pages + 2 * number) * PAGE
        return Extent(at, ((int(self.memory.ctypes.data), 2 * PAGE),))

    def index(self) -> Entries:
        image = np.fromfile(self.path, np.uint8)
        assert log_seq_of(image[:PAGE], UUID, 0) == SEQ
        return read_entries(image[PAGE : self.geometry.index_pages * PAGE], SEQ)


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path)


def test_the_head_is_written_until_it_is_durable(disk: Disk) -> None:
    """After a failed sync nobody knows what of it is on the disk; those under way must write it again."""
    written: list[int] = []
    head = disk.files.delay(
        "write", lambda: written.append(1), times=None, where=lambda _, e: e is not None and not e.offset
    )
    batches = [disk.incarnation.append(some_entries(3, i), 100) for i in range(3)]
    disk.files.fail("sync", errno.EIO)
    disk.incarnation.write(batches[0], [disk.frame(0)])
    with pytest.raises(OSError, match="sync"):
        disk.incarnation.sync()
    disk.incarnation.write(batches[1], [disk.frame(1)])
    assert len(written) == head.hits == 2
    disk.incarnation.sync()
    disk.incarnation.write(batches[2], [disk.frame(2)])
    assert len(written) == 2
    assert len(disk.index()) == 9


def test_entries_that_are_not_written_fail_the_batch(disk: Disk) -> None:
    batch = disk.incarnation.append(some_entries(3, 0), 100)
    disk.files.shorten("write", where=lambda _, e: e is not None and e.offset == PAGE)
    with pytest.raises(OSError, match="index"):
        disk.incarnation.write(batch, [disk.frame(0)])


def test_only_what_was_written_whole_counts(disk: Disk) -> None:
    batch = disk.incarnation.append(some_entries(3, 0), 100)
    disk.files.fail("write", errno.EIO, where=lambda _, e: e == disk.frame(1))
    assert disk.incarnation.write(batch, [disk.frame(i) for i in range(3)]).tolist() == [True, False, True]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 90), st.integers(2, 40)), max_size=40), st.randoms(use_true_random=False))
def test_all_entries_are_there_in_whatever_order_batches_are_written(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[tuple[int, int]], order: object
) -> None:
    """Batches of any number and size of frames, as far as they fit the segment, find room in its index."""
    disk = Disk(tmp_path_factory.mktemp("incarnation"))
    left_bytes = disk.geometry.frame_pages * PAGE
    batches, appended = [], []
    for seed, (n, pages) in enumerate(sizes):
        n = min(n, left_bytes // (pages * PAGE))
        if not n:
            continue
        left_bytes -= n * pages * PAGE
        entries = some_entries(n, seed)
        batches.append(disk.incarnation.append(entries, left_bytes // FRAME_BYTES_MIN))
        appended.append(entries)
    spans = [(b.start // 64, -(-(b.start + b.n) // 64)) for b in batches]
    for i, batch in enumerate(batches):
        if batch.own_pages:
            assert all(j == i or end <= spans[i][0] or start >= spans[i][1] for j, (start, end) in enumerate(spans))
    order.shuffle(batches)  # type: ignore[attr-defined]
    for batch in batches:
        disk.incarnation.write(batch, [])
    if batches:
        expected = np.concatenate(appended)
        assert disk.index()["key"].tobytes() == expected["key"].tobytes()
    disk.incarnation.file.close()
