"""A tier under test with frames of its own making, whose every byte follows from the key."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.native import aligned_bytes
from kvstore.tiers.nvme.tier import FrameState, NvmeTier, WriteJob

PAGE = 4096
ROOT = b"r" * 16
DIGEST = b"namespace-digest"
MAGIC = b"TESTFRAM"
HEADER = struct.Struct("<8s16s16s16sQQQ")
Int64s = NDArray[np.int64]
Bytes = NDArray[np.uint8]


class Facts(NamedTuple):
    """What a header of these tests says."""

    key: bytes
    parent: bytes
    namespace: bytes
    frame_bytes: int
    payload_bytes: int
    log_seq: int


def payload_of(key: bytes, payload_bytes: int) -> Bytes:
    seed = int.from_bytes(key, "little")
    return np.random.default_rng(seed).integers(0, 256, payload_bytes, dtype=np.uint8)


def frame_of(key: bytes, parent: bytes, pages: int, log_seq: int = 0, namespace: bytes = DIGEST) -> Bytes:
    """A frame of one header page and ``pages - 1`` of payload, in aligned memory."""
    frame = aligned_bytes(pages * PAGE)
    frame[:PAGE] = 0
    head = HEADER.pack(MAGIC, key, parent, namespace, pages * PAGE, (pages - 1) * PAGE, log_seq)
    head += struct.pack("<I", zlib.crc32(head))
    frame[: len(head)] = np.frombuffer(head, np.uint8)
    frame[PAGE:] = payload_of(key, (pages - 1) * PAGE)
    return frame


def inspect(buffer: memoryview) -> Facts | None:
    head = bytes(buffer[: HEADER.size + 4])
    if head[:8] != MAGIC or zlib.crc32(head[:-4]) != struct.unpack("<I", head[-4:])[0]:
        return None
    return Facts(*HEADER.unpack(head[:-4])[1:])


def verify(frame: memoryview) -> bool:
    facts = inspect(frame)
    return facts is not None and bytes(frame[PAGE:]) == payload_of(facts.key, facts.payload_bytes).tobytes()


def as_keys(keys: Sequence[bytes]) -> Bytes:
    return np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 16)


@dataclass
class Known:
    """What a test knows of a frame that it wrote."""

    parent: bytes
    pages: int
    slot: int


@dataclass
class Pending:
    """A write under way, and the memory that it needs."""

    job: WriteJob
    keys: list[bytes]
    parents: list[bytes]
    pages: int
    slots: Int64s
    memory: list[Bytes] = field(repr=False)
    written: bool = False


class Rig:
    """A tier and what was put into it. ``known`` has what is live, by key."""

    def __init__(self, directory: Path, seed: int = 0, **settings: Any) -> None:
        self.directory = directory
        self.settings: dict[str, Any] = {"capacity_bytes": 3 << 20, "segment_bytes": 32 * PAGE, **settings}
        self.known: dict[bytes, Known] = {}
        self.rng = np.random.default_rng(seed)
        self.open()

    def open(self, **changes: Any) -> None:
        settings = {"inspect": inspect, "verify": verify, **self.settings, **changes}
        self.tier = NvmeTier(self.directory, **settings)
        self.number = self.tier.name_namespace(DIGEST, "{}")

    def new_key(self) -> bytes:
        return self.rng.bytes(16)

    # -- writing

    def begin(self, keys: list[bytes], parents: list[bytes], pages: int, until_s: float = np.inf) -> Pending | None:
        """Allocate and begin to write as many of these as there is room for; None without any."""
        slots = self.tier.allocate(pages * PAGE, len(keys))
        if not len(slots):
            return None
        keys, parents = keys[: len(slots)], parents[: len(slots)]
        seqs = self.tier.log_seqs(slots).tolist()
        digest = self.tier.namespaces()[self.number][0]
        memory = [frame_of(k, p, pages, seq, digest) for k, p, seq in zip(keys, parents, seqs, strict=True)]
        buffers = [((int(m.ctypes.data), PAGE), (int(m.ctypes.data) + PAGE, (pages - 1) * PAGE)) for m in memory]
        n = len(slots)
        job = self.tier.begin_write(
            slots, as_keys(keys), as_keys(parents), np.full(n, self.number, np.uint32),
            np.full(n, (pages - 1) * PAGE, np.uint32), buffers, until_s=np.full(n, until_s),
        )  # fmt: skip
        return Pending(job, keys, parents, pages, slots, memory)

    def finish(self, pending: Pending) -> list[bytes]:
        """Take a written and named job in; returns the keys that are live."""
        live = self.tier.finish_write(pending.job)
        kept = []
        for i in np.flatnonzero(live).tolist():
            self.known[pending.keys[i]] = Known(pending.parents[i], pending.pages, int(pending.slots[i]))
            kept.append(pending.keys[i])
        return kept

    def put(self, n: int, pages: int = 3, parent: bytes = ROOT, chain: bool = True) -> list[bytes]:
        """Write ``n`` new frames, a chain or siblings; returns the keys of those that are live."""
        keys = [self.new_key() for _ in range(n)]
        parents = [parent, *keys[:-1]] if chain else [parent] * n
        pending = self.begin(keys, parents, pages)
        if pending is None:
            return []
        pending.job.write()
        pending.job.name()
        return self.finish(pending)

    # -- reading

    def slots(self, keys: Sequence[bytes]) -> Int64s:
        return np.array([self.known[key].slot for key in keys], np.int64)

    def read(self, keys: Sequence[bytes]) -> list[bool]:
        """Read frames; whether each arrived. Fails if one arrived with other bytes than were written."""
        frames = [aligned_bytes(self.known[key].pages * PAGE) for key in keys]
        addresses = np.array([frame.ctypes.data for frame in frames], np.uint64)
        rests = np.array([len(frame) - PAGE for frame in frames], np.int64)
        job = self.tier.begin_read(self.slots(keys), addresses, addresses + np.uint64(PAGE), PAGE, rests)
        job.run()
        arrived = self.tier.finish_read(job)
        for key, frame, there in zip(keys, frames, arrived.tolist(), strict=True):
            if there:
                facts = inspect(memoryview(frame))  # type: ignore[arg-type]
                assert facts is not None
                assert facts.key == key
                assert verify(memoryview(frame))  # type: ignore[arg-type]
        return [bool(there) for there in arrived]

    # -- leaving

    def free(self, keys: Sequence[bytes]) -> None:
        self.tier.free(self.slots(keys))
        for key in keys:
            del self.known[key]

    def compact(self, most: int = 1000) -> int:
        """Run compactions until none is due; returns how many."""
        for n in range(most):
            job = self.tier.begin_compact()
            if job is None:
                return n
            job.run()
            assert not len(self.tier.finish_compact(job))
        raise AssertionError("compaction finds no end")

    # -- ends

    def take_recovered(self) -> list[bytes]:
        """Take what the tier found as what is known; returns the keys in its order. Fails unless it is closed."""
        found = self.tier.recovered()
        self.known = {}
        order: list[bytes] = []
        for i, slot in enumerate(found.slots.tolist()):
            key, parent = found.keys[i].tobytes(), found.parents[i].tobytes()
            assert key not in self.known
            assert parent in self.known or parent.startswith(b"r" * 8), "a frame was found without its parent"
            self.known[key] = Known(parent, int(found.frame_bytes[i]) // PAGE, slot)
            assert int(found.payload_bytes[i]) == int(found.frame_bytes[i]) - PAGE
            assert self.tier.namespaces()[int(found.namespaces[i])][0] == DIGEST
            order.append(key)
        assert self.tier.n_live == len(order)
        return order

    def reopen(self, **changes: Any) -> list[bytes]:
        self.tier.close()
        self.open(**changes)
        return self.take_recovered()

    def abandon(self) -> None:
        """As if the process had ended: nothing is written any more."""
        if self.tier._closed:
            return
        self.tier._closed = True
        self.tier._opened.book.catalog.close()
        for segment in self.tier._segments.all.values():
            if segment.file.exists:
                inner = getattr(self.tier._files, "inner", self.tier._files)
                getattr(inner, "inner", inner).close(segment.file.handle)
        self.tier._opened.lock.release()

    def states(self, keys: Sequence[bytes]) -> list[FrameState]:
        return [FrameState(state) for state in self.tier.states(self.slots(keys)).tolist()]


@pytest.fixture
def rig_at() -> Iterator[Callable[..., Rig]]:
    """``rig_at(directory, **settings)``: all are checked and closed at the end, unless they were abandoned."""
    made: list[Rig] = []

    def make(directory: Path, seed: int = 0, **settings: Any) -> Rig:
        made.append(Rig(directory, seed, **settings))
        return made[-1]

    yield make
    for rig in made:
        if not rig.tier._closed:
            rig.tier.check()
            rig.tier.close()


@pytest.fixture
def rig(rig_at: Callable[..., Rig], tmp_path: Path) -> Rig:
    """3 MiB of segments of 128 KiB: frames of 3 pages, 10 to a segment."""
    return rig_at(tmp_path / "nvme")
