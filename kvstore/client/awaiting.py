"""From a blocking method to one that can be awaited, with the same arguments.

``asked``, ``copied``, ``waited`` and ``granted`` say on which threads it is done and what is given back if nobody takes
the result; ``direct`` and ``Same`` pass on what never blocks.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar, overload

from kvstore.client.hands import Hands
from kvstore.client.waiting import CONNECTIONS_MAX, WaitRule

P = ParamSpec("P")
ResultT = TypeVar("ResultT")
BlockingT = TypeVar("BlockingT")
BlockingT_co = TypeVar("BlockingT_co", covariant=True)

COPIES_MAX = 4
"""Threads that copy for one client."""

_UNWAITED = {"wait": "best_effort", "wait_s": 0.0, "durable_within_s": 0.0, "timeout_s": 0.0}
"""Parameters that say how long may be waited, and what they are to be for not at all."""


class Lanes:
    """The threads of one client. Made and used on one loop's thread."""

    def __init__(self) -> None:
        self.quick = Hands("quick", 1)
        """Calls that take as long as the daemon takes to answer."""
        self.copies = Hands("copies", COPIES_MAX)
        self._waits = Hands("waits", CONNECTIONS_MAX)
        self._places = asyncio.Semaphore(CONNECTIONS_MAX)
        self.can_wait: Callable[[], bool] = bool
        """Whether there is a slower tier to wait for; else no call waits."""
        self.timeout_s = 0.0

    async def wait(self, work: Callable[[], ResultT], undo: Undo[ResultT] | None) -> list[ResultT]:
        """[result] of a call that may wait; [] if no thread got free for it within ``timeout_s``."""
        try:
            async with asyncio.timeout(self.timeout_s):
                await self._places.acquire()
        except TimeoutError:
            return []
        # A call whose caller was cancelled keeps its thread, and so its place, until it is answered.
        return [await self._waits.do(work, undo, self._places.release)]

    async def end(self) -> None:
        """End all threads; their calls end first."""
        for hands in (self._waits, self.copies, self.quick):
            await hands.end()


class Side(Generic[BlockingT]):
    """What can be awaited of one blocking object."""

    def __init__(self, lanes: Lanes, blocking: BlockingT) -> None:
        self.lanes = lanes
        self.blocking = blocking


Undo = Callable[[ResultT], object]


class Same(Generic[ResultT]):
    """An attribute of the blocking object, by the same name; asking for it never blocks."""

    def __set_name__(self, owner: type[object], name: str) -> None:
        self._name = name

    @overload
    def __get__(self, side: None, owner: type[object]) -> Self: ...
    @overload
    def __get__(self, side: Side[Any], owner: type[object]) -> ResultT: ...
    def __get__(self, side: Side[Any] | None, owner: type[object]) -> Self | ResultT:
        if side is None:
            return self
        value: ResultT = getattr(side.blocking, self._name)
        return value


def direct(method: Callable[Concatenate[Any, P], ResultT]) -> Callable[Concatenate[Side[Any], P], ResultT]:
    """The same call: it never blocks."""

    @functools.wraps(method)
    def call(self: Side[Any], /, *args: P.args, **kwargs: P.kwargs) -> ResultT:
        return _bound(self, method)(*args, **kwargs)

    return call


def asked(
    method: Callable[Concatenate[Any, P], ResultT], undo: Callable[[Any, ResultT], object] | None = None
) -> Callable[Concatenate[Side[Any], P], Coroutine[Any, Any, ResultT]]:
    """A call that awaits the daemon's answer. ``undo(blocking, result)`` gives back what nobody takes; it may block."""

    @functools.wraps(method)
    def call(self: Side[Any], /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, ResultT]:
        work = partial(_bound(self, method), *args, **kwargs)
        return self.lanes.quick.do(work, _later(self, undo))

    return call


def copied(
    method: Callable[Concatenate[Any, P], ResultT],
) -> Callable[Concatenate[Side[Any], P], Coroutine[Any, Any, ResultT]]:
    """A call that copies memory."""

    @functools.wraps(method)
    def call(self: Side[Any], /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, ResultT]:
        return self.lanes.copies.do(partial(_bound(self, method), *args, **kwargs))

    return call


def waited(
    method: Callable[Concatenate[Any, P], ResultT],
    parameter: str,
    *,
    copies: bool = False,
    undo: Callable[[Any, ResultT], object] | None = None,
) -> Callable[Concatenate[Side[Any], P], Coroutine[Any, Any, ResultT]]:
    """A call that may wait as long as ``parameter`` says; and that copies, perhaps. ``undo`` as in ``asked``."""
    position, default = _place_of(method, parameter)

    @functools.wraps(method)
    async def call(self: Side[Any], /, *args: P.args, **kwargs: P.kwargs) -> ResultT:
        bound, lanes, giving_back = _bound(self, method), self.lanes, _later(self, undo)
        given = args[position] if len(args) > position else kwargs.get(parameter, default)
        if lanes.can_wait() and _waits(given):
            for result in await lanes.wait(partial(bound, *args, **kwargs), giving_back):
                return result
            unwaited = {**kwargs, parameter: _UNWAITED[parameter]}
            work = partial(bound, *args[:position], **unwaited)
        else:
            work = partial(bound, *args, **kwargs)
        return await (lanes.copies if copies else lanes.quick).do(work, giving_back)

    return call


class Releasable(Protocol):
    """What must be let go of."""

    def __init__(self, lanes: Lanes, blocking: Any) -> None: ...

    def let_go_soon(self) -> None:
        """Have that done; never blocks."""
        ...


ReleasableT = TypeVar("ReleasableT", bound=Releasable)


class Granting(Generic[ReleasableT]):
    """Something that will be held: ``await`` it, or ``async with`` it, which lets go of it at the end."""

    def __init__(self, coming: Coroutine[Any, Any, ReleasableT]) -> None:
        self._coming = coming

    def __await__(self) -> Generator[Any, Any, ReleasableT]:
        return self._coming.__await__()

    async def __aenter__(self) -> ReleasableT:
        self._held = await self._coming
        return self._held

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held.let_go_soon()


def granted(
    call: Callable[Concatenate[Side[Any], P], Coroutine[Any, Any, Any]], kind: type[ReleasableT]
) -> Callable[Concatenate[Side[Any], P], Granting[ReleasableT]]:
    """What ``call`` brings, as one of ``kind``."""

    @functools.wraps(call)
    def granting(self: Side[Any], /, *args: P.args, **kwargs: P.kwargs) -> Granting[ReleasableT]:
        return Granting(made(call(self, *args, **kwargs), self.lanes))

    async def made(coming: Coroutine[Any, Any, Any], lanes: Lanes) -> ReleasableT:
        return kind(lanes, await coming)

    return granting


def _bound(side: Side[Any], method: Callable[..., ResultT]) -> Callable[..., ResultT]:
    """The method of the object that is there, which may have its own."""
    found: Callable[..., ResultT] = getattr(side.blocking, method.__name__)
    return found


def _later(side: Side[Any], undo: Callable[[Any, ResultT], object] | None) -> Undo[ResultT] | None:
    if undo is None:
        return None
    blocking, quick = side.blocking, side.lanes.quick
    return lambda result: quick.soon(partial(undo, blocking, result))


def _place_of(method: Callable[..., Any], name: str) -> tuple[int, object]:
    """After how many arguments a parameter may be given by place (never: more than there can be), and its default."""
    parameters = list(inspect.signature(method).parameters.values())[1:]  # without self
    for position, each in enumerate(parameters):
        if each.name == name:
            by_place = each.kind is not inspect.Parameter.KEYWORD_ONLY
            return position if by_place else len(parameters), each.default
    raise TypeError(f"{method.__qualname__} has no parameter {name}")


def _waits(value: object) -> bool:
    """Whether a call with this value may wait. For nonsense it does not matter: the call raises."""
    if isinstance(value, WaitRule):
        return value.base_s > 0 or value.per_1k_tokens_s > 0
    return value == "wait" if isinstance(value, str) else bool(value)
