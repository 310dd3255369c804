"""Copies in HBM: how they come, who is served from them, and when they go."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvstore.errors import BadInputError, EndedError
from kvstore.jobs import Job, Lane
from kvstore.prefix_index.block_table import DRAM, HBM, NVME, Ids
from kvstore.promote import Promotion
from kvstore.store.requests import Prompt
from tests.store.three_tier import BLOCK_BYTES, ThreeTierRig


@pytest.fixture
def rig(three_tiers: ThreeTierRig) -> ThreeTierRig:
    return three_tiers


def out_of_dram(rig: ThreeTierRig, ids: np.ndarray) -> None:
    """Evict these blocks from DRAM; they are on NVMe."""
    while rig.store.index.resident(ids, DRAM).any():
        evicted = rig.store.index.evict(1)
        assert len(evicted.ids)
        rig.dram.free(evicted.slots)


def in_hbm_and_on_nvme(rig: ThreeTierRig, n_blocks: int) -> tuple[Prompt, Ids]:
    """A prompt whose blocks are there, and not in DRAM."""
    prompt = rig.rows(n_blocks, 1)
    rig.put(1, prompt)
    assert rig.persist(prompt) == n_blocks
    rig.promote(prompt)
    ids = rig.store.index.match(prompt.root_key, prompt.path).ids
    out_of_dram(rig, ids)
    return prompt, ids


def device_jobs(rig: ThreeTierRig) -> list[Job]:
    return [job for job in rig.jobs.runnable() if job.lane is Lane.DEVICE]


def test_a_block_is_promoted_at_its_second_access_and_read_from_there(rig: ThreeTierRig) -> None:
    prompt = rig.rows(4, 1)
    rig.put(1, prompt)
    rig.settle()
    assert rig.in_hbm(prompt) == [False] * 4
    first = rig.use(1, prompt)
    assert first.hbm_slots is not None
    assert (first.hbm_slots < 0).all()
    rig.settle()
    second = rig.use(1, prompt)
    assert rig.hbm_bytes_at(rig.hbm_slots(second)) == rig.expected(prompt, 4)
    assert rig.count("hit_blocks_hbm") == rig.count("hbm_promoted_blocks") == 4
    rig.store.check()


def test_who_does_not_read_hbm_promotes_nothing_and_hears_of_nothing(rig: ThreeTierRig) -> None:
    prompt = rig.rows(4, 1)
    rig.put(1, prompt)
    for _ in range(3):
        lease = rig.store.lease(1, prompt)
        assert lease.hbm_slots is None
        rig.settle()
    assert rig.in_hbm(prompt) == [False] * 4
    assert rig.count("hit_blocks_hbm") == 0


@pytest.mark.parametrize("hits", [1, 3])
def test_promotion_waits_for_so_many_accesses(tmp_path: Path, hits: int) -> None:
    rig = ThreeTierRig(tmp_path / "nvme", promotion=Promotion(hits, 1 << 20))
    prompt = rig.rows(2, 1)
    rig.put(1, prompt)
    rig.settle()
    for n_accesses in range(2, 5):
        rig.promote(prompt)
        assert rig.in_hbm(prompt) == [n_accesses >= hits] * 2
    rig.close()


def test_a_block_on_nvme_and_in_hbm_is_served_without_reading_it(rig: ThreeTierRig) -> None:
    prompt, ids = in_hbm_and_on_nvme(rig, 4)
    assert rig.store.begin_load(prompt, reads_hbm=True) is None
    lease = rig.store.lease(1, prompt, reads_hbm=True)
    assert lease.n_blocks == 4
    assert lease.n_pending == 0
    assert rig.hbm_bytes_at(rig.hbm_slots(lease)) == rig.expected(prompt, 4)
    assert not rig.store.index.resident(ids, DRAM).any()
    other = rig.store.lease(2, prompt)
    assert (other.n_blocks, other.n_pending) == (0, 4)
    rig.store.check()


def test_a_block_that_came_to_hbm_since_it_was_read_is_a_hit_once(rig: ThreeTierRig) -> None:
    prompt = rig.rows(4, 1)
    rig.put(1, prompt)
    assert rig.persist(prompt) == 4
    out_of_dram(rig, rig.store.index.match(prompt.root_key, prompt.path).ids)
    load = rig.store.begin_load(prompt, reads_hbm=True)
    assert load is not None
    rig.settle()
    rig.promote(prompt)
    assert rig.in_hbm(prompt) == [True] * 4
    counted = [rig.count(name) for name in ("hit_blocks_nvme", "hit_blocks_hbm")]
    lease = rig.store.lease(1, prompt, load=load, reads_hbm=True)
    rig.store.end_load(load)
    assert (lease.n_blocks, lease.n_nvme) == (4, 0)
    assert [rig.count(name) for name in ("hit_blocks_nvme", "hit_blocks_hbm")] == [counted[0], counted[1] + 4]


def test_a_lease_may_be_of_blocks_in_every_tier(rig: ThreeTierRig) -> None:
    prompt = rig.rows(6, 1)
    rig.put(1, prompt)
    assert rig.persist(prompt) == 6
    lease = rig.use(1, prompt, max_blocks=3)
    rig.settle()
    rig.store.release(1, lease.id)
    ids = rig.store.index.match(prompt.root_key, prompt.path).ids
    assert rig.in_hbm(prompt) == [True] * 3 + [False] * 3
    out_of_dram(rig, ids)
    lease = rig.use(1, prompt)
    assert lease.hbm_slots is not None
    assert (lease.hbm_slots >= 0).tolist() == [True] * 3 + [False] * 3
    assert rig.store.index.resident(ids, DRAM).tolist() == [False] * 3 + [True] * 3
    assert lease.n_nvme == 3
    assert rig.hbm_bytes_at(rig.hbm_slots(lease)) == rig.expected(prompt, 3)
    assert rig.bytes_at(rig.slots_of(lease)[3:]) == rig.expected(prompt, 6, 3)


def test_the_last_copy_below_takes_the_one_in_hbm_along(rig: ThreeTierRig) -> None:
    """Planted: with ``Copies.last_lost`` doing nothing, this and ``check`` find a copy without a block."""
    prompt, _ = in_hbm_and_on_nvme(rig, 3)
    assert rig.in_hbm(prompt) == [True] * 3
    gone = rig.store.index.evict_nvme(1)
    rig.nvme.free(gone.slots)
    assert gone.gone.tolist() == [True]
    assert rig.found(prompt) == 2
    assert rig.hbm.stats()["used_bytes"] == 2 * BLOCK_BYTES
    rig.store.check()


def test_a_copy_on_nvme_that_breaks_takes_it_along_but_for_who_reads_it(rig: ThreeTierRig) -> None:
    prompt, ids = in_hbm_and_on_nvme(rig, 3)
    lease = rig.store.lease(7, prompt, reads_hbm=True)
    slots = rig.hbm_slots(lease)
    rig.nvme.quarantine(rig.store.index.break_nvme(ids[1:2]))
    assert rig.found(prompt) == 1
    assert rig.hbm.stats()["quarantined_bytes"] == BLOCK_BYTES
    assert rig.hbm_bytes_at(slots) == rig.expected(prompt, 3)
    rig.store.check()
    rig.store.release(7, lease.id)
    assert rig.hbm.stats()["quarantined_bytes"] == 0
    assert rig.hbm.stats()["used_bytes"] == 2 * BLOCK_BYTES
    rig.store.check()


def test_a_reader_past_its_deadline_keeps_its_slots_out_of_use(rig: ThreeTierRig) -> None:
    """Invariant 4: the right is over, the hold is not, until the client says so or is gone."""
    prompt = rig.rows(4, 1)
    rig.put(1, prompt)
    rig.promote(prompt)
    lease = rig.use(7, prompt)
    slots = rig.hbm_slots(lease)
    rig.open_regions(7, slots)
    rig.clock.advance(11.0)
    assert [claim.id for claim in rig.store.expire()] == [lease.id]
    for tag in range(2, 8):
        rig.put(1, rig.rows(4, tag))
        rig.promote(rig.rows(4, tag))
    assert rig.hbm_bytes_at(slots) == rig.expected(prompt, 4)
    assert rig.hbm.states(slots).tolist() == [2] * 4
    rig.store.check()
    rig.store.forget_session(7)
    for tag in range(8, 12):
        rig.put(1, rig.rows(4, tag))
        rig.promote(rig.rows(4, tag))
    assert rig.in_hbm(prompt) in ([], [False] * 4)


def test_generations_tell_that_a_slot_was_reused(rig: ThreeTierRig) -> None:
    prompt = rig.rows(4, 1)
    rig.put(1, prompt)
    rig.promote(prompt)
    lease = rig.use(7, prompt)
    slots = rig.hbm_slots(lease)
    before = rig.hbm.describe(slots).generations
    rig.store.release(7, lease.id)
    for tag in range(2, 8):
        rig.put(1, rig.rows(4, tag))
        rig.promote(rig.rows(4, tag))
    assert (rig.hbm.describe(slots).generations != before).all()


def test_what_is_used_least_goes_first_its_tail_before_its_head(rig: ThreeTierRig) -> None:
    for tag in range(4):
        rig.put(1, rig.rows(4, tag))
        rig.promote(rig.rows(4, tag))
    rig.promote(rig.rows(4, 0))
    rig.put(1, rig.rows(2, 9))
    rig.promote(rig.rows(2, 9))
    assert rig.in_hbm(rig.rows(4, 0)) == [True] * 4
    assert rig.in_hbm(rig.rows(4, 1)) == [True, True, False, False]
    assert rig.in_hbm(rig.rows(2, 9)) == [True] * 2
    assert rig.count("hbm_evicted_blocks") == 2


def test_without_room_for_all_the_head_of_a_prompt_is_promoted(tmp_path: Path) -> None:
    rig = ThreeTierRig(tmp_path / "nvme", n_blocks=4, promotion=Promotion(2, 1 << 20))
    prompt = rig.rows(6, 1)
    rig.put(1, prompt)
    rig.promote(prompt)
    assert rig.in_hbm(prompt) == [True] * 4 + [False] * 2
    assert rig.count("hbm_no_room_blocks") == 2
    assert rig.stat("hbm_free_bytes") == 0
    rig.close()


def test_the_queue_has_a_bound(tmp_path: Path) -> None:
    rig = ThreeTierRig(tmp_path / "nvme", promotion=Promotion(2, 3 * BLOCK_BYTES))
    prompt = rig.rows(8, 1)
    rig.put(1, prompt)
    lease = rig.use(1, prompt)
    assert rig.stat("hbm_queued_blocks") == 3
    assert rig.count("hbm_skipped_blocks") == 5
    rig.settle()
    assert rig.in_hbm(prompt) == [True] * 3 + [False] * 5
    rig.store.release(1, lease.id)
    rig.close()


def test_clearing_takes_copies_in_hbm(rig: ThreeTierRig) -> None:
    prompt = rig.rows(4, 1)
    rig.put(1, prompt)
    assert rig.persist(prompt) == 4
    rig.promote(prompt)
    rig.store.clear({prompt.namespace.ordinal})
    assert rig.found(prompt) == 0
    rig.settle()
    assert rig.hbm.stats()["used_bytes"] == 0
    assert rig.store.index.above is not None
    assert rig.store.index.above.n == 0
    rig.store.check()


def test_clearing_waits_for_who_reads_hbm(rig: ThreeTierRig) -> None:
    prompt, _ = in_hbm_and_on_nvme(rig, 4)
    lease = rig.store.lease(7, prompt, reads_hbm=True)
    slots = rig.hbm_slots(lease)
    rig.store.clear({prompt.namespace.ordinal})
    rig.settle()
    assert rig.found(prompt) == 0
    assert rig.hbm.stats()["quarantined_bytes"] == 4 * BLOCK_BYTES
    assert rig.hbm_bytes_at(slots) == rig.expected(prompt, 4)
    rig.store.release(7, lease.id)
    rig.settle()
    assert rig.hbm.stats()["quarantined_bytes"] == 0
    assert rig.store.index.n_hidden_blocks == 0


def test_what_is_cleared_while_it_is_copied_does_not_get_there(rig: ThreeTierRig) -> None:
    prompt = rig.rows(4, 1)
    rig.put(1, prompt)
    rig.settle()
    lease = rig.use(1, prompt)
    rig.store.release(1, lease.id)
    (room,) = device_jobs(rig)
    rig.jobs.run(room)
    rig.jobs.finish(room)
    (job,) = device_jobs(rig)
    rig.jobs.run(job)
    rig.store.clear({prompt.namespace.ordinal})
    rig.jobs.finish(job)
    assert rig.hbm.stats()["used_bytes"] == rig.hbm.stats()["reserved_bytes"] == 0
    rig.store.check()


def test_blocks_stay_in_dram_while_they_are_copied(rig: ThreeTierRig) -> None:
    prompt = rig.rows(4, 1)
    rig.put(1, prompt)
    rig.settle()
    lease = rig.use(1, prompt)
    rig.store.release(1, lease.id)
    ids = rig.store.index.match(prompt.root_key, prompt.path).ids
    rig.store.pump()
    assert not len(rig.store.index.evict(32).ids)
    rig.settle()
    assert rig.in_hbm(prompt) == [True] * 4
    out_of_dram(rig, ids)


def test_after_the_stop_nothing_more_is_promoted(rig: ThreeTierRig) -> None:
    prompt = rig.rows(4, 1)
    rig.put(1, prompt)
    rig.settle()
    lease = rig.use(1, prompt)
    assert rig.store.hbm is not None
    rig.store.hbm.promoter.stop()
    rig.store.hbm.promoter.stop()
    rig.settle()
    assert rig.in_hbm(prompt) == [False] * 4
    rig.store.release(1, lease.id)
    rig.store.check()


def test_another_tenant_gets_no_handle(rig: ThreeTierRig) -> None:
    prompt = rig.rows(4, 1)
    rig.put(1, prompt)
    rig.promote(prompt)
    (region_id,) = rig.hbm.regions
    with pytest.raises(EndedError, match="not there"):
        rig.store.share_hbm(2, "somebody else", region_id)
    with pytest.raises(EndedError, match="not there"):
        rig.store.share_hbm(2, "default", region_id + 1)


def test_another_lease_of_the_same_blocks_reads_the_same_slots(rig: ThreeTierRig) -> None:
    prompt = rig.rows(4, 1)
    rig.put(1, prompt)
    rig.promote(prompt)
    lease = rig.use(7, prompt)
    joined = rig.store.attach(8, "default", lease.id, namespace=prompt.namespace.digest)
    rig.store.release(7, lease.id)
    assert joined.hbm_slots is not None
    assert rig.hbm_bytes_at(joined.hbm_slots) == rig.expected(prompt, 4)


def test_tenants_have_shares_of_hbm_and_get_them(rig: ThreeTierRig) -> None:
    """The first takes all of HBM; the second, which asks for its part, gets regions of it."""
    mine = rig.namespace(tenant="a")
    theirs = rig.namespace(tenant="b")
    for tag in range(4):
        rig.put(1, rig.rows(4, tag, namespace=mine))
        rig.promote(rig.rows(4, tag, namespace=mine))
    assert rig.stat("hbm_free_bytes") == 0
    rig.put(2, rig.rows(4, 50, namespace=theirs))
    rig.promote(rig.rows(4, 50, namespace=theirs), session=2)
    assert rig.in_hbm(rig.rows(4, 50, namespace=theirs)) == [True] * 4
    assert {region.tenant for region in rig.hbm.regions.values()} == {"a", "b"}
    tenants = rig.store.index.tenants
    assert tenants.used_bytes[HBM, tenants.number("b")] == 4 * BLOCK_BYTES
    rig.store.check()


def test_slots_of_another_size_get_regions_of_their_own(rig: ThreeTierRig) -> None:
    small, large = rig.namespace(), rig.namespace(2 * BLOCK_BYTES)
    for tag in range(4):
        rig.put(1, rig.rows(4, tag, namespace=small))
        rig.promote(rig.rows(4, tag, namespace=small))
    prompt = rig.rows(2, 60, namespace=large)
    rig.put(1, prompt)
    rig.promote(prompt)
    assert rig.in_hbm(prompt) == [True] * 2
    assert sum(rig.in_hbm(rig.rows(4, 0, namespace=small))) == 0
    assert rig.in_hbm(rig.rows(4, 3, namespace=small)) == [True] * 4
    rig.store.check()


def test_a_restart_finds_blocks_on_nvme_and_none_in_hbm(tmp_path: Path) -> None:
    rig = ThreeTierRig(tmp_path / "nvme")
    prompt = rig.rows(4, 1)
    rig.put(1, prompt)
    assert rig.persist(prompt) == 4
    rig.promote(prompt)
    rig.close()
    again = ThreeTierRig(tmp_path / "nvme")
    prompt = again.rows(4, 1)
    lease = again.use(1, prompt)
    assert lease.n_nvme == 4
    assert again.in_hbm(prompt) == [False] * 4
    assert again.store.index.resident(lease.ids, NVME).all()
    again.close()


def test_an_index_that_knows_of_no_hbm_is_refused(tmp_path: Path) -> None:
    from tests.store.rig import Rig

    rig = ThreeTierRig(tmp_path / "nvme")
    plain = Rig()
    assert rig.store.hbm is not None
    with pytest.raises(BadInputError, match="hbm=True"):
        type(rig.store.hbm)(
            plain.store.index, plain.dram, rig.setup, plain.store.jobs, plain.store.counters, plain.clock
        )
    plain.close()
    rig.close()
