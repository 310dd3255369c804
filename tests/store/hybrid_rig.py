"""Hybrid namespaces over a real store: puts, reads and restarts, with a naive account of what lies where.

The account takes from the store which entries of its block table have a copy in which tier, by key, and nothing
else: what follows for hits is worked out by ``hybrid_oracle``, what the bytes must be is the recorder's to say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvstore.lease import Lease, Reservation
from kvstore.prefix_index.block_table import DRAM_BIT, NVME_BIT
from kvstore.prefix_index.keys import block_key, part_key
from kvstore.prefix_index.rows import RowPath
from kvstore.store.namespaces import OpenNamespace
from kvstore.store.requests import Prompt
from kvstore.types import GroupKind, KVGroup, KVSpec, Namespace
from tests.store.hybrid_oracle import FULL, STATE, WIDTH, Layout, Tokens, blocks_of
from tests.store.recorder import Recorder
from tests.store.rig import Rig

ANY, IN_DRAM, ON_NVME = DRAM_BIT | NVME_BIT, DRAM_BIT, NVME_BIT
KIB = 1 << 10
MARK = "mark"

LAYOUTS = (
    Layout("gemma", (FULL, 5), (3 * KIB, 4 * KIB)),
    Layout("next", (FULL, STATE), (4 * KIB, 7 * KIB)),
    Layout("all kinds", (FULL, 2, 7, STATE), (4 * KIB, KIB, 5 * KIB, 6 * KIB)),
    Layout(MARK, (FULL, 3, STATE), (64, 2 * KIB, 4 * KIB)),
)
"""Per part what it needs and its bytes; the first is part 0. The last is of a spec without full groups."""

Entry = tuple[str, Tokens, int]
"""A part of a block: the layout, all tokens up to the block's end, and the number of the part."""


def spec_of(layout: Layout) -> KVSpec:
    """A spec that is stored in these parts: part 0 has two full groups, one of them MLA, or none."""

    def group(n_bytes: int, **more: Any) -> KVGroup:
        return KVGroup(layers=1, dtype="uint8", layout="opaque", page_bytes=n_bytes, **more)

    groups = []
    if layout.name != MARK:
        groups = [group(layout.sizes[0] - 100), group(100, kind=GroupKind.MLA)]
    for need, n_bytes in zip(layout.needs[1:], layout.sizes[1:], strict=True):
        if need == STATE:
            groups.append(group(n_bytes, kind=GroupKind.STATE))
        else:
            groups.append(group(n_bytes, kind=GroupKind.SLIDING, window_tokens=need))
    return KVSpec(WIDTH, tuple(groups))


@dataclass
class Writing:
    """Slots that a session fills."""

    session: int
    layout: Layout
    tokens: Tokens
    reservation: Reservation
    content: list[bytes]


@dataclass
class Reading:
    """A lease with what was seen through it when it was given."""

    session: int
    lease: Lease
    entries: list[Entry]
    partial: Tokens
    content: list[bytes] = field(default_factory=list)


class HybridRig:
    """Steps and checks over ``rig``, which may be exchanged for that of another process on the same directory."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.recorder = Recorder()
        self.put_tokens: dict[str, set[Tokens]] = {layout.name: set() for layout in LAYOUTS}
        self._names: dict[Entry, bytes] = {}
        self._entries: dict[bytes, Entry] = {}

    # Prompts -------------------------------------------------------------------------------------

    def namespace(self, layout: Layout) -> OpenNamespace:
        return self.rig.store.namespaces.open(Namespace(model=layout.name, spec=spec_of(layout)))

    def prompt(self, layout: Layout, tokens: Tokens, part: int = 0) -> Prompt:
        opened = self.namespace(layout)
        path = RowPath.from_tokens(np.array(tokens, np.uint32), WIDTH)
        return Prompt(opened, opened.root_key("", ""), path, self.rig.clock.now_s(), part=part)

    # Steps ---------------------------------------------------------------------------------------

    def reserve(self, session: int, layout: Layout, tokens: Tokens, part: int, first: int, n: int) -> Writing | None:
        """Slots for part ``part`` of blocks from ``first`` on, filled; None if there are none."""
        prompt = self.prompt(layout, tokens, part)
        reservation = self.rig.reserve(session, prompt, first, n)
        if not len(reservation.slots):
            return None
        self.rig.map_regions(session, reservation.slots, writable=True)
        assert reservation.block_bytes == layout.sizes[part]
        start = first + reservation.n_present
        entries = self.entries(layout, tokens, part, range(start, start + len(reservation.slots)))
        content = [self.recorder.fill(entry, layout.sizes[part]) for entry in entries]
        for slot, data in zip(reservation.slots.tolist(), content, strict=True):
            self.rig.dram.view(slot)[: len(data)] = np.frombuffer(data, np.uint8)
        return Writing(session, layout, tokens, reservation, content)

    def commit(self, writing: Writing) -> int:
        """Make it visible, all or nothing; returns how many of the parts were new."""
        before = self.copies()
        done = self.rig.store.commit(writing.session, writing.reservation.id)
        start = writing.reservation.first_block + writing.reservation.n_present
        rows = range(start, start + len(writing.content))
        part = writing.reservation.part
        entries = self.entries(writing.layout, writing.tokens, part, rows)
        new = [entry for entry in entries if not before.get(entry, 0) & IN_DRAM]
        assert done.n_committed == len(new)
        for entry, data in zip(entries, writing.content, strict=True):
            if entry in new:
                self.recorder.publish(data)
        if part == 0:
            self.put_tokens[writing.layout.name].update(tokens for _, tokens, _ in entries)
        return done.n_committed

    def put(self, session: int, layout: Layout, tokens: Tokens, part: int, first: int = 0, n: int = 0) -> int:
        """Store one part of blocks, of all that the prompt has from ``first`` on if ``n`` is 0."""
        writing = self.reserve(session, layout, tokens, part, first, n or len(tokens) // WIDTH - first)
        return self.commit(writing) if writing is not None else 0

    def put_all(self, session: int, layout: Layout, tokens: Tokens) -> None:
        for part in range(len(layout.needs)):
            self.put(session, layout, tokens, part)

    def hold(self, session: int, layout: Layout, tokens: Tokens, load: Any = None, **more: Any) -> Reading | None:
        """Lease, and compare every byte that it shows."""
        lease = self.rig.store.lease(session, self.prompt(layout, tokens), load=load, **more)
        if not lease.id:
            return None
        partial = self.partial_block(lease)
        entries = self.entries(layout, tokens, 0, range(lease.first_block, lease.n_blocks))
        entries += [(layout.name, partial, 0)] if partial else []
        for held in lease.parts:
            n = held.n - bool(partial)
            entries += self.entries(layout, tokens, held.number, range(held.first_block, held.first_block + n))
            entries += [(layout.name, partial, held.number)] if partial else []
        reading = Reading(session, lease, entries, partial)
        reading.content = self.seen(reading)
        for entry, data in zip(entries, reading.content, strict=True):
            self.recorder.verify(entry, data)
        return reading

    def partial_block(self, lease: Lease) -> Tokens:
        """The block that a lease ends inside of, by all tokens up to its end; empty if it ends with a whole one."""
        if not lease.partial_tokens:
            return ()
        block = int(lease.ids[lease.n_held - 1])
        return self._entries[self.rig.store.index.table.key[block].tobytes()][1]

    def release(self, reading: Reading) -> None:
        """Nothing has changed under the reader."""
        assert self.seen(reading) == reading.content
        self.rig.store.release(reading.session, reading.lease.id)

    def seen(self, reading: Reading) -> list[bytes]:
        slots = self.rig.store.index.slots(reading.lease.ids).tolist()
        assert len(slots) == len(reading.entries)
        assert min(slots) >= 0
        return [
            self.rig.dram.view(slot)[: self.bytes_of(entry)].tobytes()
            for slot, entry in zip(slots, reading.entries, strict=True)
        ]

    # Account -------------------------------------------------------------------------------------

    @staticmethod
    def entries(layout: Layout, tokens: Tokens, part: int, rows: Iterable[int]) -> list[Entry]:
        blocks = blocks_of(tokens)
        return [(layout.name, blocks[row], part) for row in rows]

    @staticmethod
    def bytes_of(entry: Entry) -> int:
        return next(layout.sizes[entry[2]] for layout in LAYOUTS if layout.name == entry[0])

    def name_of(self, layout: Layout, tokens: Tokens, part: int) -> bytes:
        """The key of a part of a block, hashed row by row from the root."""
        entry = (layout.name, tokens, part)
        if entry not in self._names:
            key = self.namespace(layout).root_key("", "")
            for block in blocks_of(tokens):
                row = block[len(block) - (len(block) - 1) % WIDTH - 1 :]
                key = block_key(key, np.array(row, "<u4").tobytes())
            name = self._names[entry] = part_key(key, part) if part else key
            self._entries[name] = entry
        return self._names[entry]

    def copies(self) -> dict[Entry, int]:
        """Every part of a block that was ever put and is somewhere: in which tiers."""
        table = self.rig.store.index.table
        alive = table.alive()
        there = {table.key[block].tobytes(): int(table.residency[block]) for block in alive.tolist()}
        out = {}
        for layout in LAYOUTS:
            for tokens in self.put_tokens[layout.name]:
                for part in range(len(layout.needs)):
                    name = self.name_of(layout, tokens, part)
                    if there.get(name, 0):
                        out[layout.name, tokens, part] = there[name]
        known = {self.name_of(self.layout(name), tokens, part) for name, tokens, part in out}
        unknown = {key for key, tiers in there.items() if tiers} - known
        assert not unknown, f"{len(unknown)} blocks are there that nobody put"
        return out

    @staticmethod
    def layout(name: str) -> Layout:
        return next(layout for layout in LAYOUTS if layout.name == name)

    def has(self, layout: Layout, copies: dict[Entry, int], tiers: int = ANY) -> Callable[[Tokens, int], bool]:
        """Whether a part of a block is in one of these tiers, for the oracle."""
        return lambda tokens, part: copies.get((layout.name, tokens, part), 0) & tiers != 0
