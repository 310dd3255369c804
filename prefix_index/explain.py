"""Why a match ends where it does."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

import numpy as np

from kvstore.prefix_index.block_table import STORED, BlockTable, Ids
from kvstore.prefix_index.lineage import frame_rows
from kvstore.prefix_index.rows import RowPath
from kvstore.prefix_index.search import Match, Search
from kvstore.prefix_index.tree import RadixTree, Stop, as_ids
from kvstore.types import TOKEN_BYTES

_NOTHING: Ids = np.empty(0, np.uint32)


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


class Content(StrEnum):
    """How what is stored with the same tokens differs from the prompt's next row: in what stands behind the tokens.

    SAME: not in that. OTHER: another image or sound. NONE: none is behind the stored ones. SOME: none is behind the
    prompt's.
    """

    SAME = ""
    OTHER = "other"
    NONE = "none"
    SOME = "some"


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
    content: Content = Content.SAME
    known: Ids = _NOTHING
    """Blocks of the prompt's leading rows that are in the tree: the match, a broken one, and what is behind it."""


def explain(tree: RadixTree, table: BlockTable, search: Search, root_key: bytes, path: RowPath) -> Explanation:
    """See ``PrefixIndex.explain``."""
    match = search.match(root_key, path)
    n_rows = len(match.ids)
    left_tokens = path.tail_tokens if n_rows == path.n_full_rows else path.row_bytes // path.unit_bytes
    if n_rows == path.n_rows or (n_rows == path.n_full_rows and match.partial_tokens == left_tokens):
        return Explanation(match, End.WHOLE, known=match.ids)
    root = tree.find_root(root_key, path)
    if root is None:
        return Explanation(match, End.EMPTY)
    stop = tree.walk(root, path, path.n_full_rows)
    if stop.n_rows > n_rows:
        return Explanation(match, End.BROKEN, known=as_ids(stop.ids))
    if stop.used == len(stop.node.ids) and not stop.node.n_kids:
        return Explanation(match, End.OPEN, known=match.ids)
    if path.unit_bytes == path.row_bytes:  # hashes: a row is another, and that is all
        return Explanation(match, End.DIFFERS, n_rows, known=match.ids)
    at = n_rows * path.block_tokens + match.partial_tokens
    here, stored = _token(path.row(n_rows), match.partial_tokens), _stored(table, match)
    return Explanation(match, End.DIFFERS, at, here, stored, _content(stop, path), match.ids)


def _content(stop: Stop, path: RowPath) -> Content:
    """Whether a block behind ``stop`` has the tokens of the next row, and something else behind them."""
    row, node = path.row(stop.n_rows), stop.node
    if len(row) < path.row_bytes:
        plain = covered = False
    elif stop.used < len(node.ids):
        plain, covered = node.rest.startswith(row, (stop.used - 1) * len(row)), False
    else:
        plain, covered = node.find(row) is not None, node.special is not None and node.special.has_tokens(row)
    if not path.has_extra(stop.n_rows):
        return Content.SOME if covered else Content.SAME
    return Content.OTHER if covered else Content.NONE if plain else Content.SAME


def _stored(table: BlockTable, match: Match) -> int:
    """The token that follows those that match in the block that comes closest."""
    if match.partial_id < 0 or table.state[match.partial_id] != STORED:
        return -1
    ((row, _),) = frame_rows(table, np.array([match.partial_id], np.uint32))
    return _token(row, match.partial_tokens)


def _token(row: bytes, at: int) -> int:
    part = row[at * TOKEN_BYTES : (at + 1) * TOKEN_BYTES]
    return int.from_bytes(part, "little") if len(part) == TOKEN_BYTES else -1
