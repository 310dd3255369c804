"""The client for asyncio: the same client, whose calls are made on threads.

**Why threads.** There is one implementation of every call, and it blocks. A core without I/O under two drivers was
judged, and left: locks that span several round trips (a lease and the mappings that it needs are one step) and
requests that keep a connection to themselves while they wait would become states of that core, on the path where a
blocking caller spends 30 us in all. And a daemon has at most 32 requests of one client wait at a time, so a loop
could not have more of them under way.

**How they are shared.** Calls that await nothing but the daemon's answer go to one thread, in order: they share a
connection anyway. Copies have some of their own. Calls that wait for a slower tier have as many as there are
connections for that; if none gets free within ``timeout_s``, the call is made without waiting. (One whose caller was
cancelled keeps its thread until it is answered.) So quick calls go on however many wait, there are never more than 21
threads, and the loop's own thread never blocks.

**What that costs**, measured in pairs with the blocking client in the same run (two cores shared with other work, load
10 to 20; 7 runs of 20 pairs, medians of ratios): a lease of 64 blocks that is awaited and released takes 1.06 to 1.3
times as long, once 2.2 times; 100 at once take .6 to 1.03 times as long each.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvstore.client.awaiting import Granting, Lanes, Same, Side, asked, copied, direct, granted, waited
from kvstore.client.client import Client
from kvstore.client.family import FamilyHandle, FamilyLease
from kvstore.client.hybrid import GroupView, HybridHandle, HybridLease
from kvstore.client.lease import Held, Lease, WriteReservation
from kvstore.client.namespace import NamespaceHandle
from kvstore.errors import BadInputError, UnavailableError
from kvstore.types import Namespace

P = ParamSpec("P")
ResultT = TypeVar("ResultT")
BlockingT = TypeVar("BlockingT")
AsyncT = TypeVar("AsyncT")
HeldT = TypeVar("HeldT", bound=Held)


class AsyncHeld(Side[HeldT]):
    """What leases and reservations have in common; see ``Held``. ``async with`` lets go at the end.

    Sizes, views and addresses are had at once, without ``await``.
    """

    id = Same[int]()
    valid = Same[bool]()
    addresses = Same[NDArray[np.uint64]]()
    reason = Same[str]()
    view = direct(Held.view)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.let_go_soon()

    def __len__(self) -> int:
        return len(self.blocking)

    def __getitem__(self, i: int) -> NDArray[np.uint8]:
        return self.blocking[i]

    def __repr__(self) -> str:
        return f"Async{self.blocking!r}"

    def let_go_soon(self) -> None:
        raise NotImplementedError


class AsyncLease(AsyncHeld[Lease]):
    """See ``Lease``."""

    first_block = Same[int]()
    n_blocks = Same[int]()
    n_tokens = Same[int]()
    partial_tokens = Same[int]()
    n_pending = Same[int]()
    eta_s = Same[float]()
    n_nvme = Same[int]()
    tensor = direct(Lease.tensor)
    copy_into = copied(Lease.copy_into)
    renew = asked(Lease.renew)
    release = asked(Lease.release)

    def __bool__(self) -> bool:
        return bool(self.blocking)

    def let_go_soon(self) -> None:
        self.blocking.end("it was released")
        self.lanes.quick.soon(self.blocking.release)


class AsyncGroup(Side[GroupView]):
    """See ``GroupView``."""

    first_block = Same[int]()
    block_bytes = Same[int]()
    addresses = Same[NDArray[np.uint64]]()
    view = direct(GroupView.view)
    copy_into = copied(GroupView.copy_into)

    def __len__(self) -> int:
        return len(self.blocking)

    def __getitem__(self, i: int) -> NDArray[np.uint8]:
        return self.blocking[i]


class AsyncHybridLease(AsyncLease):
    """See ``HybridLease``."""

    blocking: HybridLease

    def group(self, group: int) -> AsyncGroup:
        """What is held of a group. Raises BadInputError for one that the spec doesn't have."""
        return AsyncGroup(self.lanes, self.blocking.group(group))


class AsyncReservation(AsyncHeld[WriteReservation]):
    """See ``WriteReservation``."""

    n_present = Same[int]()
    n_skipped = Same[int]()
    fill = copied(WriteReservation.fill)
    commit = copied(WriteReservation.commit)
    abort = asked(WriteReservation.abort)

    def let_go_soon(self) -> None:
        self.blocking.end("it was aborted")
        self.lanes.quick.soon(self.blocking.abort)


class AsyncFamilyLease(Side[FamilyLease]):
    """See ``FamilyLease``."""

    id = Same[int]()
    valid = Same[bool]()
    reason = Same[str]()
    first_block = Same[int]()
    n_blocks = Same[int]()
    n_tokens = Same[int]()
    partial_tokens = Same[int]()
    n_pending = Same[int]()
    eta_s = Same[float]()
    n_nvme = Same[int]()
    shard = granted(asked(FamilyLease.shard, lambda _, lease: lease.release()), AsyncLease)
    renew = asked(FamilyLease.renew)
    release = asked(FamilyLease.release)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.let_go_soon()

    def __bool__(self) -> bool:
        return bool(self.blocking)

    def __repr__(self) -> str:
        return f"Async{self.blocking!r}"

    def let_go_soon(self) -> None:
        self.blocking.end("it was released")
        self.lanes.quick.soon(self.blocking.release)


class AsyncNamespace(Side[NamespaceHandle]):
    """See ``NamespaceHandle``. ``lease`` and ``reserve`` are for ``async with``, or to be awaited."""

    namespace = Same[Namespace]()
    block_bytes = Same[int]()
    block_tokens = Same[int]()
    match = asked(NamespaceHandle.match)
    overlap = asked(NamespaceHandle.overlap)
    overlaps = asked(NamespaceHandle.overlaps)
    lease = granted(waited(NamespaceHandle.lease, "wait", undo=lambda _, lease: lease.release()), AsyncLease)
    get_into = waited(NamespaceHandle.get_into, "wait", copies=True)
    prefetch = waited(NamespaceHandle.prefetch, "wait")
    persist = waited(NamespaceHandle.persist, "wait_s")
    reserve = granted(asked(NamespaceHandle.reserve, lambda _, slots: slots.abort()), AsyncReservation)
    put = waited(NamespaceHandle.put, "durable_within_s", copies=True)
    pin = asked(NamespaceHandle.pin, NamespaceHandle.unpin)
    unpin = asked(NamespaceHandle.unpin)
    inspect = asked(NamespaceHandle.inspect)
    explain = asked(NamespaceHandle.explain)
    end_session = asked(NamespaceHandle.end_session)


class AsyncHybrid(Side[HybridHandle]):
    """See ``HybridHandle``."""

    namespace = Same[Namespace]()
    block_tokens = Same[int]()
    match = asked(HybridHandle.match)
    overlap = asked(HybridHandle.overlap)
    overlaps = asked(HybridHandle.overlaps)
    lease = granted(waited(HybridHandle.lease, "wait", undo=lambda _, lease: lease.release()), AsyncHybridLease)
    attach = granted(asked(HybridHandle.attach, lambda _, lease: lease.release()), AsyncHybridLease)
    get_into = waited(HybridHandle.get_into, "wait", copies=True)
    prefetch = waited(HybridHandle.prefetch, "wait")
    persist = waited(HybridHandle.persist, "wait_s")
    put = waited(HybridHandle.put, "durable_within_s", copies=True)
    pin = asked(HybridHandle.pin, HybridHandle.unpin)
    unpin = asked(HybridHandle.unpin)
    inspect = asked(HybridHandle.inspect)
    explain = asked(HybridHandle.explain)
    end_session = asked(HybridHandle.end_session)

    def reserve(self, tokens: ArrayLike, part: int = 0, **more: Any) -> Granting[AsyncReservation]:
        """See ``HybridHandle.reserve``."""
        return _reserve_part(self, tokens, part, **more)


_reserve: Callable[..., WriteReservation] = HybridHandle.reserve
_reserve_part = granted(asked(_reserve, lambda _, slots: slots.abort()), AsyncReservation)


class AsyncFamily(Side[FamilyHandle]):
    """See ``FamilyHandle``."""

    namespace = Same[Namespace]()
    block_tokens = Same[int]()
    match = asked(FamilyHandle.match)
    overlap = asked(FamilyHandle.overlap)
    overlaps = asked(FamilyHandle.overlaps)
    lease = granted(waited(FamilyHandle.lease, "wait", undo=lambda _, lease: lease.release()), AsyncFamilyLease)
    attach = granted(asked(FamilyHandle.attach, lambda _, lease: lease.release()), AsyncFamilyLease)
    prefetch = waited(FamilyHandle.prefetch, "wait")
    persist = waited(FamilyHandle.persist, "wait_s")
    pin = asked(FamilyHandle.pin, FamilyHandle.unpin)
    unpin = asked(FamilyHandle.unpin)
    position = direct(FamilyHandle.position)
    end_session = asked(FamilyHandle.end_session)

    def __len__(self) -> int:
        return len(self.blocking)

    @property
    def shards(self) -> tuple[AsyncNamespace, ...]:
        """What each rank stores through."""
        return tuple(AsyncNamespace(self.lanes, handle) for handle in self.blocking.shards)


def _opened(
    method: Callable[Concatenate[Any, P], BlockingT], kind: Callable[[Lanes, BlockingT], AsyncT]
) -> Callable[Concatenate[Side[Any], P], Coroutine[Any, Any, AsyncT]]:
    """A call that opens something, which is used as one of ``kind``."""
    call = asked(method)

    @functools.wraps(method)
    async def opened(self: Side[Any], /, *args: P.args, **kwargs: P.kwargs) -> AsyncT:
        return kind(self.lanes, await call(self, *args, **kwargs))

    return opened


def _arguments_of(
    kind: Callable[P, Client],
) -> Callable[[Callable[..., None]], Callable[Concatenate[AsyncClient, P], None]]:
    """For readers and type checkers: an ``__init__`` with the arguments of another class."""

    def same(init: Callable[..., None]) -> Callable[Concatenate[AsyncClient, P], None]:
        vars(init)["__wrapped__"] = vars(kind)["__init__"]
        return init

    return same


class AsyncClient(Side[Client]):
    """A client for one event loop, with the arguments of ``Client``: ``async with`` it, or await it and ``close`` it.

        async with AsyncClient(timeout_s=2.0) as client:
            cache = await client.open(namespace)
            async with cache.lease(tokens) as lease:
                ...

    Every call has the arguments, results and errors of the blocking one. When an ``await`` is cancelled, what the
    call brings later is given back: a lease is released, a reservation aborted, a pin taken out. It returns when
    nothing is copied from or to the caller's arrays any more, and a put stores no bytes of afterwards.
    """

    @_arguments_of(Client)
    def __init__(self, *arguments: Any, **more: Any) -> None:
        """Connects when it is entered or awaited, and raises then what ``Client`` raises."""
        self._make: Callable[[], Client] = partial(Client, *arguments, **more)

    tenant = Same[str]()
    healthy = Same[bool]()
    server_version = Same[str]()
    open = _opened(Client.open, AsyncNamespace)
    open_hybrid = _opened(Client.open_hybrid, AsyncHybrid)
    open_family = _opened(Client.open_family, AsyncFamily)
    attach = granted(asked(Client.attach, lambda _, lease: lease.release()), AsyncLease)
    stats = asked(Client.stats)
    latencies = asked(Client.latencies)
    namespaces = asked(Client.namespaces)
    claims = asked(Client.claims)
    tenants = asked(Client.tenants)
    clear = waited(Client.clear, "wait_s")
    wait_healthy = waited(Client.wait_healthy, "timeout_s")

    @classmethod
    def of(cls, client: Client) -> Self:
        """One that uses a client that is there, an embedded store for example, and closes it in the end."""
        if not isinstance(client, Client):
            raise BadInputError(f"client is {client!r:.80}; give a kvstore.Client")
        made = cls()
        made._make = lambda: client
        return made

    async def run(self, call: Callable[P, ResultT], *args: P.args, **kwargs: P.kwargs) -> ResultT:
        """``call(*args, **kwargs)`` on a thread of this client: for what ``blocking``, the client that makes the calls,
        can do and is not here."""
        work = partial(call, *args, **kwargs)
        for result in await self.lanes.wait(work, None):
            return result
        return await self.lanes.copies.do(work)

    def __await__(self) -> Generator[Any, Any, Self]:
        return self._connected().__await__()

    async def __aenter__(self) -> Self:
        return await self._connected()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _connected(self) -> Self:
        if "lanes" in vars(self):
            return self
        lanes = Lanes()
        try:
            client = await lanes.quick.do(self._make, lambda client: lanes.quick.soon(client.close))
        except BaseException:  # cancelled, too: the thread is not left behind
            await lanes.end()
            raise
        lanes.can_wait, lanes.timeout_s = lambda: client.can_wait, client.timeout_s
        super().__init__(lanes, client)
        return self

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            if name in ("lanes", "blocking"):
                raise UnavailableError("the client is not connected yet: use `async with`, or await it first")
            raise AttributeError(f"an AsyncClient has no {name!r}")

    async def close(self) -> None:
        """End the session and the threads; see ``Client.close``. Idempotent."""
        await self.lanes.quick.do(self.blocking.close)
        await self.lanes.end()
