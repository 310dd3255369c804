"""The tier as its caller sees it: write, read, free, reopen; what is not live is a miss."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.errors import BadInputError, ConfigError, IntegrityError
from kvstore.native import aligned_bytes
from kvstore.tiers.nvme.tier import FrameState, NvmeTier

PAGE = 4096
ROOT = b"r" * 16


def test_what_was_written_is_read(rig: Any) -> None:
    keys = rig.put(25)
    assert len(keys) == 25
    assert rig.read(keys) == [True] * 25
    assert rig.tier.n_live == 25
    assert (rig.tier.keys(rig.slots(keys)) == np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 16)).all()
    rig.tier.check()


def test_frames_of_several_sizes_lie_side_by_side(rig: Any) -> None:
    keys = [key for pages in (2, 7, 3, 20, 2) for key in rig.put(6, pages=pages)]
    assert len(keys) == 30
    assert rig.read(keys) == [True] * 30


def test_nothing_is_live_before_it_is_durable_and_named(rig: Any) -> None:
    pending = rig.begin([rig.new_key()], [ROOT], 3)
    for step in (pending.job.write, pending.job.name):
        assert rig.tier.states(pending.slots).tolist() == [FrameState.WRITING]
        assert not _read(rig.tier, pending.slots)
        step()
    assert not _read(rig.tier, pending.slots)
    rig.finish(pending)
    assert _read(rig.tier, pending.slots)


def test_named_before_written_names_nothing(rig: Any) -> None:
    pending = rig.begin([rig.new_key()], [ROOT], 3)
    pending.job.name()
    assert rig.finish(pending) == []
    assert rig.reopen() == []


def test_a_freed_slot_is_a_miss_and_freeing_it_again_an_error(rig: Any) -> None:
    keys = rig.put(3)
    slots = rig.slots(keys)
    rig.tier.free(slots[1:])
    assert rig.tier.n_live == 1
    assert [_read(rig.tier, slots[i : i + 1]) for i in range(3)] == [True, False, False]
    with pytest.raises(IntegrityError, match="DYING"):
        rig.tier.free(slots[2:])
    assert rig.tier.n_live == 1


def test_a_slot_of_the_past_is_never_taken_for_its_successor(rig: Any) -> None:
    old = rig.slots(rig.put(5))
    rig.tier.free(old)
    rig.known.clear()
    keys = rig.put(1)  # its transaction takes the five names out
    for key in rig.put(5):
        assert rig.known[key].slot not in old.tolist()
    assert not rig.tier.states(old).any()
    assert not any(_read(rig.tier, old[i : i + 1]) for i in range(5))
    with pytest.raises(IntegrityError, match="is free"):
        rig.tier.keys(old)
    assert rig.read(keys) == [True]


def test_freed_while_it_is_written(rig: Any) -> None:
    keys = [rig.new_key() for _ in range(3)]
    pending = rig.begin(keys, [ROOT] * 3, 3)
    rig.tier.free(pending.slots[1:2])
    pending.job.write()
    pending.job.name()
    assert rig.finish(pending) == [keys[0], keys[2]]
    rig.put(1)
    rig.tier.check()
    assert keys[1] not in rig.reopen()


def test_a_reserved_slot_may_be_given_back(rig: Any) -> None:
    free = rig.tier.free_slots(3 * PAGE)
    slots = rig.tier.allocate(3 * PAGE, 4)
    assert rig.tier.free_slots(3 * PAGE) == free - 4
    rig.tier.free(slots)
    assert not rig.tier.states(slots).any()
    rig.tier.check()


@pytest.mark.parametrize("gone", ["write", "free"])
def test_a_child_is_not_named_without_its_parent(rig: Any, gone: str) -> None:
    """The data of the second batch is written while the first is on its way; then the first one fails."""
    first, second, third = (rig.new_key() for _ in range(3))
    one = rig.begin([first], [ROOT], 3)
    two = rig.begin([second, third], [first, second], 3)
    other = rig.begin([rig.new_key()], [ROOT], 3)
    if gone == "free":
        rig.tier.free(one.slots)
        one.job.write()
    for pending in (two, other):
        pending.job.write()
    for pending in (one, two, other):
        pending.job.name()
    assert rig.finish(one) == []
    live = rig.finish(two)
    assert live == ([] if gone == "write" else [second, third])
    assert rig.finish(other)
    rig.tier.check()
    if gone == "free":
        rig.put(1)
    assert set(rig.reopen()) == set(rig.known)
    assert second not in rig.known  # without its parent it is not served again


def test_two_jobs_in_flight_share_a_segment(rig: Any) -> None:
    """Whichever is written first: entries of both are found when the catalog is lost."""
    for order in ((0, 1), (1, 0)):
        pair = [rig.begin([rig.new_key()], [ROOT], 2) for _ in range(2)]
        for i in order:
            pair[i].job.write()
        for pending in pair:
            pending.job.name()
            assert rig.finish(pending)
    rig.tier.close()
    shutil.rmtree(rig.directory / "catalog")
    before = set(rig.known)
    rig.open()
    assert set(rig.take_recovered()) == before


def test_reopened_in_order_of_writing_with_parents_first(rig: Any) -> None:
    first = rig.put(4)
    second = rig.put(4, parent=first[1])
    third = rig.put(30, pages=2, chain=False)
    assert rig.reopen() == first + second + third
    assert rig.read(first + third) == [True] * 34
    assert rig.reopen() == first + second + third


def test_the_order_of_writing_outlives_moves(rig: Any) -> None:
    while rig.tier.stats()["moved_frames"] < 60:
        keys = list(rig.known)
        n_short = rig.tier.short_of(3 * PAGE, 8)
        rig.free([keys[i] for i in rig.rng.permutation(len(keys))[:n_short]])
        rig.compact()
        rig.put(8, chain=False)
    in_order = list(rig.known)  # a dict keeps the order in which they were written
    assert rig.reopen() == in_order


def test_a_parent_written_again_comes_before_its_children(rig: Any) -> None:
    parent, child = rig.put(2)
    rig.tier.quarantine(rig.slots([parent]))
    del rig.known[parent]
    again = rig.begin([parent], [ROOT], 3)
    again.job.write()
    again.job.name()
    assert rig.finish(again) == [parent]
    assert rig.reopen() == [parent, child]


def test_below_a_frame_that_was_lost_nothing_is_found(rig: Any) -> None:
    keys = rig.put(5)
    others = rig.put(2)
    rig.tier.quarantine(rig.slots(keys[1:2]))
    assert rig.compact() == 1  # a quarantined name doesn't wait for the next write
    assert rig.tier.stats()["quarantined_frames"] == 1
    rig.abandon()
    rig.open()
    assert rig.take_recovered() == [keys[0], *others]
    assert rig.tier.stats()["dropped_orphans"] == 3
    rig.put(1)
    assert keys[2] not in rig.reopen()
    assert rig.tier.stats()["dropped_orphans"] == 0


def test_names_of_the_dead_go_at_the_end(rig: Any) -> None:
    keys = rig.put(4)
    rig.free(keys[2:])
    assert rig.reopen() == keys[:2]


def test_recovered_is_asked_once(rig: Any) -> None:
    rig.tier.recovered()
    with pytest.raises(IntegrityError, match="before"):
        rig.tier.recovered()


def test_namespaces_are_numbered_and_kept_as_long_as_frames_need_them(rig: Any) -> None:
    number = rig.tier.name_namespace(b"another-digest!!", '{"b": 2}')
    assert rig.tier.name_namespace(b"another-digest!!", '{"b": 2}') == number != rig.number
    rig.put(1)
    rig.reopen()
    assert rig.tier.namespaces() == {rig.number: (b"namespace-digest", "{}")}
    with pytest.raises(BadInputError, match="16 bytes"):
        rig.tier.name_namespace(b"short", "")


def test_what_can_not_be_stored_is_refused_before_any_change(rig: Any) -> None:
    tier = rig.tier
    for size in (PAGE, 2 * PAGE + 1, 31 * PAGE):
        with pytest.raises(BadInputError):
            tier.allocate(size, 1)
    slots = tier.allocate(2 * PAGE, 2)
    memory = aligned_bytes(4 * PAGE)
    base = int(memory.ctypes.data)
    good: dict[str, Any] = {
        "keys": np.zeros((2, 16), np.uint8),
        "parents": np.ones((2, 16), np.uint8),
        "namespaces": np.full(2, rig.number, np.uint32),
        "payload_bytes": np.full(2, PAGE, np.uint32),
        "buffers": [((base, 2 * PAGE),), ((base + 2 * PAGE, 2 * PAGE),)],
    }
    for name, bad in (
        ("keys", np.zeros((1, 16), np.uint8)),
        ("parents", np.zeros((2, 8), np.uint8)),
        ("namespaces", np.full(2, 77, np.uint32)),
        ("payload_bytes", np.full(2, 2 * PAGE, np.uint32)),
        ("buffers", [((base, PAGE),), ((base, 2 * PAGE),)]),
    ):
        with pytest.raises(BadInputError):
            tier.begin_write(slots, **{**good, name: bad})
    for bad_slots in (slots[[0, 0]], slots + (1 << 32)):
        with pytest.raises(IntegrityError):
            tier.begin_write(bad_slots, **good)
    assert tier.states(slots).tolist() == [FrameState.RESERVED] * 2
    tier.free(slots)


def test_more_bytes_than_the_frame_has_do_not_arrive(rig: Any) -> None:
    (key,) = rig.put(1, pages=3)
    memory = aligned_bytes(8 * PAGE)
    at = np.array([memory.ctypes.data], np.uint64)
    for pages, arrives in ((1, True), (2, True), (3, False)):
        job = rig.tier.begin_read(rig.slots([key]), at, at + np.uint64(PAGE), PAGE, pages * PAGE)
        job.run()
        assert rig.tier.finish_read(job).tolist() == [arrives]


def test_a_directory_has_one_user(rig: Any) -> None:
    with pytest.raises(ConfigError, match="in use"):
        NvmeTier(rig.directory, 3 << 20, lambda _: None)


def test_capacity_too_small_says_how_much(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least"):
        NvmeTier(tmp_path, 1 << 20, lambda _: None)
    NvmeTier(tmp_path, 16 << 20, lambda _: None).close()  # the failed try left nothing that stands in the way


def test_it_evicts_by_need_and_never_asks_for_more(rig: Any) -> None:
    """short_of is what has to go; once it has gone, that many fit, at the latest after compaction."""
    n_total = rig.tier.live_capacity_bytes // (3 * PAGE)
    live: list[bytes] = []
    for _ in range(60):
        short = rig.tier.short_of(3 * PAGE, 8)
        assert 0 <= short <= 8
        rig.free(live[:short])
        live = live[short:]
        assert rig.tier.short_of(3 * PAGE, 8) == 0
        rig.compact()
        new = rig.put(8)
        assert len(new) == 8
        live += new
    assert n_total * 0.8 < len(live) <= n_total
    assert rig.read(live) == [True] * len(live)


def _read(tier: NvmeTier, slots: Any) -> bool:
    memory = aligned_bytes(3 * PAGE)
    at = np.array([memory.ctypes.data], np.uint64)
    job = tier.begin_read(slots, at, at + np.uint64(PAGE), PAGE, 2 * PAGE)
    job.run()
    return bool(tier.finish_read(job)[0])


def test_another_capacity(rig: Any, rig_at: Callable[..., Any]) -> None:
    """More room is used; with less, what doesn't fit is dropped and whole prefixes stay."""
    live = []
    while new := rig.put(10, pages=2):
        live += new
    n_before = len(live)
    assert set(rig.reopen(capacity_bytes=5 << 20)) == set(live)
    while new := rig.put(10, pages=2):
        live += new
    assert len(live) > 1.5 * n_before
    kept = rig.reopen(capacity_bytes=2 << 20)
    assert 0 < len(kept) < n_before
    assert rig.tier.stats()["removed_segments"] > 0
    assert rig.read(kept) == [True] * len(kept)
    rig.tier.check()
    assert rig.reopen(capacity_bytes=2 << 20) == kept
