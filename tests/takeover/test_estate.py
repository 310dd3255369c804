"""What was left is read with suspicion: nothing strange is used, nothing leaks."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.errors import IntegrityError
from kvstore.takeover.estate import read_estate
from kvstore.takeover.link import Entry
from kvstore.tiers import memfd
from kvstore.tiers.dram import DAEMON_WRITER

PAGE = 4096
Lives = Callable[..., Any]


def replaced(entries: list[Entry], key: str, **changes: Any) -> list[Entry]:
    """The entry with this key gets another text."""
    return [
        entry._replace(text=json.dumps({**json.loads(entry.text), **changes})) if entry.key == key else entry
        for entry in entries
    ]


def test_nothing_left_is_nothing() -> None:
    assert read_estate([]) is None


def test_clients_and_regions_come_back(lives: Lives) -> None:
    life = lives()
    life.put(life.client(7), list(range(5)))
    life.client(3)
    estate = read_estate(life.entries())
    assert estate is not None
    assert sorted((s.id, s.token, s.tenant, s.pid) for s in estate.sessions) == [
        (3, b"\3" * 16, "a", os.getpid()),
        (7, b"\7" * 16, "a", os.getpid()),
    ]
    assert estate.last_session_id == 7
    assert [(region.id, region.writer, region.tenant, region.mappers) for region in estate.former.regions] == [
        (region.id, 7, "a", frozenset({7})) for region in life.tier.regions.values()
    ]
    estate.close()


def test_clients_that_are_gone_are_forgotten_with_their_mappings(lives: Lives, dead_pidfd: int) -> None:
    life = lives()
    writer, reader = life.client(1), life.client(2, dead_pidfd)
    region_id = int(life.put(writer, list(range(3)))[0]) >> 20
    life.map(reader, region_id)
    estate = read_estate(life.entries())
    assert estate is not None
    assert [session.id for session in estate.sessions] == [1]
    assert estate.former.regions[0].mappers == {1}
    assert estate.last_session_id == 2
    estate.close()


def test_a_writer_that_has_not_mapped_its_region_is_not_its_writer_any_more(lives: Lives) -> None:
    life = lives()
    region_id = int(life.put(life.client(1), list(range(3)))[0]) >> 20
    life.tier.remove_mapper(region_id, 1)
    estate = read_estate(life.entries())
    assert estate is not None
    assert estate.former.regions[0].writer is None
    estate.close()


@pytest.mark.parametrize("what", ["not sealed", "another size", "no memory file"])
def test_a_region_that_is_not_what_was_said_is_memory_only(lives: Lives, what: str) -> None:
    life = lives()
    region_id = int(life.put(life.client(1), list(range(3)))[0]) >> 20
    size = life.tier.region(region_id).size_bytes
    if what == "not sealed":
        fd = memfd.create("x", size)
    elif what == "another size":
        fd = memfd.create("x", size + PAGE)
        memfd.seal_read_only(fd)
    else:
        fd = os.open("/dev/null", os.O_RDWR)
    entries = life.entries()
    for i, entry in enumerate(entries):
        if entry.key == f"region/{region_id}":
            entry.close()
            entries[i] = entry._replace(fd=fd)
    estate = read_estate(entries)
    assert estate is not None
    assert not estate.former.regions[0].serves
    assert estate.former.regions[0].mappers == {1}
    estate.close()


CHANGES: list[tuple[str, dict[str, Any]]] = [
    ("directory", {"format": 2}),
    ("directory", {"format": None}),
    ("directory", {"last_session_id": "x"}),
    ("region/1", {"size_bytes": -PAGE}),
    ("region/1", {"size_bytes": 5}),
    ("region/1", {"slot_bytes": 0}),
    ("region/1", {"writer": None}),
    ("region/1", {"base": 1 << 60}),
    ("region/1", {"base": -1}),
    ("session/1", {"token": "zz"}),
    ("session/1", {"token": "00"}),
    ("session/1", {"pid": "x"}),
]


@pytest.mark.parametrize(("key", "changes"), CHANGES)
def test_an_entry_that_cannot_be_makes_a_cold_start(lives: Lives, key: str, changes: dict[str, Any]) -> None:
    life = lives()
    life.put(life.client(1), list(range(3)))
    with pytest.raises(IntegrityError):
        read_estate(replaced(life.entries(), key, **changes))


@pytest.mark.parametrize("missing", ["directory", "session/1"])
def test_a_missing_descriptor_makes_a_cold_start(lives: Lives, missing: str) -> None:
    life = lives()
    life.put(life.client(1), list(range(3)))
    entries = life.entries()
    for i, entry in enumerate(entries):
        if entry.key == missing:
            entry.close()
            entries[i] = entry._replace(fd=-1)
    with pytest.raises(IntegrityError):
        read_estate(entries)


def test_without_a_directory_nothing_is_believed(lives: Lives) -> None:
    life = lives()
    life.put(life.client(1), list(range(3)))
    entries = life.entries()
    for entry in entries:
        if entry.key == "directory":
            entry.close()
    with pytest.raises(IntegrityError):
        read_estate([entry for entry in entries if entry.key != "directory"])


def test_a_directory_that_was_given_up_is_not_believed(lives: Lives) -> None:
    life = lives()
    life.put(DAEMON_WRITER, list(range(3)))
    life.tier.labelling.valid = False
    with pytest.raises(IntegrityError, match="given up"):
        read_estate(life.entries())


KEYS = st.sampled_from(
    ["directory", "region/1", "region/x", "region", "map/1/1", "map/1", "map/1/x", "session/1", "session/-1",
     "namespaces", "what/ever", ""]
)  # fmt: skip
TEXTS = st.one_of(
    st.sampled_from(["", "{}", "[]", "1", '"x"', '{"format":1,"last_session_id":0}', '{"size_bytes":4096}']),
    st.text(max_size=20),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)
@given(st.lists(st.tuples(KEYS, TEXTS, st.booleans()), max_size=6, unique_by=lambda item: item[0]))
def test_garbage_is_refused_or_read_but_never_leaks(lives: Lives, garbage: list[tuple[str, str, bool]]) -> None:
    life = lives()
    life.put(life.client(1), list(range(3)))
    entries = {entry.key: entry for entry in life.entries()}
    for key, text, has_fd in garbage:
        if key in entries:
            entries[key].close()
        entries[key] = Entry(key, text, os.open("/dev/null", os.O_RDONLY) if has_fd else -1)
    try:
        estate = read_estate(list(entries.values()))
    except IntegrityError:
        return
    assert estate is not None
    estate.close()  # the fixture sees what is left open
