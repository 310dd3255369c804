"""Families in a memory that is too small: shards keep in step, so that little of it holds what no hit reaches."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvstore.prefix_index.kin import Kin
from kvstore.store.kinship import Kinship
from tests.store.families import KIB, Family
from tests.store.rig import Rig

N_SHARDS, N_PROMPTS, ENGINE = 8, 48, 99


def rows_of(tag: int) -> int:
    return 3 + tag * 7 % 5


def run(rig: Rig, seed: int) -> tuple[float, float]:
    """Skewed requests for four times what fits; each prompt is leased, then stored by every rank.

    Returns the part of the blocks asked for that was hit, and of those stored the part that no hit reaches.
    """
    dice, family = random.Random(seed), Family(rig, (4 * KIB,) * N_SHARDS)
    weights = [(i + 1) ** -0.8 for i in range(N_PROMPTS)]
    n_hit = n_asked = 0
    for step in range(240):
        tag = dice.choices(range(N_PROMPTS), weights)[0]
        prompt = family.rows(rows_of(tag), tag=tag + 1)
        lease = rig.store.family_lease(ENGINE, prompt)
        if lease.id:
            family.check_bytes(lease, prompt)
            rig.store.release(ENGINE, lease.id)
        if step >= 120:
            n_hit, n_asked = n_hit + lease.n_blocks, n_asked + rows_of(tag)
        family.put(prompt)
        rig.unmap_retired()
    reached = sum(family.hit(family.rows(rows_of(tag), tag=tag + 1))[0] for tag in range(N_PROMPTS)) * N_SHARDS
    return n_hit / n_asked, 1 - reached / rig.store.index.n_blocks


def test_shards_keep_in_step(make_rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def rig() -> Rig:
        made: Rig = make_rig(capacity_bytes=2048 * KIB, region_bytes=64 * KIB, starter_bytes=16 * KIB)
        return made

    with_kin = [run(rig(), seed) for seed in range(2)]
    monkeypatch.setattr(Kin, "link", lambda *_: None)
    monkeypatch.setattr(Kinship, "stored", lambda *_: None)
    without = [run(rig(), seed) for seed in range(2)]
    for (hits, useless), (hits_without, useless_without) in zip(with_kin, without, strict=True):
        assert useless < 0.1
        assert useless_without > 2 * useless
        assert hits > hits_without
