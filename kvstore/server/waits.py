"""Waiting for what the store is doing, without asking it again and again."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Iterable
from typing import Protocol

from kvstore.errors import BadInputError

WAIT_S_MAX = 86400.0
TURN_S = 0.0005
"""How long steps go on before others have their turn."""


class Finishing(Protocol):
    """Something under way, which tells when it is done."""

    @property
    def done(self) -> bool: ...

    def on_done(self, callback: Callable[[], None]) -> None: ...


def checked_wait_s(wait_s: float) -> float:
    """Seconds that a request may wait; raises BadInputError for what is no such number."""
    if not (math.isfinite(wait_s) and 0 <= wait_s <= WAIT_S_MAX):
        raise BadInputError(f"wait_s is {wait_s!r}; it must be from 0 (don't wait) to {WAIT_S_MAX:.0f} seconds")
    return wait_s


async def paced(steps: Iterable[object]) -> None:
    """Take steps, each of them short, and let others have their turn every now and then."""
    loop = asyncio.get_running_loop()
    turn_ends_s = loop.time() + TURN_S
    for _ in steps:
        if loop.time() >= turn_ends_s:
            await asyncio.sleep(0)
            turn_ends_s = loop.time() + TURN_S


async def wait_for(finishing: Finishing, wait_s: float) -> None:
    """Until it is done or the time is up, whichever comes first."""
    if finishing.done:
        return
    done = asyncio.get_running_loop().create_future()
    finishing.on_done(lambda: None if done.done() else done.set_result(None))
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(wait_s):
            await done
