"""Waiting for blocks: several requests may await the same ones, each is told when its own are settled."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.integer[Any]]


class Awaited:
    """Blocks that one request waits for. Done when each was settled, whether well or in vain."""

    def __init__(self, ids: Ids, waiting: Iterable[int]) -> None:
        """``ids``: all blocks that it concerns; ``waiting``: those that are under way."""
        self.ids = ids
        self.waiting = set(waiting)
        self.failed: dict[int, str] = {}
        self.ended = False
        self._callbacks: list[Callable[[], None]] = []

    @property
    def done(self) -> bool:
        """Nothing is waited for any more."""
        return not self.waiting

    @property
    def n_waiting(self) -> int:
        """Blocks still under way."""
        return len(self.waiting)

    def on_done(self, callback: Callable[[], None]) -> None:
        """Call it once when done, from the store's thread; at once if that is now."""
        if self.done:
            callback()
        else:
            self._callbacks.append(callback)

    def end(self) -> None:
        """Nobody waits for this any more: callbacks are dropped."""
        self.ended = True
        self.waiting.clear()
        self._callbacks.clear()

    def settle(self, block: int, why: str = "") -> None:
        """One of the blocks is no longer under way; ``why`` says what became of it, if it is not what was wanted."""
        if why and block in self.waiting:
            self.failed[block] = why
        self.waiting.discard(block)
        if not self.waiting:
            callbacks, self._callbacks = self._callbacks, []
            for callback in callbacks:
                callback()


class Waiters:
    """Who waits for which block."""

    def __init__(self) -> None:
        self._of: dict[int, list[Awaited]] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._of

    def add(self, awaited: Awaited, blocks: Iterable[int]) -> None:
        """Tell it about these blocks, which it waits for."""
        for block in blocks:
            self._of.setdefault(block, []).append(awaited)

    def settle(self, ids: Iterable[int], why: str = "") -> None:
        """These blocks are no longer under way: whoever waited for them is told, with what was in the way if any."""
        for block in ids:
            for awaited in self._of.pop(block, ()):
                awaited.settle(block, why)

    def remove(self, awaited: Awaited) -> None:
        """It waits no longer."""
        for block in awaited.waiting:
            others = self._of.get(block)
            if others is not None and awaited in others:
                others.remove(awaited)
                if not others:
                    del self._of[block]
        awaited.end()
