"""Cleared frames don't come back when names are rebuilt from segments; what was stored later does."""

from __future__ import annotations

import random
import shutil

import numpy as np
import pytest

from kvstore.tiers.nvme import cleared
from kvstore.tiers.nvme.cleared import Marks, read_marks
from kvstore.tiers.nvme.direct import DirectFiles
from kvstore.tiers.nvme.survey import survey
from tests.tiers.nvme.conftest import DIGEST, Rig, inspect, verify

OTHER = b"another--digest-"


def clear(rig: Rig) -> None:
    """As a store does: mark, then free; durable at the end."""
    job = rig.tier.begin_mark({DIGEST})
    job.run()
    assert rig.tier.finish_mark(job)
    rig.tier.free(rig.slots(list(rig.known)), soon=True)
    rig.known.clear()
    rig.compact()


def reopened_without_catalog(rig: Rig) -> set[bytes]:
    rig.tier.close()
    shutil.rmtree(rig.directory / "catalog")
    rig.open()
    return set(rig.take_recovered())


def test_a_rebuilt_catalog_has_what_was_stored_after_the_clearing_only(rig: Rig) -> None:
    old = rig.put(7)
    clear(rig)
    new = rig.put(4)
    assert reopened_without_catalog(rig) == set(new)
    assert rig.tier.stats()["rebuilt"] == 1
    assert not set(old) & set(rig.known)
    assert reopened_without_catalog(rig) == set(new)


def test_a_survey_of_a_directory_without_catalog_knows_it_too(rig: Rig) -> None:
    rig.put(7)
    clear(rig)
    rig.put(4)
    rig.tier.close()
    shutil.rmtree(rig.directory / "catalog")
    assert survey(rig.directory, inspect, verify).n_intact == 4


def test_frames_of_other_namespaces_stay(rig: Rig) -> None:
    keys = rig.put(5)
    job = rig.tier.begin_mark({OTHER})
    job.run()
    assert rig.tier.finish_mark(job)
    assert reopened_without_catalog(rig) == set(keys)


def test_frames_that_are_moved_after_a_clearing_of_others_stay(rig: Rig) -> None:
    """Moves give frames a later incarnation, never an earlier one."""
    dice = random.Random(1)
    for _ in range(6):
        rig.put(20)
        gone = dice.sample(sorted(rig.known), 12)
        leaves = [key for key in gone if not any(known.parent == key for known in rig.known.values())]
        rig.free(leaves)
        job = rig.tier.begin_mark({OTHER})
        job.run()
        rig.tier.finish_mark(job)
        rig.compact()
    kept = set(rig.known)
    assert kept <= reopened_without_catalog(rig)


def test_a_damaged_file_of_marks_leaves_nothing_to_be_found_again_and_new_frames_count(rig: Rig) -> None:
    rig.put(5)
    clear(rig)
    rig.put(3)
    rig.tier.close()
    (rig.directory / "cleared.json").write_bytes(b'{"all": ')
    shutil.rmtree(rig.directory / "catalog")
    rig.open()
    assert rig.take_recovered() == []
    new = rig.put(4)
    assert reopened_without_catalog(rig) == set(new)


def test_a_catalog_that_is_there_is_believed_whatever_the_marks_say(rig: Rig) -> None:
    keys = rig.put(5)
    rig.tier.close()
    (rig.directory / "cleared.json").write_bytes(b"nonsense")
    rig.open()
    assert set(rig.take_recovered()) == set(keys)


def test_a_mark_that_can_not_be_written_is_told(rig: Rig) -> None:
    rig.put(2)
    job = rig.tier.begin_mark({DIGEST})
    (rig.directory / "cleared.json").mkdir()
    job.run()
    assert job.failure is not None
    assert not rig.tier.finish_mark(job)
    assert not rig.tier.may_write


def test_marks_of_many_namespaces_become_one_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cleared, "MARKS_MAX", 4)
    marks = Marks()
    marks.add([bytes([i]) * 16 for i in range(4)], 100)
    nobody = np.full((1, 16), 99, np.uint8)
    assert not marks.excludes(50, nobody).any()
    assert marks.excludes(100, np.zeros((1, 16), np.uint8)).all()
    assert not marks.excludes(101, np.zeros((1, 16), np.uint8)).any()
    marks.add([bytes([9]) * 16], 200)
    assert marks.excludes(200, nobody).all()
    assert not marks.excludes(201, nobody).any()
    marks.fit(150, 180)
    assert marks.of_all == 180
    marks.fit(190, 300)
    assert marks.of_all == -1


def test_marks_are_read_as_they_were_written(rig: Rig) -> None:
    assert read_marks(DirectFiles(rig.directory)) == Marks()
    job = rig.tier.begin_mark({DIGEST, OTHER})
    job.run()
    marks = read_marks(DirectFiles(rig.directory))
    assert set(marks.by_digest) == {DIGEST, OTHER}
    assert marks.to_bytes() == job.data


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"{}", b'{"all": 1}', b'{"all": 1, "namespaces": [["00", 1]]}', b'{"all": "x", "namespaces": []}'],
)
def test_any_other_file_means_that_nothing_counts(rig: Rig, data: bytes) -> None:
    (rig.directory / "cleared.json").write_bytes(data)
    marks = read_marks(DirectFiles(rig.directory))
    assert marks.excludes(1 << 60, np.zeros((3, 16), np.uint8)).all()
