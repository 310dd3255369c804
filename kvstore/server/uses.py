"""Copies that the daemon makes for remote clients, and the end of what they copy from or to.

A remote client maps nothing: its bytes are copied by the daemon's threads. So the slots of its claims are free as
soon as the right ends and no thread is at them. A ``Use`` knows whether one is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import EndedError


class Use:
    """Who copies from or to the slots of one claim. ``with use:`` around each chunk, on any thread; no wait in it.

    ``with`` raises EndedError once ``end`` was called; whoever calls that learns when the last chunk is done.
    """

    def __init__(self, what: str) -> None:
        """``what`` names the claim in messages."""
        self.what = what
        self.filling = threading.Lock()
        """Held by the thread that fills the slots of a reservation: two would write over each other."""
        self.filled_bytes = 0
        """Bytes that are there, from its first block on. Changed by that thread."""
        self._lock = threading.Lock()
        self._n_copying = 0
        self._then: Callable[[], None] | None = None
        self._ended = False

    @property
    def ended(self) -> bool:
        """Whether ``end`` was called."""
        return self._ended

    def __enter__(self) -> Self:
        with self._lock:
            if self._ended:
                raise EndedError(f"{self.what} has ended: what is left of it can't be copied")
            self._n_copying += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._n_copying -= 1
            then = self._then if not self._n_copying else None
        if then is not None:
            then()

    def end(self, then: Callable[[], None]) -> bool:
        """No copy begins any more. True if none is under way, else the last one calls ``then`` when it is done."""
        with self._lock:
            self._ended = True
            if not self._n_copying:
                return True
            self._then = then
            return False


class Memory(NamedTuple):
    """The blocks of a claim: where they lie (uint64 [n]), and the bytes of each. Touch them inside ``with use``."""

    use: Use
    addresses: NDArray[np.uint64]
    block_bytes: int

    @property
    def n_bytes(self) -> int:
        return len(self.addresses) * self.block_bytes
