"""Shard families: the smallest hit counts, one lease holds it in every shard, and bytes are never another's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvstore.errors import BadInputError, EndedError
from kvstore.prefix_index.block_table import DRAM
from kvstore.prefix_index.policy import Use
from kvstore.shards import SHARDS_MAX, check_family
from kvstore.types import KVGroup, KVSpec, Namespace, RowKind, Shard
from tests.store.families import KIB, Family
from tests.store.rig import Rig
from tests.store.two_tier import MIB, Settings, Sizes, TwoTierRig

ENGINE, WORKER = 10, 11


@pytest.fixture
def roomy(make_rig: Any) -> Rig:
    rig: Rig = make_rig(capacity_bytes=1024 * KIB, region_bytes=128 * KIB)
    return rig


# What is a family -----------------------------------------------------------------------------------

SPEC = KVSpec(4, (KVGroup(layers=2, kv_heads=2, head_dim=64),))
BASE = Namespace("m", SPEC, shard=Shard(0, 2, 0, 2))


def rank(tp: int, pp: int = 0, **changes: Any) -> Namespace:
    plain: dict[str, Any] = {"model": "m", "spec": SPEC, "shard": Shard(tp, 2, pp, 2)}
    return Namespace(**{**plain, **changes})


def test_ranks_of_tensor_and_pipeline_parallelism_are_a_family() -> None:
    deeper = KVSpec(4, (KVGroup(layers=3, kv_heads=2, head_dim=64),))
    check_family([rank(0), rank(1), rank(0, 1, spec=deeper), rank(1, 1, spec=deeper)])
    check_family([rank(1)])


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("model", rank(1, model="n")),
        ("revision", rank(1, revision="2")),
        ("tenant", rank(1, tenant="t")),
        ("engine", rank(1, engine="vllm")),
        ("row_kind", rank(1, row_kind=RowKind.HASHES, hash_bytes=16)),
        ("spec.block_tokens", rank(1, spec=KVSpec(8, SPEC.groups))),
        ("shard.tp_size", rank(1, shard=Shard(1, 4, 0, 2))),
        ("shard.pp_size", rank(1, shard=Shard(1, 2, 0, 1))),
    ],
)
def test_what_differs_otherwise_is_named(field: str, other: Namespace) -> None:
    with pytest.raises(BadInputError, match=f"no family: {field} of number 1"):
        check_family([BASE, other])


def test_hashes_of_another_width_are_named() -> None:
    wide, narrow = (rank(i, row_kind=RowKind.HASHES, hash_bytes=width) for i, width in enumerate((32, 16)))
    with pytest.raises(BadInputError, match="hash_bytes of number 1 is 16, of number 0 32"):
        check_family([wide, narrow])


def test_a_shard_is_named_once_and_there_are_not_too_many() -> None:
    with pytest.raises(BadInputError, match="namespaces 0 and 2 of the family have the same shard"):
        check_family([rank(0), rank(1), rank(0)])
    for namespaces in ([], [BASE] * (SHARDS_MAX + 1)):
        with pytest.raises(BadInputError, match=f"a family of {len(namespaces)} shards"):
            check_family(namespaces)


# Hits ---------------------------------------------------------------------------------------------


def test_the_smallest_hit_counts(roomy: Rig) -> None:
    family = Family(roomy, (4 * KIB, 8 * KIB, 4 * KIB))
    prompt = family.prompt(range(13))
    assert family.hit(prompt) == (0, 0)
    for i, shard in enumerate(prompt.shards):
        roomy.put(i + 1, shard, n_blocks=(7, 3, 5)[i])
        assert family.hit(prompt) == ((0, 0), (0, 0), (3, 0))[i]
    assert roomy.store.family_match(prompt, max_blocks=2).n_blocks == 2


def test_a_partly_matching_block_counts_as_far_as_it_matches_everywhere(roomy: Rig) -> None:
    family = Family(roomy, (4 * KIB, 4 * KIB), spec=KVSpec.opaque(8, 4 * KIB))
    stored = [[*range(8), 50, 51, 52, 53, 54, 55, 56, 57], [*range(8), 50, 51, 52, 1, 2, 3, 4, 5]]
    for i, opened in enumerate(family.spaces):
        roomy.put(i + 1, roomy.prompt(stored[i], opened))
    prompt = family.prompt(stored[0])
    assert family.hit(prompt) == (1, 3)
    lease = roomy.store.family_lease(ENGINE, prompt)
    assert (lease.n_blocks, lease.partial_tokens, lease.n_tokens, lease.n_held) == (1, 3, 11, 2)
    family.check_bytes(lease, prompt)
    inner = lease.ids_of(family.spaces[0].digest)[1]
    assert roomy.store.index.match(prompt.shards[0].root_key, prompt.shards[0].path).ids[1] == inner
    roomy.store.release(ENGINE, lease.id)
    whole = roomy.store.family_lease(ENGINE, prompt, max_blocks=1)
    assert (whole.n_blocks, whole.partial_tokens) == (1, 0)


def test_a_block_lost_in_one_shard_shortens_the_hit_of_all(roomy: Rig) -> None:
    family = Family(roomy)
    prompt = family.rows(6, tag=1)
    family.put(prompt)
    assert family.hit(prompt) == (6, 0)
    index = roomy.store.index
    index.touch(index.match(prompt.shards[0].root_key, prompt.shards[0].path).ids, Use(roomy.clock.now_s()))
    gone = index.evict(2)  # the tail of the shard that was touched less lately
    roomy.dram.free(gone.slots)
    assert [roomy.found(shard) for shard in prompt.shards] == [6, 4]
    assert family.hit(prompt) == (4, 0)
    lease = roomy.store.family_lease(ENGINE, prompt)
    assert (lease.n_blocks, lease.n_held) == (4, 4)
    family.check_bytes(lease, prompt)


# Leases -------------------------------------------------------------------------------------------


def test_one_lease_holds_every_shard_until_its_last_holder_lets_go(roomy: Rig) -> None:
    family = Family(roomy, (4 * KIB, 8 * KIB))
    prompt = family.rows(5, tag=1)
    family.put(prompt)
    lease = roomy.store.family_lease(ENGINE, prompt, first_block=2)
    assert (lease.first_block, lease.n_held, len(lease.ids)) == (2, 3, 6)
    family.check_bytes(lease, prompt, first_block=2)
    digests = [opened.digest for opened in family.spaces]
    roomy.store.attach(WORKER, "default", lease.id, digests[:1])
    roomy.store.release(ENGINE, lease.id)
    evicted = roomy.store.index.evict(100)
    roomy.dram.free(evicted.slots)
    assert not len(evicted.ids), "blocks before the leased ones have children, the leased ones are pinned"
    family.check_bytes(lease, prompt, first_block=2)
    roomy.store.release(WORKER, lease.id)
    evicted = roomy.store.index.evict(100)
    roomy.dram.free(evicted.slots)
    assert len(evicted.ids) == 10
    assert family.hit(prompt) == (0, 0)


def test_a_miss_in_one_shard_is_a_miss_and_pins_nothing(roomy: Rig) -> None:
    family = Family(roomy)
    prompt = family.rows(3, tag=1)
    roomy.put(1, prompt.shards[0])
    lease = roomy.store.family_lease(ENGINE, prompt)
    assert (lease.id, lease.n_blocks, lease.n_pending) == (0, 0, 0)
    assert not roomy.store.index.table.refs.any()
    assert len(roomy.store.leases) == 0


def test_attaching_needs_the_name_of_a_shard_that_is_there(roomy: Rig) -> None:
    family, others = Family(roomy), Family(roomy, revision="2")
    prompt = family.rows(2, tag=1)
    family.put(prompt)
    lease = roomy.store.family_lease(ENGINE, prompt)
    with pytest.raises(BadInputError, match="a family of 2 shards: say which"):
        roomy.store.attach(WORKER, "default", lease.id)
    with pytest.raises(BadInputError, match="has 2 shards, and not shard"):
        roomy.store.attach(WORKER, "default", lease.id, [others.spaces[0].digest])
    with pytest.raises(EndedError):
        roomy.store.attach(WORKER, "stranger", lease.id, [family.spaces[0].digest])
    assert lease.holders == {ENGINE: True}
    plain = roomy.store.lease(ENGINE, prompt.shards[0])
    with pytest.raises(BadInputError, match="is over one namespace"):
        roomy.store.attach(WORKER, "default", plain.id, [family.spaces[0].digest])


def test_a_lease_that_has_ended_still_holds_every_shard(roomy: Rig) -> None:
    family = Family(roomy)
    prompt = family.rows(3, tag=1)
    family.put(prompt)
    lease = roomy.store.family_lease(ENGINE, prompt, ttl_s=5.0)
    roomy.clock.advance(6.0)
    assert [claim.id for claim in roomy.store.expire()] == [lease.id]
    assert not len(roomy.store.index.evict(10).ids)
    roomy.store.forget_session(ENGINE)
    assert not roomy.store.index.table.refs.any()


def test_a_pin_keeps_the_smallest_hit_of_every_shard(roomy: Rig) -> None:
    family = Family(roomy)
    prompt = family.rows(5, tag=1)
    roomy.put(1, prompt.shards[0])
    assert roomy.store.family_pin(ENGINE, prompt).id == 0
    roomy.put(2, prompt.shards[1], n_blocks=3)
    pin = roomy.store.family_pin(ENGINE, prompt)
    assert len(pin.ids) == 6
    evicted = roomy.store.index.evict(100)
    roomy.dram.free(evicted.slots)
    assert len(evicted.ids) == 2
    assert [roomy.found(shard) for shard in prompt.shards] == [3, 3]
    assert roomy.store.unpin(ENGINE, pin.id)
    assert not roomy.store.index.table.refs.any()


# Under pressure -----------------------------------------------------------------------------------


def test_shards_that_were_used_together_lose_their_tails_together(roomy: Rig) -> None:
    family = Family(roomy, (4 * KIB,) * 4)
    prompt = family.rows(8, tag=1)
    family.put(prompt)
    lease = roomy.store.family_lease(ENGINE, prompt)
    roomy.store.release(ENGINE, lease.id)
    for _ in range(16):
        evicted = roomy.store.index.evict(2)
        roomy.dram.free(evicted.slots)
        found = [roomy.found(shard) for shard in prompt.shards]
        assert max(found) - min(found) <= 1


# Two tiers ----------------------------------------------------------------------------------------


@pytest.fixture
def tiers(tmp_path: Any) -> Any:
    sizes = Sizes(2 * MIB, 256 * KIB, 64 * KIB, nvme_bytes=8 * MIB, segment_bytes=256 * KIB)
    rig = TwoTierRig(tmp_path / "nvme", Settings(sizes))
    yield rig
    if not rig.ended:
        rig.close()


def drop_from_dram(rig: TwoTierRig) -> None:
    evicted = rig.store.index.evict(10_000)
    rig.dram.free(evicted.slots)


def family_read(rig: TwoTierRig, prompt: Any, session: int = ENGINE, **more: Any) -> Any:
    load = rig.store.begin_family_load(prompt, **more)
    if load is not None:
        rig.settle()
    lease = rig.store.family_lease(session, prompt, load=load, **more)
    if load is not None:
        rig.store.end_load(load)
    return lease


def test_one_lease_brings_up_what_any_shard_lacks(tiers: TwoTierRig) -> None:
    family = Family(tiers, (4 * KIB, 12 * KIB, 4 * KIB))
    prompt = family.rows(9, tag=1)
    family.put(prompt)
    tiers.settle()
    drop_from_dram(tiers)
    for shard in prompt.shards[:1]:  # one of them is in DRAM already, up to a point
        lease = tiers.read(WORKER, shard, max_blocks=4)
        tiers.store.release(WORKER, lease.id)
    first = tiers.store.family_lease(ENGINE, prompt)
    assert (first.id, first.n_blocks, first.n_pending) == (0, 0, 9)
    lease = family_read(tiers, prompt, first_block=1)
    assert (lease.n_blocks, lease.n_held, lease.n_nvme, lease.n_pending) == (9, 8, 8, 0)
    family.check_bytes(lease, prompt, first_block=1)
    assert tiers.store.index.resident(lease.ids, DRAM).all()
    tiers.store.release(ENGINE, lease.id)
    tiers.store.check()


def test_a_block_that_can_not_be_read_in_one_shard_ends_the_hit_of_all(tiers: TwoTierRig) -> None:
    family = Family(tiers)
    prompt = family.rows(6, tag=1)
    family.put(prompt)
    tiers.settle()
    drop_from_dram(tiers)
    index = tiers.store.index
    bad = index.match(prompt.shards[1].root_key, prompt.shards[1].path).ids[3:4]
    tiers.nvme.quarantine(index.break_nvme(bad))
    lease = family_read(tiers, prompt)
    assert (lease.n_blocks, lease.n_held) == (3, 3)
    family.check_bytes(lease, prompt)
    tiers.store.release(ENGINE, lease.id)
    assert [tiers.found(shard) for shard in prompt.shards] == [6, 3]


def test_what_is_read_is_read_of_every_shard_alike_where_room_is_short(tmp_path: Any) -> None:
    """DRAM has room for a third of what one prompt has in all shards: they must get as far as each other."""
    sizes = Sizes(1 * MIB, 128 * KIB, 64 * KIB, nvme_bytes=16 * MIB, segment_bytes=256 * KIB)
    rig = TwoTierRig(tmp_path / "nvme", Settings(sizes))
    family = Family(rig, (64 * KIB,) * 3)
    prompt = family.rows(16, tag=1)
    for first in range(0, 16, 2):
        for i, shard in enumerate(prompt.shards):
            rig.put(i + 1, shard, first_block=first, n_blocks=2)
            rig.settle()
    for session in (1, 2, 3):
        rig.store.forget_session(session)
    drop_from_dram(rig)
    rig.unmap_retired()
    assert family.hit(prompt) == (16, 0)
    lease = family_read(rig, prompt)
    in_dram = [int(rig.store.index.resident(ids, DRAM).sum()) for ids in rig.store.family_match(prompt).ids]
    assert max(in_dram) - min(in_dram) <= 1
    assert lease.n_blocks == min(in_dram) >= 2
    family.check_bytes(lease, prompt)
    rig.store.forget_session(ENGINE)
    rig.close()


def test_a_restart_finds_the_family_again(tiers: TwoTierRig) -> None:
    family = Family(tiers, (4 * KIB, 8 * KIB))
    prompt = family.rows(7, tag=1)
    family.put(prompt)
    tiers.settle()
    for session in (1, 2):
        tiers.store.forget_session(session)
    after = tiers.killed()
    again = Family(after, (4 * KIB, 8 * KIB))
    prompt = again.rows(7, tag=1)
    assert again.hit(prompt) == (7, 0)
    lease = family_read(after, prompt)
    assert lease.n_blocks == 7
    again.check_bytes(lease, prompt)
    assert np.unique(lease.ids).size == 14
    after.store.forget_session(ENGINE)
    after.close()
