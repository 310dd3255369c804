"""A tier, an index and their keeper as a daemon has them, and what is left of them when that daemon is gone."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.errors import KVStoreError
from kvstore.native import Mapping
from kvstore.prefix_index.index import PrefixIndex
from kvstore.prefix_index.policies import make_policy
from kvstore.prefix_index.policy import Use
from kvstore.prefix_index.rows import RowPath
from kvstore.takeover.blocks import adopt_blocks
from kvstore.takeover.estate import Estate, read_estate
from kvstore.takeover.keeper import Keeper
from kvstore.takeover.link import Entry, end_holder
from kvstore.tiers.dram import DramTier

PAGE = 4096
ROOT = b"r" * 16
Int64s = NDArray[np.int64]


def open_fds() -> set[str]:
    """The descriptors of this process, but for the one that lists them.

    Without eventfds: no part of a takeover has one, but gRPC's own threads, once another test has loaded it, make
    theirs whenever they like.
    """
    folder = Path("/proc/self/fd")
    named = {f"{fd.name} {fd.readlink()}" for fd in folder.iterdir() if fd.exists() or fd.is_symlink()} - {"", " "}
    return {name for name in named if not name.endswith("anon_inode:[eventfd]")}


def pattern(seed: int, n_bytes: int = PAGE) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, n_bytes, dtype=np.uint8)


class Life:
    """One daemon's. Clients are numbers; their mappings of the tier's regions are real ones of this process."""

    def __init__(
        self,
        estate: Estate | None = None,
        capacity_bytes: int = 64 * PAGE,
        region_bytes: int = 16 * PAGE,
        keeper: Keeper | None = None,
        serve: bool = True,
        unsealed: bool = False,
    ) -> None:
        self.keeper = keeper or Keeper(Path("/nowhere"), "me", 1.0, "life", None)
        self.estate = estate
        self.tier = DramTier(
            capacity_bytes, region_bytes, 4 * PAGE, prefault=False, ledger=self.keeper,
            former=estate.former if estate is not None else None, unsealed=unsealed,
        )  # fmt: skip
        self.index = PrefixIndex(make_policy("lru"), reserve_blocks=64)
        self.n_adopted = 0
        self.pidfds: dict[int, int] = {}
        if estate is not None:
            self.n_adopted = adopt_blocks(self.index, self.tier, {bytes(16): 0}.get, 0.0)
            for session in estate.sessions:
                self.pidfds[session.id] = session.pidfd
                self.keeper.session_opened(session.id, session.token, session.tenant, "", session.pid, session.pidfd)
        if serve:
            last_id = estate.last_session_id if estate is not None else 0
            self.keeper.start_serving(self.tier, last_id, 0.0)
            if self.keeper._link is None and self.tier.labelling is not None:
                self.tier.labelling.valid = True
        self.mapped: dict[tuple[int, int], Mapping] = {}

    def client(self, number: int, pidfd: int | None = None) -> int:
        self.pidfds[number] = os.pidfd_open(os.getpid()) if pidfd is None else pidfd
        self.keeper.session_opened(
            number, bytes([number]) * 16, "a", f"client {number}", os.getpid(), self.pidfds[number]
        )
        return number

    def map(self, client: int, region_id: int) -> Mapping:
        """As a client does: the writer writable, before the seal."""
        region = self.tier.region(region_id)
        key = (client, region_id)
        if key not in self.mapped:
            self.tier.add_mapper(region_id, client)
            self.mapped[key] = Mapping(region.fd, region.size_bytes, writable=not region.sealed)
            if region.writer == client:
                self.tier.seal(region_id)
        return self.mapped[key]

    def reserve(self, writer: int, n: int, tenant: str = "a", slot_bytes: int = PAGE) -> Int64s:
        slots = self.tier.allocate(writer, tenant, slot_bytes, n)
        if writer:
            for region_id in np.unique(slots >> 20).tolist():
                self.map(writer, region_id)
        return slots

    def put(self, writer: int, tokens: Sequence[int], tenant: str = "a", slot_bytes: int = PAGE) -> Int64s:
        """Store a path of one token a block whose bytes follow from its tokens; the slots of the new blocks."""
        path = RowPath.from_tokens(np.array(tokens, np.uint32), 1)
        n_there = len(self.index.match(ROOT, path).ids)
        slots = self.reserve(writer, path.n_rows - n_there, tenant, slot_bytes)
        for i, slot in enumerate(slots.tolist()):
            target = self.mapped[(writer, slot >> 20)].array() if writer else self.tier.region(slot >> 20).array
            start = (slot & 0xFFFFF) * slot_bytes
            target[start : start + slot_bytes] = self.content(tokens, n_there + i, slot_bytes)
        inserted = self.index.insert(ROOT, path, n_there, slots, slot_bytes, Use())
        self.tier.commit(slots, inserted.ids.astype(np.int64))
        self.index.touch(self.index.match(ROOT, path).ids, Use())
        self.label()
        return slots

    def label(self) -> None:
        self.keeper.after_request(self.index, digest_of)

    @staticmethod
    def content(tokens: Sequence[int], row: int, n_bytes: int = PAGE) -> NDArray[np.uint8]:
        return pattern(hash(tuple(tokens[: row + 1])) & 0xFFFFFFFF, n_bytes)

    def found(self, tokens: Sequence[int], slot_bytes: int = PAGE) -> int:
        """How many leading blocks are found; every one must hold its own bytes."""
        ids = self.index.match(ROOT, RowPath.from_tokens(np.array(tokens, np.uint32), 1)).ids
        for row, slot in enumerate(self.index.slots(ids).tolist()):
            np.testing.assert_array_equal(self.tier.view(slot), self.content(tokens, row, slot_bytes))
        return len(ids)

    def evict(self, n: int) -> Int64s:
        slots = self.index.evict(n).slots
        self.tier.free(slots)
        return slots

    def entries(self) -> list[Entry]:
        """What a holder would have, with descriptors of their own."""
        return [Entry(key, text, os.dup(fd) if fd >= 0 else -1) for key, text, fd in self.keeper._entries.values()]

    def check(self) -> None:
        self.tier.check()
        self.index.check()
        assert self.tier.tags(self.index.slots(self.index.table.alive())).tolist() == self.index.table.alive().tolist()

    def close(self) -> None:
        """Mappings of clients live on."""
        self.keeper.leave()
        self.tier.close()
        for pidfd in self.pidfds.values():
            os.close(pidfd)


def digest_of(ordinal: int) -> bytes:
    return bytes([ordinal]) * 16


@pytest.fixture(scope="session")
def life_class() -> type[Life]:
    """For processes that run one."""
    return Life


@pytest.fixture
def lives() -> Iterator[Callable[..., Life]]:
    """``lives(after=None, **settings)``: a life, taking over what ``after`` has left at this moment, or an estate."""
    all_lives: list[Life] = []

    def begin(after: Life | Estate | None = None, **settings: Any) -> Life:
        estate = read_estate(after.entries()) if isinstance(after, Life) else after
        all_lives.append(Life(estate, **settings))
        return all_lives[-1]

    before = open_fds()
    yield begin
    for life in all_lives:
        life.check()
        life.close()
    assert open_fds() <= before, "descriptors were leaked"


@pytest.fixture
def dead_pidfd() -> int:
    """A pidfd of a process that is gone."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    pidfd = os.pidfd_open(process.pid)
    process.wait()
    return pidfd


@pytest.fixture
def holder_path() -> Iterator[Path]:
    """Where a holder may listen; whichever does at the end is told to end."""
    with tempfile.TemporaryDirectory(prefix="kvh-") as folder:
        path = Path(folder) / "h"
        yield path
        if path.exists():
            with contextlib.suppress(KVStoreError):
                end_holder(path)
