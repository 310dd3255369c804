"""Blocks that were to be written to NVMe and are not: counted, and remembered for whoever asks why they are gone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvstore.metrics import Counters
from kvstore.prefix_index.history import Unwritten
from kvstore.prefix_index.index import PrefixIndex


class Skips:
    """Of one offloader."""

    def __init__(self, index: PrefixIndex, counters: Counters) -> None:
        self._index = index
        self._counters = counters
        counters.add("offload_skipped_blocks", 0)
        counters.add("offload_declined_blocks", 0)

    def add(self, blocks: Sequence[int], why: Unwritten) -> None:
        """These blocks are skipped for now; their next access offers them again."""
        if blocks:
            is_choice = why is Unwritten.DECLINED
            self._counters.add("offload_declined_blocks" if is_choice else "offload_skipped_blocks", len(blocks))
            self._index.history.not_written(np.array(blocks, np.intp), why)
