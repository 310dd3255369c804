"""Fair shares: who gives first, against a model of its own; and that one tenant alone is in the policy's order."""

from __future__ import annotations

import random
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.config.tenants import TenantOptions
from kvstore.prefix_index import evictor as evictor_module
from kvstore.prefix_index.block_table import DRAM, NVME
from kvstore.prefix_index.index import PrefixIndex
from kvstore.prefix_index.policies import make_policy
from kvstore.prefix_index.policy import Use
from kvstore.prefix_index.rows import RowPath
from kvstore.prefix_index.shares import shares
from kvstore.prefix_index.tenants import Asker

PAGE = 4096
NAMES = ("a", "b", "c", "d")


def root_of(tenant: int) -> bytes:
    return bytes([tenant]) * 16


def path_of(tokens: list[int]) -> RowPath:
    return RowPath.from_tokens(np.array(tokens, np.uint32), 2)


class Scene:
    """An index with several tenants, each with one namespace of its own number."""

    def __init__(self, options: TenantOptions, policy: str = "lru", nvme: bool = False) -> None:
        self.index = PrefixIndex(make_policy(policy), reserve_blocks=64, nvme=nvme, tenants=options)
        self.tenants = [self.index.tenants.number(name) for name in NAMES]
        for tenant in self.tenants:
            self.index.tenants.owns(tenant, tenant)
        self.now_s = 0.0
        self._last_slot = -1

    def store(self, tenant: int, tokens: list[int], n_pages: int = 1) -> None:
        path = path_of(tokens)
        self.now_s += 1
        use = Use(self.now_s, namespace=tenant)
        found = self.index.match(root_of(tenant), path).ids
        self.index.touch(found, use)
        slots = np.arange(path.n_rows - len(found)) + self._last_slot + 1
        self._last_slot += len(slots)
        self.index.insert(root_of(tenant), path, len(found), slots, n_pages * PAGE, use)


# A model that shares no line with what it is about --------------------------------------------------


def due_by_hand(
    room: int, left: int, wanted: dict[int, int], weight: dict[int, Fraction], least: dict[int, int]
) -> dict[int, Fraction]:
    """What is due to each tenant that wants something, in fractions; never less than its share of the room."""
    share = divide(max(room, left), wanted, weight, least)
    above = {tenant: n for tenant, n in wanted.items() if n > share[tenant]}
    rest = divide(left - sum(n for tenant, n in wanted.items() if tenant not in above), above, weight, least)
    return share | {tenant: max(share[tenant], rest[tenant]) for tenant in above}


def divide(
    total: int, among: dict[int, int], weight: dict[int, Fraction], least: dict[int, int]
) -> dict[int, Fraction]:
    free, left, out = set(among), Fraction(total), {tenant: Fraction(least[tenant]) for tenant in among}
    while free:
        level = left / sum(weight[tenant] for tenant in free)
        fixed = {tenant for tenant in free if level * weight[tenant] < least[tenant]}
        if not fixed:
            return out | {tenant: level * weight[tenant] for tenant in free}
        free -= fixed
        left -= sum(least[tenant] for tenant in fixed)
    return out


class Copies:
    """Which block has copies in which tiers, and what follows what."""

    def __init__(self, scene: Scene) -> None:
        table = scene.index.table
        alive = table.alive().tolist()
        self.tiers = {b: {t for t in (DRAM, NVME) if int(table.residency[b]) >> (16 * t) & 1} for b in alive}
        self.parent = {b: int(table.parent[b]) for b in alive}
        self.owner = {b: int(table.namespace[b]) for b in alive}
        self.size = {b: -(-int(table.size_bytes[b]) // PAGE) * PAGE for b in alive}
        self.pinned = {b for b in alive if table.refs[b]}

    def leaves(self, tier: int) -> dict[int, list[int]]:
        """By tenant what may go from a tier."""
        found: dict[int, list[int]] = {}
        for block, tiers in self.tiers.items():
            behind = [each for each, parent in self.parent.items() if parent == block]
            stays = block in self.pinned or any(tier in self.tiers[each] for each in behind)
            if tier == NVME and DRAM not in tiers:
                stays |= bool(behind)
            if tier in tiers and not stays:
                found.setdefault(self.owner[block], []).append(block)
        return found

    def drop(self, block: int, tier: int) -> None:
        self.tiers[block].discard(tier)
        while block in self.tiers and not self.tiers[block] and block not in self.pinned:
            if block in self.parent.values():
                return
            del self.tiers[block]
            block = self.parent.pop(block)


OPTIONS = st.builds(
    lambda weights, least: TenantOptions(
        weights=", ".join(f"{name}={weight}" for name, weight in zip(NAMES, weights, strict=True)),
        dram_min=", ".join(f"{name}={n * PAGE}" for name, n in zip(NAMES, least, strict=True)),
        nvme_min=", ".join(f"{name}={n * PAGE}" for name, n in zip(NAMES, least, strict=True)),
    ),
    st.lists(st.sampled_from(["1", "1", "2", "0.5", "7"]), min_size=4, max_size=4),
    st.lists(st.sampled_from([0, 0, 0, 3, 9]), min_size=4, max_size=4),
)


@pytest.mark.parametrize("tier", [DRAM, NVME])
@pytest.mark.parametrize("snapshot_min", [1, 4096])
@given(options=OPTIONS, seed=st.integers(0, 1 << 30), most=st.integers(1, 6))
@settings(derandomize=True, deadline=None, max_examples=60)
def test_only_who_has_more_than_its_share_gives_and_in_the_policys_order(
    tier: int, snapshot_min: int, options: TenantOptions, seed: int, most: int
) -> None:
    """No tenant at or below what is due to it loses a block to another's insertion."""
    dice = random.Random(seed)
    scene = Scene(options, dice.choice(["lru", "lfu", "fifo"]), nvme=tier == NVME)
    pinned = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evictor_module, "_SNAPSHOT_MIN", snapshot_min)
        patch.setattr(evictor_module, "_CHUNK", 2)
        for _ in range(dice.randrange(4, 40)):
            tenant = dice.choice(scene.tenants)
            scene.store(tenant, [dice.randrange(3) for _ in range(dice.randrange(1, 12))], dice.choice([1, 1, 3]))
            if tier == NVME:
                table = scene.index.table
                chain = scene.index.chain_unpersisted(table.alive())
                scene.index.add_nvme(chain, chain.astype(np.int64))
            if dice.random() < 0.3:
                found = scene.index.match(root_of(tenant), path_of([dice.randrange(3) for _ in range(6)])).ids
                scene.index.pin(found)
                pinned.append(found)
            if dice.random() < 0.2 and pinned:
                scene.index.unpin(pinned.pop(dice.randrange(len(pinned))))
            if dice.random() < 0.7:
                asker = Asker(dice.choice(scene.tenants), dice.randrange(6) * PAGE, dice.random() < 0.5)
                scene.index.tenants.room_for_all[tier] = dice.choice([0, 0, 30, 100]) * PAGE
                evict_and_judge(scene, tier, asker, dice.randrange(1, most + 1), options)
        scene.index.check()


def evict_and_judge(scene: Scene, tier: int, asker: Asker, n: int, options: TenantOptions) -> None:
    copies = Copies(scene)
    had = dict.fromkeys(scene.tenants, 0)
    for block, tiers in copies.tiers.items():
        had[copies.owner[block]] += copies.size[block] * (tier in tiers)
    had[asker.tenant] += asker.n_bytes
    weight = {t: Fraction(options.weight_of()[name]) for t, name in zip(scene.tenants, NAMES, strict=True)}
    promised = options.least("dram" if tier == DRAM else "nvme")
    least = {t: promised[name] for t, name in zip(scene.tenants, NAMES, strict=True)}
    ranks = scene.index.table.ranks(tier).copy()

    def allowed() -> list[int]:
        present = {tenant: n_bytes for tenant, n_bytes in had.items() if n_bytes}
        left = sum(had.values()) - max(asker.n_bytes, PAGE)
        due = due_by_hand(scene.index.tenants.room_for_all[tier], left, present, weight, least)
        leaves = copies.leaves(tier)
        givers = [t for t in present if had[t] > due[t] and t in leaves]
        alone = not any(had[t] for t in present if t != asker.tenant)
        last_resort = [asker.tenant] if asker.gives_own or alone else []
        return [block for t in givers or last_resort for block in leaves.get(t, [])]

    gone = (scene.index.evict if tier == DRAM else scene.index.evict_nvme)(n, asker).ids.tolist()
    for i, block in enumerate(gone):
        assert block in allowed(), (had, copies.owner[block])
        if i == 0:  # what is due is reckoned once for all that go together
            assert ranks[block] == min(ranks[each] for each in allowed())
        had[copies.owner[block]] -= copies.size[block]
        copies.drop(block, tier)
    assert len(gone) == n or not allowed()


@given(
    total=st.integers(0, 1 << 40),
    entries=st.lists(st.tuples(st.integers(1, 1000), st.integers(0, 1 << 38)), min_size=1, max_size=9),
)
@settings(derandomize=True, deadline=None, max_examples=200)
def test_shares_are_by_weight_and_at_least_what_is_guaranteed(total: int, entries: list[tuple[int, int]]) -> None:
    weights, least = (np.array(column, np.float64) for column in zip(*entries, strict=True))
    got = shares(float(total), weights, least)
    expected = divide(
        total,
        dict.fromkeys(range(len(entries)), 0),
        {i: Fraction(weight) for i, (weight, _) in enumerate(entries)},
        {i: low for i, (_, low) in enumerate(entries)},
    )
    if least.sum() <= total:
        np.testing.assert_allclose(got, [float(expected[i]) for i in range(len(entries))], rtol=1e-9, atol=1e-3)
        assert abs(got.sum() - total) <= 1e-6 * max(total, 1)
    else:
        np.testing.assert_array_equal(got >= least, True)


def evicted_keys(options: TenantOptions | None, n_tenants: int, policy: str, seed: int) -> list[bytes]:
    """Of one and the same run of requests, whose namespaces belong to so many tenants."""
    dice, scene = random.Random(seed), Scene(options or TenantOptions(), policy)
    for namespace in scene.tenants:
        scene.index.tenants.owns(scene.tenants[namespace % n_tenants], namespace)
    keys: list[bytes] = []
    for _ in range(60):
        scene.store(dice.choice(scene.tenants), [dice.randrange(3) for _ in range(dice.randrange(1, 14))])
        gone = scene.index.evict(dice.randrange(5), Asker(scene.tenants[0], PAGE))
        keys += [key.tobytes() for key in gone.keys]
    scene.index.check()
    return keys


@pytest.mark.parametrize("policy", ["lru", "lfu", "s3fifo"])
@given(seed=st.integers(0, 1 << 30))
@settings(derandomize=True, deadline=None, max_examples=20)
def test_one_tenant_is_evicted_from_in_the_policys_order(policy: str, seed: int) -> None:
    plain = evicted_keys(TenantOptions(shares="none"), 4, policy, seed)
    assert evicted_keys(None, 1, policy, seed) == plain
    assert evicted_keys(TenantOptions(weights="a=7", dram_min="a=40KiB"), 1, policy, seed) == plain


def test_blocks_that_turn_out_to_be_another_tenants_count_as_its() -> None:
    scene = Scene(TenantOptions())
    a, b = scene.tenants[:2]
    for i in range(8):
        for tenant in (a, b, scene.tenants[3]):
            scene.store(tenant, [100 + i, 100 + i])
    scene.index.evict(1, Asker(a, PAGE))  # orders of all are known
    scene.index.tenants.owns(b, a)
    assert scene.index.tenants.used_bytes[DRAM, [a, b]].tolist() == [0, 15 * PAGE]
    scene.index.check()
    assert len(scene.index.evict(1, Asker(b, PAGE)).ids) == 1
    at = scene.index.match(root_of(a), path_of([107, 107])).ids
    c = scene.tenants[2]
    scene.index.tenants.move(at, c)
    assert scene.index.tenants.used_bytes[DRAM, [b, c]].tolist() == [13 * PAGE, PAGE]
    scene.index.tenants.room_for_all[DRAM] = 100 * PAGE
    assert len(scene.index.evict(20, Asker(b, PAGE)).ids) == 13
    scene.index.check()


def test_many_tenants_with_little_do_not_take_from_one_what_another_floods_with() -> None:
    scene = Scene(TenantOptions())
    index = scene.index
    small = [index.tenants.number(f"small {i}") for i in range(200)]
    for tenant in small:
        index.tenants.owns(tenant, tenant)
        index.insert(root_of(0), path_of([tenant, 1]), 0, np.zeros(1, np.int64), 1, Use(0.0, namespace=tenant))
    a, b = scene.tenants[:2]
    for i in range(100):
        scene.store(a, [i, i])
        scene.store(b, [i, i])
    for i in range(300):  # b goes on
        gone = index.evict(1, Asker(b, PAGE))
        assert len(gone.ids) == 1
        scene.store(b, [1000 + i, 1000 + i])
    used = index.tenants.used_bytes[DRAM]
    assert used[small].tolist() == [PAGE] * 200
    assert (used[a], used[b]) == (100 * PAGE, 100 * PAGE)
