"""Tiers behind one small face, and a way around each of them: what a test needs to judge a tier by its memory or its
files, and not by what it says.

A block has 4096 bytes here. ``allocate``, ``fill``, ``commit``, ``free`` and ``serve`` use the tier; everything below
"By hand" does not.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import struct
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import lmdb
import numpy as np
from numpy.typing import NDArray

from kvstore.clock import ManualClock
from kvstore.compression.frame import FrameLayout, FrameRow, inspect
from kvstore.native import aligned_bytes, row_addresses
from kvstore.tiers.dram import DramTier
from kvstore.tiers.nvme.tier import NvmeTier, WriteJob
from kvstore.types import KVSpec
from tests.tiers.dram_scene import region_file_bytes
from tests.tiers.segment_files import SECTOR_BYTES, directory_bytes, frame_at, frames_of

BLOCK_BYTES = 4096
KIB = 1 << 10
Int64s = NDArray[np.int64]


class Harness(ABC):
    """A tier that is used by one client. ``contents`` is what the test put in each slot."""

    n_fit: int
    """Blocks that fit, as the tier promises before anything is in it."""
    contradictions: ClassVar[Mapping[str, Callable[[Any], None]]]
    """Damage to its tables that ``check`` must find, by the words of what it says."""

    def __init__(self) -> None:
        self.contents: dict[int, bytes] = {}

    @abstractmethod
    def allocate(self, n: int) -> Int64s: ...

    def fill(self, slots: Int64s, contents: Sequence[bytes]) -> None:
        """Put bytes where the slots are; nobody may see them yet."""
        self.contents.update(zip(slots.tolist(), contents, strict=True))
        self._fill(slots, contents)

    @abstractmethod
    def _fill(self, slots: Int64s, contents: Sequence[bytes]) -> None: ...

    @abstractmethod
    def commit(self, slots: Int64s) -> None:
        """For slots that were filled together."""

    @abstractmethod
    def free(self, slots: Int64s) -> None: ...

    @abstractmethod
    def serve(self, slots: Int64s) -> list[bytes | None]:
        """What the tier gives to a reader; None where it gives nothing."""

    @abstractmethod
    def settle(self) -> None:
        """Let the tier do what it does in the background."""

    @abstractmethod
    def check(self) -> None: ...

    @abstractmethod
    def close(self) -> None: ...

    # By hand -------------------------------------------------------------------------------------

    @abstractmethod
    def lies_at(self, slot: int) -> bytes:
        """The bytes of a block where it lies now."""

    @abstractmethod
    def findable(self) -> set[bytes]:
        """The bytes of all blocks that somebody who comes later could find. Of what was freed, some may be left."""

    @abstractmethod
    def identity(self, slot: int) -> object:
        """What tells this use of a slot from earlier ones."""

    @abstractmethod
    def taken_bytes(self) -> int:
        """What it takes of memory or of the disk, everything included that counts against capacity."""

    @property
    @abstractmethod
    def capacity_bytes(self) -> int: ...


class DramHarness(Harness):
    contradictions: ClassVar = {
        "counts": lambda self: self.tier._table.states.__setitem__(slice(0, 1), 3),
        "not live": lambda self: self.tier._table.tags.__setitem__(self.tier._table.states == 1, 5),
        "are counted": lambda self: self.tier._source.give_back(BLOCK_BYTES),
    }

    def __init__(self, _directory: Path) -> None:
        super().__init__()
        self._others_bytes = region_file_bytes()
        self.tier = DramTier(64 * BLOCK_BYTES, 16 * BLOCK_BYTES, 4 * BLOCK_BYTES, prefault=False)
        self.n_fit = self.tier.capacity_bytes // BLOCK_BYTES

    def allocate(self, n: int) -> Int64s:
        return self.tier.allocate(1, "tenant", BLOCK_BYTES, n)

    def _fill(self, slots: Int64s, contents: Sequence[bytes]) -> None:
        for slot, content in zip(slots.tolist(), contents, strict=True):
            os.pwrite(*self._place(slot, content))

    def commit(self, slots: Int64s) -> None:
        self.tier.commit(slots, slots)

    def free(self, slots: Int64s) -> None:
        self.tier.free(slots)

    def serve(self, slots: Int64s) -> list[bytes | None]:
        return [
            self.tier.view(slot).tobytes() if tag == slot else None
            for slot, tag in zip(slots.tolist(), self.tier.tags(slots).tolist(), strict=True)
        ]

    def settle(self) -> None:
        return

    def check(self) -> None:
        self.tier.check()

    def close(self) -> None:
        self.tier.close()

    def lies_at(self, slot: int) -> bytes:
        fd, _, offset = self._place(slot, b"")
        return os.pread(fd, BLOCK_BYTES, offset)

    def findable(self) -> set[bytes]:
        table = self.tier._table
        found: set[bytes] = set()
        for region_id, base, n_slots in zip(
            table.ids.tolist(), table.bases.tolist(), table.n_slots.tolist(), strict=True
        ):
            live = np.flatnonzero((table.states[base : base + n_slots] == 2) & (table.tags[base : base + n_slots] >= 0))
            found.update(self.lies_at(region_id << 20 | index) for index in live.tolist())
        return found

    def identity(self, slot: int) -> object:
        place = int(self.tier.generation_index(np.array([slot]))[0])
        return slot, os.pread(self.tier.generations_fd, 8, place * 8)

    def taken_bytes(self) -> int:
        return region_file_bytes() - self._others_bytes

    @property
    def capacity_bytes(self) -> int:
        return 64 * BLOCK_BYTES

    def _place(self, slot: int, content: bytes) -> tuple[int, bytes, int]:
        return self.tier.regions[slot >> 20].fd, content, (slot & 0xFFFFF) * BLOCK_BYTES


class NvmeHarness(Harness):
    """Every block is a first one: what follows what is not a matter of all tiers."""

    contradictions: ClassVar = {
        "by state": lambda self: self.tier._ledger.table.state.__setitem__(0, 0),
        "charged": lambda self: setattr(self.tier._ledger, "charged_bytes", 1),
        "not in the catalog": lambda self: self.tier._opened.book.catalog.commit((), [next(iter(self.names()))]),
        "overlap": lambda self: self.tier._ledger.table.page.__setitem__(1, self.tier._ledger.table.page[0]),
    }
    segment_bytes: ClassVar = 64 * KIB
    root: ClassVar = b"r" * 16
    digest: ClassVar = b"d" * 16

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory
        self._jobs: dict[int, tuple[WriteJob, Int64s]] = {}
        self.layout = FrameLayout.of(KVSpec.opaque(2, BLOCK_BYTES), 64, self.digest)
        self.clock = ManualClock()
        self._memory: list[object] = []
        self._open()
        self.tier.recovered()
        self.n_fit = self.tier.live_capacity_bytes // self.layout.frame_bytes

    def _open(self) -> None:
        self.tier = NvmeTier(
            self.directory, self.capacity_bytes, inspect, segment_bytes=self.segment_bytes, clock=self.clock
        )
        self.number = self.tier.name_namespace(self.digest, "{}")

    def allocate(self, n: int) -> Int64s:
        return self.tier.allocate(self.layout.frame_bytes, n)

    def _fill(self, slots: Int64s, contents: Sequence[bytes]) -> None:
        n = len(slots)
        if not n:
            return
        payloads = aligned_bytes(n * BLOCK_BYTES).reshape(n, BLOCK_BYTES)
        payloads[:] = np.frombuffer(b"".join(contents), np.uint8).reshape(n, BLOCK_BYTES)
        keys, parents = self._keys(slots), self._parents(n)
        rows = [FrameRow(bytes(8))] * n
        at = row_addresses(payloads)
        headers = self.layout.encode_headers(keys, parents, rows, self.tier.log_seqs(slots), at)
        buffers = [
            ((head, self.layout.header_bytes), (payload, BLOCK_BYTES))
            for head, payload in zip(row_addresses(headers).tolist(), at.tolist(), strict=True)
        ]
        numbers, sizes = np.full(n, self.number, np.uint32), np.full(n, BLOCK_BYTES, np.uint32)
        job = self.tier.begin_write(slots, keys, parents, numbers, sizes, buffers)
        self._memory = [headers, payloads]
        job.write()
        self._jobs[int(slots[0])] = (job, slots)

    def commit(self, slots: Int64s) -> None:
        job, filled = self._jobs.pop(int(slots[0]))
        assert filled.tolist() == slots.tolist()
        job.name()
        assert self.tier.finish_write(job).all()

    def free(self, slots: Int64s) -> None:
        self.tier.free(slots)

    def serve(self, slots: Int64s) -> list[bytes | None]:
        n = len(slots)
        if not n:
            return []
        headers = aligned_bytes(n * self.layout.header_bytes).reshape(n, -1)
        payloads = aligned_bytes(n * BLOCK_BYTES).reshape(n, -1)
        at = row_addresses(payloads)
        job = self.tier.begin_read(slots, row_addresses(headers), at, self.layout.header_bytes, BLOCK_BYTES)
        job.run()
        good = self.tier.finish_read(job) & self.layout.verify(headers, at, self._keys(slots), self._parents(n))
        return [payloads[i].tobytes() if good[i] else None for i in range(n)]

    def settle(self) -> None:
        while (job := self.tier.begin_compact()) is not None:
            job.run()
            assert not len(self.tier.finish_compact(job))

    def check(self) -> None:
        self.tier.check()

    def close(self) -> None:
        self.tier.close()

    def reopen(self, clean: bool) -> dict[bytes, int]:
        """Another process opens the directory; returns slots by content, as the tier found them."""
        by_key = {key_of(content): content for content in self.contents.values()}
        if not clean:
            self.tier._ledger.take_removal()  # what a dying process has not written
        self.tier.close()
        self._open()
        found = self.tier.recovered()
        slots = {by_key[key.tobytes()]: slot for key, slot in zip(found.keys, found.slots.tolist(), strict=True)}
        self.contents = {slot: content for content, slot in slots.items()}
        return slots

    def _keys(self, slots: Int64s) -> NDArray[np.uint8]:
        keys = b"".join(key_of(self.contents[slot]) for slot in slots.tolist())
        return np.frombuffer(keys, np.uint8).reshape(-1, 16).copy()

    def _parents(self, n: int) -> NDArray[np.uint8]:
        return np.frombuffer(self.root * n, np.uint8).reshape(n, 16).copy()

    def lies_at(self, slot: int) -> bytes:
        key = key_of(self.contents[slot])
        named = [frame for frame in self.named() if frame.key == key]
        return (named or frames_of(self.directory, key))[-1].payload()

    def findable(self) -> set[bytes]:
        return {frame.payload() for frame in self.named()}

    def named(self) -> list[Any]:
        """The frames where the catalog's names point to: see "The catalog" in docs/FORMAT.md."""
        found = []
        for key, value in self.names().items():
            _, page = struct.unpack(">QI", key)
            (segment,) = struct.unpack_from("<I", value, 40)
            frame = frame_at(self.directory / f"segment-{segment:08d}", page * SECTOR_BYTES)
            assert frame is not None
            found.append(frame)
        return found

    def names(self) -> dict[bytes, bytes]:
        """What the catalog says, read from a copy of its file."""
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy(self.directory / "catalog" / "data.mdb", folder)
            with lmdb.open(folder, max_dbs=2, readonly=True, lock=False) as env:
                names = env.open_db(b"names", create=False)
                with env.begin() as reading:
                    return {bytes(key): bytes(value) for key, value in reading.cursor(names)}

    def identity(self, slot: int) -> object:
        return slot

    def taken_bytes(self) -> int:
        return directory_bytes(self.directory)

    @property
    def capacity_bytes(self) -> int:
        return 640 * KIB + 12 * self.segment_bytes

    def tamper(self, slot: int, at: int) -> None:
        """A bit of the frame is wrong on the disk; ``at`` counts from its start."""
        key = key_of(self.contents[slot])
        for frame in self.named():
            if frame.key == key:
                frame.flip(at)


def key_of(content: bytes) -> bytes:
    """The block key that the harness uses for these bytes."""
    return hashlib.blake2b(content, digest_size=16).digest()
