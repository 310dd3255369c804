"""Blocks are written to NVMe behind the back of whoever stored them: when, in which order, and what doesn't fit."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.hints import Hints
from kvstore.jobs import Lane
from kvstore.offload import UNNAMED_MAX, WRITES_MAX, WritePolicy
from kvstore.store.hierarchy import WriteBehind
from tests.store.two_tier import KIB, MIB, Settings, Sizes, TwoTierRig, nvme_bytes_for

ALICE, BOB = 1, 2
FRAME_BYTES = 8 * KIB
MakeStore = Callable[..., TwoTierRig]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakeStore]:
    """``make(policy, hits=2, queue_bytes=1 MiB, sizes=Sizes())``; all are checked and closed at the end."""
    made: list[TwoTierRig] = []

    def make_one(
        policy: WritePolicy = WritePolicy.THROUGH, hits: int = 2, queue_bytes: int = MIB, sizes: Sizes | None = None
    ) -> TwoTierRig:
        write = WriteBehind(policy, hits, queue_bytes, io_timeout_s=5.0)
        made.append(TwoTierRig(tmp_path / str(len(made)), Settings(sizes or Sizes(), write)))
        return made[-1]

    yield make_one
    for rig in made:
        if rig.ended:
            continue
        rig.settle()
        for session in (ALICE, BOB):
            rig.store.forget_session(session)
        assert not rig.store.index.table.refs.any()
        rig.close()


# When --------------------------------------------------------------------------------------------


def test_through_writes_every_block_and_who_stored_it_waits_for_nothing(make: MakeStore) -> None:
    rig = make()
    prompt = rig.rows(5, tag=1)
    assert rig.put(ALICE, prompt).n_committed == 5
    assert rig.stat("offload_pending_blocks") == 5
    assert rig.stat("nvme_live_frames") == 0
    assert [job.lane for job in rig.jobs.each()] == [Lane.WRITE, Lane.CATALOG]
    assert rig.stat("offload_pending_blocks") == 0
    assert rig.count("offloaded_blocks") == rig.stat("nvme_live_frames") == 5
    assert rig.count("offloaded_bytes") == 5 * FRAME_BYTES


def test_a_block_is_written_once(make: MakeStore) -> None:
    rig = make()
    prompt = rig.rows(5, tag=1)
    for _ in range(3):
        rig.put(ALICE, prompt)
        rig.store.release(BOB, rig.store.lease(BOB, prompt).id)
        rig.settle()
    assert rig.count("offloaded_blocks") == rig.stat("nvme_written_frames") == 5


@pytest.mark.parametrize("hits", [1, 2, 3])
def test_selective_writes_a_block_at_its_nth_access(make: MakeStore, hits: int) -> None:
    """Storing it is the first; a request that looks up, computes and stores is one."""
    rig = make(WritePolicy.SELECTIVE, hits)
    prompt = rig.rows(4, tag=1)
    rig.put(ALICE, prompt)
    for n_accesses in range(1, 5):
        rig.settle()
        assert rig.stat("nvme_live_frames") == (4 if n_accesses >= hits else 0)
        rig.store.release(BOB, rig.store.lease(BOB, prompt).id)


def test_selective_writes_the_ancestors_of_a_block_too(make: MakeStore) -> None:
    rig = make(WritePolicy.SELECTIVE, hits=2)
    prompt = rig.rows(4, tag=1)
    rig.put(ALICE, prompt)
    rig.store.release(BOB, rig.store.lease(BOB, rig.rows(2, tag=1)).id)
    rig.settle()
    assert rig.stat("nvme_live_frames") == 2
    rig.store.release(BOB, rig.store.lease(BOB, prompt, first_block=3).id)
    rig.settle()
    assert rig.stat("nvme_live_frames") == 4


def test_back_writes_what_would_go_next_so_that_nothing_is_lost_when_it_goes(make: MakeStore) -> None:
    rig = make(WritePolicy.BACK)
    prompts = [rig.rows(1, tag=tag) for tag in range(1, 40)]
    for prompt in prompts[:10]:
        rig.put(ALICE, prompt)
        rig.clock.advance(1.0)
    assert not rig.store.jobs
    rig.settle()
    n_clean = int(rig.stat("nvme_live_frames"))
    assert 3 <= n_clean <= 4  # about an eighth of DRAM, ahead of its eviction
    durable = [rig.store.begin_persist(prompt) for prompt in prompts[:10]]
    n_durable = [rig.store.n_durable(persist) for persist in durable if persist is not None]
    assert n_durable == [1] * n_clean + [0] * (10 - n_clean)
    for persist in durable:
        assert persist is not None
        rig.store.end_persist(persist)
    for prompt in prompts[10:]:  # slow enough for the cleaner
        rig.put(ALICE, prompt)
        rig.settle()
    n_evicted = rig.count("evicted_blocks")
    assert n_evicted >= 39 - 32
    assert rig.count("dropped_blocks") == 0
    assert [rig.found(prompt) for prompt in prompts] == [1] * 39
    lease = rig.read(BOB, prompts[0])
    assert lease.n_nvme == 1
    assert rig.bytes_at(rig.slots_of(lease)) == rig.expected(prompts[0], 1)


def test_back_does_not_write_what_stays_in_use(make: MakeStore) -> None:
    rig = make(WritePolicy.BACK)
    hot = rig.rows(4, tag=1)
    for tag in range(1, 10):
        rig.clock.advance(1.0)
        rig.put(ALICE, rig.rows(1, tag=tag) if tag > 1 else hot)
    rig.store.release(BOB, rig.store.lease(BOB, hot).id)
    rig.settle()
    assert 3 <= rig.stat("nvme_live_frames") <= 4
    after = rig.killed()
    assert after.found(after.rows(4, tag=1)) == 0
    assert after.found(after.rows(1, tag=2)) == 1
    after.close()


def test_what_is_worth_less_than_all_on_a_full_disk_is_not_written_unless_somebody_waits(tmp_path: Path) -> None:
    rig = TwoTierRig(tmp_path, Settings(write=WriteBehind(queue_bytes_max=MIB), policy="hazard"))
    tag = 0
    while not rig.count("nvme_evicted_blocks"):
        rig.put(ALICE, rig.rows(4, tag=(tag := tag + 1))._replace(hints=Hints(priority=100)))
        rig.jobs.all()
    assert rig.count("offload_declined_blocks") == 0  # before anything is learnt, what is new is worth most
    written = rig.count("offloaded_blocks")
    worthless = rig.rows(4, tag=999)._replace(hints=Hints(priority=-100))
    rig.put(ALICE, worthless)
    rig.jobs.all()
    declined = rig.count("offload_declined_blocks")
    assert declined == 4
    assert rig.count("offloaded_blocks") == written + 4 - declined
    assert rig.count("offload_skipped_blocks") == 0
    persist = rig.store.begin_persist(worthless)
    assert persist is not None
    rig.jobs.all()
    assert rig.store.n_durable(persist) == 4
    rig.store.end_persist(persist)
    rig.close()


@pytest.mark.parametrize("policy", [WritePolicy.SELECTIVE, WritePolicy.BACK])
def test_whoever_wants_durable_blocks_gets_them_whatever_the_policy(make: MakeStore, policy: WritePolicy) -> None:
    rig = make(policy, hits=100)
    prompt = rig.rows(6, tag=1)
    rig.put(ALICE, prompt)
    persist = rig.store.begin_persist(prompt)
    assert persist is not None
    done: list[int] = []
    persist.on_done(lambda: done.append(1))
    assert persist.n_waiting == 6
    assert (rig.store.n_durable(persist), done) == (0, [])
    rig.jobs.all()
    assert (rig.store.n_durable(persist), persist.n_waiting, done) == (6, 0, [1])
    rig.store.end_persist(persist)
    again = rig.store.begin_persist(prompt)
    assert again is not None
    assert again.done
    rig.store.end_persist(again)


# The queue ---------------------------------------------------------------------------------------


def test_what_does_not_fit_the_queue_is_skipped_counted_and_offered_again(make: MakeStore) -> None:
    rig = make(queue_bytes=3 * FRAME_BYTES)
    prompt = rig.rows(5, tag=1)
    assert rig.put(ALICE, prompt).n_committed == 5
    assert rig.count("offload_skipped_blocks") == 2
    assert rig.stat("offload_pending_bytes") == 3 * FRAME_BYTES
    rig.settle()
    assert rig.stat("nvme_live_frames") == 3
    lease = rig.store.lease(BOB, prompt)
    assert rig.bytes_at(rig.slots_of(lease)) == rig.expected(prompt, 5)
    rig.settle()
    assert rig.stat("nvme_live_frames") == 5


def test_blocks_on_their_way_are_readable_and_stay(make: MakeStore) -> None:
    rig = make()
    prompt = rig.rows(8, tag=1)
    rig.put(ALICE, prompt)
    rig.store.forget_session(ALICE)
    for tag in range(2, 12):
        rig.put(BOB, rig.rows(4, tag=tag))
        rig.unmap_retired()
        lease = rig.store.lease(BOB, prompt)
        assert rig.bytes_at(rig.slots_of(lease)) == rig.expected(prompt, 8)
        rig.store.release(BOB, lease.id)
    rig.store.check()


def test_few_batches_are_on_their_way_at_a_time(make: MakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.offload.WRITE_BYTES_MAX", 2 * FRAME_BYTES)
    rig = make()
    prompt = rig.rows(9, tag=1)
    rig.put(ALICE, prompt)
    n_jobs = 0
    while jobs := rig.jobs.runnable():
        assert sum(job.lane is Lane.WRITE for job in rig.jobs.waiting) <= WRITES_MAX
        assert len(rig.jobs.waiting) <= UNNAMED_MAX
        for job in reversed(jobs):  # the later one is faster
            rig.jobs.run(job)
            n_jobs += 1
        for job in list(rig.jobs.ran):
            rig.jobs.finish(job)
        rig.store.check()
    assert n_jobs == 10
    assert rig.stat("nvme_live_frames") == 9


def test_blocks_of_several_namespaces_go_in_one_batch(make: MakeStore) -> None:
    rig = make()
    spaces = [rig.namespace(4 * KIB), rig.namespace(12 * KIB), rig.namespace(4 * KIB, tenant="b")]
    persists = []
    (hold,) = [rig.store.begin_reserve(BOB, rig.rows(1, tag=9), 0, 1)]
    for i, space in enumerate(spaces):
        prompt = rig.rows(2, tag=1, namespace=space)
        rig.put(ALICE, prompt) if i < 2 else rig.put(BOB, prompt)
        persists.append((prompt, rig.store.begin_persist(prompt)))
    rig.store.abort(BOB, hold.id)
    rig.settle()
    rig.store.forget_session(ALICE)
    rig.store.forget_session(BOB)
    for _, persist in persists:
        assert persist is not None
        assert rig.store.n_durable(persist) == 2
        rig.store.end_persist(persist)
    after = rig.killed()
    for i, (prompt, _) in enumerate(persists):
        space = after.store.namespaces.open(spaces[i].namespace)
        found = prompt._replace(namespace=space)
        lease = after.read(ALICE, found)
        assert after.bytes_at(after.slots_of(lease), space.block_bytes) == after.expected(found, 2)
    after.store.forget_session(ALICE)
    after.close()


# Disks that refuse ---------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["write", "sync", "create", "sync_directory", "write_small"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_refuses_is_left_alone_for_a_while_and_tried_again(
    make: MakeStore, operation: str, code: int
) -> None:
    rig = make()
    fault = rig.files.fail(operation, code, times=None)
    prompt, other = rig.rows(4, tag=1), rig.rows(4, tag=2)
    rig.put(ALICE, prompt)
    persist = rig.store.begin_persist(prompt)
    assert persist is not None
    rig.jobs.all()
    assert persist.done
    assert rig.store.n_durable(persist) == 0
    rig.store.end_persist(persist)
    assert fault.hits
    assert rig.count("offload_failed_blocks") == 4
    assert rig.store.stats()[1]["nvme_health"] == ("full" if code == errno.ENOSPC else "failing")
    assert rig.stat("offload_suspended") == 1

    # Storing and reading go on, in DRAM.
    assert rig.put(ALICE, other).n_committed == 4
    assert not rig.store.jobs
    assert rig.count("offload_skipped_blocks") >= 4
    for each in (prompt, other):
        lease = rig.store.lease(BOB, each)
        assert rig.bytes_at(rig.slots_of(lease)) == rig.expected(each, 4)
        rig.store.release(BOB, lease.id)

    n_attempts = 0
    for _ in range(20):  # each failure makes the next attempt later, up to 5 s
        rig.clock.advance(1.0)
        rig.store.tick()
        rig.store.release(BOB, rig.store.lease(BOB, prompt).id)
        n_attempts += rig.jobs.all() > 0
    assert 3 <= n_attempts <= 10
    fault.stop()
    rig.clock.advance(5.0)
    rig.store.tick()
    assert rig.persist(prompt) == rig.persist(other) == 4
    assert rig.store.stats()[1]["nvme_health"] == "ok"
    assert rig.stat("offload_suspended") == 0


def test_a_block_whose_parent_could_not_be_written_is_not_named(
    make: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when it was queued behind, or was on its way already."""
    monkeypatch.setattr("kvstore.offload.WRITE_BYTES_MAX", 2 * FRAME_BYTES)
    rig = make()
    prompt = rig.rows(8, tag=1)
    rig.files.fail(
        "write", errno.EIO, where=lambda _, extent: extent is not None and extent.length_bytes == FRAME_BYTES
    )
    rig.put(ALICE, prompt)
    rig.settle()
    assert rig.stat("nvme_live_frames") == rig.stat("nvme_written_frames") == 0
    assert rig.persist(prompt) == 8
    rig.store.forget_session(ALICE)
    after = rig.killed()
    assert after.found(after.rows(8, tag=1)) == 8
    after.close()


def test_nvme_that_is_full_of_blocks_in_use_skips_and_goes_on_later(make: MakeStore) -> None:
    rig = make(sizes=Sizes(256 * KIB, 32 * KIB, 8 * KIB, nvme_bytes=nvme_bytes_for(6)))
    n_fit = rig.nvme.live_capacity_bytes // FRAME_BYTES
    held = rig.rows(n_fit, tag=1)
    rig.put(ALICE, held)
    assert rig.persist(held) == n_fit
    lease = rig.store.lease(BOB, held)
    other = rig.rows(4, tag=2)
    rig.put(ALICE, other)
    rig.settle()
    assert rig.persist(other) == 0
    assert rig.count("offload_skipped_blocks") >= 4
    assert rig.count("nvme_evicted_blocks") == 0
    assert rig.found(other) == 4
    rig.store.release(BOB, lease.id)
    assert rig.persist(other) == 4
    assert rig.count("nvme_evicted_blocks") == 4
    assert rig.found(held) == n_fit  # still in DRAM
