"""Which blocks of a prompt clients have reserved and not committed yet.

Prompts with the same block can have different blocks before it, which only comparing them shows. So much of that is
done for one question at most that it takes a millisecond or so, however many reservations there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvstore.lease import Reservation
from kvstore.prefix_index.rows import RowPath
from kvstore.store.requests import Prompt

COMPARED_BYTES_MAX = 4 << 20
"""Of prompts, for one question: a million tokens. What would take more is not looked at."""
GLANCE_BYTES = 256
"""Of the block itself, looked at before all that is before it."""
_EXTRA_BYTES = 512
"""What comparing the extra keys of one block counts as: it takes as long."""


def is_written(reservations: Iterable[Reservation], prompt: Prompt, row: int, part: int = 0) -> bool | None:
    """Whether somebody is writing a row of the prompt; None if that isn't known."""
    is_known = True
    for end in _ends(reservations, prompt, row, part):
        if end is not None:
            return True
        is_known = False
    return False if is_known else None


def written_end(reservations: Iterable[Reservation], prompt: Prompt, row: int, part: int = 0) -> int:
    """Up to which row of the prompt somebody is writing, as far as is known, if ``row`` is being written; else 0."""
    return max((end for end in _ends(reservations, prompt, row, part) if end is not None), default=0)


def _ends(reservations: Iterable[Reservation], prompt: Prompt, row: int, part: int) -> Iterator[int | None]:
    """The ends of reservations of this row, one by one; None for one of which it isn't known whether it is."""
    path, left = prompt.path, COMPARED_BYTES_MAX
    seen, cost = _glance(path, row), (row + 1) * path.row_bytes + _EXTRA_BYTES * path.n_extras_before(row + 1)
    for each in reservations:
        if each.root_key != prompt.root_key or each.part != part or each.ended:
            continue
        first_row = each.first_block + each.n_present
        end = first_row + (len(each.slots) or each.n_wanted)
        if not first_row <= row < end or _glance(each.path, row) != seen:
            continue
        if each.path is path:
            yield end
        elif cost > left:
            yield None
        else:
            left -= cost
            if path.starts_as(each.path, row + 1):
                yield end


def _glance(path: RowPath, row: int) -> bytes:
    start = row * path.row_bytes
    return bytes(path.data[start : start + min(path.row_bytes, GLANCE_BYTES)])
