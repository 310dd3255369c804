"""Which blocks of a prompt clients have reserved and not committed yet."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvstore.lease import Reservation
from kvstore.prefix_index.rows import RowPath
from kvstore.store.requests import Prompt


def written_end(reservations: Iterable[Reservation], prompt: Prompt, row: int, part: int = 0) -> int:
    """Up to which row of the prompt somebody is writing, if ``row`` is being written; else 0."""
    end = 0
    for each in reservations:
        if each.root_key != prompt.root_key or each.part != part or each.ended:
            continue
        first_row = each.first_block + each.n_present
        each_end = first_row + (len(each.slots) or each.n_wanted)
        if first_row <= row < each_end and _are_same(each.path, prompt.path, row + 1):
            end = max(end, each_end)
    return end


def _are_same(one: RowPath, other: RowPath, n_rows: int) -> bool:
    """Whether two paths have the same first rows, ``n_rows`` of them."""
    if one.has_extras or other.has_extras:
        return all(one.child_key(row) == other.child_key(row) for row in range(n_rows))
    n_bytes = n_rows * one.row_bytes
    mine, others = (np.frombuffer(path.data[:n_bytes], np.uint8) for path in (one, other))
    return np.array_equal(mine, others)
