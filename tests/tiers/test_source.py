"""The budget, and pages filled ahead of use."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.native import Mapping, numa
from kvstore.tiers import source as source_module
from kvstore.tiers.region import Region
from kvstore.tiers.source import RegionSource
from tests.tiers.dram_scene import open_files

MIB = 1 << 20
PAGE = 4096


_taken: list[Region] = []


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    before = open_files()
    yield
    for region in _taken:
        region.close()
    _taken.clear()
    assert open_files() == before


def filled(capacity: int, region: int = 4 * MIB, starter: int = 4 * MIB) -> RegionSource:
    made = RegionSource(capacity, region, starter, prefault=True)
    assert made.wait_prefaulted(60)
    return made


def raw_sizes(source: RegionSource) -> list[int]:
    return sorted(region.size_bytes for region in source._raw)


def take(source: RegionSource, wanted: int, unit: int, exact: bool = False) -> Region:
    region = source.obtain(wanted, unit, exact)
    assert region is not None
    _taken.append(region)
    return region


def test_without_prefault_regions_are_fresh_and_within_the_budget() -> None:
    source = RegionSource(10 * PAGE, 4 * PAGE, PAGE, prefault=False)
    sizes = [take(source, 4 * PAGE, PAGE).size_bytes for _ in range(3)]
    assert sizes == [4 * PAGE, 4 * PAGE, 2 * PAGE]
    assert source.obtain(PAGE, PAGE) is None
    assert source.available_bytes == 0
    source.give_back(4 * PAGE)
    assert source.obtain(8 * PAGE, 5 * PAGE) is None
    assert take(source, 8 * PAGE, 3 * PAGE).size_bytes == 3 * PAGE
    assert not source.wait_prefaulted(0)
    source.close()


def test_prefault_fills_the_whole_capacity_in_pages_that_exist() -> None:
    source = filled(10 * MIB + 3 * PAGE)
    facts = source.facts()
    assert facts.raw_bytes == facts.raw_prefaulted_bytes == 10 * MIB + 3 * PAGE
    assert raw_sizes(source) == [2 * MIB + 3 * PAGE, 4 * MIB, 4 * MIB]
    assert sum(os.fstat(region.fd).st_blocks * 512 for region in source._raw) == 10 * MIB + 3 * PAGE
    region = take(source, 4 * MIB, PAGE)
    assert region.populated_bytes == 4 * MIB
    source.close()


def test_starters_are_kept_ready_where_they_are_small_change() -> None:
    source = filled(40 * MIB, region=16 * MIB, starter=MIB)
    assert raw_sizes(source) == [MIB, MIB, 6 * MIB, 16 * MIB, 16 * MIB]
    assert take(source, MIB, PAGE).size_bytes == MIB
    assert raw_sizes(source) == [MIB, 6 * MIB, 16 * MIB, 16 * MIB]
    source.close()


def test_a_region_cut_to_size_gives_the_rest_back_to_be_filled_again() -> None:
    source = filled(8 * MIB, region=8 * MIB)
    region = take(source, 5 * MIB, MIB)
    assert (region.size_bytes, region.populated_bytes) == (5 * MIB, 5 * MIB)
    assert os.fstat(region.fd).st_size == 5 * MIB
    assert source.wait_prefaulted(60)
    assert raw_sizes(source) == [3 * MIB]
    assert source.facts().out_bytes == 5 * MIB
    source.close()


def test_filled_memory_of_half_the_size_is_preferred_unless_exact() -> None:
    source = filled(12 * MIB)
    assert take(source, 6 * MIB, MIB).size_bytes == 4 * MIB
    exact = take(source, 6 * MIB, MIB, exact=True)
    assert exact.size_bytes == 6 * MIB
    assert exact.populated_bytes == 4 * MIB  # the one grown, pages kept
    assert len(exact.array) == 6 * MIB
    source.close()


def test_a_larger_region_is_put_together_from_the_budget_of_several() -> None:
    source = filled(12 * MIB)  # three of the same size
    region = take(source, 12 * MIB, 12 * MIB)
    assert region.size_bytes == 12 * MIB
    assert source.facts().raw_bytes == 0
    assert source.available_bytes == 0
    source.close()


def test_a_slot_of_more_than_half_the_raw_regions_is_not_lost_to_rounding() -> None:
    source = filled(12 * MIB)
    assert [take(source, 3 * MIB, 3 * MIB).size_bytes for _ in range(4)] == [3 * MIB] * 4
    assert source.obtain(PAGE, PAGE) is None
    source.close()


def test_memory_is_there_at_once_while_it_is_being_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever takes the region that is being filled waits for one chunk, and the filling goes elsewhere."""
    started, go_on = threading.Event(), threading.Event()
    real, real_resize = Region.populate, Region.resize
    calls: list[Region] = []
    filling: list[Region] = []

    def slow(self: Region, length_bytes: int) -> None:
        calls.append(self)
        filling.append(self)
        started.set()
        assert go_on.wait(60)
        real(self, length_bytes)
        filling.remove(self)

    def resize(self: Region, size_bytes: int) -> None:
        in_use.append(self in filling)
        real_resize(self, size_bytes)

    in_use: list[bool] = []
    monkeypatch.setattr(Region, "populate", slow)
    monkeypatch.setattr(Region, "resize", resize)
    source = RegionSource(8 * MIB, 8 * MIB, 8 * MIB, prefault=True)
    assert started.wait(60)
    taken: list[Region | None] = []
    taker = threading.Thread(target=lambda: taken.append(source.obtain(6 * MIB, MIB)))
    taker.start()
    taker.join(0.05)  # long enough to be cut while it is filled, if it were not waited for
    go_on.set()
    taker.join(60)
    assert in_use == [False]
    region = taken[0]
    assert region is not None
    _taken.append(region)
    assert region.size_bytes == 6 * MIB
    assert source.wait_prefaulted(60)
    assert raw_sizes(source) == [2 * MIB]
    assert source.facts().out_bytes == 6 * MIB
    assert region in calls
    assert 0 < region.populated_bytes < 6 * MIB
    source.close()


def test_the_budget_holds_while_the_thread_and_a_taker_compete() -> None:
    capacity = 16 * MIB
    source = RegionSource(capacity, MIB, 256 << 10, prefault=True)
    held: list[Region] = []
    for step in range(150):
        region = source.obtain((step % 7 + 1) * 300 * 1024 // PAGE * PAGE, PAGE * (step % 3 + 1), exact=step % 2 == 0)
        if region is not None:
            held.append(region)
        if region is None or step % 3 == 0:
            gone = held.pop(0)
            gone.close()
            source.give_back(gone.size_bytes)
        facts = source.facts()
        assert facts.out_bytes == sum(one.size_bytes for one in held)
        assert facts.out_bytes + facts.raw_bytes <= capacity
    for region in held:
        region.close()
        source.give_back(region.size_bytes)
    assert source.wait_prefaulted(60)
    assert source.facts().raw_bytes == capacity
    source.close()


def test_no_memory_is_no_region_and_a_fact(monkeypatch: pytest.MonkeyPatch) -> None:
    source = RegionSource(8 * PAGE, 4 * PAGE, PAGE, prefault=False)

    def refuse(*_: object, **__: object) -> Mapping:
        raise OSError(12, "Cannot allocate memory")

    before = open_files()
    with monkeypatch.context() as patch:
        patch.setattr("kvstore.tiers.region.Mapping", refuse)
        assert source.obtain(4 * PAGE, PAGE) is None
    assert "Cannot allocate" in source.facts().failure
    assert source.facts().out_bytes == 0
    assert open_files() == before
    assert take(source, 4 * PAGE, PAGE).size_bytes == 4 * PAGE
    source.close()


def test_a_failed_growth_returns_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    source = filled(12 * MIB)

    def refuse(self: Region, size_bytes: int) -> None:
        raise OSError(12, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(Region, "resize", refuse)
        assert source.obtain(12 * MIB, 12 * MIB) is None
    assert source.facts().out_bytes == 0
    assert source.available_bytes == 12 * MIB
    source.close()


@pytest.mark.parametrize("where", ["populate", "create"])
def test_filling_that_fails_stops_with_a_fact_and_allocation_goes_on(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        if where == "populate":
            patch.setattr(Region, "populate", refuse)
        else:
            patch.setattr(source_module, "Region", refuse)
        source = RegionSource(8 * MIB, 4 * MIB, 4 * MIB, prefault=True)
        assert not source.wait_prefaulted(60)
        assert source._thread is not None
        source._thread.join(60)
    assert "no longer filled ahead" in source.facts().failure
    assert take(source, 4 * MIB, MIB).size_bytes == 4 * MIB
    assert take(source, 4 * MIB, MIB).size_bytes == 4 * MIB
    source.close()


def test_close_ends_the_thread_and_closes_what_is_raw() -> None:
    before = open_files()
    source = RegionSource(64 * MIB, 4 * MIB, MIB, prefault=True)
    source.close()
    source.close()
    assert not any(thread.name == "kvstore-prefault" for thread in threading.enumerate())
    assert open_files() == before
    assert not source.wait_prefaulted(0)


def policies_of(regions: list[Region]) -> list[str]:
    """What the kernel has been asked for at the end of each region, by mappings of their last pages."""
    tails = [Mapping(region.fd, PAGE, writable=True, offset_bytes=region.size_bytes - PAGE) for region in regions]
    told = {int(line.split()[0], 16): line.split()[1] for line in Path("/proc/self/numa_maps").read_text().splitlines()}
    return [told[tail.address] for tail in tails]


@pytest.mark.skipif(numa.nodes() == (), reason="this kernel tells of no NUMA nodes")
def test_every_region_is_asked_for_from_its_node_before_its_pages_are_filled() -> None:
    node = numa.nodes()[0]
    source = RegionSource(12 * MIB, 4 * MIB, 4 * MIB, prefault=True, numa_node=node)
    assert source.wait_prefaulted(60)
    assert policies_of(source._raw) == [f"prefer:{node}"] * 3
    for region in source._raw:
        assert (numa.page_nodes(region.address, region.size_bytes) == node).all()
    grown = take(source, 8 * MIB, 8 * MIB)
    assert grown.populated_bytes == 4 * MIB
    assert policies_of([grown]) == [f"prefer:{node}"]
    grown.mapping.populate()
    assert (numa.page_nodes(grown.address, grown.size_bytes) == node).all()
    source.close()
    fresh = RegionSource(MIB, MIB, MIB, prefault=False, numa_node=node)
    assert policies_of([take(fresh, MIB, PAGE)]) == [f"prefer:{node}"]
    fresh.close()
    anywhere = RegionSource(MIB, MIB, MIB, prefault=False)
    assert policies_of([take(anywhere, MIB, PAGE)]) == ["default"]
    anywhere.close()


def test_memory_that_cannot_be_placed_is_had_all_the_same_and_that_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = RegionSource(2 * MIB, MIB, MIB, prefault=False, numa_node=1023)
    assert [take(source, MIB, PAGE).size_bytes for _ in range(2)] == [MIB, MIB]
    assert [record.__dict__["event"] for record in caplog.records] == ["placing_failed"]
    assert source.facts().failure == ""
    source.close()
