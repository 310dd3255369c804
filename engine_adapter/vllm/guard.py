"""Nothing that goes wrong in here goes up into the engine: it is counted, logged once, and the cache does less."""

from __future__ import annotations

import logging
import traceback
from types import TracebackType
from typing import Self

from kvstore.engine_adapter.counters import SharedCounters

logger = logging.getLogger("vllm.kvstore")


class Guard:
    """``with guard("what"):`` swallows every Exception of the block. Usable from several threads."""

    def __init__(self, counters: SharedCounters) -> None:
        self._counters = counters
        self._told: set[tuple[str, str]] = set()

    def __call__(self, what: str) -> _Guarded:
        return _Guarded(self, what)

    def swallow(self, what: str, error: Exception) -> None:
        """Count an error and say it the first time that it comes from there."""
        self._counters.add("errors")
        kind = what, type(error).__name__
        if kind in self._told:
            return
        self._told.add(kind)
        trace = "".join(traceback.format_exception(error))
        logger.error(
            "kvstore: %s failed; the engine goes on without what it would have found (said once)\n%s", what, trace
        )

    def say_once(self, what: str, message: str) -> None:
        """A warning that is worth one line, whatever its number."""
        if (what, "") not in self._told:
            self._told.add((what, ""))
            logger.warning("kvstore: %s", message)


class _Guarded:
    def __init__(self, guard: Guard, what: str) -> None:
        self._guard, self._what = guard, what

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self._guard.swallow(self._what, error)
        return True
