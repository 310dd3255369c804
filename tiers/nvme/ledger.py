"""Who lies where: slots, segments, what is charged, and names that are still to be removed. One thread only."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import IntegrityError
from kvstore.tiers.nvme.jobs import Removal
from kvstore.tiers.nvme.layout import Geometry, Int64s
from kvstore.tiers.nvme.names import FIRST, RECORD, Records, flags_of, place_keys, seal, until_of
from kvstore.tiers.nvme.segments import Segment, Segments, SegmentState, Stream
from kvstore.tiers.nvme.table import FrameState, FrameTable

_BUSY = (FrameState.RESERVED, FrameState.WRITING, FrameState.DOOMED)


class Ledger:
    """Keeps slot table and segments in step."""

    def __init__(self, geometry: Geometry, segments: Segments) -> None:
        self.geometry = geometry
        self.table = FrameTable()
        self.segments = segments
        self.charged_bytes = 0
        self.live_pages = 0
        self.next_age = 0
        self._limit_before = 0
        """What may be charged even if files that would be needed for it can no more be made."""
        self.urgent = False
        """A name waits whose frame must not be served again, whatever happens."""
        self.n_renamed = 0
        """Live frames, and such that are being written, whose names are to say another time than they do."""
        self._dying: list[Int64s] = []
        self._nameless: list[tuple[int, bytes]] = []

    # -- room -----------------------------------------------------------------------------------

    def charge(self, pages: int) -> int:
        """What one frame takes of the bytes that may be live."""
        return int(self.geometry.charged_bytes(np.array([pages], np.int64))[0])

    def free_bytes(self) -> int:
        """Bytes that may still become live, with the files that there are or can be made."""
        return max(self._limit_bytes() - self.charged_bytes, 0)

    def short_of(self, pages: int, n: int) -> int:
        """How many frames of a size have to go before ``n`` more may become live; not above 0 if they may now."""
        charge = self.charge(pages)
        n = min(n, max(self.n_most(pages), 1))
        return -(-(self.charged_bytes + n * charge - self._limit_bytes()) // charge)

    def n_most(self, pages: int) -> int:
        """How many frames of a size may be live at a time, if no others are."""
        return self._live_bytes() // self.charge(pages)

    def reserve(self, pages: int, n: int) -> Int64s:
        """Up to ``n`` slots with places for frames of this size; rows."""
        charge = self.charge(pages)
        numbers, firsts = self.segments.place(Stream.NEW, pages, min(n, self.free_bytes() // charge))
        table, rows = self.table, self.table.take(len(numbers))
        table.segment[rows], table.page[rows], table.pages[rows] = numbers, firsts, pages
        table.charge[rows] = charge
        # If the disk has got smaller, two frames go for one that comes until the rest fits: none just goes.
        before = self.charged_bytes
        self.charged_bytes += charge * len(rows)
        if len(rows):
            self._limit_before = self.charged_bytes if self.charged_bytes <= self._live_bytes() else before
        for segment, mine in self.by_segment(rows):
            table.log_seq[rows[mine]] = segment.log_seq
            segment.rows.append(rows[mine])
        return rows

    def adopt(self, records: Records) -> Int64s:
        """Slots for frames that were found on the disk; rows. Each segment must be there."""
        table, rows = self.table, self.table.take(len(records))
        value = records["value"]
        for name in ("segment", "pages", "namespace", "payload_bytes", "key", "parent", "age"):
            getattr(table, name)[rows] = value[name]
        table.page[rows], table.log_seq[rows] = records["place"]["page"], records["place"]["log_seq"]
        table.first[rows] = (value["flags"] & FIRST) != 0
        table.until_s[rows], table.is_renamed[rows] = until_of(records), False
        table.charge[rows] = self.geometry.charged_bytes(table.pages[rows].astype(np.int64))
        self.charged_bytes += int(table.charge[rows].sum())
        self._limit_before = self.charged_bytes
        for segment, mine in self.by_segment(rows):
            segment.rows.append(rows[mine])
            segment.count(busy=len(mine))
        table.move(rows, FrameState.WRITING)
        table.know(rows)
        self.live(rows)
        self.next_age = max(self.next_age, int(value["age"].max(initial=0)) + 1)
        return rows

    # -- states ---------------------------------------------------------------------------------

    def live(self, rows: Int64s) -> None:
        """Frames being written are durable and named."""
        self.table.move(rows, FrameState.LIVE)
        for segment, mine in self.by_segment(rows):
            segment.count(busy=-len(mine))
            self._count_live(segment, rows[mine], 1)

    def abandon(self, rows: Int64s) -> None:
        """Frames that were never named are gone."""
        counted = rows[self.table.state[rows] != FrameState.DOOMED]
        self.charged_bytes -= int(self.table.charge[counted].sum())
        for segment, mine in self.by_segment(rows):
            segment.count(busy=-len(mine))
        self.table.give(rows)

    def doom(self, rows: Int64s) -> None:
        """Frames that are being written are not wanted any more."""
        self.charged_bytes -= int(self.table.charge[rows].sum())
        self.table.move(rows, FrameState.DOOMED)

    def bury(self, rows: Int64s) -> None:
        """Named frames are dead; their names are to go."""
        states = self.table.state[rows]
        lived, doomed = rows[states == FrameState.LIVE], rows[states == FrameState.DOOMED]
        self.charged_bytes -= int(self.table.charge[lived].sum())
        for segment, mine in self.by_segment(lived):
            self._count_live(segment, lived[mine], -1)
            segment.count(dying=len(mine))
            segment.unreadable = False
        for segment, mine in self.by_segment(doomed):
            segment.count(busy=-len(mine), dying=len(mine))
        self.table.bury(rows)
        if len(rows):
            self._dying.append(rows)

    def rehouse(self, rows: Int64s, segments: Int64s, pages: Int64s) -> None:
        """Live frames lie elsewhere now, at places that are counted as busy."""
        table = self.table
        for segment, mine in self.by_segment(rows):
            self._count_live(segment, rows[mine], -1)
        table.segment[rows], table.page[rows] = segments, pages
        for segment, mine in self.by_segment(rows):
            table.log_seq[rows[mine]] = segment.log_seq
            segment.count(busy=-len(mine))
            self._count_live(segment, rows[mine], 1)
            segment.rows.append(rows[mine])

    # -- names ----------------------------------------------------------------------------------

    @property
    def n_waiting(self) -> int:
        """Names that wait for a transaction to take them out."""
        return sum(map(len, self._dying)) + len(self._nameless)

    def strike(self, records: Records) -> None:
        """Names have to go that no slot stands for."""
        names = place_keys(records["place"]["log_seq"].astype(np.int64), records["place"]["page"].astype(np.int64))
        for number, log_seq, name in zip(
            records["value"]["segment"].tolist(), records["place"]["log_seq"].tolist(), names, strict=True
        ):
            segment = self.segments.all.get(number)
            there = segment is not None and segment.log_seq == log_seq
            if segment is not None and there:
                segment.count(dying=1)
            self._nameless.append((number if there else -1, name))

    def take_removal(self) -> Removal:
        """All names that wait, for one transaction."""
        rows = np.concatenate([np.zeros(0, np.int64), *self._dying])
        names = place_keys(self.table.log_seq[rows], self.table.page[rows].astype(np.int64))
        numbers = np.array([number for number, _ in self._nameless], np.int64)
        names += [name for _, name in self._nameless]
        self._dying, self._nameless, self.urgent = [], [], False
        return Removal(names, rows, numbers)

    def finish_removal(self, removal: Removal) -> None:
        """The names are gone, or wait for the next transaction."""
        if removal.failed:
            if len(removal.rows):
                self._dying.append(removal.rows)
            self._nameless += zip(removal.segments.tolist(), removal.names[len(removal.rows) :], strict=True)
            return
        for segment, mine in self.by_segment(removal.rows):
            segment.count(dying=-len(mine))
        for number in removal.segments[removal.segments >= 0].tolist():
            self.segments.all[number].count(dying=-1)
        self.table.give(removal.rows)
        self.settle()

    def rename(self, rows: Int64s, until_s: NDArray[np.float64]) -> None:
        """Frames may be found until another time: their names are to say so."""
        table = self.table
        table.until_s[rows] = until_s
        table.is_renamed[rows] = True
        self.n_renamed += len(rows)  # at least: some may be so already

    def take_renamed(self, n_max: int) -> Int64s:
        """Some live frames whose names are to change; they count as changed."""
        table = self.table
        waiting = np.flatnonzero(table.is_renamed)
        waiting = waiting[np.isin(table.state[waiting], (FrameState.LIVE, FrameState.WRITING))]
        rows: Int64s = waiting[table.state[waiting] == FrameState.LIVE][:n_max]
        table.is_renamed[rows] = False
        self.n_renamed = len(waiting) - len(rows)
        return rows

    def records(self, rows: Int64s) -> Records:
        """Names of frames as they lie now, sealed."""
        table = self.table
        records = np.zeros(len(rows), RECORD)
        records["place"]["log_seq"], records["place"]["page"] = table.log_seq[rows], table.page[rows]
        value = records["value"]
        for name in ("segment", "pages", "namespace", "payload_bytes", "key", "parent", "age"):
            value[name] = getattr(table, name)[rows]
        value["flags"] = flags_of(table.first[rows], table.until_s[rows])
        seal(records)
        return records

    # -- segments -------------------------------------------------------------------------------

    def by_segment(self, rows: Int64s) -> list[tuple[Segment, Int64s]]:
        """The segments that frames lie in, and for each the places in ``rows`` of its frames."""
        if not len(rows):
            return []
        numbers = self.table.segment[rows]
        order = np.argsort(numbers, kind="stable")
        cuts = np.flatnonzero(np.diff(numbers[order])) + 1
        return [(self.segments.all[int(numbers[mine[0]])], mine) for mine in np.split(order, cuts)]

    def settle(self) -> None:
        """Whatever segment holds nothing any more may be reused."""
        self.segments.settle()

    def live_rows(self, segment: Segment) -> Int64s:
        """Live frames of a segment in order of place."""
        rows = np.unique(np.concatenate([np.zeros(0, np.int64), *segment.rows]))
        table = self.table
        rows = rows[(table.state[rows] == FrameState.LIVE) & (table.segment[rows] == segment.number)]
        in_order: Int64s = rows[np.argsort(table.page[rows], kind="stable")]
        return in_order

    def check(self) -> None:
        """Raises IntegrityError when segments, slots and sums contradict each other or two frames overlap."""
        table = self.table
        table.check()
        self.segments.check()
        used = np.flatnonzero(np.isin(table.state, (*_BUSY, FrameState.LIVE, FrameState.DYING)))
        charged = used[np.isin(table.state[used], (FrameState.RESERVED, FrameState.WRITING, FrameState.LIVE))]
        if (n_bytes := int(table.charge[charged].sum())) != self.charged_bytes:
            raise IntegrityError(f"{self.charged_bytes} bytes are charged, slots say {n_bytes}")
        if self.live_pages != (n_live := int(table.pages[table.state == FrameState.LIVE].sum())):
            raise IntegrityError(f"{self.live_pages} pages are counted as live, slots say {n_live}")
        for segment in self.segments.all.values():
            mine = used[table.segment[used] == segment.number]
            states = table.state[mine]
            live = mine[states == FrameState.LIVE]
            if len(live) != segment.n_live or int(table.pages[live].sum()) != segment.live_pages:
                raise IntegrityError(f"segment {segment.number} has {len(live)} live frames, counted {segment.n_live}")
            if int(np.isin(states, _BUSY).sum()) > segment.n_busy:
                raise IntegrityError(f"segment {segment.number} has more frames being written than it counts")
            if segment.state is SegmentState.FREE:
                continue
            here = mine[table.log_seq[mine] == segment.log_seq]
            _must_not_overlap(segment, table.page[here], table.pages[here], self.geometry)
            if len(here) != len(mine):
                raise IntegrityError(f"segment {segment.number} was reused under a frame that still counts")

    def _live_bytes(self) -> int:
        return self.geometry.live_bytes(self.segments.n_files + self.segments.n_growable)

    def _limit_bytes(self) -> int:
        return max(self._live_bytes(), self._limit_before)

    def _count_live(self, segment: Segment, rows: Int64s, sign: int) -> None:
        pages, charged_bytes = int(self.table.pages[rows].sum()), int(self.table.charge[rows].sum())
        segment.count_live(sign * len(rows), sign * pages, sign * charged_bytes)
        self.live_pages += sign * pages


def _must_not_overlap(
    segment: Segment, firsts: NDArray[np.int32], pages: NDArray[np.int32], geometry: Geometry
) -> None:
    order = np.argsort(firsts, kind="stable")
    ends = firsts[order] + pages[order]
    if (ends[:-1] > firsts[order][1:]).any():
        raise IntegrityError(f"two frames overlap in segment {segment.number}")
    end_page = segment.n_places * geometry.segment_pages
    if len(order) and (int(firsts.min()) < geometry.index_pages or int(ends.max()) > end_page):
        raise IntegrityError(f"a frame lies outside segment {segment.number}")
