"""How long a request waits, and the connections it may wait on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvstore.client import Client, WaitRule
from kvstore.client.greeting import join
from kvstore.client.link import Calls
from kvstore.client.prompts import tokens_asked_for
from kvstore.client.transport import TimedOutError, Transport
from kvstore.client.waiting import CONNECTIONS_MAX, WaitingCalls, wait_seconds
from kvstore.errors import BadInputError, EndedError, KVStoreError, UnavailableError
from kvstore.server.daemon import WAITS_PER_SESSION_MAX
from kvstore.types import KVSpec, Namespace, RowKind
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.framing import Method

WAIT_S = 20.0


@pytest.mark.parametrize(
    ("wait", "n_tokens", "expected"),
    [
        ("best_effort", 10_000, 0.0),
        ("wait", 10_000, 2.0),
        (0, 10_000, 0.0),
        (7.5, 10_000, 7.5),
        (np.float64(0.25), 1, 0.25),
        (WaitRule(0.1), 10_000, 0.1),
        (WaitRule(0.1, 0.2), 0, 0.1),
        (WaitRule(0.1, 0.2), 1024, 0.3),
        (WaitRule(0.1, 0.2), 4096, 0.9),
        (WaitRule(0.1, 0.2), 1 << 20, 2.0),
    ],
)
def test_how_long_is_waited(wait: Any, n_tokens: int, expected: float) -> None:
    assert wait_seconds(wait, n_tokens, timeout_s=2.0) == pytest.approx(expected)


@pytest.mark.parametrize("wait", ["forever", -1, float("nan"), float("inf"), None, True, "1"])
def test_what_is_no_wait_is_named(wait: Any) -> None:
    with pytest.raises(BadInputError, match=r"wait is") as told:
        wait_seconds(wait, 1, 1.0)
    if wait in (None, True):
        assert str(told.value) == f"wait is {wait!r}; give 'best_effort', 'wait', seconds or a WaitRule"


@pytest.mark.parametrize(("base_s", "per_1k_tokens_s"), [(-1, 0), (0, -1), (float("nan"), 0), ("1", 0)])
def test_a_rule_of_nonsense_is_refused(base_s: Any, per_1k_tokens_s: Any) -> None:
    with pytest.raises(BadInputError, match=r"WaitRule\.(base_s|per_1k_tokens_s)"):
        WaitRule(base_s, per_1k_tokens_s)


@pytest.mark.parametrize(
    ("n_tokens", "first_block", "max_blocks", "expected"),
    [(100, 0, 0, 100), (100, 2, 0, 68), (100, 0, 3, 48), (100, 2, 3, 16), (100, 9, 0, 0), (100, 0, 99, 100)],
)
def test_tokens_that_are_asked_for(n_tokens: int, first_block: int, max_blocks: int, expected: int) -> None:
    tokens = Namespace("m", KVSpec.opaque(16, 4096))
    assert tokens_asked_for(tokens, pb.Prompt(rows=bytes(4 * n_tokens)), first_block, max_blocks) == expected


def test_tokens_behind_hashes() -> None:
    hashes = Namespace("m", KVSpec.opaque(16, 4096), row_kind=RowKind.HASHES, hash_bytes=32)
    assert tokens_asked_for(hashes, pb.Prompt(rows=bytes(5 * 32)), 1, 0) == 64


# The connections ---------------------------------------------------------------------------------

over_unix_sockets = pytest.mark.needs("unix_socket", reason="about the connections of that socket")


class Pool:
    """``WaitingCalls`` to a daemon, and how many connections were made."""

    def __init__(self, client: Client) -> None:
        self.made = 0
        self.late: list[Calls] = []
        self.session = client._session
        self.calls = WaitingCalls(self._connect, self.late.append)

    def _connect(self, deadline_s: float) -> Transport:
        self.made += 1
        return join(self.session._link.address, self.session._token, pb.CHANNEL_WAITS, deadline_s)

    def stats(self, timeout_s: float = WAIT_S) -> pb.StatsReply:
        return self.calls.call(Method.STATS, pb.StatsRequest(), pb.StatsReply, time.monotonic() + timeout_s)


@pytest.fixture
def pool(client: Client) -> Iterator[Pool]:
    made = Pool(client)
    yield made
    made.calls.end()


def waits_of(daemon: Any) -> int:
    return int(daemon.call(lambda d: sum(len(session.waits) for session in d.sessions)))


@over_unix_sockets
def test_one_connection_serves_one_call_after_another(pool: Pool, daemon: Any, wait_until: Callable[..., None]) -> None:
    for _ in range(5):
        assert pool.stats().numbers["sessions"] == 1
    assert pool.made == waits_of(daemon) == 1
    pool.calls.end()
    wait_until(lambda: waits_of(daemon) == 0, "the daemon forgets the connection")
    with pytest.raises(UnavailableError, match="lost"):
        pool.stats()


@over_unix_sockets
def test_an_answer_that_is_an_error_leaves_the_connection_usable(pool: Pool) -> None:
    for _ in range(3):
        with pytest.raises(BadInputError, match="0 regions"):
            pool.calls.call(Method.MAP_REGIONS, pb.MapRegionsRequest(), pb.MapRegionsReply, time.monotonic() + WAIT_S)
    assert pool.made == 1


@over_unix_sockets
def test_threads_that_wait_at_once_have_a_connection_each_up_to_a_bound(
    pool: Pool, daemon: Any, wait_until: Callable[..., None]
) -> None:
    """The daemon's loop is held, so that no answer comes before all threads have asked."""
    go, held = threading.Event(), threading.Event()
    for _ in range(2):
        pool.stats()

    def hold() -> None:
        held.set()
        go.wait(WAIT_S)

    answers: list[pb.StatsReply] = []
    threads = [threading.Thread(target=lambda: answers.append(pool.stats())) for _ in range(CONNECTIONS_MAX + 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert len(answers) == CONNECTIONS_MAX + 4
    assert pool.made <= CONNECTIONS_MAX
    daemon._loop.call_soon_threadsafe(hold)
    assert held.wait(WAIT_S)
    with pytest.raises(TimedOutError):
        pool.stats(0.05)
    go.set()
    assert pool.stats().numbers["sessions"] == 1
    assert pool.late == [] or all(transport.late for transport in pool.late)


@over_unix_sockets
def test_no_free_connection_is_a_miss_by_the_deadline(pool: Pool) -> None:
    for _ in range(CONNECTIONS_MAX):
        assert pool.calls._places.acquire(timeout=0)
    start_s = time.monotonic()
    with pytest.raises(UnavailableError, match=f"{CONNECTIONS_MAX} threads"):
        pool.stats(0.05)
    assert time.monotonic() - start_s < WAIT_S / 2
    for _ in range(CONNECTIONS_MAX):
        pool.calls._places.release()
    pool.stats()


@over_unix_sockets
def test_a_late_answer_is_given_back_and_not_taken_for_the_next(pool: Pool, daemon: Any) -> None:
    go, held = threading.Event(), threading.Event()
    pool.stats()

    def hold() -> None:
        held.set()
        go.wait(WAIT_S)

    daemon._loop.call_soon_threadsafe(hold)
    assert held.wait(WAIT_S)
    with pytest.raises(TimedOutError):
        pool.calls.call(Method.HEARTBEAT, pb.HeartbeatRequest(), pb.HeartbeatReply, time.monotonic() + 0.05)
    go.set()
    assert pool.stats().numbers["sessions"] == 1
    assert pool.made == 1
    assert [type(reply) for transport in pool.late for reply in transport.late] == [pb.HeartbeatReply]


@over_unix_sockets
def test_ending_wakes_a_call_that_waits(pool: Pool, daemon: Any) -> None:
    go, held = threading.Event(), threading.Event()
    pool.stats()

    def hold() -> None:
        held.set()
        go.wait(WAIT_S)

    daemon._loop.call_soon_threadsafe(hold)
    assert held.wait(WAIT_S)
    errors: list[KVStoreError] = []

    def ask() -> None:
        try:
            pool.stats()
        except KVStoreError as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    while not pool.calls._busy:
        threading.Event().wait(0.001)
    pool.calls.end()
    thread.join(WAIT_S)
    go.set()
    assert not thread.is_alive()
    assert isinstance(errors[0], UnavailableError)


@over_unix_sockets
def test_a_client_may_have_so_many_connections_to_wait_on_and_no_more(client: Client, daemon: Any) -> None:
    session = client._session
    opened = [
        join(session._link.address, session._token, pb.CHANNEL_WAITS, time.monotonic() + WAIT_S)
        for _ in range(WAITS_PER_SESSION_MAX)
    ]
    with pytest.raises(BadInputError, match=str(WAITS_PER_SESSION_MAX)):
        join(session._link.address, session._token, pb.CHANNEL_WAITS, time.monotonic() + WAIT_S)
    assert waits_of(daemon) == WAITS_PER_SESSION_MAX
    client.close()
    assert waits_of(daemon) == 0
    for transport in opened:
        transport.close()
    assert CONNECTIONS_MAX <= WAITS_PER_SESSION_MAX


def test_a_lease_that_ends_before_its_reply_is_looked_at_is_over(
    client: Client, wait_until: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process stopped in between has had its end acknowledged for it: the slot may hold other bytes by now."""
    ns = client.open(Namespace("m", KVSpec.opaque(16, 4096)))
    assert ns.put(np.arange(32), np.ones((2, 4096), np.uint8)).n_stored == 2
    session = client._session
    use = session._use

    def late(reply: Any, make: Any) -> Any:
        session._on_event(pb.Event(ended_leases=[reply.lease_id]))
        return use(reply, make)

    monkeypatch.setattr(session, "_use", late)
    lease = ns.lease(np.arange(32))
    assert not lease.valid
    with pytest.raises(EndedError):
        lease.view(0)
    wait_until(lambda: client.stats()["leases"] == 0, "its end is acknowledged")
