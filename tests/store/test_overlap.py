"""What routers are told: tokens by tier, and load times that are learnt from real loads. Asking changes nothing."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from kvstore.load_time import ERROR_OF_GUESS
from kvstore.onboard import Load
from kvstore.prefix_index.block_table import NVME
from kvstore.prefix_index.rows import RowPath
from kvstore.store.family import FamilyPrompt
from kvstore.store.hierarchy import WriteBehind
from kvstore.store.overlap import Overlap
from kvstore.store.requests import Prompt
from kvstore.types import KVSpec, Namespace, RowKind
from tests.store.families import Family
from tests.store.hybrid_rig import LAYOUTS, spec_of
from tests.store.rig import BLOCK_TOKENS, KIB, Rig
from tests.store.two_tier import MIB, Settings, Sizes, TwoTierRig

ALICE, BOB = 1, 2
FRAME_BYTES = 8 * KIB
BLOCK_BYTES = 4 * KIB


def below(path: Path, *n_rows: int, sizes: Sizes | None = None) -> TwoTierRig:
    """A store just started over prompts on NVMe, with tags 1, 2 and so on."""
    rig = TwoTierRig(path, Settings(sizes or Sizes(), WriteBehind(queue_bytes_max=MIB, io_timeout_s=5.0)))
    for tag, n in enumerate(n_rows, start=1):
        rig.put(ALICE, rig.rows(n, tag=tag))
        assert rig.persist(rig.rows(n, tag=tag)) == n
    return rig.killed()


def tiers(found: Overlap) -> tuple[int, int, int, int]:
    return found.n_tokens, found.n_dram_tokens, found.n_nvme_tokens, found.n_loading_tokens


def state_of(rig: Rig) -> list[bytes]:
    """All that a policy or a lease would change."""
    table = rig.store.index.table
    names = ("last_use_s", "rank", "refs", "residency", *(("hits", "nvme_rank") if rig.store.hierarchy else ()))
    return [getattr(table, name).tobytes() for name in names]


def load_in(rig: TwoTierRig, prompt: Prompt, took_s: float) -> Load:
    """Read it from NVMe in so much time by the clock."""
    load = rig.store.begin_load(prompt)
    assert load is not None
    rig.clock.advance(took_s)
    rig.jobs.all()
    assert load.done
    rig.store.end_load(load)
    return load


@pytest.fixture
def dram() -> Rig:
    return Rig()


def test_nothing_stored_is_nothing_to_load(dram: Rig) -> None:
    assert dram.store.overlap(dram.rows(3, tag=1)) == Overlap(0, 0, 0, 0, 0.0, 1.0)


def test_in_dram_a_load_is_a_copy_and_clients_say_how_long_those_take(dram: Rig) -> None:
    prompt = dram.rows(5, tag=1)
    dram.put(ALICE, dram.rows(4, tag=1))
    found = dram.store.overlap(prompt)
    assert tiers(found) == (8, 8, 0, 0)
    assert 0 < found.load_s < 1e-3
    assert found.load_error == pytest.approx(ERROR_OF_GUESS)
    for _ in range(30):
        dram.store.note_copy(prompt.namespace, 4 * BLOCK_BYTES, 0.016)
        dram.store.note_copy(prompt.namespace, 4 * BLOCK_BYTES, 77.0)  # too soon after the one before
        dram.clock.advance(0.1)
    found = dram.store.overlap(prompt)
    assert found.load_s == pytest.approx(0.016, rel=0.05)
    assert found.load_error < 1.1
    other = dram.namespace(tenant="other")
    dram.put(ALICE, dram.rows(4, tag=1, namespace=other))
    assert dram.store.overlap(dram.rows(4, tag=1, namespace=other)).load_s < 1e-3, "another tenant's word counted"


def test_copies_of_what_was_read_first_are_known_by_themselves(tmp_path: Path) -> None:
    rig = below(tmp_path, 2, 2)
    cold, hot = rig.rows(2, tag=1), rig.rows(2, tag=2)
    rig.store.release(BOB, rig.read(BOB, hot).id)
    before_s = rig.store.overlap(hot).load_s
    rig.store.note_copy(cold.namespace, 2 * BLOCK_BYTES, 7.0, after_read=True)
    assert rig.store.overlap(cold).load_s == pytest.approx(7.0, rel=0.1)
    assert rig.store.overlap(hot).load_s == before_s


def test_partly_matching_blocks_count_by_their_tokens(dram: Rig) -> None:
    dram.put(ALICE, dram.prompt([1, 2, 3, 4]))
    assert tiers(dram.store.overlap(dram.prompt([1, 2, 3, 9]))) == (3, 3, 0, 0)


def test_each_token_is_where_it_is_fastest_and_asking_changes_nothing(tmp_path: Path) -> None:
    rig = below(tmp_path, 6)
    prompt = rig.rows(6, tag=1)
    rig.store.release(BOB, rig.read(BOB, prompt, first_block=2, max_blocks=4).id)  # blocks 2 and 3
    rig.clock.advance(100.0)
    before, lookups = state_of(rig), rig.count("lookups")
    found = rig.store.overlap(rig.rows(6, tag=1))
    assert tiers(found) == (12, 4, 8, 0)
    assert (state_of(rig), rig.count("lookups"), rig.jobs.runnable()) == (before, lookups, [])
    assert rig.store.hierarchy is not None
    assert not rig.store.hierarchy.onboarder.stats()["waiting_blocks"]


def test_what_is_on_its_way_is_told_and_what_waits_before_it_counts(tmp_path: Path) -> None:
    rig = below(tmp_path, 6)
    prompt = rig.rows(6, tag=1)
    alone_s = rig.store.overlap(prompt).load_s
    load = rig.store.begin_load(prompt, max_blocks=2)
    assert load is not None
    found = rig.store.overlap(prompt)
    assert tiers(found) == (12, 0, 12, 4)
    assert found.load_s == pytest.approx(alone_s)  # the same bytes, some of them asked for already
    rig.put(ALICE, rig.rows(2, tag=2))
    assert rig.persist(rig.rows(2, tag=2)) == 2
    rig.store.end_load(load)


@pytest.mark.parametrize(("start_s", "bytes_per_s"), [(0.001, 2e6), (0.02, 2e6), (0.0005, 5e8)])
def test_load_times_are_learnt_from_loads_by_the_clock(tmp_path: Path, start_s: float, bytes_per_s: float) -> None:
    sizes = [1, 8, 2, 4] * 4
    rig = below(tmp_path, *sizes, sizes=Sizes(512 * KIB))
    far_off = []
    for tag, n_rows in enumerate(sizes, start=1):
        prompt, took_s = rig.rows(n_rows, tag=tag), start_s + n_rows * FRAME_BYTES / bytes_per_s
        expected_s = rig.store.overlap(prompt).load_s - prompt.namespace.copy_times[1].expected_s(n_rows * BLOCK_BYTES)
        far_off.append(abs(math.log(expected_s / took_s)))
        load_in(rig, prompt, took_s)
    assert max(far_off[-4:]) < math.log(1.15), far_off
    assert max(far_off[-4:]) < max(far_off[:4])


def test_a_stuck_disk_is_no_time_at_all(tmp_path: Path) -> None:
    rig = below(tmp_path, 4)
    prompt = rig.rows(4, tag=1)
    load = rig.store.begin_load(prompt)
    assert load is not None
    rig.clock.advance(6.0)
    rig.store.tick()
    found = rig.store.overlap(prompt)
    assert tiers(found) == (8, 0, 8, 8)
    assert found.load_s == math.inf
    assert found.load_error >= 1
    rig.store.end_load(load)
    rig.jobs.all()
    assert rig.store.overlap(prompt).load_s < math.inf


def test_a_family_is_where_its_slowest_shard_is(dram: Rig) -> None:
    family = Family(dram, (4 * KIB, 8 * KIB))
    family.put(family.rows(4, tag=1))
    long = family.rows(6, tag=1)
    dram.put(1, long.shards[0])
    found = dram.store.overlap(long)
    assert tiers(found) == (8, 8, 0, 0)
    slowest = max(dram.store.overlap(FamilyPrompt((shard,))).load_s for shard in family.rows(4, tag=1).shards)
    assert found.load_s == pytest.approx(slowest)


def test_a_hybrid_hit_takes_as_long_as_all_that_it_needs(dram: Rig) -> None:
    layout = LAYOUTS[0]
    opened = dram.namespace(spec=spec_of(layout))
    tokens = np.arange(6 * opened.namespace.spec.block_tokens).tolist()
    whole = dram.prompt(tokens, opened)
    dram.put(ALICE, whole)
    assert dram.store.overlap(whole).n_tokens == 0
    parts = dram.reserve(ALICE, whole._replace(part=1))
    assert dram.store.commit(ALICE, parts.id).n_committed == 6
    found = dram.store.overlap(whole)
    assert found.n_tokens == found.n_dram_tokens == len(tokens)
    n_bytes = 6 * layout.sizes[0]
    assert found.load_s > opened.copy_times[0].expected_s(n_bytes)


def test_tokens_of_engine_hashes_are_those_of_blocks(dram: Rig) -> None:
    opened = dram.store.namespaces.open(
        Namespace("m", KVSpec.opaque(BLOCK_TOKENS, BLOCK_BYTES), row_kind=RowKind.HASHES, hash_bytes=8)
    )
    path = RowPath.from_hashes(bytes(range(24)), 8)
    prompt = Prompt(opened, opened.root_key("", ""), path, dram.clock.now_s())
    dram.put(ALICE, prompt)
    assert tiers(dram.store.overlap(prompt)) == (3 * BLOCK_TOKENS, 3 * BLOCK_TOKENS, 0, 0)


def test_only_where_there_is_a_slower_tier_is_anything_on_it(tmp_path: Path) -> None:
    rig = below(tmp_path, 3)
    ids = rig.store.index.match(rig.rows(3, tag=1).root_key, rig.rows(3, tag=1).path).ids
    assert rig.store.index.resident(ids, NVME).all()
    assert tiers(rig.store.overlap(rig.rows(3, tag=1))) == (6, 0, 6, 0)
