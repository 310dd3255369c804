"""A request that waits until blocks are durable."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kvstore.prefix_index.block_table import Ids
from kvstore.waiting import Awaited


class Persist(Awaited):
    """What a request that wants durable blocks waits for. ``rest``: blocks that have yet to be queued, in order."""

    def __init__(self, ids: Ids, unwritten: list[int], late: list[int]) -> None:
        """``unwritten``: those that NVMe doesn't hold; ``late``: those that it holds under names that are to change."""
        super().__init__(ids, [*unwritten, *late])
        self.rest = deque(unwritten)
        self.n_blocks = len(ids)
        """Blocks of the prompt that it is about; with parts of blocks there are more ``ids``."""
        self.n_durable: Callable[[], int] | None = None
        """Says how many are durable where that isn't simply the leading ones of ``ids``."""
