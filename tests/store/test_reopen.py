"""A store that is started again over an NVMe directory: what it finds, for whom, and what goes first then."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.store.requests import Prompt
from kvstore.tiers.nvme.crash import MODES, Mode
from tests.store.two_tier import Settings, Sizes, TwoTierRig, nvme_bytes_for
from tests.tiers.dram_scene import open_files
from tests.tiers.segment_files import directory_bytes

ALICE, BOB = 1, 2
KIB = 1 << 10


def reads(rig: TwoTierRig, prompt: Prompt) -> int:
    """Read a prompt and compare its bytes; returns how many blocks came."""
    lease = rig.read(BOB, prompt)
    content = rig.bytes_at(rig.slots_of(lease), prompt.namespace.block_bytes)
    assert content == rig.expected(prompt, prompt.path.n_rows)[: len(content)]
    rig.store.release(BOB, lease.id)
    return len(content)


def test_everything_durable_is_found_by_those_whose_it_is(tmp_path: Path) -> None:
    rig = TwoTierRig(tmp_path / "disk")
    asks: list[Callable[[TwoTierRig], Prompt]] = [
        lambda it: it.rows(3, tag=1),
        lambda it: it.rows(3, tag=1, salt="s"),
        lambda it: it.rows(3, tag=1, lora="l"),
        lambda it: it.rows(3, tag=1, namespace=it.namespace(12 * KIB)),
        lambda it: it.rows(3, tag=1, namespace=it.namespace(tenant="b")),
    ]
    for i, ask in enumerate(asks[::2]):
        assert rig.put(ALICE + i, ask(rig)).n_committed == 3
        assert rig.persist(ask(rig)) == 3
        rig.store.forget_session(ALICE + i)
    rig = rig.killed()
    assert rig.count("recovered_blocks") == rig.store.index.n_cold_blocks == 9
    assert [rig.found(ask(rig)) for ask in asks] == [3, 0, 3, 0, 3]
    assert [reads(rig, ask(rig)) for ask in asks] == [3, 0, 3, 0, 3]
    rig.close()


def test_what_was_never_asked_for_again_goes_first_oldest_first(tmp_path: Path) -> None:
    sizes = Sizes(nvme_bytes=nvme_bytes_for(6))
    rig = TwoTierRig(tmp_path / "disk", replace(Settings(), sizes=sizes))
    n_fit = rig.nvme.live_capacity_bytes // (8 * KIB)
    for tag in range(1, n_fit + 1):
        rig.put(ALICE, rig.rows(1, tag=tag))
        assert rig.persist(rig.rows(1, tag=tag)) == 1
    rig.store.forget_session(ALICE)
    rig = rig.killed()
    assert reads(rig, rig.rows(1, tag=2)) == 1
    for tag in range(100, 100 + n_fit // 2):
        rig.clock.advance(1.0)
        rig.put(ALICE, rig.rows(1, tag=tag))
        assert rig.persist(rig.rows(1, tag=tag)) == 1
    left = [tag for tag in range(1, n_fit + 1) if rig.found(rig.rows(1, tag=tag))]
    n_gone = n_fit // 2
    assert left == [2, *range(n_gone + 2, n_fit + 1)]
    rig.close()


def test_a_short_last_block_is_found_by_its_exact_tail(tmp_path: Path) -> None:
    rig = TwoTierRig(tmp_path / "disk")
    stored = [5, 6, 7, 8, 9]
    rig.put(ALICE, rig.prompt(stored))
    assert rig.persist(rig.prompt(stored)) == 3
    rig.store.forget_session(ALICE)
    rig = rig.killed()
    assert reads(rig, rig.prompt([5, 6, 7, 8, 1])) == 2
    assert reads(rig, rig.prompt(stored)) == 3
    rig.close()


def test_an_empty_start_forgets_everything_and_a_normal_one_after_it_finds_what_came_since(tmp_path: Path) -> None:
    rig = TwoTierRig(tmp_path / "disk")
    rig.put(ALICE, rig.rows(3, tag=1))
    assert rig.persist(rig.rows(3, tag=1)) == 3
    rig = rig.killed("none")
    assert rig.found(rig.rows(3, tag=1)) == 0
    rig.put(ALICE, rig.rows(3, tag=2))
    assert rig.persist(rig.rows(3, tag=2)) == 3
    rig.store.forget_session(ALICE)
    rig = rig.killed()
    assert reads(rig, rig.rows(3, tag=1)) == 0
    assert reads(rig, rig.rows(3, tag=2)) == 3
    rig.close()


def test_a_smaller_tier_keeps_what_fits_whole_and_its_cap(tmp_path: Path) -> None:
    rig = TwoTierRig(tmp_path / "disk")
    for tag in range(1, 13):
        rig.put(ALICE, rig.rows(4, tag=tag))
        assert rig.persist(rig.rows(4, tag=tag)) == 4
    rig.store.forget_session(ALICE)
    rig.abandon()
    smaller = replace(rig.settings, sizes=Sizes(nvme_bytes=nvme_bytes_for(6)))
    rig = TwoTierRig(tmp_path / "disk", smaller, rig.clock)
    assert directory_bytes(rig.directory) <= rig.nvme.capacity_bytes
    found = [rig.found(rig.rows(4, tag=tag)) for tag in range(1, 13)]
    assert 0 < sum(found) < 48
    for tag in range(1, 13):
        assert reads(rig, rig.rows(4, tag=tag)) == found[tag - 1]
    for tag in range(20, 40):
        rig.put(ALICE, rig.rows(2, tag=tag))
        assert rig.persist(rig.rows(2, tag=tag)) == 2
        assert directory_bytes(rig.directory) <= rig.nvme.capacity_bytes
    rig.close()


@pytest.mark.parametrize("mode", [*MODES, None])
def test_twenty_restarts_in_the_middle_of_work_leak_nothing(tmp_path: Path, mode: Mode | None) -> None:
    """A power cut, or a process that dies, while jobs are half done."""
    files_before = open_files()
    rig = TwoTierRig(tmp_path / "disk-0", Settings(durability=True))
    dice = random.Random(1)
    durable: dict[int, int] = {}
    for life in range(20):
        for tag, n_durable in durable.items():
            assert reads(rig, rig.rows(3, tag=tag)) >= n_durable
        for tag in range(life * 10 + 1, life * 10 + 5):
            rig.put(ALICE, rig.rows(3, tag=tag))
            for _ in range(dice.randrange(8)):
                rig.jobs.step(dice)
        for tag in range(life * 10 + 1, life * 10 + 5):
            persist = rig.store.begin_persist(rig.rows(3, tag=tag))
            if persist is not None:
                durable[tag] = rig.store.n_durable(persist)
        durable = dict(list(durable.items())[-12:])
        assert directory_bytes(rig.directory) <= rig.nvme.capacity_bytes
        rig = rig.killed() if mode is None else rig.power_cut(tmp_path / f"disk-{life + 1}", mode, life)
    assert any(durable.values())
    rig.store.check()
    rig.close()
    assert open_files() <= files_before + 1
