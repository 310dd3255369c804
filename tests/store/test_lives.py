"""Lives on NVMe: what a name says of them, when that is written again, and what a restart makes of it."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.hints import TTL_S_MAX, Hints
from kvstore.lives import Lives
from kvstore.persist import Persist
from kvstore.server.draining import drain
from kvstore.server.jobs import JobPump
from kvstore.store.requests import Prompt
from kvstore.tiers.nvme.catalog import CatalogError
from kvstore.tiers.nvme.names import FIRST, NO_RECORDS, RECORD, flags_of, until_of
from tests.store.rig import Rig
from tests.store.two_tier import CATALOG, TwoTierRig

ALICE, BOB = 1, 2


def living(rig: Rig, tag: int, ttl_s: float, n_rows: int = 4) -> Prompt:
    return rig.rows(n_rows, tag)._replace(hints=Hints(ttl_s=ttl_s))


def use(rig: TwoTierRig, prompt: Prompt) -> None:
    lease = rig.store.lease(BOB, prompt)
    rig.store.release(BOB, lease.id)
    rig.settle()


def left_s(rig: TwoTierRig, prompt: Prompt) -> list[float]:
    """What the names of a prompt's blocks say is left of their lives."""
    ids = rig.store.index.match(prompt.root_key, prompt.path).ids
    until_s = rig.nvme.until_s(rig.store.index.nvme_slots(ids))
    assert rig.store.hierarchy is not None
    now_s: float = rig.store.hierarchy._lives._unix_s()
    return [round(each) for each in (until_s - now_s).tolist()] if np.isfinite(until_s).all() else [np.inf] * len(ids)


def waits(rig: TwoTierRig, prompt: Prompt) -> Persist:
    persist = rig.store.begin_persist(prompt)
    assert persist is not None
    return persist


def end(rig: TwoTierRig) -> TwoTierRig:
    rig.store.forget_session(ALICE)
    rig.store.forget_session(BOB)
    return rig.killed()


def found(rig: TwoTierRig, *tags: int) -> list[int]:
    return [rig.store.match(rig.rows(4, tag)).n_tokens for tag in tags]


@pytest.fixture
def rig(tmp_path: Path) -> TwoTierRig:
    return TwoTierRig(tmp_path / "nvme")


def test_flags_keep_an_end_to_two_seconds_and_never_later() -> None:
    until_s = np.array([np.inf, 1.8e9 + 1.9, 1.8e9 + 2.0, -5.0, 1e300])
    records = np.zeros(5, RECORD)
    records["value"]["flags"] = flags_of(np.array([True, False, True, False, True]), until_s)
    assert until_of(records).tolist() == [np.inf, 1.8e9, 1.8e9 + 2.0, 2.0, 2.0 * ((1 << 31) - 1)]
    assert (records["value"]["flags"] & FIRST).tolist() == [1, 0, 1, 0, 1]
    records["value"]["flags"] = FIRST
    assert np.isinf(until_of(records)).all(), "names of before there were lives"


def test_a_life_that_is_lifted_is_lifted_on_disk(rig: TwoTierRig) -> None:
    for tag in (1, 2):
        rig.put(ALICE, living(rig, tag, 600.0))
    rig.settle()
    assert left_s(rig, rig.rows(4, 1)) == pytest.approx([600] * 4, abs=5)
    rig.put(ALICE, rig.rows(4, 1))
    rig.settle()
    assert left_s(rig, rig.rows(4, 1)) == [np.inf] * 4
    rig.store.check()
    after = end(rig)
    after.clock.advance(700.0)
    assert found(after, 1, 2) == [8, 0]
    after.close()


def test_a_longer_life_is_written_once_it_doubles_what_is_left(rig: TwoTierRig) -> None:
    prompt = living(rig, 1, 600.0)
    rig.put(ALICE, prompt)
    rig.settle()
    use(rig, prompt._replace(hints=Hints(ttl_s=1000.0)))
    assert left_s(rig, prompt) == pytest.approx([600] * 4, abs=5), "not with each use"
    use(rig, prompt._replace(hints=Hints(ttl_s=2000.0)))
    assert left_s(rig, prompt) == pytest.approx([2000] * 4, abs=5)
    after = end(rig)
    after.clock.advance(1500.0)
    assert found(after, 1) == [8]
    after.clock.advance(600.0)
    assert found(after, 1) == [0]
    after.close()


def test_a_life_made_longer_while_it_is_being_written(rig: TwoTierRig) -> None:
    prompt = living(rig, 1, 600.0)
    rig.put(ALICE, prompt)
    rig.store.tick()
    assert rig.nvme.stats()["live_frames"] == 0
    assert rig.store.stats()[0]["offload_writes"] > 0, "it is being written"
    rig.put(ALICE, rig.rows(4, 1))
    rig.store.tick()
    rig.settle()
    assert left_s(rig, prompt) == [np.inf] * 4
    rig.store.forget_session(ALICE)
    rig.close()


def test_a_rebuilt_catalog_leaves_out_what_had_an_end(rig: TwoTierRig) -> None:
    rig.put(ALICE, rig.rows(4, 1))
    rig.put(ALICE, living(rig, 2, 600.0))
    rig.settle()
    rig.store.forget_session(ALICE)
    rig.abandon()
    shutil.rmtree(rig.directory / CATALOG)
    after = rig.reopened(rig.directory)
    assert found(after, 1, 2) == [8, 0], "until when, only the catalog knew"
    after.close()


def test_a_change_that_the_disk_refuses_is_made_later(rig: TwoTierRig, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = living(rig, 1, 600.0)
    rig.put(ALICE, prompt)
    rig.settle()
    book = rig.nvme._opened.book
    commit = book.commit
    refused: list[int] = []

    def refuse(records: Any, deletes: Any, renamed: Any = NO_RECORDS) -> None:
        if len(renamed) and not refused:
            refused.append(len(renamed))
            raise CatalogError("no room", full=True)
        commit(records, deletes, renamed)

    monkeypatch.setattr(book, "commit", refuse)
    rig.put(ALICE, rig.rows(4, 1))
    rig.settle()
    assert refused == [4]
    rig.clock.advance(60.0)  # writing is tried again after a while
    rig.settle()
    rig.store.check()
    after = end(rig)
    after.clock.advance(700.0)
    assert found(after, 1) == [8]
    after.close()


def test_a_block_is_durable_once_its_name_says_the_longer_life(rig: TwoTierRig) -> None:
    for tag in (1, 2):
        rig.put(ALICE, living(rig, tag, 600.0))
    rig.settle()
    prompts = rig.rows(4, 1), living(rig, 2, 5000.0)
    for prompt in prompts:
        rig.put(ALICE, prompt)
    begun = [waits(rig, prompt) for prompt in prompts]
    assert [(rig.store.n_durable(each), each.n_waiting) for each in begun] == [(0, 4), (0, 4)]
    for job in rig.jobs.runnable():
        rig.jobs.run(job)
    assert [rig.store.n_durable(each) for each in begun] == [0, 0], "nor while the change is under way"
    rig.jobs.all()  # and no tick
    assert [(rig.store.n_durable(each), each.done) for each in begun] == [(4, True)] * 2
    assert [rig.store.why_not_durable(each) for each in begun] == ["", ""]
    for each in begun:
        rig.store.end_persist(each)
    after = end(rig)
    after.clock.advance(700.0)
    assert found(after, 1, 2) == [8, 8]
    after.close()


def test_who_waits_for_blocks_waits_for_what_was_made_longer_meanwhile(rig: TwoTierRig) -> None:
    prompt = living(rig, 1, 600.0)
    rig.put(ALICE, prompt)
    persist = waits(rig, prompt)
    rig.put(ALICE, rig.rows(4, 1))
    durable: list[int] = []
    persist.on_done(lambda: durable.append(rig.store.n_durable(persist)))
    rig.jobs.all()
    assert durable == [4]
    assert left_s(rig, prompt) == [np.inf] * 4
    rig.store.end_persist(persist)
    rig.store.forget_session(ALICE)
    rig.close()


def test_a_life_that_is_left_shorter_on_disk_counts_as_durable(rig: TwoTierRig) -> None:
    rig.put(ALICE, living(rig, 1, 600.0))
    rig.settle()
    rig.put(ALICE, living(rig, 1, 1000.0))
    persist = waits(rig, rig.rows(4, 1))
    assert (rig.store.n_durable(persist), persist.done) == (4, True)
    assert left_s(rig, rig.rows(4, 1)) == pytest.approx([600] * 4, abs=5)
    rig.store.end_persist(persist)
    rig.store.forget_session(ALICE)
    rig.close()


def test_nobody_waits_for_a_name_that_cannot_be_written(rig: TwoTierRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.put(ALICE, living(rig, 1, 600.0))
    rig.settle()

    def refuse(*_: Any) -> None:
        raise CatalogError("no room", full=True)

    monkeypatch.setattr(rig.nvme._opened.book, "commit", refuse)
    rig.put(ALICE, rig.rows(4, 1))
    persist = waits(rig, rig.rows(4, 1))
    rig.jobs.all()
    assert (rig.store.n_durable(persist), persist.done) == (0, True)
    assert "full" in rig.store.why_not_durable(persist)
    rig.store.end_persist(persist)
    rig.store.forget_session(ALICE)
    monkeypatch.undo()
    rig.close()


def test_a_drained_store_has_written_longer_lives(rig: TwoTierRig) -> None:
    for tag in (1, 2):
        rig.put(ALICE, living(rig, tag, 600.0))
    rig.settle()
    rig.put(ALICE, rig.rows(4, 1))  # and no tick

    async def stop() -> bool:
        loop = asyncio.get_running_loop()
        pump = JobPump(loop, rig.store.jobs, rig.store.pump)
        drained = await drain(rig.store, pump, loop.time() + 60.0)
        pump.close(join=drained)
        return drained

    assert asyncio.run(stop())
    after = end(rig)
    after.clock.advance(700.0)
    assert found(after, 1, 2) == [8, 0]
    after.close()


def test_no_life_is_longer_than_can_be_asked_for_whatever_the_wall_clock_says(rig: TwoTierRig) -> None:
    prompt = living(rig, 1, 600.0)
    rig.put(ALICE, prompt)
    index = rig.store.index
    ids = index.match(prompt.root_key, prompt.path).ids
    set_back = Lives(index, rig.nvme, rig.clock, lambda: 1e6)
    set_back.found(ids, np.array([1.8e9, 1e6 + 50.0, 1e6 - 50.0, np.inf]))
    left = index.hints.expire_s(ids[:3]) - rig.clock.now_s()
    assert left.tolist() == pytest.approx([TTL_S_MAX, 50.0, -50.0])
    rig.store.forget_session(ALICE)
    rig.close()
