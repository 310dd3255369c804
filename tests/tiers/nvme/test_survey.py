"""Damage of every kind is found, and repair leaves exactly what is intact and has its ancestors."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from kvstore.errors import ConfigError
from kvstore.tiers.nvme.survey import Survey, survey
from tests.tiers.nvme.conftest import HEADER, MAGIC, PAGE, Rig, inspect, verify


class Lies(NamedTuple):
    """Where a frame lies: found by its bytes, with no code of the tier."""

    path: Path
    offset: int
    key: bytes
    size_bytes: int

    def write(self, at: int, data: bytes) -> None:
        with self.path.open("r+b") as file:
            file.seek(self.offset + at)
            file.write(data)

    def read(self) -> bytes:
        return self.path.read_bytes()[self.offset : self.offset + self.size_bytes]

    def flip(self, at: int) -> None:
        self.write(at, bytes([self.read()[at] ^ 0x10]))


def frames(directory: Path) -> Iterator[Lies]:
    for path in sorted(directory.glob("segment-*")):
        data = path.read_bytes()
        for offset in range(0, len(data), PAGE):
            if data[offset : offset + 8] == MAGIC:
                _, key, _, _, size_bytes, _, _ = HEADER.unpack(data[offset : offset + HEADER.size])
                yield Lies(path, offset, key, size_bytes)


def lies(directory: Path, rig: Rig) -> dict[bytes, Lies]:
    """The frames of a rig that only ever appended, by key."""
    return {each.key: each for each in frames(directory) if each.key in rig.known}


def look(rig: Rig, *, repair: bool = False) -> Survey:
    return survey(rig.directory, inspect, verify, repair=repair)


def with_ancestors(rig: Rig, lost: set[bytes]) -> set[bytes]:
    """What is left without these: everything that has all blocks before it. Straight from what was written."""

    def whole(key: bytes) -> bool:
        while key in rig.known:
            if key in lost:
                return False
            key = rig.known[key].parent
        return True

    return {key for key in rig.known if whole(key)}


def check_repair(rig: Rig, lost: set[bytes], **found: object) -> None:
    """The survey counts the damage, changes nothing; after repair a tier serves just what is left, and all is well."""
    before = {path.name: path.read_bytes() for path in sorted(rig.directory.glob("segment-*"))}
    catalog = (rig.directory / "catalog" / "data.mdb").read_bytes() if (rig.directory / "catalog").exists() else b""
    seen = look(rig)
    left = with_ancestors(rig, lost)
    assert not seen.ok
    assert seen.n_intact == len(left)
    assert {name: getattr(seen, name) for name in found} == found
    if catalog:
        assert (rig.directory / "catalog" / "data.mdb").read_bytes() == catalog
    assert look(rig, repair=True).repaired
    assert {path.name: path.read_bytes() for path in sorted(rig.directory.glob("segment-*"))} == before
    again = look(rig)
    assert again.ok
    assert (again.n_intact, again.n_names, again.bad) == (len(left), len(left), [])
    rig.open()
    assert set(rig.take_recovered()) == left
    assert all(rig.read(sorted(left)))


@pytest.fixture
def full(rig: Rig) -> Rig:
    """Two chains, one of which forks, over several segments; closed."""
    first = rig.put(14)
    rig.put(5, parent=first[6])
    rig.put(9)
    rig.tier.close()
    return rig


def test_a_sound_directory_is_found_sound(full: Rig) -> None:
    seen = look(full)
    assert seen.ok
    assert (seen.n_names, seen.n_intact, seen.n_bad, seen.catalog, seen.namespaces) == (28, 28, 0, "ok", "ok")
    assert seen.n_bytes == 28 * 3 * PAGE
    assert not look(full, repair=True).repaired


@pytest.mark.parametrize(("at", "what"), [(9, "header"), (PAGE + 1, "bytes"), (3 * PAGE - 1, "bytes")])
def test_a_flipped_bit_costs_its_block_and_those_behind_it(full: Rig, at: int, what: str) -> None:
    keys = list(full.known)
    lies(full.directory, full)[keys[5]].flip(at)
    seen = look(full)
    assert [(each.key, what in each.what) for each in seen.bad if "before" not in each.what] == [(keys[5].hex(), True)]
    check_repair(full, {keys[5]}, n_corrupt=1, n_orphans=8 + 5)


def test_frames_that_changed_places_are_no_frames_of_their_names(full: Rig) -> None:
    where, keys = lies(full.directory, full), list(full.known)
    one, other = where[keys[2]], where[keys[20]]
    first, second = one.read(), other.read()
    one.write(0, second)
    other.write(0, first)
    assert {each.what for each in look(full).bad if "before" not in each.what} == {"another frame lies there"}
    check_repair(full, {keys[2], keys[20]}, n_corrupt=2)


def test_a_missing_segment_costs_what_was_in_it(full: Rig) -> None:
    where = lies(full.directory, full)
    victim = where[list(full.known)[12]].path
    lost = {key for key, each in where.items() if each.path == victim}
    victim.unlink()
    check_repair(full, lost, n_misplaced=len(lost), n_corrupt=0)


def test_a_cut_segment_costs_what_lay_behind_the_cut(full: Rig) -> None:
    where = lies(full.directory, full)
    victim = where[list(full.known)[3]].path
    in_it = sorted((each for each in where.values() if each.path == victim), key=lambda each: each.offset)
    cut = in_it[2]
    with victim.open("r+b") as file:
        file.truncate(cut.offset + PAGE)
    check_repair(full, {each.key for each in in_it[2:]}, n_misplaced=len(in_it) - 2)


@pytest.mark.parametrize("damage", ["torn", "empty", "missing", "no namespaces", "bad namespaces"])
def test_without_a_catalog_the_segments_say_what_is_there(full: Rig, damage: str) -> None:
    data, listing = full.directory / "catalog" / "data.mdb", full.directory / "namespaces.json"
    if damage == "torn":
        data.write_bytes(data.read_bytes()[:6000] + bytes(4000))
    elif damage == "empty":
        data.write_bytes(b"")
    elif damage == "missing":
        shutil.rmtree(data.parent)
    elif damage == "no namespaces":
        listing.unlink()
    else:
        listing.write_bytes(b"[[1, 2")
    check_repair(full, set(), catalog="missing" if damage == "missing" else "damaged", n_corrupt=0)


def test_a_damaged_head_is_told_and_costs_nothing(full: Rig) -> None:
    where = lies(full.directory, full)
    path = where[next(iter(full.known))].path
    with path.open("r+b") as file:
        file.write(bytes(PAGE))
    seen = look(full)
    assert seen.ok
    assert [segment.head for segment in seen.segments if segment.head != "none"].count("damaged") == 1


@pytest.mark.parametrize("seed", range(12))
def test_any_damage_is_found_and_what_is_left_is_what_has_its_ancestors(full: Rig, seed: int) -> None:
    dice = random.Random(seed)
    where = lies(full.directory, full)
    lost: set[bytes] = set()
    for _ in range(dice.randint(1, 5)):
        each = where[dice.choice(list(where))]
        kind = dice.choice(["flip", "zero page", "noise", "header of another"])
        if kind == "flip":
            # Of a header only what has a meaning: the rest of its page is padding.
            each.flip(dice.choice([dice.randrange(HEADER.size + 4), dice.randrange(PAGE, 3 * PAGE)]))
        elif kind == "zero page":
            each.write(dice.choice([0, PAGE, 2 * PAGE]), bytes(PAGE))
        elif kind == "noise":
            each.write(dice.randrange(PAGE, 2 * PAGE), dice.randbytes(PAGE))
        else:
            others = [other for other in where.values() if other.key != each.key]
            each.write(0, dice.choice(others).read()[:PAGE])
        lost.add(each.key)
    lost = {key for key in lost if not verify_on_disk(where[key], key)}
    if lost:
        check_repair(full, lost)
    else:
        assert look(full).ok


def verify_on_disk(frame: Lies, key: bytes) -> bool:
    """Whether two damages have undone each other."""
    data = memoryview(bytearray(frame.read()))
    facts = inspect(data)
    return facts is not None and facts.key == key and verify(data)


def test_a_repair_that_has_no_room_leaves_the_catalog_as_it_was(full: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    lies(full.directory, full)[list(full.known)[5]].flip(PAGE)
    data = full.directory / "catalog" / "data.mdb"
    before = data.read_bytes()

    def refuse(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kvstore.tiers.nvme.direct.DirectFiles.write_small", refuse)
    with pytest.raises(Exception, match="No space left"):
        look(full, repair=True)
    assert data.read_bytes() == before


def test_a_directory_in_use_is_left_alone(rig: Rig) -> None:
    rig.put(3)
    with pytest.raises(ConfigError, match="in use by another process"):
        look(rig, repair=True)


@pytest.mark.parametrize("what", ["missing", "empty", "foreign", "other version"])
def test_what_is_no_directory_of_ours_is_refused_and_left_alone(tmp_path: Path, what: str) -> None:
    place = tmp_path / "place"
    if what != "missing":
        place.mkdir()
    if what == "foreign":
        (place / "kvstore.json").write_text('{"magic": "other"}')
    if what == "other version":
        (place / "kvstore.json").write_text('{"magic": "kvstore-nvme", "version": 99}')
    before = sorted(path.name for path in place.iterdir()) if place.exists() else None
    with pytest.raises(ConfigError, match=r"no NVMe directory|no superblock|format version"):
        survey(place, inspect, verify, repair=True)
    after = sorted(path.name for path in place.iterdir() if path.name != "lock") if place.exists() else None
    assert after == before


def test_progress_comes_to_an_end(full: Rig) -> None:
    steps: list[tuple[int, int]] = []
    survey(full.directory, inspect, verify, lambda done, total: steps.append((done, total)))
    assert steps[-1] == (28 * 3 * PAGE, 28 * 3 * PAGE)
    assert steps == sorted(steps)


def test_a_segment_of_another_directory_is_foreign(full: Rig, rig_at: Callable[..., Rig], tmp_path: Path) -> None:
    other = rig_at(tmp_path / "other", seed=9)
    other.put(4)
    other.tier.close()
    stranger = next(path for path in sorted(other.directory.glob("segment-*")) if b"TESTFRAM" in path.read_bytes())
    where = lies(full.directory, full)
    victim = where[next(iter(full.known))].path
    lost = {key for key, each in where.items() if each.path == victim}
    shutil.copy(stranger, victim)
    assert "foreign" in [segment.head for segment in look(full).segments]
    check_repair(full, lost, n_misplaced=len(lost))
