"""What a client tells the next daemon of what the one before has lent it."""

from __future__ import annotations

import gc
import os
from typing import Any

from kvstore.client.acks import Acknowledgements
from kvstore.client.era import Era
from kvstore.client.mapping import Regions
from kvstore.native import Mapping
from kvstore.wire.framing import Method


class Told:
    """An ``Acknowledgements`` whose queue can be seen."""

    def __init__(self) -> None:
        self.acks = Acknowledgements(lambda: None)

    @property
    def epochs(self) -> list[int]:
        gc.collect()
        sent: Any = self.acks._queue
        assert all(method == Method.REGIONS_UNMAPPED for method, _ in sent)
        return [request.settled_epoch for _, request in sent]


def test_with_nothing_held_the_next_daemon_hears_at_once() -> None:
    told = Told()
    era = Era().followed_by(told.acks, 7)
    assert told.epochs == [7]
    del era
    assert told.epochs == [7], "an era that goes on, or ends with its client, is nobody's business"


def test_it_hears_when_the_last_hold_is_gone() -> None:
    told = Told()
    era = Era()
    holds = [era, era]
    era = era.followed_by(told.acks, 7)
    holds.pop()
    assert told.epochs == []
    holds.pop()
    assert told.epochs == [7]


def test_a_later_daemon_hears_only_when_all_earlier_ones_holds_are_gone() -> None:
    told = Told()
    era = Era()
    first = era
    era = era.followed_by(told.acks, 2)
    second = era
    era = era.followed_by(told.acks, 3)
    del second
    assert told.epochs == []
    del first
    assert sorted(told.epochs) == [2, 3]
    assert told.epochs[-1] == 3


def test_a_later_hold_keeps_only_later_daemons_waiting() -> None:
    told = Told()
    era = Era().followed_by(told.acks, 2)
    second = era
    era = era.followed_by(told.acks, 3)
    assert told.epochs == [2]
    del second
    assert told.epochs == [2, 3]


def test_a_forked_child_tells_nothing() -> None:
    told = Told()
    era = Era()
    kept = era
    era.followed_by(told.acks, 7)
    era._pid = os.getpid() + 1
    del era, kept
    assert told.epochs == []


def test_a_region_asked_for_twice_is_acknowledged_once_it_is_unmapped() -> None:
    """A daemon that may not have been heard asks again; an array still looks at the region."""
    unmapped: list[int] = []
    regions = Regions(unmapped.append)
    fd = os.memfd_create("region")
    os.ftruncate(fd, 4096)
    regions.add(5, fd, 4096, writable=False)
    os.close(fd)
    mappings: dict[int, Mapping] = regions.find([5], writable=False)
    array = mappings[5].array()
    mappings.clear()
    regions.retire([5])
    regions.retire([5])
    assert unmapped == []
    del array
    gc.collect()
    assert unmapped == [5]
    regions.retire([5])
    assert unmapped == [5, 5], "one that is not mapped here is acknowledged at once"
