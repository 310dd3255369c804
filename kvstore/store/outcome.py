"""What became of a lookup: what of it was a hit, and what ended the hit."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.metrics import Counters
from kvstore.onboard import MISSED_BY_LOADS, Load
from kvstore.prefix_index.block_table import At

NOT_FOUND, NOT_ASKED, GONE = "not_found", "not_asked", "gone"
MISSES = {why: f"miss_blocks_{why}" for why in (NOT_FOUND, NOT_ASKED, *MISSED_BY_LOADS, GONE)}
"""The counter of each reason why blocks of a prompt were not used."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A prompt of ``n_rows`` blocks, of which ``n_blocks`` (``n_tokens`` tokens) can be used now.

    ``n_nvme`` of these were read from NVMe for it, ``n_hbm`` are in HBM, for who reads there. ``n_unused`` more are
    stored, and ``why`` says what keeps them from being used. ``max_blocks`` is what was asked for, 0 = all.
    """

    n_rows: int
    n_blocks: int
    n_tokens: int
    n_nvme: int
    token_bytes: float
    n_unused: int = 0
    why: str = GONE
    max_blocks: int = 0
    n_hbm: int = 0

    def count(self, counters: Counters) -> None:
        """Add it to the counters. A block of which only some tokens match counts as not found."""
        add = counters.add
        add("lookups")
        add("lookup_blocks", self.n_rows)
        add("hit_blocks", self.n_blocks)
        add("hit_blocks_nvme", self.n_nvme)
        add("hit_blocks_hbm", self.n_hbm)
        add("hit_tokens", self.n_tokens)
        add("hit_bytes", int(self.n_tokens * self.token_bytes))
        add("lookup_hits", self.n_tokens > 0)
        n_missed = self.n_rows - self.n_blocks
        if n_missed <= 0:
            add("lookup_full_hits")
            return
        n_unused = min(self.n_unused, n_missed)
        if n_unused:
            add(MISSES[self.why], n_unused)
        if n_missed > n_unused:
            all_asked = not 0 < self.max_blocks <= self.n_blocks + n_unused
            add(MISSES[NOT_FOUND if all_asked else NOT_ASKED], n_missed - n_unused)


def unused(load: Load | None, stored: At, n_there: int) -> tuple[int, str]:
    """How many of the blocks that are stored are not there for a request, and why the first of them is not.

    ``load`` is what the request has had read, if anything: what broke in it is not found any more, but was stored.
    """
    if load is not None and len(load.ids) > len(stored):
        stored = load.ids
    if len(stored) <= n_there:
        return 0, GONE
    return len(stored) - n_there, load.why(int(stored[n_there])) if load is not None else GONE
