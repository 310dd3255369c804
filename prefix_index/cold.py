"""Blocks known by key only: what a reopened tier holds before any prompt has shown its rows.

They are found by hashing a prompt's rows behind the last block of the tree. A short last block is found
only by a prompt with exactly that tail, and a prompt that shares just the first tokens of a cold block
does not see it: its tokens aren't known until a prompt has named them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import BadInputError, IntegrityError
from kvstore.prefix_index.block_table import COLD, NO_PARENT, BlockTable, Ids
from kvstore.prefix_index.rows import RowPath
from kvstore.types import KEY_BYTES

_NONE = np.uint32(0xFFFFFFFF)
_STEP_FACTOR, _STEP_MAX = 8, 512


class Batch(NamedTuple):
    """Blocks to be made known, checked and resolved among themselves."""

    known: Ids
    """Per block its id if it is known already, else NO_PARENT."""
    parent_places: NDArray[np.int64]
    """Per block the place of its parent in the batch, or -1."""
    parent_ids: Ids
    """Per block the id of its parent if that was known before, else NO_PARENT."""


class ColdBlocks:
    """Finds cold blocks by key, over sorted arrays of 16 bytes a block; an entry whose block is cold no longer
    is passed over."""

    def __init__(self, table: BlockTable) -> None:
        self._table = table
        self._empty()

    @property
    def n(self) -> int:
        """Blocks that are cold."""
        return self._table.n_cold

    def _empty(self) -> None:
        self._prefixes = np.empty(0, np.uint64)
        self._ids: Ids = np.empty(0, np.uint32)
        self._roots = np.empty(0, np.uint32)
        self._root_ordinals: dict[bytes, int] = {}
        self._root_keys: list[bytes] = []

    def find(self, keys: NDArray[np.uint8]) -> Ids:
        """Ids of the cold blocks with these keys [n, 16]; NO_PARENT where there is none."""
        places = self._places(keys)
        out = np.full(len(keys), _NONE, np.uint32)
        found = places >= 0
        out[found] = self._ids[places[found]]
        return out

    def has_root(self, root_key: bytes) -> bool:
        """Whether a first block under this root may be cold."""
        return root_key in self._root_ordinals

    def root_key(self, block: int) -> bytes:
        """The root under which a cold first block lies."""
        place = int(self._places(self._table.key[block : block + 1])[0])
        if place < 0 or self._roots[place] == _NONE:
            raise IntegrityError(f"block {block} is no cold first block")
        return self._root_keys[int(self._roots[place])]

    def follow(self, parent: int, parent_key: bytes, path: RowPath, first_row: int, end_row: int) -> Ids:
        """Cold blocks of the leading rows from ``first_row`` on, behind the block ``parent``."""
        table = self._table
        out: list[Ids] = []
        row, step = first_row, 1
        while row < end_row:
            keys = path.chain(parent_key, row, min(row + step, end_row))
            ids = self.find(keys)
            # The hashes say who follows whom; an entry that claims another parent is damaged, and no hit.
            before = np.concatenate((np.array([parent], np.uint32), ids[:-1]))
            lost = (ids == _NONE) | (table.parent[np.where(ids == _NONE, 0, ids)] != before)
            n = int(lost.argmax()) if lost.any() else len(ids)
            out.append(ids[:n])
            if n < len(ids) or table.n_children[ids[-1]] == 0:
                break
            parent, parent_key = int(ids[-1]), keys[-1].tobytes()
            row, step = row + step, min(step * _STEP_FACTOR, _STEP_MAX)
        return np.concatenate(out) if out else np.empty(0, np.uint32)

    def resolve(self, keys: NDArray[np.uint8], parents: NDArray[np.uint8]) -> Batch:
        """Who is known and whose parent is where. Raises BadInputError for a key given twice or a parent that
        comes behind its child; nothing has changed then."""
        n = len(keys)
        order, prefixes = _sorted(keys)
        twin = np.flatnonzero(prefixes[1:] == prefixes[:-1])
        if len(twin):
            _refuse_twins(keys, order, prefixes, twin)
        # Mostly a block stands right behind its parent.
        parent_places = np.arange(-1, n - 1)
        parent_places[:1] = -1
        elsewhere = np.flatnonzero(np.append(True, (parents[1:] != keys[:-1]).any(axis=1))[:n])
        parent_places[elsewhere] = _find_all(keys, order, prefixes, parents[elsewhere])
        late = np.flatnonzero(parent_places >= np.arange(n))
        if len(late):
            raise BadInputError(
                f"block {late[0]} of {n} comes before its parent, block {parent_places[late[0]]}: give parents first"
            )
        none = np.full(n, _NONE, np.uint32)
        return Batch(self.find(keys) if self.n else none, parent_places, self.find(parents) if self.n else none.copy())

    def add(self, ids: Ids, roots: NDArray[np.uint8], is_first: NDArray[np.bool_]) -> None:
        """These blocks, whose keys the table has, are cold now; ``roots`` [n, 16] counts where ``is_first``."""
        ordinals = np.full(len(ids), _NONE, np.uint32)
        if is_first.any():
            unique, which = np.unique(_wide(roots[is_first]), return_inverse=True)
            known = [self._root_ordinals.setdefault(key, len(self._root_ordinals)) for key in unique.tolist()]
            self._root_keys = list(self._root_ordinals)
            ordinals[is_first] = np.array(known, np.uint32)[which.reshape(-1)]
        self._drop_stale()
        order, prefixes = _sorted(self._table.key[ids])
        ids, ordinals = ids[order], ordinals[order]
        self._table.state[ids] = COLD
        if len(self._ids):
            at = np.searchsorted(self._prefixes, prefixes)
            prefixes = np.insert(self._prefixes, at, prefixes)
            ids, ordinals = np.insert(self._ids, at, ids), np.insert(self._roots, at, ordinals)
        self._prefixes, self._ids, self._roots = prefixes, ids, ordinals
        self._table.n_cold = len(ids)

    def left(self, n: int) -> None:
        """``n`` blocks are cold no longer; their state says so already."""
        self._table.n_cold -= n
        if self.n == 0:
            self._empty()
        elif self.n * 2 < len(self._ids):
            self._drop_stale()

    def _drop_stale(self) -> None:
        keep = self._table.state[self._ids] == COLD
        keep[keep] = _prefixes(self._table.key[self._ids[keep]]) == self._prefixes[keep]
        if not keep.all():
            self._prefixes, self._ids, self._roots = self._prefixes[keep], self._ids[keep], self._roots[keep]

    def _places(self, keys: NDArray[np.uint8]) -> NDArray[np.int64]:
        """Where the entries of these keys stand, -1 without."""
        table = self._table
        probe = _prefixes(keys)
        places = np.full(len(keys), -1, np.int64)
        todo = np.arange(len(keys))
        at = np.searchsorted(self._prefixes, probe)
        while len(todo):
            inside = at < len(self._ids)
            todo, at = todo[inside], at[inside]
            alike = self._prefixes[at] == probe[todo]
            todo, at = todo[alike], at[alike]
            ids = self._ids[at]
            good = (table.state[ids] == COLD) & (table.key[ids] == keys[todo]).all(axis=1)
            places[todo[good]] = at[good]
            todo, at = todo[~good], at[~good] + 1
        return places

    def check(self) -> None:
        """Raises IntegrityError unless exactly the blocks in state COLD are found by their key. Slow."""
        cold = np.flatnonzero(self._table.state[: self._table.n_used] == COLD).astype(np.uint32)
        if len(cold) != self.n or not np.array_equal(self.find(self._table.key[cold]), cold):
            raise IntegrityError("the index is inconsistent: not true that every cold block is found by its key")
        if (self._table.parent[cold] == NO_PARENT).any():
            for block in cold[self._table.parent[cold] == NO_PARENT].tolist():
                self.root_key(block)


def _prefixes(keys: NDArray[np.uint8]) -> NDArray[np.uint64]:
    return np.ascontiguousarray(keys).view(np.uint64).reshape(-1, KEY_BYTES // 8)[:, 0]


def _wide(keys: NDArray[np.uint8]) -> NDArray[np.void]:
    return np.ascontiguousarray(keys).view(f"V{KEY_BYTES}").reshape(-1)


def _sorted(keys: NDArray[np.uint8]) -> tuple[NDArray[np.intp], NDArray[np.uint64]]:
    prefixes = _prefixes(keys)
    order = np.argsort(prefixes, kind="stable")
    return order, prefixes[order]


def _find_all(
    keys: NDArray[np.uint8], order: NDArray[np.intp], prefixes: NDArray[np.uint64], wanted: NDArray[np.uint8]
) -> NDArray[np.int64]:
    """Where in ``keys``, sorted by ``order`` to ``prefixes``, each of ``wanted`` stands, or -1."""
    probe = _prefixes(wanted)
    by_size = np.argsort(probe)  # neighbours are found in cached memory
    place = np.empty(len(probe), np.intp)
    place[by_size] = np.minimum(np.searchsorted(prefixes, probe[by_size]), max(len(keys) - 1, 0))
    out = order[place].astype(np.int64)
    same = (keys[out] == wanted).all(axis=1)
    for i in np.flatnonzero(~same & (prefixes[place] == probe)).tolist():  # another key with the same 8 bytes
        found = np.flatnonzero((keys == wanted[i]).all(axis=1))
        if len(found):
            out[i], same[i] = found[0], True
    out[~same] = -1
    return out


def _refuse_twins(
    keys: NDArray[np.uint8], order: NDArray[np.intp], prefixes: NDArray[np.uint64], twin: NDArray[np.intp]
) -> None:
    for prefix in np.unique(prefixes[twin]).tolist():
        alike = [keys[i].tobytes() for i in order[prefixes == prefix].tolist()]
        if len(set(alike)) < len(alike):
            raise BadInputError(f"a block key beginning {alike[0][:8].hex()} is given twice: give each block once")
