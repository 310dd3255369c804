"""From reserved slots to live frames: makes write jobs and takes their results in. One thread only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import BadInputError, IntegrityError
from kvstore.metrics import Counters
from kvstore.tiers.nvme.files import Extent
from kvstore.tiers.nvme.incarnation import Batch, Incarnation
from kvstore.tiers.nvme.jobs import WriteJob, WritePart
from kvstore.tiers.nvme.layout import FRAME_BYTES_MIN, PAGE_BYTES, Geometry, Int64s
from kvstore.tiers.nvme.ledger import Ledger
from kvstore.tiers.nvme.namebook import NameBook
from kvstore.tiers.nvme.names import FIRST, Records, until_of
from kvstore.tiers.nvme.segment_index import ENTRY, ENTRY_FIRST, ENTRY_LIMITED
from kvstore.tiers.nvme.segments import Segment, SegmentState
from kvstore.tiers.nvme.table import FrameState

Pieces = tuple[tuple[int, int], ...]


class Writer:
    """Jobs in flight, oldest first: their names become durable in this order."""

    def __init__(self, ledger: Ledger, book: NameBook, counters: Counters) -> None:
        self._ledger = ledger
        self._book = book
        self._counters = counters
        self._places: dict[int, tuple[WriteJob, int]] = {}
        """Of rows being written: the job and the place in it."""
        self.n_running = 0

    def begin(
        self,
        slots: Int64s,
        keys: NDArray[np.uint8],
        parents: NDArray[np.uint8],
        namespaces: NDArray[np.uint32],
        payload_bytes: NDArray[np.uint32],
        buffers: Sequence[Pieces],
        firsts: NDArray[np.bool_] | None = None,
        until_s: NDArray[np.float64] | None = None,
    ) -> WriteJob:
        """See ``NvmeTier.begin_write``."""
        ledger, table = self._ledger, self._ledger.table
        rows = table.rows_in(slots, FrameState.RESERVED)
        self._check(rows, keys, parents, namespaces, payload_bytes, buffers)
        table.key[rows], table.parent[rows] = keys, parents
        table.namespace[rows], table.payload_bytes[rows] = namespaces, payload_bytes
        table.age[rows] = ledger.next_age + np.arange(len(rows))
        ledger.next_age += len(rows)
        table.until_s[rows], table.is_renamed[rows] = np.inf if until_s is None else until_s, False
        table.move(rows, FrameState.WRITING)
        table.know(rows)
        above = table.find(table.parent[rows])
        table.first[rows] = above < 0 if firsts is None else firsts
        wanted = table.first[rows] | (above >= 0)
        wanted &= np.isin(namespaces, [n for n in np.unique(namespaces).tolist() if self._book.keep(n)])
        records = ledger.records(rows)
        places = np.flatnonzero(wanted)
        parts = [
            WritePart(
                segment.number, incarnation_of(segment), mine,
                [Extent(int(table.page[rows[at]]) * PAGE_BYTES, buffers[at]) for at in mine.tolist()],
                append_entries(segment, records[mine], self._book, ledger.geometry),
            )
            for segment, mine in ((segment, places[among]) for segment, among in ledger.by_segment(rows[places]))
        ]  # fmt: skip
        job = WriteJob(rows, parts, records, ledger.take_removal(), self._book, {})
        self._places.update({row: (job, at) for at, row in enumerate(rows.tolist())})
        job.before = {at: self._places[row] for at, row in enumerate(above.tolist()) if row in self._places}
        self.n_running += 1
        return job

    def finish(self, job: WriteJob) -> NDArray[np.bool_]:
        """See ``NvmeTier.finish_write``."""
        ledger, table, rows = self._ledger, self._ledger.table, job.rows
        for row in rows.tolist():
            del self._places[row]
        self.n_running -= 1
        wanted = table.state[rows] == FrameState.WRITING
        live: NDArray[np.bool_] = job.named & wanted
        ledger.live(rows[live])
        ledger.bury(rows[job.named & ~wanted])
        ledger.abandon(rows[~job.named])
        for part in job.parts:
            if part.failed:
                ledger.segments.seal(ledger.segments.all[part.number])
        ledger.finish_removal(job.removal)
        ledger.settle()
        self._counters.add("written_frames", int(live.sum()))
        self._counters.add("written_bytes", int(table.pages[rows[live]].sum()) * PAGE_BYTES)
        self._counters.add("failed_writes", int((~job.named).sum()))
        return live

    def _check(
        self,
        rows: Int64s,
        keys: NDArray[np.uint8],
        parents: NDArray[np.uint8],
        namespaces: NDArray[np.uint32],
        payload_bytes: NDArray[np.uint32],
        buffers: Sequence[Pieces],
    ) -> None:
        n = len(rows)
        if keys.shape != (n, 16) or parents.shape != (n, 16):
            raise BadInputError(f"keys are {keys.shape}, parents {parents.shape}; {n} slots need [{n}, 16] each")
        if not len(namespaces) == len(payload_bytes) == len(buffers) == n:
            raise BadInputError(
                f"{n} slots, but {len(namespaces)} namespaces, {len(payload_bytes)} sizes, {len(buffers)} buffers"
            )
        unknown = set(np.unique(namespaces).tolist()) - self._book.known.keys()
        if unknown:
            raise BadInputError(f"namespace {min(unknown)} has no name: see name_namespace()")
        given = np.array([sum(length for _, length in pieces) for pieces in buffers], np.int64)
        frame_bytes = self._ledger.table.pages[rows].astype(np.int64) * PAGE_BYTES
        if (given != frame_bytes).any() or (payload_bytes >= frame_bytes).any():
            at = int(np.flatnonzero((given != frame_bytes) | (payload_bytes >= frame_bytes))[0])
            raise BadInputError(
                f"frame {at} has {frame_bytes[at]} bytes, its buffers {given[at]}, its payload {payload_bytes[at]}"
            )


def append_entries(segment: Segment, records: Records, book: NameBook, geometry: Geometry) -> Batch:
    """Entries of frames in the index of the segment that they go to."""
    value = records["value"]
    entries = np.zeros(len(records), ENTRY)
    for name in ("key", "parent", "payload_bytes"):
        entries[name] = value[name]
    entries["page"] = records["place"]["page"]
    entries["pages"] = value["pages"] | np.where(value["flags"] & FIRST, ENTRY_FIRST, np.uint32(0))
    entries["pages"] |= np.where(np.isinf(until_of(records)), np.uint32(0), ENTRY_LIMITED)
    digests = {n: np.frombuffer(book.known[n][0], np.uint8) for n in np.unique(value["namespace"]).tolist()}
    entries["namespace"] = np.array([digests[n] for n in value["namespace"].tolist()], np.uint8).reshape(-1, 16)
    pages_left = geometry.segment_pages - segment.fill_page if segment.state is SegmentState.OPEN else 0
    return incarnation_of(segment).append(entries, pages_left * PAGE_BYTES // FRAME_BYTES_MIN + segment.n_busy)


def incarnation_of(segment: Segment) -> Incarnation:
    """Where frames with places in a segment go."""
    if segment.incarnation is None:
        raise IntegrityError(f"frames have places in segment {segment.number}, which is not being filled")
    return segment.incarnation
