"""Hybrid namespaces in the store: what becomes of parts whose block goes, and what is written to NVMe."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvstore.errors import BadInputError, EndedError
from kvstore.hints import Hints
from kvstore.hybrid import PARTS_MAX, parts_of, place_of
from kvstore.offload import WritePolicy
from kvstore.prefix_index.block_table import NVME
from kvstore.store.hierarchy import WriteBehind
from kvstore.types import GroupKind, KVGroup, KVSpec, Namespace
from tests.store.hybrid_rig import IN_DRAM, KIB, LAYOUTS, ON_NVME, HybridRig, spec_of
from tests.store.rig import Rig
from tests.store.two_tier import Settings, Sizes, TwoTierRig, nvme_bytes_for

WRITER, READER = 1, 2
GEMMA, NEXT = LAYOUTS[:2]
TOKENS = tuple(range(24))


def two_tiers(folder: Path, policy: WritePolicy) -> tuple[TwoTierRig, HybridRig]:
    sizes = Sizes(400 * KIB, 64 * KIB, 16 * KIB, nvme_bytes_for(14))
    rig = TwoTierRig(folder / "disk", Settings(sizes, WriteBehind(policy, queue_bytes_max=1 << 20)))
    return rig, HybridRig(rig)


def test_parts_of_a_block_that_is_lost_meanwhile_are_not_stored(tmp_path: Path) -> None:
    rig, it = two_tiers(tmp_path, WritePolicy.THROUGH)
    it.put(WRITER, NEXT, TOKENS[:8], 0)
    rig.settle()
    writing = it.reserve(WRITER, NEXT, TOKENS[:8], 1, 3, 1)
    assert writing is not None
    index = rig.store.index
    evicted = index.evict(4)
    rig.dram.free(evicted.slots)
    ids = np.flatnonzero(index.resident(np.arange(index.table.n_used), NVME)).astype(np.uint32)
    rig.nvme.quarantine(index.break_nvme(ids[index.table.parent[ids] != ids]))
    with pytest.raises(EndedError, match="lost its parent block"):
        rig.store.commit(WRITER, writing.reservation.id)
    assert rig.dram_bytes()["reserved"] == 0
    rig.store.forget_session(WRITER)
    rig.close()


@pytest.mark.parametrize("policy", WritePolicy)
def test_what_no_hit_needs_is_not_written_to_nvme(policy: WritePolicy, tmp_path: Path) -> None:
    rig, it = two_tiers(tmp_path, policy)
    it.put_all(WRITER, GEMMA, TOKENS)
    for _ in range(2):
        reading = it.hold(READER, GEMMA, TOKENS)
        assert reading is not None
        it.release(reading)
        rig.settle()
    hierarchy = rig.store.hierarchy
    assert hierarchy is not None
    while not hierarchy.cleaner.drain():
        rig.settle()
    copies = it.copies()
    parts = {tokens: tiers for (_, tokens, part), tiers in copies.items() if part == 1}
    assert len(parts) == 12
    assert all(tiers & IN_DRAM for tiers in parts.values())
    written = sorted(len(tokens) // 2 for tokens, tiers in parts.items() if tiers & ON_NVME)
    assert written == [10, 11, 12]
    assert sum(tiers & ON_NVME != 0 for (_, _, part), tiers in copies.items() if part == 0) == 12
    rig.store.forget_session(WRITER)
    rig.close()


def test_a_hybrid_hit_is_durable_with_the_life_that_its_blocks_have(tmp_path: Path) -> None:
    rig, it = two_tiers(tmp_path, WritePolicy.THROUGH)
    prompt = it.prompt(NEXT, TOKENS)
    for part in range(2):
        limited = rig.reserve(WRITER, it.prompt(NEXT, TOKENS, part)._replace(hints=Hints(ttl_s=600.0)))
        rig.map_regions(WRITER, limited.slots, writable=True)
        rig.store.commit(WRITER, limited.id)
    rig.settle()
    assert rig.persist(prompt) == 12
    assert rig.store.begin_reserve(WRITER, prompt, 0, 12).n_present == 12  # without a limit
    persist = rig.store.begin_persist(prompt)
    assert persist is not None
    assert (rig.store.n_durable(persist), persist.n_waiting) == (0, 12)
    rig.jobs.all()
    assert (rig.store.n_durable(persist), persist.done) == (12, True)
    rig.store.end_persist(persist)
    rig.store.forget_session(WRITER)
    rig.close()


def test_what_no_hit_needs_makes_room_first() -> None:
    it = HybridRig(Rig(100 * KIB, 100 * KIB, 100 * KIB))
    it.put_all(WRITER, GEMMA, TOKENS)
    it.put(WRITER, GEMMA, tuple(range(100, 106)), 0)
    evicted = it.rig.count("evicted_blocks")
    assert evicted == 2
    copies = it.copies()
    assert len([entry for entry in copies if entry[2] == 0]) == 15, "no block had to go"
    assert len([entry for entry in copies if entry[2] == 1]) == 12 - evicted
    assert it.hold(READER, GEMMA, TOKENS) is not None
    it.rig.store.forget_session(READER)
    it.rig.store.forget_session(WRITER)
    it.rig.close()


def test_a_pin_counts_the_blocks_of_the_hit() -> None:
    it = HybridRig(Rig(160 * KIB))
    it.put(WRITER, NEXT, TOKENS[:8], 0)
    it.put(WRITER, NEXT, TOKENS[:8], 1, 2, 1)
    pin = it.rig.store.pin(READER, it.prompt(NEXT, TOKENS[:8]))
    assert (pin.n_blocks, len(pin.ids)) == (3, 4)
    assert it.rig.store.unpin(READER, pin.id)
    nothing = it.rig.store.pin(READER, it.prompt(NEXT, TOKENS[8:16]))
    assert (nothing.id, nothing.n_blocks) == (0, 0)
    it.rig.store.forget_session(WRITER)
    it.rig.close()


def test_a_namespace_says_what_it_stores() -> None:
    rig = Rig()
    opened = rig.store.namespaces.open(Namespace("m", spec_of(LAYOUTS[2])))
    assert len(set(opened.ordinals)) == len({each.digest for each in opened.stored}) == 4
    assert opened.digest not in {each.digest for each in opened.stored}
    assert [each.block_bytes for each in opened.stored] == list(LAYOUTS[2].sizes)
    assert all(rig.store.namespaces.by_ordinal(ordinal) is opened for ordinal in opened.ordinals)
    plain = rig.namespace()
    assert (plain.parts, plain.ordinals, plain.stored[0].digest) == ((), (plain.ordinal,), plain.digest)
    rig.close()


def test_how_a_spec_is_cut() -> None:
    full, latent = KVGroup(layers=2, kv_heads=2, head_dim=8), KVGroup(layers=1, head_dim=8, kind=GroupKind.MLA)
    window = KVGroup(layers=1, kv_heads=2, head_dim=8, kind=GroupKind.SLIDING, window_tokens=33)
    state = KVGroup(layers=3, dtype="uint8", layout="opaque", page_bytes=100, kind=GroupKind.STATE)
    spec = KVSpec(16, (full, window, latent, state), page_tokens=8)
    base, first, second = parts_of(spec)
    assert (base.groups, base.window_blocks, base.is_state) == ((0, 2), 0, False)
    assert (first.groups, first.window_blocks, first.is_state) == ((1,), 3, False)
    assert (second.groups, second.window_blocks, second.is_state) == ((3,), 1, True)
    assert sum(part.block_bytes for part in parts_of(spec)) == spec.block_bytes
    full_bytes = 2 * 2 * 16 * 2 * 8 * 2
    assert place_of(spec, 2) == (base, full_bytes, 16 * 8 * 2)
    assert place_of(spec, 3) == (second, 0, 600)
    with pytest.raises(BadInputError, match="group 4 is not there"):
        place_of(spec, 4)
    for whole in ((full,), (window,), (state,), (full, latent)):
        assert parts_of(KVSpec(16, whole)) == ()
    assert len(parts_of(KVSpec(16, (full, *[window] * PARTS_MAX)))) == PARTS_MAX + 1
    with pytest.raises(BadInputError, match="16 sliding and state groups, the most is 15"):
        parts_of(KVSpec(16, (full, *[window] * 16)))
