"""The NVMe tier: frames in segment files, named by a catalog, found again after any end of the process.

It knows slots, keys and parents, and nothing of what a frame holds. One thread calls it; what is slow is in
jobs, whose ``write``, ``name`` and ``run`` go on other threads. Nothing here raises for what a disk does.

Data is durable before it is named, parents are named before children, and a segment is reused only after the
names of all that was in it are gone. ``capacity_bytes`` holds at every instant for the whole directory.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvstore.clock import Clock, SystemClock
from kvstore.errors import BadInputError, IntegrityError
from kvstore.logs import about
from kvstore.metrics import Counters
from kvstore.tiers.nvme import layout
from kvstore.tiers.nvme.catalog import CatalogError
from kvstore.tiers.nvme.cleared import MarkJob, open_marks
from kvstore.tiers.nvme.compaction import CompactJob
from kvstore.tiers.nvme.disk_room import DiskRoom
from kvstore.tiers.nvme.files import Files
from kvstore.tiers.nvme.health import OK, Health, means_full
from kvstore.tiers.nvme.jobs import Failure, ReadJob, WriteJob
from kvstore.tiers.nvme.layout import PAGE_BYTES, Int64s
from kvstore.tiers.nvme.ledger import Ledger
from kvstore.tiers.nvme.mover import Mover
from kvstore.tiers.nvme.names import NO_RECORDS, items
from kvstore.tiers.nvme.opening import Opened, open_directory
from kvstore.tiers.nvme.reader import Reader
from kvstore.tiers.nvme.rebuild import Inspect, Verify
from kvstore.tiers.nvme.recovery import Recovered
from kvstore.tiers.nvme.segments import Segments, Stream
from kvstore.tiers.nvme.table import FrameState
from kvstore.tiers.nvme.writer import Pieces, Writer

__all__ = ["CompactJob", "FrameState", "NvmeTier", "ReadJob", "Recovered", "WriteJob"]

log = logging.getLogger("kvstore.nvme")

_COUNTED = (
    "written_frames", "written_bytes", "failed_writes", "moved_frames", "moved_bytes",
    "read_frames", "failed_reads", "unreadable_frames", "quarantined_frames",
)  # fmt: skip

_MARGIN_BYTES = 1 << 20
"""Left free on the file system, besides the catalog's room, when a segment file is made."""


class NvmeTier:
    """Frames within ``capacity_bytes`` of a directory. Close it when done."""

    def __init__(
        self,
        directory: Path,
        capacity_bytes: int,
        inspect: Inspect,
        files: Files | None = None,
        recovery: str = "normal",
        segment_bytes: int = 0,
        clock: Clock | None = None,
        verify: Verify | None = None,
    ) -> None:
        """Open a directory, or make a tier in an empty or missing one; blocks while it is read.

        ``recovery``: "normal" reads the catalog, or what the segments say where that is missing or damaged;
        "strict" reads all frames as well and keeps those that ``verify`` accepts; "none" starts empty.
        ``inspect`` reads a frame's header. ``segment_bytes`` 0 fits the capacity; only a new directory takes it.

        Raises ConfigError for a directory that is foreign, in use, of another format version or not usable, and
        for a capacity that is too small; OSError or ConfigError when the disk refuses.
        """
        try:
            opened = open_directory(directory, capacity_bytes, segment_bytes, files, recovery, inspect, verify)
        except CatalogError as error:
            way_out = "; make room on the file system and start again: no block is lost" if error.full else ""
            raise OSError(f"the NVMe directory {str(directory)!r} can't be opened: {error}{way_out}") from error
        self.capacity_bytes = capacity_bytes
        self._opened = opened
        self._files = opened.files
        self._geometry = opened.geometry
        self._counters = Counters()
        for name in _COUNTED:
            self._counters.add(name, 0)
        clock = clock or SystemClock()
        self._health = Health(clock)
        disk = DiskRoom(opened.files, clock, opened.geometry.catalog_bytes + _MARGIN_BYTES)
        disk.look()
        self._segments = Segments(opened.geometry, opened.files, opened.superblock.uuid_bytes, disk, opened.taken)
        self._ledger = Ledger(opened.geometry, self._segments)
        self._writer = Writer(self._ledger, opened.book, self._counters)
        self._mover = Mover(self._ledger, opened.files, disk, opened.book, self._counters)
        self._reader = Reader(self._ledger, opened.files, self._counters)
        opened.book.watch(self._ledger.table.n_in_namespace, clock)
        self._marks = open_marks(opened.files, [each.log_seq for each in opened.segments if each.log_seq >= 0])
        self._closed = False
        self._recovered: Recovered | None = self._take_in(opened)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- what was there -------------------------------------------------------------------------

    def recovered(self) -> Recovered:
        """What was found on the disk, all live. To be called once: IntegrityError after that."""
        if self._recovered is None:
            raise IntegrityError("recovered() was called before; what it gave is the caller's to keep")
        found, self._recovered = self._recovered, None
        return found

    def namespaces(self) -> dict[int, tuple[bytes, str]]:
        """Namespaces by number: digest and description; an empty description when only frames knew it."""
        return dict(self._opened.book.known)

    def name_namespace(self, digest: bytes, description: str) -> int:
        """The number of a namespace, for ``begin_write``; durable with the first frame that is named with it."""
        if len(digest) != 16:
            raise BadInputError(f"the digest of a namespace has 16 bytes, not {len(digest)}")
        return self._opened.book.number(digest, description)

    # -- room -----------------------------------------------------------------------------------

    @property
    def live_capacity_bytes(self) -> int:
        """Frame bytes that can be live at once, if they fill segments without a rest: see ``capacity_for``."""
        return self._geometry.live_capacity_bytes

    @staticmethod
    def capacity_for(live_bytes: int, frame_bytes: int) -> int:
        """A capacity, close to the smallest, in which ``live_bytes`` of frames of one size can be live."""
        return layout.capacity_for(live_bytes, frame_bytes)

    @property
    def may_write(self) -> bool:
        """False for a while after a write failed."""
        return self._health.may_try

    @property
    def health(self) -> str:
        """ "ok", "full" (no room on the file system) or "failing", as the last write ended."""
        return self._health.state

    def free_slots(self, frame_bytes: int) -> int:
        """How many frames ``allocate`` would give now. Raises BadInputError for a size that can't be stored."""
        pages = self._geometry.check_frame(frame_bytes)
        if not self.may_write:
            return 0
        n_logical = self._ledger.free_bytes() // self._ledger.charge(pages)
        return self._at_once(min(n_logical, self._segments.room(Stream.NEW, pages)))

    def short_of(self, frame_bytes: int, n: int) -> int:
        """How many frames of this size must be freed before ``n`` more fit, or as many of them as ever could; 0 if
        they fit now or after a compaction, or if nothing helps: then writing is suspended. Raises BadInputError for
        a size that can't be stored."""
        pages = self._geometry.check_frame(frame_bytes)
        if not self.may_write:
            return 0
        n = self._at_once(n)
        short = self._ledger.short_of(pages, n)
        missing = n - self._segments.room(Stream.NEW, pages)
        if short <= 0 and (missing <= 0 or self._writer.n_running > 0 or self._mover.may_gain()):
            return 0
        n_most = self._ledger.n_most(pages)
        if not n_most:
            n_files = self._segments.n_files + self._segments.n_growable
            self._learn(Failure(True, f"the file system has room for {n_files} segments, too few for frames"), False)
            return 0
        return short if short > 0 else missing

    def allocate(self, frame_bytes: int, n: int) -> Int64s:
        """Up to ``n`` reserved slots, int64; fewer or none when there is no room or writing is suspended, and one
        to try with after a failure.

        Each goes to ``begin_write`` or ``free``. Raises BadInputError for a size that can't be stored.
        """
        pages = self._geometry.check_frame(frame_bytes)
        rows = self._ledger.reserve(pages, self._at_once(n) if self.may_write else 0)
        return self._ledger.table.handles(rows)

    def log_seqs(self, slots: Int64s) -> Int64s:
        """Which incarnation of a segment each frame lies in."""
        return self._ledger.table.log_seq[self._ledger.table.rows(slots)]

    # -- writing --------------------------------------------------------------------------------

    def begin_write(
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
        """Frames for reserved slots. ``keys``, ``parents``: uint8 [n, 16]; a parent in the same call comes first.

        ``firsts``: bool [n], whose parent is a root; another one whose parent is neither live nor being written is
        not named. Without it such a parent counts as a root. ``until_s``: Unix time after which a restart is not to
        find the block any more, inf (as for all without it) for none; kept to two seconds.

        ``buffers``: for each frame the ``(address, length)`` pieces of memory that it consists of, multiples of
        4096; they must stay and not change until the job is written. Raises BadInputError or IntegrityError
        before any change.
        """
        return self._writer.begin(slots, keys, parents, namespaces, payload_bytes, buffers, firsts, until_s)

    def finish_write(self, job: WriteJob) -> NDArray[np.bool_]:
        """Which frames are live now, bool [n]: durable, named and not freed meanwhile. The others' slots are free."""
        live = self._writer.finish(job)
        self._learn(job.failure, bool(job.named.any()))
        return live

    # -- reading --------------------------------------------------------------------------------

    def begin_read(
        self,
        slots: Int64s,
        header_addresses: NDArray[np.uint64],
        payload_addresses: NDArray[np.uint64],
        header_bytes: ArrayLike,
        payload_padded_bytes: ArrayLike,
    ) -> ReadJob:
        """Read frames into memory: ``header_bytes`` to one address each, the rest to another; multiples of 4096.

        A slot that isn't live, or whose frame is shorter, does not arrive.
        """
        return self._reader.begin(slots, header_addresses, payload_addresses, header_bytes, payload_padded_bytes)

    def finish_read(self, job: ReadJob) -> NDArray[np.bool_]:
        """Of which frames all bytes arrived; bool [n]. Whether they are the right ones is for the caller to check."""
        return self._reader.finish(job)

    # -- leaving --------------------------------------------------------------------------------

    def free(self, slots: Int64s, *, soon: bool = False) -> None:
        """Frames are dead, or reserved slots not needed. Their names go with the next transaction.

        With ``soon``, ``begin_compact`` has names removed without waiting for one. Raises IntegrityError before any
        change for a slot that is free.
        """
        table = self._ledger.table
        rows = table.rows_in(slots, FrameState.RESERVED, FrameState.WRITING, FrameState.LIVE)
        states = table.state[rows]
        self._ledger.abandon(rows[states == FrameState.RESERVED])
        self._ledger.doom(rows[states == FrameState.WRITING])
        self._ledger.bury(rows[states == FrameState.LIVE])
        self._ledger.settle()
        self._ledger.urgent |= soon and self._ledger.n_waiting > 0
        self._mover.fruitful()

    def quarantine(self, slots: Int64s) -> None:
        """As ``free``, for frames whose bytes are bad; ``begin_compact`` has their names removed without delay."""
        self.free(slots, soon=True)
        self._counters.add("quarantined_frames", len(slots))

    def begin_compact(self) -> CompactJob | None:
        """Work that makes room, looks for some, changes names, or removes some that must not wait.

        None when none is due or one is under way.
        """
        return self._mover.begin(self.may_write)

    def finish_compact(self, job: CompactJob) -> Int64s:
        """Take the results in. Returns slots of live frames that could not be read: quarantine them."""
        lost = self._mover.finish(job)
        removed = bool(job.removal.names) and not job.removal.failed
        self._learn(job.failure, bool(job.moved.any()) or removed or (job.done and len(job.renamed) > 0))
        return lost

    # -- lives ----------------------------------------------------------------------------------

    def until_s(self, slots: Int64s) -> NDArray[np.float64]:
        """Until when blocks may be found (Unix time, inf for no end), as ``begin_write`` and ``live_until`` said."""
        return self._ledger.table.until_s[self._ledger.table.rows(slots)]

    def live_until(self, slots: Int64s, until_s: NDArray[np.float64]) -> None:
        """Blocks may be found until another time. It is durable with one of the next jobs of ``begin_compact``.

        Raises IntegrityError before any change for a slot that is neither written nor live.
        """
        self._ledger.rename(self._ledger.table.rows_in(slots, FrameState.WRITING, FrameState.LIVE), until_s)

    def is_changing(self, slots: Int64s) -> NDArray[np.bool_]:
        """Which names have yet to say what ``live_until`` said; bool [n]."""
        rows = self._ledger.table.rows(slots)
        return self._ledger.table.is_renamed[rows] | self._mover.is_renaming(rows)

    # -- clearing -------------------------------------------------------------------------------

    def begin_mark(self, digests: Collection[bytes]) -> MarkJob:
        """Frames of these namespaces that are on the disk now are not to be found again by a rebuilt catalog either.

        Independent of ``free``, which their slots need as others do. What is written from now on is not affected.
        """
        self._marks.add(digests, self._segments.seal_open())
        self._ledger.settle()
        return MarkJob(self._files, self._marks.to_bytes())

    def finish_mark(self, job: MarkJob) -> bool:
        """Whether that is durable; else it is to be begun again."""
        self._learn(job.failure, job.failure is None)
        return job.failure is None

    # -- facts ----------------------------------------------------------------------------------

    @property
    def n_live(self) -> int:
        """Frames that are live."""
        return self._ledger.table.counts[FrameState.LIVE]

    def states(self, slots: Int64s) -> NDArray[np.uint8]:
        """The ``FrameState`` of each slot."""
        current = self._ledger.table.current(slots)
        states = np.zeros(len(slots), np.uint8)
        states[current] = self._ledger.table.state[slots[current] & 0xFFFFFFFF]
        return states

    @property
    def n_names_to_remove(self) -> int:
        """Names of dead frames that wait for their transaction."""
        return self._ledger.n_waiting

    def dying(self) -> Int64s:
        """Slots of dead frames whose names are still there, or may be: they are FREE once they are gone.

        Looks at the whole table.
        """
        table = self._ledger.table
        return table.handles(np.flatnonzero(np.isin(table.state, (FrameState.DYING, FrameState.DOOMED))))

    def frame_bytes(self, slots: Int64s) -> Int64s:
        """The sizes of frames, 0 for a slot that is free."""
        table = self._ledger.table
        sizes, current = np.zeros(len(slots), np.int64), table.current(slots)
        sizes[current] = table.pages[slots[current] & 0xFFFFFFFF].astype(np.int64) * PAGE_BYTES
        return sizes

    def keys(self, slots: Int64s) -> NDArray[np.uint8]:
        """The keys of slots, uint8 [n, 16]. Raises IntegrityError for one that is free."""
        return self._ledger.table.key[self._ledger.table.rows(slots)]

    def stats(self) -> dict[str, int | float | str]:
        """Bytes, counts and facts now. ``used_bytes`` are those of live frames."""
        ledger = self._ledger
        return {
            "capacity_bytes": self.capacity_bytes,
            "live_capacity_bytes": self.live_capacity_bytes,
            "used_bytes": ledger.live_pages * PAGE_BYTES,
            "free_bytes": ledger.free_bytes(),
            "live_frames": self.n_live,
            "names_to_remove": ledger.n_waiting,
            "segment_bytes": self._geometry.segment_bytes,
            "segments": self._segments.n_files,
            "free_segments": self._segments.n_free,
            "catalog_bytes": self._opened.book.catalog.file_bytes,
            "health": self.health,
            "direct_io": int(self._files.direct),
            **self._opened.facts,
            **self._counters.snapshot(),
        }

    def check(self) -> None:
        """Raises IntegrityError that names what contradicts what. For tests: reads the whole catalog."""
        self._ledger.check()
        table = self._ledger.table
        live = np.flatnonzero(table.state == FrameState.LIVE)
        renamed = {name for name, _ in items(self._ledger.records(live[table.is_renamed[live]]))}
        names = self._opened.book.catalog.read()
        if self._writer.n_running or self._mover.running is not None:
            return  # names are on their way
        found = ((key, value, names.pop(key, None)) for key, value in items(self._ledger.records(live)))
        missing = [key for key, value, said in found if said != value and not (said and key in renamed)]
        if missing:
            raise IntegrityError(f"{len(missing)} live frames are not in the catalog as they lie")
        if len(names) > self._ledger.n_waiting:
            raise IntegrityError(f"{len(names)} names have no live frame, but {self._ledger.n_waiting} are to go")
        if (on_disk := self._files.on_disk_bytes()) > self.capacity_bytes:
            raise IntegrityError(f"{on_disk} bytes on the disk exceed the capacity of {self.capacity_bytes}")

    def close(self) -> None:
        """Remove names that wait, then close everything. Blocks; idempotent. Jobs under way must be finished."""
        if self._closed:
            return
        self._closed = True
        removal = self._ledger.take_removal()
        try:
            self._opened.book.commit(NO_RECORDS, removal.names)
        except CatalogError as error:
            log.warning(
                "%d dead frames keep their names until the next start: %s", len(removal.names), error,
                extra=about("nvme_names_kept", names=len(removal.names), error=str(error)),
            )  # fmt: skip
        self._opened.book.catalog.close()
        self._segments.close()
        self._opened.files.end_threads()
        self._opened.lock.release()

    def after_fork(self) -> None:
        """In a forked child, which has no part in the tier: the directory is not kept locked by it."""
        self._opened.lock.abandon()

    # -- inside ---------------------------------------------------------------------------------

    def _take_in(self, opened: Opened) -> Recovered:
        for found in opened.segments:
            self._segments.adopt(found.number, found.handle, max(found.log_seq, 0), found.size_bytes)
        rows = self._ledger.adopt(opened.records)
        self._ledger.settle()
        try:
            self._segments.make_reserve()
        except OSError as error:
            self._learn(Failure(means_full(error.errno or 0), str(error)), succeeded=False)
        table = self._ledger.table
        return Recovered(
            table.handles(rows), table.key[rows], table.parent[rows], table.namespace[rows],
            table.payload_bytes[rows], (table.pages[rows] * PAGE_BYTES).astype(np.uint32), table.until_s[rows],
        )  # fmt: skip

    def _at_once(self, n: int) -> int:
        """After a failure one frame is tried: if it fails again, nothing was evicted for many."""
        return n if self.health == OK else min(n, 1)

    def _learn(self, failure: Failure | None, succeeded: bool) -> None:
        if failure is not None:
            if self._health.may_try:
                log.warning(
                    "writing to NVMe failed: %s", failure.text,
                    extra=about("nvme_write_failed", error=failure.text, full=failure.full),
                )  # fmt: skip
            self._health.failed(failure.full)
        elif succeeded:
            self._health.succeeded()
