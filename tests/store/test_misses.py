"""Lookups that were no whole hits, counted by what became of the first block that they lack."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvstore.hints import Hints
from kvstore.prefix_index.history import Left
from kvstore.store import misses
from kvstore.store.misses import Ending
from tests.store.families import Family
from tests.store.hybrid_rig import LAYOUTS, HybridRig
from tests.store.rig import KIB, Rig
from tests.store.two_tier import TwoTierRig

ALICE, BOB = 1, 2


def counts(rig: Rig) -> dict[str, int]:
    """What has been counted, by reason, without zeros."""
    numbers = rig.store.stats()[0]
    return {
        name.removeprefix("missed_lookups_"): int(n)
        for name, n in numbers.items()
        if name.startswith("missed_lookups_") and n
    }


def look(rig: Rig, prompt: Any, **more: Any) -> None:
    rig.store.release(BOB, rig.store.lease(BOB, prompt, **more).id)


def test_whole_hits_and_what_was_not_asked_for_are_no_misses(rig: Rig) -> None:
    prompt = rig.rows(4, 1)
    rig.put(ALICE, prompt)
    look(rig, prompt)
    look(rig, rig.prompt([*range(1000, 1007)]))  # ends inside of the last block
    look(rig, rig.rows(6, 1), max_blocks=3)
    assert counts(rig) == {}


def test_never_stored_by_what_is_stored_instead(rig: Rig) -> None:
    rig.put(ALICE, rig.prompt([1, 2, 3, 4, 5, 6]))
    look(rig, rig.rows(3, 7))
    look(rig, rig.prompt([1, 2, 3, 4, 9, 9]))
    look(rig, rig.prompt([1, 2, 3, 4, 5, 6, 7, 8]))
    look(rig, rig.prompt([1, 2, 3, 4, 5, 6, 7]))
    assert counts(rig) == {Ending.NEW: 1, Ending.DIFFERS: 1, Ending.LONGER: 2}


def test_how_a_block_left(rig: Rig) -> None:
    prompt = rig.rows(6, 1)
    rig.put(ALICE, prompt)
    rig.dram.free(rig.store.index.evict(2).slots)
    look(rig, prompt)
    rig.store.clear({prompt.namespace.ordinal})
    look(rig, prompt)
    assert counts(rig) == {"evicted_dram": 1, Left.CLEARED: 1}


def test_a_block_that_left_after_the_lookup_was_not_there_before(rig: Rig) -> None:
    prompt = rig.rows(2, 1)
    look(rig, prompt)
    rig.clock.advance(0.1)
    rig.put(ALICE, prompt)
    rig.clock.advance(0.1)
    rig.dram.free(rig.store.index.evict(2).slots)
    assert counts(rig) == {Ending.NEW: 1}


def test_a_block_whose_time_is_over_and_one_that_is_being_written(rig: Rig) -> None:
    short_lived = replace_hints(rig.rows(2, 1), ttl_s=5.0)
    rig.put(ALICE, short_lived)
    rig.clock.advance(6.0)
    look(rig, rig.rows(2, 1))
    reservation = rig.reserve(ALICE, rig.rows(3, 2))
    look(rig, rig.rows(3, 2))
    rig.store.abort(ALICE, reservation.id)
    assert counts(rig) == {Left.EXPIRED: 1, Ending.BEING_WRITTEN: 1}


def test_what_is_stored_and_not_loaded(two_tiers: Callable[..., TwoTierRig]) -> None:
    rig = two_tiers()
    prompt = rig.rows(3, 1)
    rig.put(ALICE, prompt)
    rig.settle()
    rig.dram.free(rig.store.index.evict(2).slots)
    look(rig, prompt)
    rig.nvme.free(rig.store.index.evict_nvme(2).slots)
    look(rig, prompt)
    assert counts(rig) == {Ending.NOT_LOADED: 1, "evicted_nvme": 1}


def test_so_many_are_looked_into_and_no_more(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(misses, "NOTED_MAX", 3)
    for tag in range(5):
        look(rig, rig.rows(1, tag))
    assert counts(rig) == {Ending.NEW: 3, Ending.UNSAMPLED: 2}
    look(rig, rig.rows(1, 9))
    assert counts(rig) == {Ending.NEW: 4, Ending.UNSAMPLED: 2}


def test_the_history_is_looked_through_once_a_second(rig: Rig) -> None:
    look(rig, rig.rows(1, 1))
    rig.store.tick()
    look(rig, rig.rows(1, 2))
    rig.clock.advance(0.5)
    rig.store.tick()
    assert rig.count("missed_lookups_new") == 1
    rig.clock.advance(0.5)
    rig.store.tick()
    assert rig.count("missed_lookups_new") == 2


def test_a_part_that_a_hybrid_model_needs(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(capacity_bytes=400 * KIB, region_bytes=64 * KIB, starter_bytes=16 * KIB)
    it, layout = HybridRig(rig), LAYOUTS[1]
    tokens = tuple(range(24))
    it.put(ALICE, layout, tokens, 0)
    look(rig, it.prompt(layout, tokens))
    look(rig, it.prompt(layout, tuple(range(100, 124))))
    assert counts(rig) == {Ending.PARTS: 1, Ending.NEW: 1}


def test_a_family_by_the_shard_that_has_least(rig: Rig) -> None:
    family = Family(rig)
    prompt = family.rows(4, 1)
    first, second = prompt.shards
    rig.put(ALICE, first)
    rig.put(BOB, second, n_blocks=2)
    rig.store.release(BOB, rig.store.family_lease(BOB, prompt).id)
    assert counts(rig) == {Ending.LONGER: 1}
    rig.store.requests.watched(first.namespace, rig.clock.now_s())
    rig.store.release(BOB, rig.store.family_lease(BOB, prompt).id)
    (looked,) = rig.store.requests.after(first.namespace.ordinal, 0, 1 << 10).requests
    assert np.array_equal(looked.keys, first.path.keys(first.root_key).view(np.uint64)[:, 0])


def replace_hints(prompt: Any, **hints: Any) -> Any:
    return prompt._replace(hints=Hints(**hints))
