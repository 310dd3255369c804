"""Clearing namespaces: found by nobody from that moment, gone from every tier bit by bit, whatever else goes on."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.errors import EndedError
from kvstore.lease import Lease
from kvstore.store import clearing
from kvstore.store.clearing import DROP_BLOCKS, Stage
from kvstore.store.events import Kind
from kvstore.store.hierarchy import WriteBehind
from kvstore.store.requests import Prompt
from kvstore.tiers.nvme.crash import MODES
from tests.store.rig import Rig
from tests.store.two_tier import Settings, Sizes, TwoTierRig, nvme_bytes_for

KIB = 1 << 10
MakeRig = Callable[..., Rig]
MakeTwoTier = Callable[..., TwoTierRig]


@pytest.fixture
def two_tiers(tmp_path: Path) -> Iterator[MakeTwoTier]:
    """``two_tiers(settings)``: each is checked and closed at the end, unless it has ended."""
    made: list[TwoTierRig] = []

    def make(settings: Settings | None = None) -> TwoTierRig:
        made.append(TwoTierRig(tmp_path / str(len(made)), settings))
        return made[-1]

    yield make
    for rig in made:
        if not rig.ended:
            rig.close()


def clear(rig: Rig, *prompts: Prompt) -> int:
    """Clear the namespaces of these prompts; how many blocks could be found."""
    hidden = rig.store.clear({prompt.namespace.ordinal for prompt in prompts})
    return sum(each.n_blocks for each in hidden.values())


def durable(rig: Rig) -> bool:
    return rig.store.clearing.is_durable


def finish(rig: Rig) -> None:
    """Let everything go that can."""
    if isinstance(rig, TwoTierRig):
        rig.settle()
    while rig.store.clearing.step():
        rig.store.check()


def store_era(rig: Rig, prompt: Prompt, era: int) -> int:
    """Store a prompt with bytes that say which era they are of; how many blocks were stored."""
    reservation = rig.reserve(1, prompt)
    if not len(reservation.slots):
        return 0
    rig.map_regions(1, reservation.slots, writable=True)
    for slot in reservation.slots.tolist():
        rig.dram.view(slot)[: reservation.block_bytes] = era
    return rig.store.commit(1, reservation.id).n_committed


def eras(rig: Rig, lease: Lease) -> set[int]:
    """What the blocks of a lease hold."""
    return {int(value) for data in rig.bytes_at(rig.slots_of(lease)) for value in data[:: len(data) - 1]}


def test_only_the_namespaces_named_are_cleared(rig: Rig) -> None:
    mine, other = rig.rows(4, 1), rig.rows(3, 1, namespace=rig.namespace(revision="other"))
    rig.put(1, mine)
    rig.put(1, other)
    assert clear(rig, mine) == 4
    assert (rig.found(mine), rig.found(other)) == (0, 3)
    finish(rig)
    assert rig.store.clearing.n_left_blocks == 0
    assert rig.dram_bytes()["used"] == 3 * 4 * KIB
    assert rig.count("cleared_blocks") == 4


def test_all_salts_of_a_namespace_go(rig: Rig) -> None:
    prompts = [rig.rows(2, 1, salt=salt, lora=lora) for salt in ("", "a", "b") for lora in ("", "x")]
    for prompt in prompts:
        rig.put(1, prompt)
    assert clear(rig, prompts[0]) == 12
    assert [rig.found(prompt) for prompt in prompts] == [0] * 6
    finish(rig)
    assert rig.dram_bytes()["used"] == 0


def test_a_reader_keeps_its_bytes_while_the_same_prompt_is_stored_anew(rig: Rig) -> None:
    prompt = rig.rows(3, 1)
    assert store_era(rig, prompt, 1) == 3
    lease = rig.store.lease(2, prompt)
    assert clear(rig, prompt) == 3
    finish(rig)
    assert rig.store.clearing.n_left_blocks == 3
    assert rig.store.lease(2, prompt).id == 0
    assert store_era(rig, prompt, 2) == 3
    fresh = rig.store.lease(3, prompt)
    assert (eras(rig, lease), eras(rig, fresh)) == ({1}, {2})
    rig.store.release(2, lease.id)
    finish(rig)
    assert rig.store.clearing.n_left_blocks == 0
    assert eras(rig, fresh) == {2}


def test_a_reservation_of_before_can_not_be_committed_and_its_client_is_told(rig: Rig) -> None:
    prompt, other = rig.rows(3, 1), rig.rows(3, 1, namespace=rig.namespace(revision="other"))
    ended, kept = rig.reserve(1, prompt), rig.reserve(1, other)
    clear(rig, prompt)
    assert rig.dram_bytes()["quarantined"] == 3 * 4 * KIB
    assert [claim.id for claim in rig.store.expire()] == [ended.id]
    assert rig.store.expire() == []
    with pytest.raises(EndedError):
        rig.store.commit(1, ended.id)
    assert rig.dram_bytes()["quarantined"] == 0
    assert rig.found(prompt) == 0
    assert rig.store.commit(1, kept.id).n_committed == 3


def test_a_step_takes_a_bounded_number_of_blocks(make_rig: MakeRig) -> None:
    rig = make_rig(capacity_bytes=4096 * KIB, region_bytes=1024 * KIB)
    for tag in range(10):
        rig.put(1, rig.rows(90, tag))
    n = rig.store.index.n_blocks
    assert n == 900
    clear(rig, rig.rows(1, 0))
    steps = 0
    while rig.store.clearing.step():
        left = rig.store.clearing.n_left_blocks
        assert n - left <= DROP_BLOCKS
        n, steps = left, steps + 1
        rig.store.check()
    assert n == 0
    assert steps >= 900 / DROP_BLOCKS


def test_names_on_nvme_are_gone_for_good_and_what_is_being_written_gets_none(two_tiers: MakeTwoTier) -> None:
    rig = two_tiers()
    written, under_way, queued = rig.rows(5, 1), rig.rows(4, 2), rig.rows(3, 3)
    rig.put(1, written)
    rig.settle()
    rig.put(1, under_way)
    (write,) = rig.jobs.runnable()
    rig.jobs.run(write)  # on the disk, not yet named
    rig.put(1, queued)
    assert clear(rig, written) == 12
    while rig.store.clearing.step():
        pass
    assert rig.store.clearing.n_left_names > 0
    finish(rig)
    assert durable(rig)
    assert rig.store.clearing.n_left_names == 0
    assert rig.stat("blocks") == rig.stat("nvme_live_frames") == rig.stat("nvme_names_to_remove") == 0
    rig.store.check()
    again = rig.killed()
    assert [again.found(each) for each in (written, under_way, queued)] == [0, 0, 0]
    again.close()


def test_it_is_not_called_durable_before_the_names_are_gone(two_tiers: MakeTwoTier) -> None:
    rig = two_tiers()
    prompt = rig.rows(6, 1)
    rig.put(1, prompt)
    rig.settle()
    lease = rig.store.lease(2, prompt)
    clear(rig, prompt)
    while rig.store.clearing.step():
        pass
    rig.jobs.take()
    assert not durable(rig)
    finish(rig)
    assert durable(rig)  # though its blocks are being read
    assert rig.store.clearing.n_left_blocks == 6
    rig.store.release(2, lease.id)
    finish(rig)
    assert rig.store.clearing.n_left_blocks == 0


def test_a_block_that_is_being_read_from_nvme_is_not_served(two_tiers: MakeTwoTier) -> None:
    rig = two_tiers(Settings(Sizes(dram_bytes=64 * KIB)))
    prompt = rig.rows(8, 1)
    store_era(rig, prompt, 1)
    rig.settle()
    rig.put(1, rig.rows(14, 2, namespace=rig.namespace(revision="other")))  # drives it out of DRAM
    rig.settle()
    load = rig.store.begin_load(prompt)
    assert load is not None
    clear(rig, prompt)
    rig.store.events.watched(rig.clock.now_s())
    seq = rig.store.events.last_seq
    finish(rig)
    assert {batch.kind for batch in rig.store.events.after(seq, 1000).batches} == {Kind.REMOVED}
    assert rig.store.lease(2, prompt, load=load).id == 0
    rig.store.end_load(load)
    finish(rig)
    assert rig.store.clearing.n_left_blocks == 0
    rig.store.check()


def test_blocks_known_by_key_only_are_not_found_either(two_tiers: MakeTwoTier) -> None:
    first = two_tiers()
    prompt, other = first.rows(5, 1), first.rows(4, 1, namespace=first.namespace(revision="other"))
    for each in (prompt, other):
        first.put(1, each)
    first.settle()
    rig = first.killed()
    prompt, other = rig.rows(5, 1), rig.rows(4, 1, namespace=rig.namespace(revision="other"))
    assert rig.store.index.n_cold_blocks == 9
    assert clear(rig, prompt) == 5
    assert rig.found(prompt) == 0
    finish(rig)
    assert rig.found(other) == 4
    rig.store.check()
    assert rig.stat("nvme_live_frames") == 4
    rig.close()


@pytest.mark.parametrize("seed", range(6))
def test_after_a_power_cut_in_the_middle_what_is_found_is_whole_and_of_one_era(
    tmp_path: Path, two_tiers: MakeTwoTier, seed: int
) -> None:
    """Some blocks of before may be back; none has a descendant's or another era's bytes, and none lacks an ancestor."""
    dice = random.Random(seed)
    rig = two_tiers(Settings(Sizes(nvme_bytes=nvme_bytes_for(16)), durability=True))
    lengths = [dice.randint(1, 5) for _ in range(4)]
    prompts = [rig.rows(n, tag) for tag, n in enumerate(lengths)]
    for prompt in prompts:
        store_era(rig, prompt, 1)
    rig.settle(dice)
    clear(rig, prompts[0])
    for _ in range(dice.randint(0, 3)):
        rig.store.clearing.step()
    store_era(rig, dice.choice(prompts), 2)
    for _ in range(dice.randint(0, 6)):
        rig.jobs.step(dice)
    was_durable = rig.store.clearing.is_durable
    again = rig.power_cut(tmp_path / "after", dice.choice(MODES), seed)
    for tag, n in enumerate(lengths):
        lease = again.read(1, again.rows(n, tag))
        if lease.id:
            assert eras(again, lease) <= ({2} if was_durable else {1, 2})
            again.store.release(1, lease.id)
    again.store.check()
    again.close()


@pytest.mark.parametrize("seed", range(10))
def test_no_order_of_events_brings_an_old_era_back(two_tiers: MakeTwoTier, seed: int) -> None:
    """Clearings among everything else a store does; each prompt is found with bytes of its present era only."""
    dice = random.Random(seed)
    rig = two_tiers(Settings(write=WriteBehind(queue_bytes_max=64 * KIB)))
    spaces = [rig.namespace(revision=str(i)) for i in range(2)]
    era = {space.ordinal: 1 for space in spaces}
    prompts = [rig.rows(dice.randint(1, 6), tag, namespace=space) for space in spaces for tag in range(5)]
    held: list[tuple[Lease, int]] = []

    def lease() -> None:
        prompt = dice.choice(prompts)
        taken = rig.read(2, prompt) if dice.random() < 0.3 else rig.store.lease(2, prompt)
        if taken.id:
            assert eras(rig, taken) == {era[prompt.namespace.ordinal]}
            held.append((taken, era[prompt.namespace.ordinal]))

    def release() -> None:
        if held:
            taken, then = held.pop(dice.randrange(len(held)))
            assert eras(rig, taken) == {then}
            rig.store.release(2, taken.id)

    def put() -> None:
        prompt = dice.choice(prompts)
        store_era(rig, prompt, era[prompt.namespace.ordinal])

    def wipe() -> None:
        space = dice.choice(spaces)
        rig.store.clear({space.ordinal})
        era[space.ordinal] += 1

    def some_jobs() -> None:
        for _ in range(dice.randint(1, 6)):
            rig.jobs.step(dice)

    def tick() -> None:
        rig.clock.advance(0.05)
        rig.unmap_retired()
        rig.store.tick()

    actions = [(put, 8), (lease, 6), (release, 5), (some_jobs, 8), (tick, 6), (wipe, 2)]
    for _ in range(250):
        dice.choices([action for action, _ in actions], [weight for _, weight in actions])[0]()
        rig.store.check()
    while held:
        release()
    finish(rig)
    rig.settle()
    assert rig.store.clearing.n_left_blocks == 0
    assert durable(rig)


def test_cleared_blocks_do_not_come_back_with_a_rebuilt_catalog(two_tiers: MakeTwoTier) -> None:
    rig = two_tiers()
    prompt, other = rig.rows(4, 1), rig.rows(3, 1, namespace=rig.namespace(revision="other"))
    for each in (prompt, other):
        store_era(rig, each, 1)
    rig.settle()
    clear(rig, prompt)
    finish(rig)
    assert durable(rig)
    again_stored = rig.rows(2, 5)
    store_era(rig, again_stored, 2)
    rig.settle()
    rig.abandon()
    shutil.rmtree(rig.directory / "catalog")
    again = rig.reopened(rig.directory)
    assert again.stat("nvme_rebuilt") == 1
    assert again.found(again.rows(4, 1)) == 0
    assert again.found(again.rows(3, 1, namespace=again.namespace(revision="other"))) == 3
    assert again.found(again.rows(2, 5)) == 2
    again.close()


def test_it_is_not_durable_while_that_can_not_be_written_down(two_tiers: MakeTwoTier) -> None:
    rig = two_tiers()
    prompt = rig.rows(3, 1)
    rig.put(1, prompt)
    rig.settle()
    obstacle = rig.directory / "cleared.json"
    obstacle.mkdir()
    clear(rig, prompt)
    finish(rig)
    assert not durable(rig)
    assert rig.store.clearing.n_left_names > 0
    obstacle.rmdir()
    for _ in range(40):  # it is tried again by itself
        finish(rig)
    assert durable(rig)


@pytest.mark.parametrize("seed", range(25))
def test_from_the_moment_that_it_is_durable_a_crash_brings_nothing_back(two_tiers: MakeTwoTier, seed: int) -> None:
    """Whatever is being written or read when namespaces are cleared, and in whatever order that ends."""
    dice = random.Random(seed)
    rig = two_tiers()
    lengths = [dice.randint(1, 4) for _ in range(6)]
    for tag, n in enumerate(lengths):
        rig.put(1, rig.rows(n, tag))
        for _ in range(dice.randint(0, 4)):
            rig.jobs.step(dice)
    clear(rig, rig.rows(1, 0))
    while not durable(rig):
        for _ in range(dice.randint(0, 3)):
            rig.store.clearing.step()
        if rig.jobs.step(dice) is None:
            rig.clock.advance(0.05)
            rig.store.tick()
    again = rig.killed()
    assert [again.found(again.rows(n, tag)) for tag, n in enumerate(lengths)] == [0] * 6
    again.close()


def stage(rig: Rig) -> Stage:
    return rig.store.clearing._stage


def test_stages_are_passed_in_order(two_tiers: MakeTwoTier) -> None:
    rig = two_tiers()
    prompt = rig.rows(4, 1)
    rig.put(1, prompt)
    rig.settle()
    clear(rig, prompt)
    seen = [stage(rig)]
    while not durable(rig):
        while rig.store.clearing.step():
            pass
        seen.append(stage(rig))
        rig.jobs.all()
    assert (seen[0], stage(rig)) == (Stage.DROPPING, Stage.DURABLE)
    assert seen == sorted(seen, key=list(Stage).index)


def test_few_names_wait_at_a_time(two_tiers: MakeTwoTier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clearing, "NAMES_MAX", 3)
    rig = two_tiers()
    prompt = rig.rows(10, 1)
    rig.put(1, prompt)
    rig.settle()
    clear(rig, prompt)
    most = 0
    while not durable(rig):
        while rig.store.clearing.step():
            most = max(most, rig.nvme.n_names_to_remove)
        rig.jobs.all()
        rig.store.tick()
    assert most == 3
    assert rig.stat("blocks") == rig.stat("hidden_blocks") == 0
