"""Blocks that lie on NVMe only come up to DRAM: once for all who wait, in the order of the prompt, within bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.jobs import Lane
from kvstore.offload import WritePolicy
from kvstore.onboard import Load
from kvstore.store.hierarchy import WriteBehind
from kvstore.store.requests import Prompt
from tests.store.two_tier import KIB, MIB, Settings, Sizes, TwoTierRig, nvme_bytes_for

ALICE, BOB, EVE = 1, 2, 3
FRAME_BYTES = 8 * KIB
Below = Callable[..., TwoTierRig]


@pytest.fixture
def below(tmp_path: Path) -> Iterator[Below]:
    """``below({tag: rows}, sizes=Sizes(), write)``: a store that was just started over these prompts."""
    made: list[TwoTierRig] = []

    def make(rows: dict[int, int], sizes: Sizes | None = None, write: WriteBehind | None = None) -> TwoTierRig:
        write = write or WriteBehind(queue_bytes_max=MIB, io_timeout_s=5.0)
        rig = TwoTierRig(tmp_path / str(len(made)), Settings(sizes or Sizes(), write))
        for tag, n_rows in rows.items():
            for n in range(1, n_rows + 1):  # also more than DRAM holds
                assert rig.put(ALICE, rig.rows(n, tag=tag), first_block=n - 1).n_committed == 1
                rig.settle()
            assert rig.persist(rig.rows(n_rows, tag=tag)) == n_rows
        rig.store.forget_session(ALICE)
        made.append(rig.killed())
        return made[-1]

    yield make
    for rig in made:
        if rig.ended:
            continue
        for session in (ALICE, BOB, EVE):
            rig.store.forget_session(session)
        rig.settle()
        assert not rig.store.index.table.refs.any()
        assert rig.dram_bytes()["reserved"] == 0
        rig.close()


def begin(rig: TwoTierRig, prompt: Prompt, first_block: int = 0, max_blocks: int = 0) -> Load:
    load = rig.store.begin_load(prompt, first_block, max_blocks)
    assert load is not None
    return load


def test_what_is_in_dram_needs_no_load(below: Below) -> None:
    rig = below({1: 4})
    prompt = rig.rows(4, tag=1)
    rig.store.release(BOB, rig.read(BOB, prompt).id)
    assert rig.store.begin_load(prompt) is None
    assert rig.store.begin_load(rig.rows(4, tag=2)) is None
    assert rig.count("onboarded_blocks") == 4


def test_a_lease_takes_the_leading_blocks_that_are_there_and_says_how_many_are_not(below: Below) -> None:
    rig = below({1: 6})
    prompt = rig.rows(6, tag=1)
    rig.store.release(BOB, rig.read(BOB, rig.rows(2, tag=1)).id)
    lease = rig.store.lease(BOB, prompt)
    assert (lease.n_blocks, lease.n_tokens, lease.n_pending, lease.n_nvme) == (2, 4, 4, 0)
    assert rig.bytes_at(rig.slots_of(lease)) == rig.expected(prompt, 2)
    nothing = rig.store.lease(BOB, prompt, first_block=3)
    assert (nothing.id, nothing.n_blocks, nothing.n_pending) == (0, 3, 3)


@pytest.mark.parametrize(("first", "most", "rows"), [(0, 0, range(6)), (2, 0, range(2, 6)), (1, 3, range(1, 3))])
def test_a_load_reads_what_was_asked_for_and_the_lease_says_where_it_came_from(
    below: Below, first: int, most: int, rows: range
) -> None:
    rig = below({1: 6})
    prompt = rig.rows(6, tag=1)
    load = begin(rig, prompt, first, most)
    assert load.n_waiting == len(rows)
    assert load.eta_s > 0
    rig.settle()
    lease = rig.store.lease(BOB, prompt, first, most, load=load)
    rig.store.end_load(load)
    assert (lease.n_blocks, lease.n_nvme) == (rows.stop, len(rows))
    assert rig.bytes_at(rig.slots_of(lease)) == [rig.expected(prompt, 6)[row] for row in rows]
    assert rig.count("onboarded_blocks") == len(rows)
    assert rig.count("hit_blocks_nvme") == len(rows)


def test_all_who_want_a_block_wait_for_one_read_and_each_is_told(below: Below) -> None:
    rig = below({1: 4})
    long, short = rig.rows(4, tag=1), rig.rows(2, tag=1)
    told: list[str] = []
    first = begin(rig, long)
    second = begin(rig, short)
    for name, load in (("first", first), ("second", second)):
        load.on_done(lambda name=name: told.append(name))  # type: ignore[misc]
    rig.store.end_load(first)
    (job,) = rig.jobs.runnable()
    assert (job.lane, job.n_bytes) == (Lane.READ, 4 * FRAME_BYTES)
    rig.jobs.all()
    assert told == ["second"]
    assert rig.store.begin_load(long) is None
    assert rig.store.lease(BOB, short, load=second).n_nvme == 2
    rig.store.end_load(second)
    assert rig.stat("nvme_read_frames") == 4


def test_long_loads_come_up_in_the_order_of_the_prompt_and_by_bounded_pieces(
    below: Below, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.onboard.READ_BYTES_MAX", 2 * FRAME_BYTES)
    rig = below({1: 12}, Sizes(256 * KIB))
    prompt = rig.rows(12, tag=1)
    load = begin(rig, prompt)
    assert [job.n_bytes for job in rig.jobs.runnable()] == [2 * FRAME_BYTES] * 4
    for n_done in range(1, 7):
        job = rig.jobs.runnable()[0]
        rig.jobs.run(job)
        rig.jobs.finish(job)
        assert load.n_waiting == 12 - 2 * n_done
        lease = rig.store.lease(BOB, prompt)
        assert lease.n_blocks == 2 * n_done
        assert rig.bytes_at(rig.slots_of(lease)) == rig.expected(prompt, 2 * n_done)
        rig.store.release(BOB, lease.id)
    assert load.done
    rig.store.end_load(load)


def test_reads_may_return_in_any_order(below: Below, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.onboard.READ_BYTES_MAX", FRAME_BYTES)
    rig = below({1: 4})
    prompt = rig.rows(4, tag=1)
    load = begin(rig, prompt)
    for job in reversed(rig.jobs.runnable()):
        assert rig.store.lease(BOB, prompt).n_blocks == 0
        rig.jobs.run(job)
        rig.jobs.finish(job)
        rig.store.check()
    assert load.done
    assert rig.store.lease(BOB, prompt, load=load).n_blocks == 4
    rig.store.end_load(load)


def test_more_than_the_queue_holds_is_refused_counted_and_not_waited_for(below: Below) -> None:
    rig = below({1: 12})
    prompt = rig.rows(12, tag=1)
    load = begin(rig, prompt)
    assert load.n_waiting == 8  # half of DRAM, counted as frames
    assert rig.count("onboard_refused_blocks") == 4
    rig.settle()
    assert rig.store.lease(BOB, prompt, load=load).n_blocks == 8
    rig.store.end_load(load)
    rig.store.forget_session(BOB)
    assert rig.read(BOB, prompt).n_blocks == 12


def test_a_prompt_that_is_longer_than_dram_comes_up_as_far_as_it_fits(below: Below) -> None:
    rig = below({1: 40})
    prompt = rig.rows(40, tag=1)
    assert rig.found(prompt) == 40
    lease = rig.read(BOB, prompt)
    for _ in range(8):
        more = rig.read(BOB, prompt)
        rig.store.release(BOB, lease.id)
        lease = more
    assert 24 <= lease.n_blocks <= 32
    assert rig.bytes_at(rig.slots_of(lease)) == rig.expected(prompt, lease.n_blocks)
    assert rig.found(prompt) == 40
    rig.store.release(BOB, lease.id)


def test_what_comes_up_pushes_out_what_was_used_longest_ago_and_loses_nothing(below: Below) -> None:
    rig = below({1: 8, 2: 8, 3: 8, 4: 8, 5: 8})
    prompts = [rig.rows(8, tag=tag) for tag in range(1, 6)]
    for round_ in range(3):
        for prompt in prompts:
            rig.clock.advance(1.0)
            lease = rig.read(BOB, prompt)
            assert lease.n_blocks == 8
            assert rig.bytes_at(rig.slots_of(lease)) == rig.expected(prompt, 8)
            rig.store.release(BOB, lease.id)
        assert rig.count("dropped_blocks") == 0
        assert rig.count("evicted_blocks") >= 8 * round_
    in_dram = [rig.store.lease(BOB, prompt).n_blocks for prompt in prompts]
    assert in_dram == [0, 8, 8, 8, 8]


def test_a_load_that_waits_for_a_client_to_unmap_costs_others_no_more_than_one_attempt(below: Below) -> None:
    """The client may be stopped; what was evicted for the load comes back when it goes on, or is gone."""
    write = WriteBehind(WritePolicy.SELECTIVE, 100, MIB, 5.0)
    rig = below({1: 4}, Sizes(1 * MIB, 64 * KIB, 8 * KIB), write)
    for tag in range(10, 74):
        assert rig.put(BOB, rig.rows(4, tag=tag)).n_committed == 4
    load = begin(rig, rig.rows(4, tag=1))
    for _ in range(30):
        rig.jobs.all()
        rig.clock.advance(0.05)
        rig.store.tick()
    assert not load.done
    assert rig.count("evicted_blocks") <= 4 + 2 * 16  # its own number, and up to two regions
    rig.unmap_retired()
    rig.settle()
    assert load.n_waiting == 0
    assert rig.store.lease(EVE, rig.rows(4, tag=1), load=load).n_blocks == 4
    rig.store.end_load(load)


def test_a_block_that_a_client_stores_while_it_comes_up_is_there_once(below: Below) -> None:
    """It had reserved it before anybody stored it."""
    rig = below({})
    prompt = rig.rows(1, tag=1)
    reservation = rig.reserve(ALICE, prompt, ttl_s=90.0)
    rig.map_regions(ALICE, reservation.slots, writable=True)
    rig.put(BOB, prompt)
    assert rig.persist(prompt) == 1
    for tag in range(2, 12):
        rig.put(BOB, rig.rows(4, tag=tag))
        rig.settle()
    load = begin(rig, prompt)
    (job,) = rig.jobs.runnable()
    rig.jobs.run(job)
    rig.fill(reservation, prompt)
    assert rig.store.commit(ALICE, reservation.id).n_committed == 1
    used = rig.dram_bytes()["used"]
    rig.jobs.finish(job)
    rig.store.check()
    assert rig.dram_bytes()["used"] == used
    lease = rig.store.lease(BOB, prompt, load=load)
    assert rig.bytes_at(rig.slots_of(lease)) == rig.expected(prompt, 1)
    rig.store.end_load(load)


def test_a_read_that_comes_late_finds_its_frames_where_they_were(below: Below) -> None:
    """Although all others on NVMe went and came several times meanwhile, and these may have been moved."""
    rig = below(dict.fromkeys(range(1, 22), 1), Sizes(nvme_bytes=nvme_bytes_for(6)))
    wanted = [rig.rows(1, tag=tag) for tag in range(1, 22, 4)]
    loads = [begin(rig, prompt) for prompt in wanted]
    reads = rig.jobs.runnable()
    for job in reads:
        rig.jobs.waiting.remove(job)
    for tag in range(30, 150):
        rig.put(ALICE, rig.rows(1, tag=tag))
        rig.jobs.all()
        rig.unmap_retired()
    assert rig.count("nvme_evicted_blocks") > 80
    assert rig.stat("nvme_moved_frames") > 0
    for job in reads:
        job.run()
        rig.store.finish(job)
    assert rig.count("onboarded_blocks") >= len(reads)
    assert rig.count("onboard_corrupt_blocks") == rig.count("onboard_unreadable_blocks") == 0
    for prompt, load in zip(wanted, loads, strict=True):
        rig.settle()
        lease = rig.store.lease(BOB, prompt, load=load)
        assert rig.bytes_at(rig.slots_of(lease)) == rig.expected(prompt, 1)
        rig.store.release(BOB, lease.id)
        rig.store.end_load(load)


def test_the_guess_of_the_time_follows_the_speed_of_the_disk(below: Below) -> None:
    rig = below(dict.fromkeys(range(1, 9), 4))
    guesses = []
    for tag in range(1, 9):
        load = begin(rig, rig.rows(4, tag=tag))
        guesses.append(load.eta_s)
        for job in rig.jobs.runnable():
            rig.jobs.run(job)
            rig.clock.advance(2.0)
            rig.jobs.finish(job)
        rig.store.end_load(load)
    assert guesses[0] < 0.002
    assert guesses[-1] == pytest.approx(2.0, rel=0.05)


def test_tenants_get_their_blocks_in_memory_of_their_own(below: Below) -> None:
    rig = below({1: 2})
    for tenant in ("b", "c"):
        space = rig.namespace(tenant=tenant)
        rig.put(ALICE if tenant == "b" else EVE, rig.rows(2, tag=1, namespace=space))
        assert rig.persist(rig.rows(2, tag=1, namespace=space)) == 2
    rig.store.forget_session(ALICE)
    rig.store.forget_session(EVE)
    after = rig.killed()
    for tenant in ("default", "b", "c"):
        prompt = after.rows(2, tag=1, namespace=after.namespace(tenant=tenant))
        lease = after.read(BOB, prompt)
        slots = after.slots_of(lease)
        assert after.bytes_at(slots) == after.expected(prompt, 2)
        assert {after.dram.region(slot >> 20).tenant for slot in slots.tolist()} == {tenant}
        after.store.release(BOB, lease.id)
    after.close()
