"""Sessions whose bytes the daemon's threads copy: nothing of theirs is free while a chunk is copied, whoever lets go.

The chunk is the test's own thread, inside ``with use``.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import CancelledError, Future
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import Message

from kvstore.client import Client
from kvstore.clock import ManualClock
from kvstore.errors import BadInputError, EndedError, SessionEndedError, UnavailableError
from kvstore.server.daemon import Daemon
from kvstore.server.remote import RemoteSession
from kvstore.server.replies import Reply
from kvstore.server.uses import Memory
from kvstore.types import KVSpec, Namespace
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.framing import Method
from tests.conftest import DaemonThread

BLOCK_TOKENS, BLOCK_BYTES, N_BLOCKS = 16, 8192, 4
NAMESPACE = Namespace("model", KVSpec.opaque(BLOCK_TOKENS, BLOCK_BYTES))
TTL_S = 30.0
WAIT_S = 20.0
NO_SLOTS = np.empty(0, np.int64)

END_LEASE, END_RESERVATION = ("release", "time"), ("abort", "commit", "clear", "time")
ENDS = [*((True, how) for how in END_LEASE), *((False, how) for how in END_RESERVATION)]
"""Everything that lets go of a lease (True) or a reservation, but for the end of its session."""


class Scene:
    """A daemon, and one remote client of it with a lease and a reservation."""

    def __init__(self, thread: DaemonThread, clock: ManualClock) -> None:
        self.thread = thread
        self.clock = clock
        self.remote = self.open("one")
        self.namespace = self.ask(Method.OPEN_NAMESPACE, _description()).digest
        self.prompt = pb.Prompt(namespace=self.namespace, rows=_tokens(0))
        self.reserve(self.prompt)
        self.fill()
        self.ask(Method.COMMIT, pb.CommitRequest(reservation_id=self.reservation_id))
        self.lease_id = self.ask(Method.LEASE, pb.LeaseRequest(prompt=self.prompt, ttl_s=TTL_S)).lease_id
        self.reserve(pb.Prompt(namespace=self.namespace, rows=_tokens(1)))
        self.fill()

    def on_loop(self, function: Callable[[Daemon], Any]) -> Any:
        return self.thread.call(function)

    def open(self, owner: str, *, beats: bool = True) -> RemoteSession:
        open_it = lambda daemon: daemon.remote.open(owner.encode(), "default", owner, lambda _: None, beats=beats)  # noqa: E731
        remote: RemoteSession = self.on_loop(open_it)
        return remote

    def reserve(self, prompt: pb.Prompt) -> None:
        request = pb.ReserveRequest(prompt=prompt, n_blocks=N_BLOCKS, ttl_s=TTL_S)
        reply = self.ask(Method.RESERVE, request)
        assert reply.n_reserved == N_BLOCKS
        self.reservation_id = reply.reservation_id

    def fill(self) -> None:
        """As if all blocks had been sent."""
        with self.memory(lease=False).use as use:
            use.filled_bytes = N_BLOCKS * BLOCK_BYTES

    def memory(self, *, lease: bool) -> Memory:
        def get(daemon: Daemon) -> Memory:
            if lease:
                return daemon.remote.reading(self.remote, self.lease_id, NO_SLOTS)
            return daemon.remote.writing(self.remote, self.reservation_id)

        memory: Memory = self.on_loop(get)
        return memory

    def held(self, *, lease: bool) -> bool:
        """Whether the claim keeps its slots from being used again; the store agrees with itself in any case."""

        def look(daemon: Daemon) -> bool:
            daemon.store.check()
            if lease:
                return daemon.store.leases.get(self.lease_id) is not None
            return daemon.store.reservations.get(self.reservation_id) is not None

        return bool(self.on_loop(look))

    def begin(self, method: Method, request: Message) -> tuple[Future[Message], Callable[[], None]]:
        """A request as the thread of a call makes it: its answer, and what gives up waiting for that."""
        answer: Future[Message] = Future()
        tasks: list[asyncio.Task[Reply]] = []

        def done(task: asyncio.Task[Reply]) -> None:
            if task.cancelled():
                answer.cancel()
            elif (error := task.exception()) is not None:
                answer.set_exception(error)
            else:
                answer.set_result(task.result().message)

        def begin(daemon: Daemon) -> None:
            result = daemon.remote.answer(self.remote, method, request)
            if isinstance(result, Reply):
                answer.set_result(result.message)
                return
            tasks.append(asyncio.ensure_future(_awaited(result)))
            daemon.remote.keep(self.remote, tasks[0])
            tasks[0].add_done_callback(done)

        self.on_loop(begin)
        return answer, lambda: self.on_loop(lambda _: [task.cancel() for task in tasks])

    def ask(self, method: Method, request: Message) -> Any:
        return self.begin(method, request)[0].result(WAIT_S)

    def clear(self, daemon: Daemon) -> None:
        reservation = daemon.store.reservations.get(self.reservation_id)
        assert reservation is not None
        daemon.store.clear({reservation.namespace})

    def let_go(self, how: str) -> Future[Message] | None:
        """Begin to end the lease or the reservation; the answer, where somebody asked."""
        if how == "release":
            return self.begin(Method.RELEASE, pb.ReleaseRequest(lease_id=self.lease_id))[0]
        if how == "abort":
            return self.begin(Method.ABORT, pb.AbortRequest(reservation_id=self.reservation_id))[0]
        if how == "commit":
            return self.begin(Method.COMMIT, pb.CommitRequest(reservation_id=self.reservation_id))[0]
        if how == "clear":
            self.on_loop(self.clear)
        else:
            self.clock.advance(TTL_S + 1)
        self.on_loop(lambda daemon: daemon._tell_ended())
        return None


def _description() -> pb.OpenNamespaceRequest:
    return pb.OpenNamespaceRequest(description_json=json.dumps(NAMESPACE.to_dict()))


def _tokens(seed: int) -> bytes:
    return np.random.default_rng(seed).integers(0, 50_000, N_BLOCKS * BLOCK_TOKENS, dtype=np.uint32).tobytes()


async def _awaited(result: Awaitable[Reply]) -> Reply:
    return await result


@pytest.fixture
def scene(start_daemon: Callable[..., DaemonThread]) -> Iterator[Scene]:
    clock = ManualClock(100.0)
    scene = Scene(start_daemon(clock, heartbeat_s=3600.0), clock)
    yield scene
    scene.on_loop(lambda daemon: daemon.remote.end(scene.remote))


@pytest.mark.parametrize(("lease", "how"), ENDS)
def test_a_claim_is_held_and_closed_until_its_chunk_is_done(
    scene: Scene, wait_until: Callable[..., None], lease: bool, how: str
) -> None:
    """And whoever comes meanwhile gets no new access, of which the end would know nothing."""
    with scene.memory(lease=lease).use:
        answer = scene.let_go(how)
        assert scene.held(lease=lease)
        assert answer is None or not answer.done()
        with pytest.raises(EndedError, match="has ended"):
            scene.memory(lease=lease)
        assert scene.held(lease=lease)
    wait_until(lambda: not scene.held(lease=lease), "it is let go of")
    if answer is not None:
        answer.result(WAIT_S)
    with pytest.raises(EndedError):
        scene.memory(lease=lease)
    assert (lease, scene.lease_id if lease else scene.reservation_id) not in scene.remote.uses


@pytest.mark.parametrize(
    ("lease", "first", "second", "second_finds"),
    [
        (True, "release", "release", False), (False, "abort", "abort", False), (False, "commit", "abort", False),
        (False, "abort", "commit", None), (False, "commit", "commit", None), (True, "time", "release", False),
        (False, "clear", "abort", False), (False, "time", "commit", None),
    ],
)  # fmt: skip
def test_who_lets_go_second_waits_with_the_first(
    scene: Scene, wait_until: Callable[..., None], lease: bool, first: str, second: str, second_finds: bool | None
) -> None:
    with scene.memory(lease=lease).use:
        one, two = scene.let_go(first), scene.let_go(second)
        assert scene.held(lease=lease)
        assert two is not None
        assert not two.done()
    wait_until(lambda: not scene.held(lease=lease), "it is let go of")
    if second_finds is None:  # a commit of what is gone
        with pytest.raises(EndedError):
            two.result(WAIT_S)
    else:
        assert two.result(WAIT_S).found == second_finds  # type: ignore[attr-defined]
    if one is not None:
        reply = one.result(WAIT_S)
        assert getattr(reply, "n_committed", 0) == N_BLOCKS or getattr(reply, "found", False)


@pytest.mark.parametrize("ends", ["stream", "goodbye", "silence"])
@pytest.mark.parametrize(("lease", "how"), [(True, ""), (False, ""), *ENDS])
def test_the_end_of_the_session_waits_too(
    scene: Scene, wait_until: Callable[..., None], lease: bool, how: str, ends: str
) -> None:
    """Whatever lets go of the claim already."""
    session = scene.remote.session
    with scene.memory(lease=lease).use:
        answer = scene.let_go(how) if how else None
        if ends == "stream":
            scene.on_loop(lambda daemon: daemon.remote.end(scene.remote))
        elif ends == "goodbye":
            scene.ask(Method.GOODBYE, pb.GoodbyeRequest())
        else:
            scene.clock.advance(4 * 3600.0)
            scene.on_loop(lambda daemon: daemon._end_overdue())
        scene.on_loop(lambda daemon: daemon._tell_ended())
        assert not session.live
        assert scene.held(lease=lease)
        if answer is not None:
            with pytest.raises((SessionEndedError, CancelledError)):
                answer.result(WAIT_S)
        with pytest.raises(SessionEndedError):
            scene.memory(lease=lease)
        assert scene.held(lease=lease)
    wait_until(lambda: not scene.on_loop(lambda daemon: daemon.sessions.get(session.id)), "nothing is left of it")
    assert not scene.held(lease=True)
    assert not scene.held(lease=False)
    assert scene.on_loop(lambda daemon: daemon.store.stats()[0]["dram_quarantined_bytes"]) == 0


@pytest.mark.parametrize("first", ["clear", "time"])
def test_a_session_may_end_before_the_end_of_its_claim_is_told(
    scene: Scene, wait_until: Callable[..., None], first: str
) -> None:
    """The next tick finds a claim without a right, of a session that is ending."""

    def end(daemon: Daemon) -> None:
        if first == "clear":
            scene.clear(daemon)
        else:
            scene.clock.advance(TTL_S + 1)
        daemon.remote.end(scene.remote)
        daemon._tell_ended()

    with scene.memory(lease=False).use, scene.memory(lease=True).use:
        scene.on_loop(end)
        assert scene.held(lease=False)
        assert scene.held(lease=True)
    wait_until(lambda: not (scene.held(lease=False) or scene.held(lease=True)), "nothing is left of it")


@pytest.mark.parametrize("how", ["abort", "commit"])
def test_what_was_asked_is_done_though_nobody_waits_any_more(
    scene: Scene, wait_until: Callable[..., None], how: str
) -> None:
    """Else the claim would stay, for ever ended and never let go of."""
    request: Any = (pb.AbortRequest if how == "abort" else pb.CommitRequest)(reservation_id=scene.reservation_id)
    with scene.memory(lease=False).use:
        answer, give_up = scene.begin(Method.ABORT if how == "abort" else Method.COMMIT, request)
        give_up()
        with pytest.raises(CancelledError):
            answer.result(WAIT_S)
        assert scene.held(lease=False)
    wait_until(lambda: not scene.held(lease=False), "it is let go of")
    match = pb.MatchRequest(prompt=pb.Prompt(namespace=scene.namespace, rows=_tokens(1)))
    assert scene.ask(Method.MATCH, match).n_blocks == (0 if how == "abort" else N_BLOCKS)


def test_a_daemon_that_stops_waits_for_the_chunks_of_all_sessions(scene: Scene) -> None:
    """Also of one that ends before another that nothing is copied for. No session begins any more."""
    scene.open("two")
    ended: Future[None] = Future()

    def end_all(daemon: Daemon) -> None:
        asyncio.ensure_future(daemon.remote.end_all()).add_done_callback(lambda _: ended.set_result(None))

    with scene.memory(lease=False).use:
        scene.on_loop(end_all)
        scene.on_loop(id)  # it had its turn
        assert len(scene.on_loop(lambda daemon: daemon.remote)) == 0
        assert not ended.done()
        assert scene.held(lease=False)
        with pytest.raises(UnavailableError, match="the daemon is ending"):
            scene.open("three")
    ended.result(WAIT_S)
    assert not scene.held(lease=False)


def test_what_a_request_grants_while_its_session_ends_is_let_go_of(
    scene: Scene, wait_until: Callable[..., None]
) -> None:
    """It is woken in the very moment in which the session ends."""
    woken, granted = asyncio.Event(), []

    async def grant(daemon: Daemon) -> Reply:
        await woken.wait()
        answer = daemon.answer(scene.remote.session, Method.LEASE, pb.LeaseRequest(prompt=scene.prompt))
        assert isinstance(answer, Reply)
        granted.append(answer.message.lease_id)  # type: ignore[attr-defined]
        return answer

    def begin(daemon: Daemon) -> None:
        daemon.remote.keep(scene.remote, asyncio.ensure_future(grant(daemon)))

    def end(daemon: Daemon) -> None:
        woken.set()
        daemon.remote.end(scene.remote)

    scene.on_loop(begin)
    scene.on_loop(end)
    wait_until(lambda: scene.on_loop(lambda daemon: len(daemon.sessions)) == 0, "the session has ended")
    assert granted[0] > 0
    assert scene.on_loop(lambda daemon: len(daemon.store.leases)) == 0


def test_a_commit_that_fails_leaves_a_reservation_that_can_be_filled(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise BadInputError("no commit of this")

    with monkeypatch.context() as patch:
        scene.on_loop(lambda daemon: patch.setattr(daemon.store, "commit", fail))
        with scene.memory(lease=False).use:
            answer = scene.let_go("commit")
            assert answer is not None
        with pytest.raises(BadInputError, match="no commit of this"):
            answer.result(WAIT_S)
    assert scene.memory(lease=False).use.filled_bytes == 0
    scene.fill()
    done = scene.ask(Method.COMMIT, pb.CommitRequest(reservation_id=scene.reservation_id))
    assert done.n_committed == N_BLOCKS


def test_remote_sessions_take_no_places_of_this_machine(start_daemon: Callable[..., DaemonThread]) -> None:
    scene = Scene(start_daemon(ManualClock(100.0), heartbeat_s=3600.0, max_clients=1), ManualClock())
    with pytest.raises(BadInputError, match="1 clients are connected over gRPC"):
        scene.open("two")
    for _ in range(3):  # of calls: as many as there are calls
        scene.open("call", beats=False)
    with Client(scene.thread.config.socket_path, timeout_s=5.0) as client:
        assert client.healthy
        with pytest.raises(BadInputError, match="1 clients are connected, the most"):
            Client(scene.thread.config.socket_path, timeout_s=5.0)
    scene.on_loop(lambda daemon: daemon.remote.end(scene.remote))
    scene.open("two")
