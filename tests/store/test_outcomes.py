"""Every block of a lookup is a hit or a miss, and each miss has the reason why it was one."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.metrics import Counters
from kvstore.onboard import MISSED_BY_LOADS, Load
from kvstore.store.hierarchy import WriteBehind
from kvstore.store.outcome import GONE, MISSES, NOT_ASKED, NOT_FOUND, Outcome, unused
from tests.store.two_tier import MIB, Settings, TwoTierRig

ALICE, BOB = 1, 2
N = 6


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[TwoTierRig]:
    """A store that was just started over prompt 1 of six blocks, which lie on NVMe only."""
    first = TwoTierRig(tmp_path / "nvme", Settings(write=WriteBehind(queue_bytes_max=MIB, io_timeout_s=5.0)))
    first.put(ALICE, first.rows(N, tag=1))
    assert first.persist(first.rows(N, tag=1)) == N
    first.store.forget_session(ALICE)
    rig = first.killed()
    yield rig
    rig.files.release_all()
    for session in (ALICE, BOB):
        rig.store.forget_session(session)
    rig.settle()
    rig.close()


def misses(rig: TwoTierRig) -> dict[str, int]:
    """The misses so far, by reason; each block looked up is a hit or one of them."""
    found = {why: int(rig.count(name)) for why, name in MISSES.items() if rig.count(name)}
    assert rig.count("lookup_blocks") == rig.count("hit_blocks") + sum(found.values())
    return found


def lookup(rig: TwoTierRig, n_rows: int = N, max_blocks: int = 0, *, wait: bool = True) -> Load | None:
    prompt = rig.rows(n_rows, tag=1)
    load = rig.store.begin_load(prompt, 0, max_blocks)
    if load is not None and wait:
        rig.settle()
    rig.store.lease(BOB, prompt, 0, max_blocks, load=load)
    if load is not None:
        rig.store.end_load(load)
    return load


def test_what_was_never_stored_is_not_found(rig: TwoTierRig) -> None:
    lookup(rig, N + 3)
    assert misses(rig) == {NOT_FOUND: 3}
    assert (rig.count("lookup_hits"), rig.count("lookup_full_hits")) == (1, 0)
    lookup(rig)
    assert misses(rig) == {NOT_FOUND: 3}
    assert (rig.count("lookups"), rig.count("lookup_hits"), rig.count("lookup_full_hits")) == (2, 2, 1)


def test_what_the_client_did_not_ask_for_is_told_apart(rig: TwoTierRig) -> None:
    lookup(rig, N, max_blocks=2)
    assert misses(rig) == {NOT_ASKED: 4}
    lookup(rig, N + 3, max_blocks=N + 1)
    assert misses(rig) == {NOT_ASKED: 4, NOT_FOUND: 3}


def test_what_is_on_its_way_is_pending(rig: TwoTierRig) -> None:
    lookup(rig, wait=False)
    assert misses(rig) == {"pending": N}
    rig.settle()
    lookup(rig, N + 1)
    assert misses(rig) == {"pending": N, NOT_FOUND: 1}


def test_what_the_disk_cannot_read_is_unreadable(rig: TwoTierRig) -> None:
    rig.files.fail("read", errno.EIO, times=None)
    lookup(rig)
    assert misses(rig) == {"unreadable": N}


def test_what_does_not_verify_is_corrupt(rig: TwoTierRig) -> None:
    rig.files.flip("read", times=None)
    lookup(rig)
    assert misses(rig) == {"corrupt": N}


def test_what_a_hanging_disk_does_not_give_in_time_is_late_and_then_refused(rig: TwoTierRig) -> None:
    prompt = rig.rows(N, tag=1)
    load = rig.store.begin_load(prompt)
    assert load is not None
    rig.jobs.take()  # in the hands of a worker that does not come back
    rig.clock.advance(6.0)
    rig.store.tick()
    assert load.done
    rig.store.lease(BOB, prompt, load=load)
    rig.store.end_load(load)
    assert misses(rig) == {"late": N}
    lookup(rig, wait=False)
    assert misses(rig) == {"late": N, "refused": N}


def test_what_finds_no_room_in_dram_is_told_so(rig: TwoTierRig) -> None:
    held = [rig.put(ALICE, rig.rows(1, tag=tag)) for tag in range(2, 34)]
    assert sum(each.n_committed for each in held) >= 30
    for tag in range(2, 34):
        rig.store.lease(ALICE, rig.rows(1, tag=tag))
    before = misses(rig)
    lookup(rig)
    after = misses(rig)
    assert after["no_room"] - before.get("no_room", 0) > 0
    assert set(after) - set(before) == {"no_room"}


def test_hits_are_told_in_bytes(rig: TwoTierRig) -> None:
    lookup(rig)
    prompt = rig.rows(N, tag=1)
    spec = prompt.namespace.namespace.spec
    assert rig.count("hit_tokens") == N * spec.block_tokens
    assert rig.count("hit_bytes") == N * spec.block_bytes


@given(
    st.integers(0, 50),
    st.integers(0, 50),
    st.integers(0, 50),
    st.integers(0, 60),
    st.sampled_from([*MISSED_BY_LOADS, GONE]),
)
def test_hits_and_misses_always_add_up(n_blocks: int, n_unused: int, n_beyond: int, asked: int, why: str) -> None:
    counters = Counters()
    n_rows = n_blocks + n_unused + n_beyond
    Outcome(n_rows, n_blocks, n_blocks * 2, 0, 8.0, n_unused, why, asked).count(counters)
    assert counters["lookup_blocks"] == n_rows
    assert counters["hit_blocks"] + sum(counters[name] for name in MISSES.values()) == n_rows
    assert counters[MISSES[why]] == n_unused
    assert counters["lookup_full_hits"] == (n_rows == n_blocks)


def test_what_broke_while_it_was_read_counts_as_stored() -> None:
    ids = np.arange(4)
    load = Load(ids, [2, 3], ids, 0.0, 0.0)
    load.settle(2, "corrupt")
    load.settle(3)
    assert unused(load, ids[:2], 2) == (2, "corrupt")
    assert unused(load, ids, 4) == (0, GONE)
    assert unused(None, ids, 1) == (3, GONE)
