"""Descriptions of namespaces beside the slot directory: what is noted is found, and what can't be noted is said."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import IntegrityError
from kvstore.takeover import notes as notes_module
from kvstore.takeover.estate import read_estate
from kvstore.takeover.keeper import Keeper
from kvstore.takeover.notes import NamespaceNotes, read_notes
from kvstore.tiers import memfd

A, B = b"a" * 16, b"b" * 16


@pytest.fixture
def notes() -> Iterator[NamespaceNotes]:
    made = NamespaceNotes()
    yield made
    made.close()


def test_what_was_noted_is_read_again_whatever_it_is(notes: NamespaceNotes) -> None:
    notes.add(A, 'of "quotes",\n\rlines and \u2028 umlauts: \u00e4')
    notes.add(B, "x" * 100_000)
    assert A in notes
    assert read_notes(notes.fd) == {A: 'of "quotes",\n\rlines and \u2028 umlauts: \u00e4', B: "x" * 100_000}


@pytest.mark.parametrize("n_bytes", [1, 20, 37])
def test_a_line_that_was_not_finished_is_left_out(notes: NamespaceNotes, n_bytes: int) -> None:
    notes.add(A, "first")
    end = os.fstat(notes.fd).st_size
    notes.add(B, "second")
    os.ftruncate(notes.fd, end + n_bytes)
    assert read_notes(notes.fd) == {A: "first"}


@pytest.mark.parametrize("text", [b"{}\n", b"[1, 2]\n", b'["00", "x"]\n', b'["%s", 3]\n' % (b"00" * 16), b"\xff\n"])
def test_what_no_daemon_wrote_is_refused(text: bytes) -> None:
    fd = memfd.create("x", 0)
    os.pwrite(fd, text, 0)
    with pytest.raises((IntegrityError, ValueError, TypeError)):
        read_notes(fd)
    os.close(fd)


def test_a_file_that_is_too_large_is_not_read(notes: NamespaceNotes) -> None:
    os.ftruncate(notes.fd, notes_module.NOTES_BYTES_MAX + 1)
    with pytest.raises(IntegrityError, match="the most is"):
        read_notes(notes.fd)


def test_a_keeper_that_cannot_note_says_so_once_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(notes_module, "NOTES_BYTES_MAX", 100)
    keeper = Keeper(Path("/nowhere"), "me", 1.0, "x", None)
    assert keeper.note_namespace(A, "first")
    assert not keeper.note_namespace(B, "y" * 60)
    assert not keeper.note_namespace(B, "y" * 60)
    assert not keeper.note_namespace(B, "")
    assert keeper.note_namespace(A, "")
    assert len([record for record in caplog.records if "can't be noted" in record.message]) == 1
    keeper.leave()


def test_an_estate_has_the_notes_and_descriptions_without_a_file_are_refused(lives: Callable[..., Any]) -> None:
    life = lives()
    life.keeper.note_namespace(A, "first")
    life.put(life.client(1), [1, 2])
    estate = read_estate(life.entries())
    assert estate is not None
    assert estate.namespaces == {A: "first"}
    estate.close()
    entries = life.entries()
    for i, entry in enumerate(entries):
        if entry.key == "namespaces":
            entry.close()
            entries[i] = entry._replace(fd=-1)
    with pytest.raises(IntegrityError, match="no memory file"):
        read_estate(entries)
