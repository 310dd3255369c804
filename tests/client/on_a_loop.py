"""The client for asyncio with the interface of the blocking one, so that the same tests run over it."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Self

from kvstore.client.aio import AsyncClient
from kvstore.client.awaiting import Side

WAIT_S = 60.0


class Loop:
    """An event loop on a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="loop", daemon=True)
        self._thread.start()

    def call(self, function: Any, *arguments: Any, **more: Any) -> Any:
        """What a function returns that is called there, or what comes of that if it is to be awaited."""

        async def result() -> Any:
            value = function(*arguments, **more)
            return await value if inspect.isawaitable(value) else value

        return self.taken(asyncio.run_coroutine_threadsafe(result(), self._loop).result(WAIT_S))

    def taken(self, value: Any) -> Any:
        """A value as the tests see it."""
        if isinstance(value, tuple) and value and isinstance(value[0], Side):
            return tuple(map(self.taken, value))
        return OnALoop(self, value) if isinstance(value, Side) else value

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        self._loop.close()


class OnALoop:
    """What is asked of it is awaited on the loop; what the awaitable side does not have is the blocking one's."""

    def __init__(self, loop: Loop, side: Side[Any]) -> None:
        self._loop = loop
        self._side = side

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._side if hasattr(type(self._side), name) else self._side.blocking, name)
        return partial(self._loop.call, value) if inspect.ismethod(value) else self._loop.taken(value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("_loop", "_side"):
            super().__setattr__(name, value)
        else:
            setattr(self._side.blocking, name, _blocking(value))

    def __enter__(self) -> Self:
        self._loop.call(self._side.__aenter__)  # type: ignore[attr-defined]
        return self

    def __exit__(self, *raised: object) -> None:
        self._loop.call(self._side.__aexit__, *raised)  # type: ignore[attr-defined]

    def __len__(self) -> int:
        return len(self._side)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return bool(self._side)

    def __getitem__(self, i: int) -> Any:
        return self._side[i]  # type: ignore[index]

    def __repr__(self) -> str:
        return repr(self._side).removeprefix("Async")


def _blocking(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_blocking, value))
    return value._side.blocking if isinstance(value, OnALoop) else value


@contextmanager
def loop_clients() -> Iterator[Any]:
    """Gives what makes one from the arguments of ``Client``; all are closed at the end."""
    loop, made = Loop(), []

    def connect(*arguments: Any, **more: Any) -> Any:
        client = AsyncClient(*arguments, **more)
        loop.call(client.__aenter__)
        made.append(client)
        return ConnectedOnALoop(loop, client)

    try:
        yield connect
        for client in made:
            loop.call(client.close)
    finally:
        loop.stop()


class ConnectedOnALoop(OnALoop):
    """A client; it is connected already, and stays a client of its own when it is entered."""

    def __enter__(self) -> Self:
        return self
