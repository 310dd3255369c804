"""What every tier has to do, judged by its memory or its files and not by what it says of itself.

A new tier joins by a ``Harness`` of its own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore.errors import IntegrityError
from tests.tiers.harness import BLOCK_BYTES, DramHarness, Harness, Int64s, NvmeHarness
from tests.tiers.hbm_harness import HbmHarness

TIERS: list[Callable[[Path], Harness]] = [DramHarness, NvmeHarness, HbmHarness]
NAMES = ["dram", "nvme", "hbm"]


@pytest.fixture(params=TIERS, ids=NAMES)
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Harness]:
    made: Harness = request.param(tmp_path / "tier")
    yield made
    assert made.taken_bytes() <= made.capacity_bytes
    made.close()


class Source:
    """Bytes that are never the same twice."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def __call__(self, n: int) -> list[bytes]:
        return [self._rng.bytes(BLOCK_BYTES) for _ in range(n)]


@pytest.fixture
def source() -> Source:
    return Source(1)


def store(tier: Harness, contents: list[bytes]) -> Int64s:
    """For what fits: a tier that has to gather its room may give it piece by piece."""
    given = [np.empty(0, np.int64)]
    for _ in contents:
        slots = tier.allocate(len(contents) - sum(map(len, given)))
        tier.fill(slots, contents[sum(map(len, given)) :][: len(slots)])
        if len(slots):
            tier.commit(slots)
        given.append(slots)
        if sum(map(len, given)) == len(contents):
            return np.concatenate(given)
        tier.settle()
    raise AssertionError(f"there was room for {sum(map(len, given))} of {len(contents)} blocks")


def test_reserved_blocks_are_found_by_nobody(tier: Harness, source: Source) -> None:
    contents = source(5)
    slots = tier.allocate(5)
    assert len(slots) == len(set(slots.tolist())) == 5
    assert tier.findable() == set()
    tier.fill(slots, contents)
    assert tier.findable() == set()
    tier.commit(slots)
    assert tier.findable() == set(contents)


def test_committed_bytes_are_there_and_stay_while_others_come_and_go(tier: Harness, source: Source) -> None:
    contents = source(9)
    slots = store(tier, contents)
    for round_ in range(30):
        others = store(tier, source(7 + round_ % 3))
        tier.free(others)
        tier.settle()
        assert [tier.lies_at(slot) for slot in slots.tolist()] == contents
        assert tier.serve(slots) == contents
        tier.check()


def test_all_that_is_promised_fits_and_full_is_no_error(tier: Harness, source: Source) -> None:
    slots = store(tier, source(tier.n_fit))
    assert len(tier.allocate(1)) == len(tier.allocate(1000)) == 0
    assert len(tier.findable()) == tier.n_fit
    tier.free(slots[:4])
    tier.settle()
    assert len(tier.allocate(1000)) == 4
    tier.check()


def test_what_is_freed_is_gone_and_its_room_comes_back(tier: Harness, source: Source) -> None:
    contents = source(tier.n_fit)
    slots = store(tier, contents)
    for _ in range(4):
        gone = contents[::2]
        tier.free(slots[::2])
        tier.settle()
        assert set(contents[1::2]) <= tier.findable() <= set(contents)
        contents[::2] = source(len(gone))
        slots[::2] = store(tier, contents[::2])
        assert set(contents) <= tier.findable() <= set(contents) | set(gone)
        assert tier.serve(slots) == contents
        tier.check()


def test_reserved_blocks_can_be_given_back(tier: Harness) -> None:
    for _ in range(3):
        slots = tier.allocate(tier.n_fit)
        assert len(slots) == tier.n_fit
        tier.free(slots)
        tier.settle()
    assert tier.findable() == set()
    tier.check()


def test_a_slot_that_is_used_again_can_be_told_from_its_earlier_use(tier: Harness, source: Source) -> None:
    seen: set[object] = set()
    for _ in range(6):
        slots = store(tier, source(tier.n_fit // 2))
        now = {tier.identity(slot) for slot in slots.tolist()}
        assert len(now) == len(slots)
        assert not now & seen
        seen |= now
        tier.free(slots)
        tier.settle()


@pytest.mark.parametrize("wrong", ["freed before", "given twice", "never given", "negative"])
def test_wrong_slots_are_refused_and_nothing_changes(tier: Harness, source: Source, wrong: str) -> None:
    contents, gone = source(4), source(1)
    slots = store(tier, contents)
    dead = store(tier, gone)
    tier.free(dead)
    tier.settle()
    bad = {
        "freed before": np.append(slots, dead),
        "given twice": np.append(slots, slots[:1]),
        "never given": np.append(slots, slots.max() + 12345),
        "negative": np.append(slots, -1),
    }[wrong]
    with pytest.raises(IntegrityError):
        tier.free(bad)
    assert set(contents) <= tier.findable() <= set(contents + gone)
    assert tier.serve(slots) == contents
    tier.check()


@pytest.mark.parametrize("kind", TIERS, ids=NAMES)
def test_check_finds_planted_contradictions(kind: type[Harness], tmp_path: Path, source: Source) -> None:
    for number, (words, damage) in enumerate(kind.contradictions.items()):
        tier: Harness = kind(tmp_path / str(number))  # type: ignore[call-arg]
        store(tier, source(3))
        tier.allocate(2)
        tier.check()
        damage(tier)
        with pytest.raises(IntegrityError, match=words):
            tier.check()
        tier.close()


@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_calls_agrees_with_a_dictionary(tier: Harness, seed: int) -> None:
    """And the capacity holds after every one of them."""
    dice, source = random.Random(seed), Source(seed)
    reserved: list[tuple[Int64s, list[bytes]]] = []
    live: dict[int, bytes] = {}
    freed: set[bytes] = set()

    def check() -> None:
        assert tier.taken_bytes() <= tier.capacity_bytes
        assert set(live.values()) <= tier.findable() <= set(live.values()) | freed
        for slot, content in live.items():
            assert tier.lies_at(slot) == content
        tier.check()

    def reserve() -> None:
        n_used = len(live) + sum(len(slots) for slots, _ in reserved)
        n = dice.randrange(1, 14)
        slots = tier.allocate(n)
        assert n_used + len(slots) <= tier.n_fit
        if len(slots):
            contents = source(len(slots))
            tier.fill(slots, contents)
            reserved.append((slots, contents))

    def commit() -> None:
        if reserved:
            slots, contents = reserved.pop(0)
            tier.commit(slots)
            live.update(zip(slots.tolist(), contents, strict=True))

    def free() -> None:
        gone = dice.sample(sorted(live), dice.randrange(len(live) + 1))
        tier.free(np.array(gone, np.int64))
        for slot in gone:
            freed.add(live.pop(slot))

    def serve() -> None:
        slots = np.array(sorted(live), np.int64)
        assert tier.serve(slots) == [live[slot] for slot in slots.tolist()]

    for _ in range(60):
        dice.choice([reserve, reserve, commit, commit, free, tier.settle, serve])()
        check()
    while reserved:
        commit()
    tier.settle()
    check()


# Tiers whose bytes leave memory --------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[NvmeHarness]:
    made = NvmeHarness(tmp_path / "tier")
    yield made
    made.close()


@pytest.mark.parametrize("at", [0, 9, 14, 40, 64, 80, 88, 104, 135, 4087, 4095, 4096, 6000, 8191])
def test_a_block_with_one_wrong_bit_is_not_served(disk: NvmeHarness, source: Source, at: int) -> None:
    contents = source(3)
    slots = store(disk, contents)
    disk.tamper(int(slots[1]), at)
    assert disk.serve(slots) == [contents[0], None, contents[2]]


@pytest.mark.parametrize("n_bytes", [0, 1, 4096, 12 * 4096])
def test_a_block_whose_file_was_cut_is_not_served(disk: NvmeHarness, source: Source, n_bytes: int) -> None:
    slots = store(disk, source(7))
    path = disk.named()[0].path
    os_size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(n_bytes)
    served = disk.serve(slots)
    assert os_size > n_bytes
    for slot, content in zip(slots.tolist(), served, strict=True):
        assert content in (None, disk.contents[slot])
    assert None in served


@pytest.mark.parametrize("clean", [True, False])
def test_what_was_committed_is_found_by_the_next_process_and_nothing_else(
    disk: NvmeHarness, source: Source, clean: bool
) -> None:
    kept, freed, reserved = source(20), source(6), source(3)
    slots = store(disk, kept)
    gone = store(disk, freed)
    disk.free(gone)
    if clean:
        disk.settle()
    more = disk.allocate(3)
    if not clean:
        disk.fill(more, reserved)
    found = disk.reopen(clean)
    assert set(found) - set(freed if not clean else ()) == set(kept)
    again = np.array([found[content] for content in kept], np.int64)
    assert disk.serve(again) == kept
    disk.check()
    assert len(slots) == len(again)
    assert len(disk.allocate(1000)) == disk.n_fit - len(found)
