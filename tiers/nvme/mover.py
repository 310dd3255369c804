"""When to make room, and from what: plans compactions and takes their results in. One thread only."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.metrics import Counters
from kvstore.tiers.nvme import names
from kvstore.tiers.nvme.compaction import CompactJob, MovePart
from kvstore.tiers.nvme.disk_room import DiskRoom
from kvstore.tiers.nvme.files import Files
from kvstore.tiers.nvme.jobs import Removal
from kvstore.tiers.nvme.layout import PAGE_BYTES, Int64s
from kvstore.tiers.nvme.ledger import Ledger
from kvstore.tiers.nvme.namebook import NameBook
from kvstore.tiers.nvme.segments import Segment, Stream
from kvstore.tiers.nvme.table import FrameState
from kvstore.tiers.nvme.writer import append_entries, incarnation_of

_LOW_SHARE = 32
"""Compaction begins when no more than this part of the segments is left to open."""
_GAIN_SHARE = 64
"""A segment is worth moving if this part of it comes back."""
_RENAMED_MAX = 4096
"""Names that are changed in one transaction."""


class Mover:
    """One compaction at a time."""

    def __init__(self, ledger: Ledger, files: Files, disk: DiskRoom, book: NameBook, counters: Counters) -> None:
        self._ledger = ledger
        self._files = files
        self._disk = disk
        self._book = book
        self._counters = counters
        self.running: CompactJob | None = None
        self._useless: list[Segment] = []
        self._n_fruitless = 0
        self._room_before = 0

    def fruitful(self) -> None:
        """Something was freed: what could not be gained before may be now."""
        self._n_fruitless = 0

    def is_renaming(self, rows: Int64s) -> NDArray[np.bool_]:
        """Whose names the job under way is to change; bool [n]."""
        running = self.running
        return np.zeros(len(rows), np.bool_) if running is None else np.isin(rows, running.renamed_rows)

    def may_gain(self) -> bool:
        """Whether room comes back without anything being freed."""
        segments = self._ledger.segments
        pending = self.running is not None or segments.any_to_remove() or segments.any_waits_for_names()
        return pending or self._victim() is not None

    def begin(self, may_write: bool) -> CompactJob | None:
        """A job if one is due, else None. Without leave to write it is only to look at the disk."""
        ledger, segments = self._ledger, self._ledger.segments
        if self.running is not None:
            return None
        victim = self._victim() if may_write and self._is_low() else None
        waits = ledger.n_waiting > 0 and (ledger.urgent or segments.any_waits_for_names())
        looks = segments.disk_limits and self._disk.is_old
        renamed = ledger.take_renamed(_RENAMED_MAX) if may_write and ledger.n_renamed else np.zeros(0, np.int64)
        if not (victim or looks or len(renamed) or (may_write and (waits or segments.any_to_remove()))):
            return None
        self._room_before = segments.room_pages(Stream.MOVED)
        self._useless = segments.take_to_remove() if may_write else []
        self.running = self._plan(victim, ledger.take_removal() if may_write else Removal.of_nothing(), renamed)
        return self.running

    def finish(self, job: CompactJob) -> Int64s:
        """Take the results in; returns the slots of frames that could not be read and still lie where they were."""
        ledger, table, segments = self._ledger, self._ledger.table, self._ledger.segments
        self.running = None
        alive = table.current(job.slots)
        alive[alive] = table.state[job.rows[alive]] == FrameState.LIVE
        here = job.moved & alive
        ledger.rehouse(job.rows[here], job.new_segments[here], job.new_pages[here])
        if not job.done:
            again = job.renamed_rows[table.state[job.renamed_rows] == FrameState.LIVE]
            ledger.rename(again, table.until_s[again])
        stale = ~here
        for number, n in zip(*np.unique(job.new_segments[stale], return_counts=True), strict=True):
            segments.all[int(number)].count(busy=-int(n))
        # Freed while it was moved: it has a new name, and nobody else knows.
        ledger.strike(job.records[job.moved & ~alive])
        for part in job.parts:
            if part.failed:
                segments.seal(segments.all[part.number])
        if job.victim >= 0:
            segments.all[job.victim].count(readers=-1)
        for segment in self._useless:
            segments.removed(segment)
        ledger.finish_removal(job.removal)
        ledger.settle()
        self._counters.add("moved_frames", int(job.moved.sum()))
        self._counters.add("moved_bytes", int(table.pages[job.rows[job.moved]].sum()) * PAGE_BYTES)
        gained = segments.room_pages(Stream.MOVED) > self._room_before
        self._n_fruitless = 0 if gained else self._n_fruitless + (job.victim >= 0)
        lost = ~job.readable & alive
        if lost.any():
            segments.all[job.victim].unreadable = True
            self._counters.add("unreadable_frames", int(lost.sum()))
        return job.slots[lost]

    def _is_low(self) -> bool:
        segments = self._ledger.segments
        n_low = max(1, self._ledger.geometry.n_segments // _LOW_SHARE)
        return segments.n_available(Stream.NEW) < n_low

    def _victim(self) -> Segment | None:
        """The sealed segment with the least live in it, if moving that gains room."""
        ledger = self._ledger
        if self._n_fruitless > len(ledger.segments.all):
            return None
        room_bytes = ledger.geometry.frame_pages * PAGE_BYTES
        most_bytes = room_bytes - max(room_bytes // _GAIN_SHARE, PAGE_BYTES)
        victim = ledger.segments.least_charged()
        return victim if victim is not None and victim.charged_bytes <= most_bytes else None

    def _plan(self, victim: Segment | None, removal: Removal, renamed: Int64s) -> CompactJob:
        ledger, table = self._ledger, self._ledger.table
        rows = np.zeros(0, np.int64) if victim is None else ledger.live_rows(victim)
        numbers, firsts = self._places(rows)
        rows = rows[: len(numbers)]
        old_pages = table.page[rows].astype(np.int64)
        records = ledger.records(rows)
        records["value"]["segment"], records["place"]["page"] = numbers, firsts
        parts = []
        for number in np.unique(numbers).tolist():
            segment = ledger.segments.all[number]
            mine = np.flatnonzero(numbers == number)
            records["place"]["log_seq"][mine] = segment.log_seq
            parts.append(
                MovePart(
                    number, incarnation_of(segment), mine, old_pages[mine] * PAGE_BYTES, firsts[mine] * PAGE_BYTES,
                    table.pages[rows[mine]].astype(np.int64) * PAGE_BYTES,
                    append_entries(segment, records[mine], self._book, ledger.geometry),
                )
            )  # fmt: skip
        names.seal(records)
        if victim is not None:
            victim.count(readers=1)
        return CompactJob(
            -1 if victim is None else victim.number, -1 if victim is None else victim.file.handle, rows,
            table.handles(rows), numbers, firsts, parts, records,
            names.place_keys(table.log_seq[rows], old_pages), removal, renamed, ledger.records(renamed),
            [each.file for each in self._useless], self._disk, self._files, self._book,
        )  # fmt: skip

    def _places(self, rows: Int64s) -> tuple[Int64s, Int64s]:
        """Places for frames in this order, for as many as there is room."""
        numbers, firsts = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        pages = self._ledger.table.pages[rows]
        cuts = np.flatnonzero(np.diff(pages)) + 1
        for run in np.split(np.arange(len(rows)), cuts) if len(rows) else ():
            number, first = self._ledger.segments.place(Stream.MOVED, int(pages[run[0]]), len(run))
            numbers.append(number)
            firsts.append(first)
            if len(number) < len(run):
                break
        return np.concatenate(numbers), np.concatenate(firsts)
