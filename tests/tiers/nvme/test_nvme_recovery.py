"""What a directory gives when parts of it are lost or damaged: whole prefixes of what is intact, never an error."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.tiers.nvme.direct import DirectFiles
from kvstore.tiers.nvme.faults import FaultyFiles
from kvstore.tiers.nvme.names import FIRST, RECORD, seal
from kvstore.tiers.nvme.recovery import closed_and_ordered, newest_of_each
from kvstore.tiers.nvme.segment_index import head_page

PAGE = 4096
ROOT = b"r" * 16


def place_of(rig: Any, key: bytes) -> tuple[Path, int]:
    """The segment file that a frame lies in, and its first byte there."""
    table, row = rig.tier._ledger.table, rig.known[key].slot & 0xFFFFFFFF
    return rig.directory / f"segment-{int(table.segment[row]):08d}", int(table.page[row]) * PAGE


def damage(path: Path, offset: int, n_bytes: int = 1) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        old = file.read(n_bytes)
        file.seek(offset)
        file.write(bytes(byte ^ 0x55 for byte in old))


def lose_catalog(rig: Any, how: str) -> None:
    rig.tier.close()
    data = rig.directory / "catalog" / "data.mdb"
    if how == "folder":
        shutil.rmtree(rig.directory / "catalog")
    elif how == "file":
        data.unlink()
    elif how == "empty":
        data.write_bytes(b"")
    elif how == "cut":
        data.write_bytes(data.read_bytes()[:20_000])
    else:
        data.write_bytes(np.random.default_rng(0).bytes(data.stat().st_size))


def fill_with_moves(rig: Any) -> None:
    """A tier in use for a while: segments reused, frames moved, some dead."""
    keys: list[bytes] = []
    for _ in range(60):
        short = rig.tier.short_of(3 * PAGE, 8)
        gone = sorted(rig.rng.permutation(len(keys))[:short].tolist(), reverse=True)
        rig.free([keys.pop(i) for i in gone])
        rig.compact()
        keys += rig.put(8, chain=False)
    assert rig.tier.stats()["moved_frames"] > 20


@pytest.mark.parametrize("how", ["folder", "file", "empty", "cut", "noise"])
def test_a_lost_catalog_is_rebuilt(rig: Any, how: str) -> None:
    fill_with_moves(rig)
    rig.free(list(rig.known)[:12])
    rig.compact()
    first = rig.put(4)
    rig.put(6, parent=first[1])
    before = set(rig.known)
    lose_catalog(rig, how)
    rig.open()
    assert rig.tier.stats()["rebuilt"] == 1
    found = rig.take_recovered()
    assert before <= set(found)
    assert rig.read(found) == [True] * len(found)
    rig.tier.check()
    assert rig.tier.namespaces()[rig.number] == (b"namespace-digest", "{}")
    assert set(rig.reopen()) == set(found)  # from the catalog that was made
    assert rig.tier.stats()["rebuilt"] == 0


def test_of_a_block_the_last_written_copy_says_whether_it_had_an_end(rig: Any) -> None:
    ended, lifted, kept = (rig.new_key() for _ in range(3))

    def write(key: bytes, until_s: float) -> None:
        pending = rig.begin([key], [ROOT], 3, until_s)
        pending.job.write()
        pending.job.name()
        assert rig.finish(pending) == [key]

    for key, untils_s in ((ended, (np.inf, 2e9)), (lifted, (2e9, np.inf)), (kept, (np.inf, np.inf))):
        write(key, untils_s[0])
        rig.free([key])
        write(key, untils_s[1])
    lose_catalog(rig, "folder")
    rig.open()
    assert set(rig.take_recovered()) == {lifted, kept}, "an older frame without an end stands for none that has one"
    assert rig.read([lifted, kept]) == [True, True]


def test_a_rebuilt_tier_that_is_too_full_finds_its_way_back(rig: Any) -> None:
    """The dead come back with the living and fill it beyond what may be live: it only asks to free more."""
    fill_with_moves(rig)
    lose_catalog(rig, "folder")
    rig.open()
    keys = rig.take_recovered()
    assert len(keys) * 3 * PAGE > 0.9 * rig.tier.live_capacity_bytes
    for _ in range(40):
        while short := rig.tier.short_of(3 * PAGE, 8):
            rig.free(keys[:short])
            keys = keys[short:]
        rig.compact()
        keys += rig.put(8, chain=False)
    assert len(keys) * 3 * PAGE > 0.7 * rig.tier.live_capacity_bytes
    rig.tier.check()
    assert rig.read(keys) == [True] * len(keys)


def test_lost_together_with_a_header_the_frame_and_all_below_it_are_lost(rig: Any) -> None:
    keys = rig.put(5)
    others = rig.put(3)
    damage(*place_of(rig, keys[2]))
    lose_catalog(rig, "folder")
    rig.open()
    assert set(rig.take_recovered()) == {*keys[:2], *others}
    assert rig.tier.stats()["dropped_orphans"] == 2


def test_an_index_entry_lost_together_with_the_catalog_loses_its_frame(rig: Any) -> None:
    keys = rig.put(5, chain=False)
    path, offset = place_of(rig, keys[0])
    first_page = offset // PAGE
    damage(path, PAGE + 64 * 3 + 20)
    lose_catalog(rig, "folder")
    rig.open()
    assert set(rig.take_recovered()) == set(keys) - {keys[3]}
    assert first_page == 2


def test_with_the_catalog_the_index_of_a_segment_is_not_needed(rig: Any) -> None:
    keys = rig.put(5)
    path, _ = place_of(rig, keys[0])
    damage(path, PAGE, 64 * 5)
    assert rig.reopen() == keys
    assert rig.read(keys) == [True] * 5


def test_a_damaged_head_loses_nothing(rig: Any) -> None:
    """The names say which life of the file they belong to."""
    keys = rig.put(25, chain=False)
    path, _ = place_of(rig, keys[0])
    damage(path, 8)
    assert set(rig.reopen()) == set(keys)
    assert rig.read(keys) == [True] * 25
    for _ in range(40):  # it is used again, with a head of its own
        rig.free(rig.put(10))
        rig.compact()
    rig.tier.check()
    assert set(rig.reopen()) == set(keys)


def test_a_head_that_can_not_be_read_loses_nothing(rig: Any) -> None:
    keys = rig.put(25, chain=False)
    path, _ = place_of(rig, keys[0])
    rig.tier.close()
    files = FaultyFiles(DirectFiles(rig.directory))
    head = files.fail("read", errno.EIO, where=lambda name, e: name == path.name and e is not None and e.offset == 0)
    rig.open(files=files)
    assert head.hits == 1
    assert set(rig.take_recovered()) == set(keys)
    assert rig.read(keys) == [True] * 25


@pytest.mark.parametrize("what", ["another life", "another segment"])
def test_a_segment_with_another_head_is_not_believed(rig: Any, what: str) -> None:
    """The names are those of another life of the file, or of another file."""
    keys = rig.put(25, chain=False)
    path, _ = place_of(rig, keys[0])
    lost = [key for key in keys if place_of(rig, key)[0] == path]
    uuid, number = rig.tier._opened.superblock.uuid_bytes, int(path.name[-8:])
    head = head_page(uuid, number, 1 << 40) if what == "another life" else head_page(uuid, number + 1, 1 << 24)
    with path.open("r+b") as file:
        file.write(head.tobytes())
    assert set(rig.reopen()) == set(keys) - set(lost)
    assert rig.tier.stats()["dropped_misplaced"] == len(lost)
    assert len(rig.put(20)) == 20
    rig.tier.check()


def test_a_missing_segment_loses_its_frames(rig: Any) -> None:
    keys = rig.put(25)
    path, _ = place_of(rig, keys[12])
    rig.tier.close()
    path.unlink()
    rig.open()
    found = rig.take_recovered()
    assert found == keys[: len(found)]  # a chain: nothing below what is lost
    assert 0 < len(found) < 13
    assert len(rig.put(25)) == 25
    rig.tier.check()
    assert set(rig.reopen()) == set(rig.known)


@pytest.mark.parametrize("keep", [0, 100, 2 * PAGE, 10 * PAGE, 11 * PAGE + 7])
def test_a_cut_segment_loses_what_lay_behind_the_cut(rig: Any, keep: int) -> None:
    keys = rig.put(25, chain=False)
    path, _ = place_of(rig, keys[0])
    ends = {key: place_of(rig, key)[1] + 3 * PAGE for key in keys if place_of(rig, key)[0] == path}
    rig.tier.close()
    with path.open("r+b") as file:
        file.truncate(keep)
    rig.open()
    lost = {key for key, end in ends.items() if end > keep}
    found = rig.take_recovered()
    assert set(found) == set(keys) - lost
    assert rig.read(found) == [True] * len(found)
    rig.free([key for key in found if key in ends])
    for _ in range(40):  # the cut file goes, a whole one takes its place
        rig.free(rig.put(10))
        rig.compact()
    assert path.stat().st_size in (0, keep, 32 * PAGE)
    assert {p.stat().st_size for p in rig.directory.glob("segment-*")} == {32 * PAGE}
    rig.tier.check()


def test_a_foreign_segment_file_is_not_believed(rig: Any, rig_at: Callable[..., Any], tmp_path: Path) -> None:
    """Files of one directory laid into another name nothing there."""
    keys = rig.put(10)
    other = rig_at(tmp_path / "other", 7)
    theirs = other.put(10)
    path, _ = place_of(other, theirs[0])
    other.tier.close()
    lose_catalog(rig, "folder")
    shutil.copy(path, rig.directory / "segment-00000005")
    rig.open()
    assert set(rig.take_recovered()) == set(keys)


def test_payloads_that_look_like_frames_are_not_taken_for_some(rig: Any) -> None:
    """Bytes are the clients': one may store the image of a segment's index and of a frame in its blocks."""
    keys = rig.put(2, pages=10)
    path, offset = place_of(rig, keys[0])
    image = path.read_bytes()
    rig.tier.close()
    forged = bytearray(image[offset + PAGE :])
    forged[: 8 * PAGE] = image[PAGE : 9 * PAGE]
    with path.open("r+b") as file:
        file.seek(offset + PAGE)
        file.write(forged[: 8 * PAGE])
    shutil.rmtree(rig.directory / "catalog")
    rig.open()
    assert set(rig.take_recovered()) == set(keys)  # those of the index, and nothing from within


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"[[1, 2]]", b'[[0, "zz", "a"]]', b'[[0, "00", "a"]]'])
def test_damaged_namespaces_are_numbered_anew(rig: Any, text: bytes) -> None:
    keys = rig.put(3)
    rig.tier.close()
    (rig.directory / "namespaces.json").write_bytes(text)
    rig.open()
    assert rig.take_recovered() == keys
    assert rig.tier.stats()["rebuilt"] == 1
    assert [digest for digest, _ in rig.tier.namespaces().values()] == [b"namespace-digest"]


def test_strict_reads_every_byte(rig: Any) -> None:
    keys = rig.put(20, chain=False)
    bad = keys[3::5]
    for key in bad:
        path, offset = place_of(rig, key)
        damage(path, offset + PAGE + 5000)
    assert set(rig.reopen()) == set(keys)
    assert set(rig.reopen(recovery="strict")) == set(keys) - set(bad)
    assert rig.tier.stats()["dropped_corrupt"] == len(bad)
    rig.put(1)
    assert set(rig.reopen()) == set(rig.known)  # their names are gone


def records_of(parents: list[int], ages: list[int]) -> Any:
    """Names of a forest: -1 is a first block, -2 a block whose parent isn't there."""
    n = len(parents)
    records = np.zeros(n, RECORD)
    keys = np.random.default_rng(n).integers(0, 256, (n, 16), dtype=np.uint8)
    records["value"]["key"] = keys
    for i, parent in enumerate(parents):
        if parent >= 0:
            records["value"]["parent"][i] = keys[parent]
        elif parent == -1:
            records["value"]["flags"][i] = FIRST
    records["value"]["age"] = ages
    seal(records)
    return records


@settings(deadline=None)
@given(st.data())
def test_order_and_closure_against_a_plain_walk(data: st.DataObject) -> None:
    n = data.draw(st.integers(0, 60))
    parents = [data.draw(st.integers(-2 if i % 7 == 3 else -1, i - 1)) for i in range(n)]
    order = data.draw(st.permutations(range(n)))  # where each lies in the file
    at = {old: new for new, old in enumerate(order)}
    shuffled = [at[parents[old]] if parents[old] >= 0 else parents[old] for old in order]
    ages = data.draw(st.permutations(range(n)))
    got = closed_and_ordered(records_of(shuffled, ages)).tolist()

    def whole(i: int) -> bool:
        return shuffled[i] == -1 or (shuffled[i] >= 0 and whole(shuffled[i]))

    def oldest(i: int) -> int:
        return max(ages[i], oldest(shuffled[i]) if shuffled[i] >= 0 else -1)

    assert sorted(got) == [i for i in range(n) if whole(i)]
    position = {i: p for p, i in enumerate(got)}
    assert all(position[shuffled[i]] < position[i] for i in got if shuffled[i] >= 0)
    assert [oldest(i) for i in got] == sorted(oldest(i) for i in got)


def test_a_chain_of_many_thousands() -> None:
    n = 50_000
    got = closed_and_ordered(records_of([i + 1 for i in range(n - 1)] + [-1], list(range(n))))
    assert got.tolist() == list(range(n - 1, -1, -1))


def test_a_cycle_is_lost() -> None:
    assert closed_and_ordered(records_of([1, 2, 0, -1, 0], list(range(5)))).tolist() == [3]


def test_the_last_written_of_a_key_counts() -> None:
    records = records_of([-1] * 6, list(range(6)))
    for i, same in ((2, 0), (5, 0), (4, 1)):
        records["value"]["key"][i] = records["value"]["key"][same]
    assert newest_of_each(records).tolist() == [False, False, False, True, True, True]
