"""Which tokens a cache holds, to see whether a sequence that ``generate`` is given begins with them.

``generate`` passes on to the model only what is not in the cache, so that a forward can't tell: another prompt as long
with the same last tokens looks the same there.
"""

from __future__ import annotations

import numpy as np

from kvstore.engine_adapter.transformers.checks import Ids, wrong_tokens
from kvstore.engine_adapter.transformers.rows import Rows


class HeldTokens:
    """The tokens of a cache's columns: up to the prompt's end its own (forwards are checked), then what is here."""

    def __init__(self, rows: Rows, n_columns: int) -> None:
        """``rows``: the prompt; ``n_columns``: so many of its columns the cache begins with."""
        self._rows = rows
        self._end = n_columns
        self._after: list[Ids] = []
        """The columns behind the prompt, uint32 [rows of the cache, columns] each."""
        self.known = True
        """Whether there is a token for each column; if not, ``wrong`` refuses everything."""

    def add(self, first: int, ids: Ids) -> None:
        """Columns ``first ..`` are computed with ``ids``, uint32 [rows of the cache, columns]; none are behind."""
        self.cut(first)
        self.known = self.known and self._end == first
        if (after := ids[:, max(self._rows.n_columns - first, 0) :]).shape[1]:
            self._after.append(after)
        self._end = first + ids.shape[1]

    def cut(self, n_columns: int) -> None:
        """Only the first ``n_columns`` columns are left; nothing changes if there are no more."""
        if n_columns >= self._end:
            return
        self._end = n_columns
        n_kept = max(n_columns - self._rows.n_columns, 0)
        self._after = [np.concatenate(self._after, axis=1)[:, :n_kept]] if n_kept else []

    def forget(self) -> None:
        """Rows changed in a way that is not followed here."""
        self.known = False
        self._after.clear()

    def repeat(self, repeats: int) -> None:
        """Each row of the cache stands ``repeats`` times in it from now on."""
        self._after = [np.repeat(each, repeats, axis=0) for each in self._after]

    def copy(self) -> HeldTokens:
        """For a copy of the cache."""
        copied = HeldTokens(self._rows, self._end)
        copied._after, copied.known = list(self._after), self.known
        return copied

    def wrong(self, ids: Ids, n_held: int, repeats: int) -> str:
        """What is wrong with a sequence from its first column on, or nothing.

        ``ids``: uint32 [batch * repeats, columns]; ``n_held``: how many columns the cache holds. The prompt must be the
        prompt's also where it is not computed yet, and something must be left to compute.
        """
        if n_held and (not self.known or self._end < n_held):
            return "the cache does not know which tokens it holds any more (beams, embeddings, or rows that changed)"
        if n_held >= ids.shape[1]:
            return f"{ids.shape[1]} tokens were given, but the cache holds {n_held} already"
        if said := wrong_tokens(self._rows, ids, 0, repeats):
            return said
        first = self._rows.n_columns
        if n_held <= first:
            return ""
        held = np.concatenate(self._after, axis=1)[:, : n_held - first]
        given = ids[:, first:n_held]
        n_rows = max(len(held), len(given))
        if n_rows % len(held) or n_rows % len(given):
            return f"{len(given)} rows were given, but the cache holds {len(held)}"
        same = np.repeat(held, n_rows // len(held), axis=0) == np.repeat(given, n_rows // len(given), axis=0)
        if same.all():
            return ""
        row, column = np.argwhere(~same)[0].tolist()
        return f"row {row} goes on with other tokens than the cache holds, from token {first + column} on"
