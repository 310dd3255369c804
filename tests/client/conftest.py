"""The tests of this folder run over every transport: one interface, whatever lies between client and store.

``TRANSPORTS`` says how each is set up. A test that takes ``client`` (or ``place``, or ``serve``) runs once per
transport. One that only some can pass says what it needs and why:

    @pytest.mark.needs("shared_memory", reason="...")

``shared_memory``: leased blocks lie in place, in memory that the store and its clients share.
``processes``: another process can connect too, with ``Client(place.target)``.
``fork``: so can a forked child.
``unix_socket``: the test looks at the connections of the Unix socket themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import pytest

from kvstore.client import Client, NamespaceHandle
from kvstore.clock import ManualClock
from kvstore.config import DaemonConfig, GrpcOptions
from kvstore.embedded import Embedded
from kvstore.types import Namespace
from tests.client.on_a_loop import loop_clients
from tests.client.scene import spec_of

TIMEOUT_S = 5.0


class Connect(Protocol):
    """One more client of the store, ``TIMEOUT_S`` unless told otherwise; arguments as of ``Client``."""

    def __call__(self, *, tenant: str = "default", **arguments: Any) -> Client: ...


@dataclass(frozen=True, slots=True)
class Place:
    """A store that runs, and how clients come to it."""

    connect: Connect
    target: str | None = None
    """What another process gives to ``Client``."""


class Start(Protocol):
    """Starts the fixtures' daemon (``DaemonThread``), with the settings and the clock of the place."""

    def __call__(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class Transport:
    """``open(start, config, clock)`` sets a place up and tears it down: around ``start()``, a daemon whose end
    the fixtures see to, or around a store of its own, made from ``config`` and ``clock``."""

    open: Callable[[Start, DaemonConfig, ManualClock | None], AbstractContextManager[Place]]
    can: frozenset[str]
    settings: Callable[[DaemonConfig], dict[str, Any]] = lambda _: {}
    """What the fixtures' daemon needs beyond its configuration."""


@contextmanager
def over_the_unix_socket(start: Start, config: DaemonConfig, clock: ManualClock | None) -> Iterator[Place]:
    path = start().config.socket_path
    yield Place(lambda **arguments: Client(path, **{"timeout_s": TIMEOUT_S, **arguments}), str(path))


@contextmanager
def embedded(start: Start, config: DaemonConfig, clock: ManualClock | None) -> Iterator[Place]:
    with Embedded(replace(config, socket_path=None), timeout_s=TIMEOUT_S, clock=clock) as store:
        yield Place(lambda **arguments: store.client(**arguments))
        store._inside.thread.call(lambda daemon: daemon.store.check(), TIMEOUT_S)


@contextmanager
def over_asyncio(start: Start, config: DaemonConfig, clock: ManualClock | None) -> Iterator[Place]:
    path = start().config.socket_path
    with loop_clients() as connect:
        yield Place(lambda **arguments: connect(path, **{"timeout_s": TIMEOUT_S, **arguments}))


def grpc_options(config: DaemonConfig) -> GrpcOptions:
    assert config.socket_path is not None
    return GrpcOptions(listen=f"unix:{config.socket_path.with_name('grpc.sock')}")


@contextmanager
def over_grpc(start: Start, config: DaemonConfig, clock: ManualClock | None) -> Iterator[Place]:
    start()
    target = f"grpc+{grpc_options(config).listen}"
    yield Place(lambda **arguments: Client(target, **{"timeout_s": TIMEOUT_S, **arguments}), target)


TRANSPORTS: dict[str, Transport] = {
    "grpc": Transport(over_grpc, frozenset({"processes"}), lambda config: {"grpc": grpc_options(config)}),
    "embedded": Transport(embedded, frozenset({"shared_memory"})),
    "asyncio": Transport(over_asyncio, frozenset({"shared_memory"})),
    "unix": Transport(over_the_unix_socket, frozenset({"shared_memory", "processes", "fork", "unix_socket"})),
}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs(what, reason): skipped over transports that can't")


@pytest.fixture(params=list(TRANSPORTS))
def transport(request: pytest.FixtureRequest) -> Transport:
    chosen = TRANSPORTS[request.param]
    for mark in request.node.iter_markers("needs"):
        if not set(mark.args) <= chosen.can:
            pytest.skip(f"{request.param}: {mark.kwargs['reason']}")
    return chosen


@pytest.fixture
def serve(
    transport: Transport, start_daemon: Callable[..., Any], config: DaemonConfig
) -> Iterator[Callable[..., Place]]:
    """``serve(clock=None, **settings)``: a store with these settings of the daemon, on this test's transport."""
    with ExitStack() as stack:

        def serve(clock: ManualClock | None = None, **settings: Any) -> Place:
            all_settings = {**transport.settings(config), **settings}
            opened = transport.open(lambda: start_daemon(clock, **all_settings), replace(config, **settings), clock)
            return stack.enter_context(opened)

        yield serve


@pytest.fixture
def daemon(request: pytest.FixtureRequest, start_daemon: Callable[..., Any], config: DaemonConfig) -> Any:
    """The daemon of ``place``, or for tests over no transport one as elsewhere."""
    chosen = request.getfixturevalue("transport") if "transport" in request.fixturenames else None
    return start_daemon(**(chosen.settings(config) if chosen is not None else {}))


@pytest.fixture
def place(request: pytest.FixtureRequest, transport: Transport, config: DaemonConfig) -> Iterator[Place]:
    """A store with the settings of ``config``; the same as ``daemon`` for tests that take both."""
    with transport.open(lambda: request.getfixturevalue("daemon"), config, None) as opened:
        yield opened


@pytest.fixture
def connect(place: Place) -> Connect:
    return place.connect


@pytest.fixture
def client(connect: Connect) -> Iterator[Client]:
    with connect() as connected:
        yield connected


@pytest.fixture
def ns(client: Client) -> NamespaceHandle:
    return client.open(Namespace("model", spec_of()))
