"""Parts of blocks: what groups of layers with a shorter memory have of a block, each stored by itself.

A model with sliding-window or recurrent layers doesn't need them for every block of a prompt. What every hit
needs (the layers with full attention) is the block itself, in the tree; what each other group has of it is a
*part*: an entry of the block table of its own, with its own place, size, pins, rank and copies, whose parent is
the block. So a part is a leaf to everything that moves, writes or evicts: it goes before its block does, on
NVMe it follows its block, and what happens to one part happens to no other.

Which parts a hit needs, its ``Rule`` says; how far a prompt is stored is decided here, on whole paths at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import BadInputError
from kvstore.prefix_index.block_table import DRAM, PART, PARTS_MAX, At, BlockTable, Ids
from kvstore.prefix_index.copies import Copies
from kvstore.prefix_index.keys import part_key
from kvstore.prefix_index.policy import EvictionPolicy, Use
from kvstore.types import KEY_BYTES

ANY_TIER = -1


class Rule(NamedTuple):
    """What a hit that ends behind a block needs of the parts with this number: those of the last blocks before.

    ``window_blocks``: of how many (of all, if there are fewer). ``is_state``: of one block, and no hit ends inside it.
    """

    number: int
    window_blocks: int
    is_state: bool = False


class Span(NamedTuple):
    """Parts that belong together: those numbered ``number`` of the blocks from ``first_row`` on."""

    number: int
    first_row: int
    ids: NDArray[np.intp]


class NewParts(NamedTuple):
    """Parts of the blocks asked for. ``is_new``: the slot was taken, else there was a copy in DRAM, which stays."""

    ids: Ids
    is_new: NDArray[np.bool_]


class Parts:
    """The parts of one block table. One thread uses them; nothing here blocks."""

    def __init__(self, table: BlockTable, copies: Copies, policy: EvictionPolicy) -> None:
        self._table = table
        self._copies = copies
        self._policy = policy

    # Questions -----------------------------------------------------------------------------------

    def ids(self, at: At, number: int) -> NDArray[np.int64]:
        """The parts of blocks, int64 [n], -1 where there is none; one without a copy (broken) is there, too."""
        if number > len(self._table.parts):
            return np.full(len(at), -1, np.int64)
        found: NDArray[np.int64] = self._table.parts[number - 1][at].astype(np.int64) - 1
        return found

    def is_there(self, at: At, number: int, tier: int = ANY_TIER) -> NDArray[np.bool_]:
        """Which blocks have their part in the tier, or in any."""
        ids = self.ids(at, number)
        there = ids >= 0
        if there.any():
            table, found = self._table, ids[there]
            there[there] = table.residency[found] != 0 if tier == ANY_TIER else table.resident(found, tier)
        return there

    def reach(self, at: At, rules: Sequence[Rule], tier: int = ANY_TIER, first_row: int = 0) -> int:
        """How many leading blocks of a path make a hit: behind the last of them every rule is satisfied.

        ``at``: the path from its head on, as far as it is stored. With a tier all that the hit needs of rows
        from ``first_row`` on, the blocks included, is in that tier.
        """
        n = len(at)
        if tier != ANY_TIER and not (there := self._table.resident(at[first_row:], tier)).all():
            n = first_row + int(there.argmin())
            at = at[:n]
        if all(self._all_there(at, max(n - rule.window_blocks, 0), rule, tier, first_row) for rule in rules):
            return n  # mostly a prompt ends where one has ended before
        may_end = np.ones(n, np.bool_)
        rows = np.arange(n)
        for rule in rules:
            there = self._usable(at, 0, rule, tier, first_row)
            if rule.window_blocks == 1:
                may_end &= there
            else:
                last_gap = np.maximum.accumulate(np.where(there, -1, rows))
                may_end &= rows - last_gap >= np.minimum(rows + 1, rule.window_blocks)
        ends = np.flatnonzero(may_end)
        return int(ends[-1]) + 1 if len(ends) else 0

    def reaches_into(self, block: int, rules: Sequence[Rule], tier: int = ANY_TIER) -> bool:
        """Whether a hit may end inside this block, where one may end behind the block before it.

        A window from inside of it covers no more of the blocks before than one from its beginning.
        """
        inside = np.array([block], np.intp)
        if not all(not rule.is_state and self.is_there(inside, rule.number, tier)[0] for rule in rules):
            return False
        return tier == ANY_TIER or bool(self._table.resident(inside, tier)[0])

    def needed(self, at: At, first_row: int, rules: Sequence[Rule]) -> list[Span]:
        """What a hit behind the last block of ``at`` needs of the parts of the blocks from ``first_row`` on.

        ``at``: the whole path from its head. Only for a hit: see ``reach``.
        """
        spans = []
        for rule in rules:
            first = max(len(at) - rule.window_blocks, first_row, 0)
            spans.append(Span(rule.number, first, self.ids(at[first:], rule.number).astype(np.intp)))
        return spans

    def of(self, at: At) -> NDArray[np.intp]:
        """All parts of these blocks, in no order."""
        found = [column[at] for column in self._table.parts]
        ids = np.concatenate([each[each != 0] for each in found]) if found else np.empty(0, np.uint32)
        return ids.astype(np.intp) - 1

    def is_spare(self, ids: At) -> NDArray[np.bool_]:
        """Which ids are spare parts: to be given up first, not worth being written anywhere."""
        if not self._table.n_spare:
            return np.zeros(len(ids), np.bool_)
        spare: NDArray[np.bool_] = self._table.spare[ids]
        return spare

    # Changes -------------------------------------------------------------------------------------

    def insert(
        self,
        path: At,
        first_row: int,
        rule: Rule,
        slots: NDArray[np.int64],
        size_bytes: int,
        use: Use,
    ) -> NewParts:
        """Store the parts of rows ``first_row ..`` of a path of blocks that are stored; counts as an access.

        ``path``: all blocks of it. Parts with a window that lie outside of it both at the path's end and at every
        fork on it are spare from now on, until they are used. Raises BadInputError for rows the path doesn't have.
        """
        table = self._table
        end = first_row + len(slots)
        if first_row < 0 or end > len(path):
            raise BadInputError(f"parts of rows {first_row} to {end - 1} of a path of {len(path)} stored blocks")
        table.reserve_parts(rule.number)
        at = path[first_row:end].astype(np.intp)
        ids = self.ids(at, rule.number)
        absent = ids < 0
        known = ids[~absent]
        is_new = absent.copy()
        is_new[~absent] = ~table.resident(known, DRAM)
        ids[absent] = self._add(at[absent], rule.number, size_bytes, use)
        self._policy.inserted(ids[absent], use)
        # The rank first: whoever hears of the copy looks at it.
        table.used(ids[is_new], use.now_s, use.category)
        self._copies.gain(ids[is_new], DRAM, slots[is_new])
        back = is_new & ~absent
        if back.any():
            self.touch(ids[back], replace(use, is_again=True))
        if not rule.is_state:
            self._sort_out(path.astype(np.intp), rule, ids[absent], use)
        return NewParts(ids.astype(np.uint32), is_new)

    def touch(self, ids: At, use: Use) -> None:
        """A hit has used these parts."""
        if not len(ids):
            return
        at = ids.astype(np.intp, copy=False)
        self._set_spare(at, to=False)
        self._table.used(at, use.now_s, use.category, is_access=not use.is_again)
        self._copies.changed(at, self._policy.accessed(at, use))

    def adopt(self, ids: At, parents: At, numbers: NDArray[np.uint8]) -> None:
        """These ids, whose other columns are filled, are the parts of blocks that have none of this number."""
        table = self._table
        if not len(ids):
            return
        table.reserve_parts(int(numbers.max()))
        table.state[ids], table.part[ids] = PART, numbers
        for number in np.unique(numbers).tolist():
            mine = numbers == number
            table.parts[number - 1][parents[mine]] = ids[mine].astype(np.uint32) + 1
        table.n_parts += len(ids)

    # Own -----------------------------------------------------------------------------------------

    def _usable(self, at: At, start: int, rule: Rule, tier: int, first_row: int) -> NDArray[np.bool_]:
        """Which rows from ``start`` on have the part as ``reach`` wants it: in the tier from ``first_row`` on."""
        there = self.is_there(at[start:], rule.number)
        if tier != ANY_TIER:
            first = max(first_row, start)
            there[first - start :] = self.is_there(at[first:], rule.number, tier)
        return there

    def _all_there(self, at: At, start: int, rule: Rule, tier: int, first_row: int) -> bool:
        return bool(self._usable(at, start, rule, tier, first_row).all())

    def _add(self, parents: At, number: int, size_bytes: int, use: Use) -> NDArray[np.int64]:
        """New parts without a copy."""
        table = self._table
        ids = table.allocate(len(parents)).astype(np.int64)
        if not len(ids):
            return ids
        keys = [part_key(key, number) for key in _each(table.key[parents])]
        table.key[ids] = np.frombuffer(b"".join(keys), np.uint8).reshape(-1, KEY_BYTES)
        table.parent[ids], table.namespace[ids] = parents, use.namespace
        table.n_children[parents] += 1
        table.slot[ids], table.size_bytes[ids], table.last_use_s[ids] = -1, size_bytes, use.now_s
        for column in (table.refs, table.residency, table.n_children, table.n_dram_children):
            column[ids] = 0
        table.clear_places(ids)
        if table.nvme:
            self._copies.n_broken += len(ids)  # until they gain their copy
        self.adopt(ids, parents, np.full(len(ids), number, np.uint8))
        return ids

    def _sort_out(self, path: NDArray[np.intp], rule: Rule, new: NDArray[np.int64], use: Use) -> None:
        """Of the path's parts: what a window at its end or at a fork needs is not spare, other new ones are."""
        table = self._table
        n_kids = table.n_children[path].astype(np.int64)
        for column in table.parts:
            n_kids -= column[path] != 0
        ends = np.append(np.flatnonzero(n_kids[:-1] > 1) + 1, len(path))
        steps = np.zeros(len(path) + 1, np.int64)
        np.add.at(steps, np.maximum(ends - rule.window_blocks, 0), 1)
        np.add.at(steps, ends, -1)
        in_window = np.cumsum(steps[:-1]) > 0
        ids = self.ids(path, rule.number)
        live = ids[in_window & (ids >= 0)]
        wanted_again = live[table.spare[live]]
        if len(wanted_again):
            self._set_spare(wanted_again, to=False)
            self._copies.changed(wanted_again, self._policy.accessed(wanted_again, use))
        self._set_spare(new[~np.isin(new, live)], to=True)

    def _set_spare(self, at: At, *, to: bool) -> None:
        table = self._table
        at = at[table.spare[at] != to]
        if not len(at):
            return
        table.spare[at] = to
        table.n_spare += len(at) if to else -len(at)
        if to:
            self._policy.demoted(at[::-1])
            self._copies.changed(at)


def is_part(table: BlockTable, block: int) -> bool:
    """Whether this is a part of a block."""
    return bool(table.parts) and table.part[block] != 0


def forget(table: BlockTable, part: int) -> None:
    """A part leaves: its block has it no more."""
    table.parts[int(table.part[part]) - 1][table.parent[part]] = 0
    table.n_parts -= 1
    table.n_spare -= int(table.spare[part])
    table.part[part], table.spare[part] = 0, False


def recognised(
    keys: NDArray[np.uint8], parents: NDArray[np.uint8], namespaces: NDArray[np.uint32]
) -> NDArray[np.uint8]:
    """Which of the blocks that a tier still has are parts, and which: numbers uint8 [n], 0 for none.

    A part's key proves it. Blocks of one namespace are parts of one number, or none is: each namespace is tried
    with its first block.
    """
    numbers = np.zeros(len(keys), np.uint8)
    for namespace, first in zip(*np.unique(namespaces, return_index=True), strict=True):
        key, parent = keys[first].tobytes(), parents[first].tobytes()
        number = next((n for n in range(1, PARTS_MAX + 1) if part_key(parent, n) == key), 0)
        if not number:
            continue
        mine = np.flatnonzero(namespaces == namespace)
        proved = [
            part_key(above, number) == key for key, above in zip(_each(keys[mine]), _each(parents[mine]), strict=True)
        ]
        numbers[mine] = np.where(proved, number, 0)
    return numbers


def _each(keys: NDArray[np.uint8]) -> list[bytes]:
    return [row.tobytes() for row in keys]
