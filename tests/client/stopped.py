"""Copies that stand still before they begin, until a test lets them go on."""

from __future__ import annotations

import threading
from typing import Any

import pytest

WAIT_S = 20.0


class Stopped:
    """The next call of ``module.name`` stands still."""

    def __init__(self, patch: pytest.MonkeyPatch, module: object, name: str) -> None:
        self.reached, self._go = threading.Event(), threading.Event()
        function = getattr(module, name)

        def stopped(*arguments: Any, **more: Any) -> Any:
            if not self.reached.is_set():
                self.reached.set()
                assert self._go.wait(WAIT_S), "nobody let it go on"
            return function(*arguments, **more)

        patch.setattr(module, name, stopped)

    def let_go(self) -> None:
        self._go.set()


class Thread:
    """A call on a thread."""

    def __init__(self, call: Any) -> None:
        self._outcome: list[Any] = []

        def work() -> None:
            try:
                self._outcome.append(call())
            except Exception as error:
                self._outcome.append(error)

        self._thread = threading.Thread(target=work, daemon=True)
        self._thread.start()

    def outcome(self) -> Any:
        """What it returned or raised, when it has ended."""
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        return self._outcome[0]
