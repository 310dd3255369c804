"""Which of a job's copies come from blocks that the device has in its own memory already."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from kvstore.client.hbm import HbmHeld
from kvstore.engine_adapter.gpu.copies import Copies
from kvstore.errors import DeviceError

_NOTHING = np.empty(0, np.uint64)


class InHbm:
    """Ranges of device addresses, of what is held of the store's HBM. One thread."""

    def __init__(self) -> None:
        self._starts = self._ends = _NOTHING

    def add(self, held: Iterable[HbmHeld]) -> None:
        """Copies from these blocks are told apart from now on."""
        parts = [each for each in held if len(each)]
        if not parts:
            return
        starts = np.concatenate([self._starts, *(each.addresses for each in parts)])
        ends = [self._ends, *(each.addresses + np.uint64(each.block_bytes) for each in parts)]
        order = np.argsort(starts, kind="stable")
        self._starts, self._ends = starts[order], np.maximum.accumulate(np.concatenate(ends)[order])

    def which(self, copies: Copies) -> NDArray[np.bool_]:
        """Which runs come from there, bool ``[n]``.

        Raises DeviceError for one that goes on behind what is held, which nobody could vouch for.
        """
        if not len(self._starts):
            return np.zeros(len(copies), np.bool_)
        # The last block that begins before the run ends: a run may go on from one block into the next.
        run_ends = copies.host + copies.sizes
        begin = np.searchsorted(self._starts, copies.host, "right") - 1
        end = np.searchsorted(self._starts, run_ends, "left") - 1
        starts_in: NDArray[np.bool_] = (begin >= 0) & (copies.host < self._ends[begin])
        ends_in = (end >= 0) & (run_ends <= self._ends[end])
        if bool((starts_in != ends_in).any()):
            raise DeviceError("a run lies in part in the store's HBM, in part elsewhere: it can't be one copy")
        return starts_in
