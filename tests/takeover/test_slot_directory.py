"""The slot directory: no half label is ever seen, whenever its writer dies."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvstore.errors import IntegrityError
from kvstore.tiers import memfd
from kvstore.tiers.directory import FormerDirectory, Labels, SlotDirectory

N_PLACES = 10_000


class Died(BaseException):
    """The process is gone."""


@pytest.fixture
def directory() -> Iterator[SlotDirectory]:
    made = SlotDirectory(N_PLACES)
    made.valid = True
    yield made
    made.close()


def labels(n: int, seed: int = 0) -> Labels:
    rng = np.random.default_rng(seed)

    def keys() -> Any:
        return rng.integers(0, 256, (n, 16), dtype=np.uint8)

    sizes = rng.integers(1, 1 << 32, n, dtype=np.uint32)
    return Labels(keys(), keys(), rng.random(n) < 0.5, keys(), sizes, rng.random(n))


def same(a: Labels, b: Labels) -> bool:
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in Labels.__dataclass_fields__)


def test_what_was_published_is_found(directory: SlotDirectory) -> None:
    places = np.array([9_999, 0, 17], np.int64)
    wanted = labels(3)
    directory.publish(places, wanted)
    former = FormerDirectory(directory.fd)
    assert former.labelled(0, N_PLACES).tolist() == [0, 17, 9_999]
    assert former.labelled(10, 100).tolist() == [7]
    assert same(former.labels(places), wanted)
    assert directory.has_label(np.array([0, 1])).tolist() == [True, False]


def test_ranks_change_and_freed_slots_are_gone(directory: SlotDirectory) -> None:
    places = np.arange(5)
    directory.publish(places, labels(5))
    directory.note_ranks(places[:2], np.array([7.5, 8.5]))
    directory.forget(places[1:3])
    former = FormerDirectory(directory.fd)
    assert former.labelled(0, 100).tolist() == [0, 3, 4]
    assert former.labels(places[:1]).ranks.tolist() == [7.5]


class DiesAt:
    """Stands for the columns; the store number ``n`` is made in part, then the process dies."""

    def __init__(self, columns: Any, n: int) -> None:
        self._columns = columns
        self.left = n

    def __getattr__(self, name: str) -> Any:
        column = getattr(self._columns, name)
        outer = self

        class Column:
            def __setitem__(self, places: Any, values: Any) -> None:
                if outer.left == 0:
                    half = len(places) // 2
                    column[places[:half]] = values[:half] if np.ndim(values) else values
                    raise Died
                outer.left -= 1
                column[places] = values

            def __getitem__(self, places: Any) -> Any:
                return column[places]

        return Column()


@pytest.mark.parametrize("store", range(6))
def test_a_writer_that_dies_at_any_store_leaves_whole_labels_only(directory: SlotDirectory, store: int) -> None:
    """Places that had another label before: neither that one nor a mixture may come back."""
    places = np.arange(8)
    before, after = labels(8, 1), labels(8, 2)
    directory.publish(places, before)
    directory.forget(places)
    directory._columns = DiesAt(directory._columns, store)  # type: ignore[assignment]
    with pytest.raises(Died):
        directory.publish(places, after)
    former = FormerDirectory(directory.fd)
    seen = former.labelled(0, 100)
    assert len(seen) == (4 if store == 5 else 0)  # the state bytes are the sixth and last column
    assert same(former.labels(seen), after.take(seen))


def test_slots_wait_for_their_labels_once(directory: SlotDirectory) -> None:
    directory.committed(np.array([5, 3]))
    directory.committed(np.array([], np.int64))
    directory.committed(np.array([3, 9]))
    assert directory.take_committed().tolist() == [3, 5, 9]
    assert directory.take_committed().tolist() == []


def test_one_that_is_not_valid_is_not_believed(directory: SlotDirectory) -> None:
    directory.valid = False
    with pytest.raises(IntegrityError, match="given up"):
        FormerDirectory(directory.fd)
    fresh = SlotDirectory(10)
    with pytest.raises(IntegrityError, match="given up"):
        FormerDirectory(fresh.fd)
    fresh.close()


@pytest.mark.parametrize("header", [b"", b"KVSLOTS\0", bytes(64), b"KVSLOTS\0\2\0\0\0\1\0\0\0" + bytes(16)])
def test_other_files_are_refused(header: bytes) -> None:
    fd = memfd.create("other", 0 if not header else memfd.PAGE_BYTES)
    os.pwrite(fd, header, 0)
    with pytest.raises(IntegrityError, match="slot directory"):
        FormerDirectory(fd)
    os.close(fd)


def test_lengths_are_checked(directory: SlotDirectory) -> None:
    former = FormerDirectory(directory.fd)
    for base, n in ((-1, 5), (0, N_PLACES + 1), (N_PLACES, 1), (5, -1)):
        with pytest.raises(IntegrityError, match="places"):
            former.labelled(base, n)
    os.pwrite(directory.fd, (N_PLACES + 5000).to_bytes(8, "little"), 16)
    with pytest.raises(IntegrityError, match="bytes"):
        FormerDirectory(directory.fd)


def test_nobody_can_resize_it_and_a_place_costs_little(directory: SlotDirectory) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(directory.fd, 0)
    huge = SlotDirectory(1 << 30)
    huge.publish(np.arange(4096), labels(4096))
    assert os.fstat(huge.fd).st_blocks * 512 <= 4096 * 61 + 8 * memfd.PAGE_BYTES
    huge.close()


def test_closed_twice_it_says_so_when_used(directory: SlotDirectory) -> None:
    directory.close()
    directory.close()
    with pytest.raises(IntegrityError, match="closed"):
        directory.forget(np.arange(1))
