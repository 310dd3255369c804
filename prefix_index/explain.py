"""Why a match ends where it does."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

import numpy as np

from kvstore.prefix_index.block_table import STORED, BlockTable
from kvstore.prefix_index.lineage import frame_rows
from kvstore.prefix_index.rows import RowPath
from kvstore.prefix_index.search import Match, Search
from kvstore.prefix_index.tree import RadixTree
from kvstore.types import TOKEN_BYTES


class End(StrEnum):
    """What is behind the last block that matches.

    WHOLE: nothing, the whole prompt matches. EMPTY: nothing at all is stored below the root. OPEN: the prompt goes on,
    nothing stored does. DIFFERS: what is stored goes on in another way. BROKEN: the next block is known, its bytes
    are lost.
    """

    WHOLE = "whole"
    EMPTY = "empty"
    OPEN = "open"
    DIFFERS = "differs"
    BROKEN = "broken"


class Explanation(NamedTuple):
    """``match`` as the index gives it. ``differs_at``: the first token of the prompt for which the stored block that
    comes closest has another one (or none), -1 unless that is how the match ends; of hash rows the row counts."""

    match: Match
    end: End
    differs_at: int = -1
    here: int = -1
    """The prompt's token there."""
    stored: int = -1
    """That of the stored block; -1 where it ends there, or where something else than tokens differs."""


def explain(tree: RadixTree, table: BlockTable, search: Search, root_key: bytes, path: RowPath) -> Explanation:
    """See ``PrefixIndex.explain``."""
    match = search.match(root_key, path)
    n_rows = len(match.ids)
    left_tokens = path.tail_tokens if n_rows == path.n_full_rows else path.row_bytes // path.unit_bytes
    if n_rows == path.n_rows or (n_rows == path.n_full_rows and match.partial_tokens == left_tokens):
        return Explanation(match, End.WHOLE)
    root = tree.find_root(root_key, path)
    if root is None:
        return Explanation(match, End.EMPTY)
    stop = tree.walk(root, path, path.n_full_rows)
    if stop.n_rows > n_rows:
        return Explanation(match, End.BROKEN)
    if stop.used == len(stop.node.ids) and not stop.node.n_kids:
        return Explanation(match, End.OPEN)
    if path.unit_bytes == path.row_bytes:  # hashes: a row is another, and that is all
        return Explanation(match, End.DIFFERS, n_rows)
    at = n_rows * path.block_tokens + match.partial_tokens
    return Explanation(match, End.DIFFERS, at, _token(path.row(n_rows), match.partial_tokens), _stored(table, match))


def _stored(table: BlockTable, match: Match) -> int:
    """The token that follows those that match in the block that comes closest."""
    if match.partial_id < 0 or table.state[match.partial_id] != STORED:
        return -1
    ((row, _),) = frame_rows(table, np.array([match.partial_id], np.uint32))
    return _token(row, match.partial_tokens)


def _token(row: bytes, at: int) -> int:
    part = row[at * TOKEN_BYTES : (at + 1) * TOKEN_BYTES]
    return int.from_bytes(part, "little") if len(part) == TOKEN_BYTES else -1
