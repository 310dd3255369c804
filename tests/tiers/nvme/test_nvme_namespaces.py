"""The list of namespaces: bounded, true to the blocks on the disk; no blocks wait for the names of others."""

from __future__ import annotations

import errno
import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.clock import ManualClock
from kvstore.errors import BadInputError
from kvstore.tiers.nvme import layout
from kvstore.tiers.nvme.direct import DirectFiles
from kvstore.tiers.nvme.faults import FaultyFiles
from kvstore.tiers.nvme.namebook import IDLE_S, LOOK_S, file_bytes, fitting, number_for
from kvstore.tiers.nvme.tier import FrameState, NvmeTier

PAGE = 4096
DIGEST = b"namespace-digest"


def digest_of(i: int) -> bytes:
    return hashlib.blake2b(b"%d" % i, digest_size=16).digest()


def put_in(rig: Any, number: int) -> list[bytes]:
    """One frame of a namespace; the keys of those that are live."""
    own, rig.number = rig.number, number
    try:
        kept: list[bytes] = rig.put(1, pages=2)
        return kept
    finally:
        rig.number = own


def fill_list(rig: Any, text: str) -> dict[int, bytes]:
    """Frames of other namespaces, one each, until there is no room for one more; their keys by number."""
    keys: dict[int, bytes] = {}
    for i in range(500):
        rig.settings["clock"].advance(LOOK_S)
        try:
            number = rig.tier.name_namespace(digest_of(i), text)
        except BadInputError:
            return keys
        (keys[number],) = put_in(rig, number)
    raise AssertionError("there always was room")


def segments_of(rig: Any) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in rig.directory.glob("segment-*")}


def on_disk(rig: Any) -> dict[int, tuple[bytes, str]]:
    rows = json.loads((rig.directory / "namespaces.json").read_text())
    return {number: (bytes.fromhex(digest), text) for number, digest, text in rows}


def list_room(monkeypatch: pytest.MonkeyPatch, room_bytes: int) -> None:
    monkeypatch.setattr(layout, "_NAMESPACES_BYTES_MIN", 2 * room_bytes)
    monkeypatch.setattr(layout, "_NAMESPACES_SHARE", 1 << 30)


@pytest.fixture
def crowded(rig_at: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Room for more frames than namespaces."""
    list_room(monkeypatch, 4096)
    return rig_at(tmp_path / "nvme", clock=ManualClock())


def test_a_full_list_turns_new_namespaces_away_and_nobody_else(crowded: Any) -> None:
    (mine,) = crowded.put(1)
    keys = fill_list(crowded, "d" * 100)
    room_bytes = crowded.tier._geometry.namespaces_bytes
    assert len(keys) > room_bytes // 80  # descriptions go first
    assert (crowded.directory / "namespaces.json").stat().st_size <= room_bytes
    with pytest.raises(BadInputError, match="more capacity, or wait"):
        crowded.tier.name_namespace(b"one-more-of-them", "")
    assert crowded.tier.name_namespace(DIGEST, "{}") == crowded.number
    assert len(crowded.put(4)) == 4
    assert crowded.tier.health == "ok"
    crowded.tier.check()
    assert crowded.states([mine]) == [FrameState.LIVE]


def test_namespaces_without_frames_make_room(crowded: Any) -> None:
    crowded.put(1)
    keys = fill_list(crowded, "d" * 100)
    n_before = len(keys)
    gone = list(keys)[::2]
    crowded.free([keys.pop(number) for number in gone])
    crowded.put(1)  # their names go with it
    crowded.settings["clock"].advance(IDLE_S)
    numbers = [crowded.tier.name_namespace(digest_of(10_000 + i), "") for i in range(len(gone) // 2)]
    for number in numbers:
        assert len(put_in(crowded, number)) == 1
    assert set(on_disk(crowded)) >= {*numbers, *keys, crowded.number}
    assert len(on_disk(crowded)) <= n_before + 1
    assert not set(on_disk(crowded)) & set(gone)
    # One that has left the list is still known by its number, and comes back with its next frame.
    assert len(put_in(crowded, gone[0])) == 1
    assert gone[0] in on_disk(crowded)
    crowded.tier.check()


def test_namespaces_that_were_just_named_stay_listed(crowded: Any) -> None:
    """Their blocks are on their way; who comes when the list is full is turned away at once."""
    numbers: list[int] = []
    with suppress(BadInputError):
        while len(numbers) < 500:
            numbers.append(crowded.tier.name_namespace(digest_of(len(numbers)), "d" * 100))
    assert 30 < len(numbers) < 500
    for number in numbers:
        assert len(put_in(crowded, number)) == 1


def test_a_frame_of_a_namespace_that_found_no_room_is_not_live(crowded: Any) -> None:
    """Its namespace had no frame for a while, and others took the room; nothing is written in vain."""
    early = crowded.tier.name_namespace(b"early-and-unused", "")
    assert len(crowded.put(1)) == 1
    keys = fill_list(crowded, "")
    before = crowded.tier.stats()["catalog_bytes"], segments_of(crowded)
    assert put_in(crowded, early) == []
    assert (crowded.tier.stats()["catalog_bytes"], segments_of(crowded)) == before
    assert crowded.tier.health == "ok"
    crowded.free([keys.popitem()[1] for _ in range(2)])
    crowded.put(1)
    assert put_in(crowded, early) == []
    crowded.settings["clock"].advance(IDLE_S)
    assert len(put_in(crowded, early)) == 1
    crowded.tier.check()


def test_only_namespaces_that_are_used_have_to_be_written(tmp_path: Path, rig_at: Callable[..., Any]) -> None:
    """Somebody names one, and the file can't be written: blocks of others go on."""
    (tmp_path / "nvme").mkdir()
    files, clock = FaultyFiles(DirectFiles(tmp_path / "nvme")), ManualClock()
    rig = rig_at(tmp_path / "nvme", files=files, clock=clock)
    assert len(rig.put(2)) == 2
    number = rig.tier.name_namespace(digest_of(1), "new")
    fault = files.fail("write_small", errno.ENOSPC, times=None)
    assert len(rig.put(2)) == 2
    assert fault.hits == 0
    assert put_in(rig, number) == []
    assert rig.tier.health == "full"
    fault.stop()
    clock.advance(5.0)
    assert len(put_in(rig, number)) == 1
    assert set(on_disk(rig)) == {rig.number, number}


@pytest.mark.parametrize("how", ["missing", "older", "others"])
def test_numbers_that_the_list_does_not_know_are_found_in_the_segments(rig: Any, how: str) -> None:
    keys = rig.put(3)
    path = rig.directory / "namespaces.json"
    older = path.read_bytes()
    other = rig.tier.name_namespace(digest_of(1), "other")
    (theirs,) = put_in(rig, other)
    rig.tier.close()
    if how == "missing":
        path.unlink()
    elif how == "older":
        path.write_bytes(older)
    else:
        path.write_text(json.dumps([[other + 1, digest_of(2).hex(), "another"]]))
    rig.open()
    found = rig.tier.recovered()
    assert rig.tier.stats()["rebuilt"] == 1
    known = rig.tier.namespaces()
    digests = {k.tobytes(): known[n][0] for k, n in zip(found.keys, found.namespaces.tolist(), strict=True)}
    assert digests == {**dict.fromkeys(keys, DIGEST), theirs: digest_of(1)}
    assert {digest for digest, _ in on_disk(rig).values()} >= set(digests.values())  # at once, not with the next names


def test_an_older_list_gives_nobody_the_number_of_another(rig: Any) -> None:
    """Numbers are of the digest: also with the list of before in place of that of now, they are right or unknown."""
    first = rig.tier.name_namespace(digest_of(1), "")
    (key,) = put_in(rig, first)
    path = rig.directory / "namespaces.json"
    older = path.read_bytes()
    rig.free([key])
    assert rig.reopen() == []
    path.unlink()
    second = rig.tier.name_namespace(digest_of(2), "")
    (other,) = put_in(rig, second)
    rig.tier.close()
    path.write_bytes(older)
    rig.open()
    found = rig.tier.recovered()
    digests = [rig.tier.namespaces()[n][0] for n in found.namespaces.tolist()]
    found_in = dict(zip([each.tobytes() for each in found.keys], digests, strict=True))
    assert found_in == {key: digest_of(1), other: digest_of(2)}  # what was dead came back with it


def test_a_list_that_is_too_large_for_the_capacity_becomes_smaller(crowded: Any) -> None:
    keys = crowded.put(3)
    path = crowded.directory / "namespaces.json"
    crowded.tier.close()
    path.write_text(json.dumps([[crowded.number, DIGEST.hex(), "a" * (1 << 20)]]))
    crowded.open()
    assert crowded.take_recovered() == keys
    assert path.stat().st_size < 1000
    assert len(crowded.put(2)) == 2
    crowded.tier.check()


def test_numbers_do_not_collide() -> None:
    taken: dict[int, bytes] = {}
    for tail in range(5):
        digest = b"\xff\xff\xff\xff" + bytes([tail]) * 12
        taken[number_for(digest, taken)] = digest
    assert sorted(taken) == [0, 1, 2, 3, 0xFFFFFFFF]


def test_what_fits_are_those_with_the_most_frames() -> None:
    known = {i: (digest_of(i), "x" * 50) for i in range(100)}
    n_frames = {i: i % 10 for i in known}
    assert fitting(known, file_bytes(known), n_frames) == known
    plain = fitting(known, file_bytes(known) - 1, n_frames)
    assert plain == {i: (digest, "") for i, (digest, _) in known.items()}
    some = fitting(known, file_bytes(plain) // 2, n_frames)
    assert file_bytes(some) <= file_bytes(plain) // 2
    assert 45 <= len(some) <= 50
    assert min(n_frames[i] for i in some) >= max(n_frames[i] for i in known if i not in some)


def test_blocks_of_namespaces_that_no_longer_fit_are_dropped(crowded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same directory, opened with room for half as many."""
    keys = fill_list(crowded, "")
    crowded.tier.close()
    list_room(monkeypatch, 2048)
    with NvmeTier(crowded.directory, inspect=lambda _: None, **crowded.settings) as tier:
        found = tier.recovered()
        n_dropped = int(tier.stats()["dropped_unlisted"])
        assert n_dropped > len(keys) // 3
        assert len(found.slots) == len(keys) - n_dropped
        assert set(np.unique(found.namespaces).tolist()) == set(on_disk(crowded))
        assert (crowded.directory / "namespaces.json").stat().st_size <= 2048
        tier.check()
