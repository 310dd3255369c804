"""Case 3: a load fails half-way. A miss for exactly the blocks that failed, which are never marked as loaded; what
came before them is served, and the next load works."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

import pytest

from kvstore.jobs import Lane
from kvstore.tiers.nvme.files import Extent
from tests.cases.scenes import READER, again, frame_of, read, stored_below
from tests.store.two_tier import TwoTierRig

N = 6

ORDERS: dict[str, Callable[[Any, Any], Any]] = {
    "EIO": lambda files, where: files.fail("read", errno.EIO, times=None, where=where),
    "short": lambda files, where: files.shorten("read", times=None, where=where),
    "flipped": lambda files, where: files.flip("read", times=None, where=where),
}


@pytest.mark.parametrize("bad", [(0,), (3,), (5,), (2, 4), tuple(range(N))])
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_a_load_that_fails_in_part_is_a_miss_for_that_part(
    order: Callable[[Any, Any], Any], bad: tuple[int, ...], make_store: Callable[..., TwoTierRig]
) -> None:
    first = make_store()
    prompt, other = first.rows(N, tag=1), first.rows(N, tag=2)
    rig = stored_below(first, prompt, other)
    prompt, other = again(rig, prompt), again(rig, other)
    places = {(frame.path.name, frame.offset) for frame in (frame_of(rig, prompt, row) for row in bad)}

    def where(name: str, extent: Extent | None) -> bool:
        return extent is not None and (name, extent.offset) in places

    fault = order(rig.files, where)
    free_before = rig.dram_bytes()["free"]
    load = rig.store.begin_load(prompt)
    assert load is not None
    rig.settle()
    assert load.done
    assert fault.hits == 2 * len(bad)  # a second try, for what was of the moment
    lease = rig.store.lease(READER, prompt, load=load)
    rig.store.end_load(load)
    assert lease.n_blocks == min(bad)
    assert lease.n_pending == 0
    assert rig.bytes_at(rig.slots_of(lease)) == rig.expected(prompt, min(bad))
    failed = rig.count("onboard_unreadable_blocks") + rig.count("onboard_corrupt_blocks")
    assert failed == len(bad)
    # Those behind a bad one have come up; they are of use once somebody stores the bad one again.
    assert rig.dram_bytes()["used"] == (N - len(bad)) * 4096
    assert rig.dram_bytes()["reserved"] == 0
    assert rig.dram_bytes()["free"] == free_before - (N - len(bad)) * 4096
    rig.store.release(READER, lease.id)

    fault.stop()
    assert read(rig, other) == rig.expected(other, N)
    rig.put(1, prompt, min(bad))
    assert read(rig, prompt) == rig.expected(prompt, N)
    rig.close()


@pytest.mark.parametrize("kind", ["EIO", "short", "flipped"])
def test_what_fails_once_is_read_again_and_served(kind: str, make_store: Callable[..., TwoTierRig]) -> None:
    first = make_store()
    prompt = first.rows(N, tag=1)
    rig = stored_below(first, prompt)
    prompt = again(rig, prompt)
    orders: dict[str, Callable[[], Any]] = {
        "EIO": lambda: rig.files.fail("read", errno.EIO, after=2),
        "short": lambda: rig.files.shorten("read", after=2),
        "flipped": lambda: rig.files.flip("read", after=2),
    }
    fault = orders[kind]()
    assert read(rig, prompt) == rig.expected(prompt, N)
    assert fault.hits == 1
    assert rig.count("onboard_unreadable_blocks") == rig.count("onboard_corrupt_blocks") == 0
    rig.close()


def test_a_load_whose_memory_can_not_be_had_is_a_miss_and_others_go_on(make_store: Callable[..., TwoTierRig]) -> None:
    first = make_store()
    prompt, other = first.rows(N, tag=1), first.rows(N, tag=2)
    rig = stored_below(first, prompt, other)
    prompt, other = again(rig, prompt), again(rig, other)
    pinned = rig.rows(31, tag=3)
    assert rig.put(1, pinned).n_committed == 31
    lease = rig.store.lease(READER, pinned)
    load = rig.store.begin_load(prompt)
    assert load is not None
    rig.settle()
    rig.clock.advance(rig.settings.write.io_timeout_s)
    rig.store.tick()
    assert load.n_waiting == 0
    assert rig.store.lease(READER + 1, prompt, load=load).n_blocks <= 1
    rig.store.end_load(load)
    assert rig.count("onboard_no_room_blocks") + rig.count("onboard_refused_blocks") >= N - 1
    rig.store.release(READER, lease.id)
    rig.store.forget_session(READER + 1)
    assert read(rig, other) == rig.expected(other, N)
    assert read(rig, prompt) == rig.expected(prompt, N)
    rig.close()


def test_two_loads_of_the_same_blocks_read_them_once_and_fail_together(make_store: Callable[..., TwoTierRig]) -> None:
    first = make_store()
    prompt = first.rows(N, tag=1)
    rig = stored_below(first, prompt)
    prompt = again(rig, prompt)
    at = frame_of(rig, prompt, 2)
    rig.files.fail(
        "read", errno.EIO, times=2, where=lambda _, extent: extent is not None and extent.offset == at.offset
    )
    loads = [rig.store.begin_load(prompt) for _ in range(3)]
    assert all(load is not None and load.n_waiting == N for load in loads)
    assert [job.lane for job in rig.jobs.runnable()] == [Lane.READ]
    rig.settle()
    assert rig.stat("onboarded_blocks") == N - 1
    for load in loads:
        assert load is not None
        assert load.done
        assert rig.store.lease(READER, prompt, load=load).n_blocks == 2
        rig.store.end_load(load)
    rig.store.forget_session(READER)
    rig.close()
