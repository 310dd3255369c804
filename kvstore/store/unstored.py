"""Remembers what was to be stored and was not, so that it can be said when somebody asks for it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvstore.lease import Reservation, Unstored
from kvstore.prefix_index.index import PrefixIndex
from kvstore.prefix_index.keys import part_key
from kvstore.types import KEY_BYTES

NOTED_ROWS_MAX = 256
"""So many rows behind the last stored one are noted at most: their keys have to be computed, and drive others out."""


def note_unstored(index: PrefixIndex, reservation: Reservation, stretches: Sequence[Unstored]) -> None:
    """These rows of a reservation's prompt were not stored. Costs a match and their keys; for what is rare."""
    path, history = reservation.path, index.history
    if not history or not stretches:
        return
    ids = index.match(reservation.root_key, path).ids
    n = min(len(ids), min(stretch.first_row for stretch in stretches))
    end = min(max(stretch.end_row for stretch in stretches), path.n_rows, n + NOTED_ROWS_MAX)
    keys = path.chain(index.table.key[ids[n - 1]].tobytes() if n else reservation.root_key, n, end)
    if reservation.part:
        parts = b"".join(part_key(key.tobytes(), reservation.part) for key in keys)
        keys = np.frombuffer(parts, np.uint8).reshape(-1, KEY_BYTES)
    for first_row, end_row, left in stretches:
        history.not_stored(keys[first_row - n : end_row - n], left)
