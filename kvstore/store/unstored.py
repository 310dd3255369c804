"""Remembers what was to be stored and was not: the first block of each such stretch, by which it is asked for later."""

from __future__ import annotations

from kvstore.lease import Reservation
from kvstore.prefix_index.history import Left
from kvstore.prefix_index.index import PrefixIndex
from kvstore.prefix_index.keys import part_key

CHAIN_ROWS_MAX = 64
"""Behind more rows that are not stored either nothing is noted: their keys would have to be computed."""


def note_unstored(index: PrefixIndex, reservation: Reservation, row: int, left: Left) -> None:
    """The blocks of a reservation from ``row`` on were not stored. Costs a match and a key; for what is rare."""
    path = reservation.path
    if not index.history or row >= path.n_rows:
        return
    ids = index.match(reservation.root_key, path).ids
    n = min(len(ids), row)
    if row - n > CHAIN_ROWS_MAX:
        return
    parent_key = index.table.key[ids[n - 1]].tobytes() if n else reservation.root_key
    key = path.chain(parent_key, n, row + 1)[-1].tobytes()
    index.history.not_stored(part_key(key, reservation.part) if reservation.part else key, left)
