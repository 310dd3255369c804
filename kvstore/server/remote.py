"""Sessions of clients whose memory is elsewhere: no process to watch, nothing mapped.

What such a client holds ends with its session, and is free at once: nobody but the daemon's own threads reads or
writes its slots, and for the chunk that one of them is at, the end waits (see ``uses.py``). Whatever lets go of a
claim of such a session goes through ``_when_idle``: release, abort, commit, the end of its time, and of the session.

Everything here but ``find`` runs on the loop's thread.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from google.protobuf.message import Message
from numpy.typing import NDArray

from kvstore.clock import Clock
from kvstore.errors import BadInputError, EndedError, SessionEndedError, UnavailableError
from kvstore.server.hello import CLIENT_NAME_CHARS_MAX
from kvstore.server.monitor import Monitor
from kvstore.server.replies import Reply, Result
from kvstore.server.session import REMOTE_PID, Session, Sessions
from kvstore.server.uses import Memory, Use
from kvstore.store.store import Store
from kvstore.types import Namespace
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.framing import Method

Claim = tuple[bool, int]
"""Whether it is a lease, and its id."""

HOLDING = frozenset(
    {
        Method.HEARTBEAT, Method.GOODBYE, Method.LEASE, Method.ATTACH_LEASE, Method.LEASE_SHARD, Method.RELEASE,
        Method.RENEW, Method.RESERVE, Method.COMMIT, Method.ABORT, Method.PIN, Method.UNPIN,
    }
)  # fmt: skip
"""What only a session can ask for: it grants something, or is about something granted."""

LOCAL = frozenset(
    {
        Method.HELLO, Method.EVENT, Method.MAP_REGIONS, Method.REGIONS_MAPPED, Method.REGIONS_UNMAPPED, Method.MAP_HBM,
    }
)  # fmt: skip
"""What makes sense on the Unix socket only."""


class Host(Protocol):
    """What remote sessions need of the daemon."""

    store: Store
    sessions: Sessions
    monitor: Monitor

    def answer(self, session: Session, method: int, request: Message) -> Result:
        """Work on a request."""
        ...

    def end_session(self, session: Session) -> None:
        """All it holds is free from now on."""
        ...

    def after_request(self) -> None:
        """A request has been worked on."""
        ...

    def hello_reply(self, session: Session, request: pb.HelloRequest) -> pb.HelloReply:
        """What a client is told of its session."""
        ...


@dataclass(slots=True, eq=False)
class RemoteSession:
    """One remote client. ``owner`` is who opened it: nobody else can use its token.

    ``tell`` gets its events, and None once it has ended; it must not block. A Use stays in ``uses`` until its claim has
    really been let go of: ``endings`` has what waits for that, in its order.
    """

    session: Session
    owner: bytes
    tell: Callable[[pb.Event | None], None]
    beats: bool = True
    uses: dict[Claim, Use] = field(default_factory=dict)
    endings: dict[Claim, list[Callable[[], object]]] = field(default_factory=dict)
    tasks: set[asyncio.Task[Reply]] = field(default_factory=set)

    def send_event(self, event: pb.Event) -> None:
        """See ``EventSink``."""
        self.tell(event)


class RemoteSessions:
    """The remote sessions of a daemon; at most ``sessions_max`` that live as long as their client wants."""

    def __init__(self, loop: asyncio.AbstractEventLoop, host: Host, clock: Clock, sessions_max: int) -> None:
        self._loop = loop
        self._host = host
        self._clock = clock
        self._sessions_max = sessions_max
        self._by_token: dict[bytes, RemoteSession] = {}
        self._by_id: dict[int, RemoteSession] = {}
        self._held: set[RemoteSession] = set()
        """Those that hold something still, or may: the ones of ``_by_id``, and the ones that are ending."""
        self._closed = False
        self._all_gone = asyncio.Event()
        self._all_gone.set()

    def __len__(self) -> int:
        return len(self._by_token)

    def open(
        self,
        owner: bytes,
        tenant: str,
        client_name: str,
        tell: Callable[[pb.Event | None], None],
        *,
        beats: bool = True,
    ) -> RemoteSession:
        """A session of its own; with ``beats`` False it lives until ``end``, whether heartbeats come or not.

        Those without are bounded by whoever opens them: one for a call that has a place. Raises BadInputError for no
        tenant's name, and where there are too many sessions; UnavailableError once all have ended for good.
        """
        Namespace.check_tenant(tenant)
        if self._closed:
            raise UnavailableError("the daemon is ending: connect again when it is back")
        if beats and sum(remote.beats for remote in self._held) >= self._sessions_max:
            raise BadInputError(
                f"{self._sessions_max} clients are connected over gRPC, the most this daemon takes (--max-clients)"
            )
        now_s = self._clock.now_s() if beats else float("inf")
        session = self._host.sessions.open_remote(tenant, client_name[:CLIENT_NAME_CHARS_MAX], now_s)
        remote = RemoteSession(session, owner, tell, beats)
        session.events = remote
        self._held.add(remote)
        self._by_token[_digest(session.token)] = self._by_id[session.id] = remote
        self._all_gone.clear()
        return remote

    def find(self, token: bytes, owner: bytes) -> RemoteSession:
        """The session with this token, for the one who opened it. Raises SessionEndedError. On any thread."""
        remote = self._by_token.get(_digest(token))
        if remote is None or remote.owner != owner:
            raise SessionEndedError("the session has ended, or never was: open one with Session")
        return remote

    def answer_alone(self, tenant: str, method: int, request: Message) -> Result:
        """A request outside of any session. Raises SessionEndedError for one that needs a session."""
        if method in HOLDING:
            raise SessionEndedError(f"{Method(method).name} needs a session: open one with Session")
        Namespace.check_tenant(tenant)
        return self._ask(Session(0, tenant, "", REMOTE_PID, -1, 0.0), method, request)

    def answer(self, remote: RemoteSession, method: int, request: Message) -> Result:
        """A request of a session. Raises SessionEndedError if it has ended."""
        _must_be_live(remote)
        if method == Method.GOODBYE:
            self.end(remote)
            return Reply(pb.GoodbyeReply())
        if isinstance(request, pb.CommitRequest):
            self._must_be_filled(remote, request)
        claim = _ended_by(request)
        if claim is None:
            return self._ask(remote.session, method, request)
        answered: asyncio.Future[Result] = self._loop.create_future()

        def ask() -> None:
            try:
                _must_be_live(remote)  # else the end of the session lets go of it
                answered.set_result(self._ask(remote.session, method, request))
            except Exception as error:
                answered.set_exception(error)

        self._when_idle(remote, claim, ask)
        return answered.result() if answered.done() else self._answered(answered)

    @staticmethod
    async def _answered(answered: asyncio.Future[Result]) -> Reply:
        """Once no chunk is copied any more: that takes a moment. The request is worked on whoever waits for it."""
        result = await asyncio.shield(answered)
        return result if isinstance(result, Reply) else await result

    def _ask(self, session: Session, method: int, request: Message) -> Result:
        return self._host.monitor.measured(method, session, lambda: self._host.answer(session, method, request))

    def keep(self, remote: RemoteSession, task: asyncio.Task[Reply]) -> None:
        """A request that is worked on: cancelled with the session."""
        remote.tasks.add(task)
        task.add_done_callback(remote.tasks.discard)

    def give_back(self, remote: RemoteSession, reply: Message) -> None:
        """What a reply granted that nobody got."""
        if isinstance(reply, pb.LeaseReply) and reply.lease_id:
            self.end_claim(remote.session, True, reply.lease_id)
        elif isinstance(reply, pb.ReserveReply) and reply.reservation_id:
            self.end_claim(remote.session, False, reply.reservation_id)
        elif isinstance(reply, pb.PinReply) and reply.pin_id:
            self._host.store.unpin(remote.session.id, reply.pin_id, remote.session.tenant)

    # Bulk --------------------------------------------------------------------------------------------

    def reading(self, remote: RemoteSession, lease_id: int, slots: NDArray[np.int64]) -> Memory:
        """The blocks of a lease of this session: those in ``slots``, or all if that is empty.

        Raises EndedError, SessionEndedError, or BadInputError for slots that it doesn't hold, and for blocks of several
        sizes.
        """
        _must_be_live(remote)
        store = self._host.store
        lease = store.leases.get(lease_id)
        if lease is None or not lease.right_of(remote.session.id, self._clock.now_s()):
            raise EndedError(f"lease {lease_id} is unknown or has ended: lease the prefix again")
        held, sizes = store.index.slots(lease.ids), store.index.table.size_bytes[lease.ids]
        if len(slots):
            order = np.argsort(held)
            at = order[np.minimum(np.searchsorted(held, slots, sorter=order), len(held) - 1)]
            if (held[at] != slots).any():
                raise BadInputError(f"lease {lease_id} does not hold all of the {len(slots)} slots asked for")
            held, sizes = slots, sizes[at]
        if (sizes != sizes[0]).any():
            raise BadInputError(f"lease {lease_id} holds blocks of several sizes: name the slots of one at a time")
        use = self._use(remote, (True, lease_id), f"lease {lease_id}")
        return Memory(use, store.dram.addresses(held), int(sizes[0]))

    def writing(self, remote: RemoteSession, reservation_id: int) -> Memory:
        """The slots of a reservation of this session. Raises EndedError, SessionEndedError."""
        _must_be_live(remote)
        store = self._host.store
        reservation = store.reservations.get(reservation_id)
        if reservation is None or not reservation.right_of(remote.session.id, self._clock.now_s()):
            raise EndedError(f"reservation {reservation_id} is unknown or has ended: reserve and write again")
        use = self._use(remote, (False, reservation_id), f"reservation {reservation_id}")
        return Memory(use, store.dram.addresses(reservation.slots), reservation.block_bytes)

    @staticmethod
    def _use(remote: RemoteSession, claim: Claim, what: str) -> Use:
        use = remote.uses.get(claim)
        if use is None:
            use = remote.uses[claim] = Use(what)
        elif use.ended:
            # Another would let a copy begin that whoever lets go of the claim knows nothing of.
            raise EndedError(f"{what} has ended: it is let go of as soon as what is being copied is done")
        return use

    def _must_be_filled(self, remote: RemoteSession, request: pb.CommitRequest) -> None:
        """What was not sent is not there: the slots have bytes of earlier blocks."""
        reservation = self._host.store.reservations.get(request.reservation_id)
        if reservation is None or remote.session.id not in reservation.holders:
            return  # which the commit itself will say
        n_blocks = request.n_blocks or len(reservation.slots)
        use = remote.uses.get((False, request.reservation_id))
        filled_bytes = use.filled_bytes if use is not None else 0
        if filled_bytes < n_blocks * reservation.block_bytes:
            raise BadInputError(
                f"{n_blocks} blocks of reservation {request.reservation_id} were to be committed; "
                f"{filled_bytes // reservation.block_bytes} were sent: send the others with Write"
            )

    # Ends --------------------------------------------------------------------------------------------

    def end_claim(self, session: Session, lease: bool, claim_id: int) -> None:
        """A claim's right is over: let go of it, once no chunk is copied any more."""
        remote = self._by_id.get(session.id)
        if remote is None:
            return  # the end of the session lets go of it, or has done so
        let_go = self._host.store.release if lease else self._host.store.abort
        self._when_idle(remote, (lease, claim_id), lambda: let_go(session.id, claim_id))

    def _when_idle(self, remote: RemoteSession, claim: Claim, then: Callable[[], object]) -> None:
        """No chunk of a claim is begun any more; calls ``then`` when none is copied: at once, if none is.

        What is to be done then is done in the order in which it came, and in one go.
        """
        if claim in remote.endings:
            remote.endings[claim].append(then)
            return
        use = remote.uses.get(claim)
        if use is None:
            then()
            return
        remote.endings[claim] = [then]
        if use.end(lambda: self._post(lambda: self._idle_later(remote, claim))):
            self._idle(remote, claim)

    def _idle(self, remote: RemoteSession, claim: Claim) -> None:
        for then in remote.endings.pop(claim):
            then()
        # Now the claim is gone; if it was to be committed and could not, its slots are filled from the start again.
        remote.uses.pop(claim, None)

    def _idle_later(self, remote: RemoteSession, claim: Claim) -> None:
        self._idle(remote, claim)
        self._host.after_request()

    def end(self, remote: RemoteSession) -> None:
        """The session is over, and with it all it holds. Idempotent.

        That is free once no chunk is copied any more and no request of it is worked on.
        """
        if self._by_id.pop(remote.session.id, None) is None:
            return
        del self._by_token[_digest(remote.session.token)]
        remote.session.live = False
        remote.session.events = None
        self._host.store.end_rights(remote.session.id)
        n_busy = 1

        def idle(_: object = None) -> None:
            nonlocal n_busy
            n_busy -= 1
            if not n_busy:
                self._host.end_session(remote.session)
                self._held.discard(remote)
                if not self._held:
                    self._all_gone.set()

        for task in remote.tasks:
            n_busy += 1
            task.add_done_callback(idle)
            # After its first step, or what it has to give back would never be reached.
            self._loop.call_soon(task.cancel)
        for claim in list(remote.uses):
            n_busy += 1
            self._when_idle(remote, claim, idle)
        idle()
        remote.tell(None)

    def end_by_id(self, session: Session) -> None:
        """``end``, of the session with this number."""
        remote = self._by_id.get(session.id)
        if remote is not None:
            self.end(remote)

    async def end_all(self) -> None:
        """``end`` of all of them, for good; waits until no chunk is copied any more."""
        self._closed = True
        for remote in list(self._by_id.values()):
            self.end(remote)
        await self._all_gone.wait()

    def _post(self, call: Callable[[], object]) -> None:
        self._loop.call_soon_threadsafe(call)


def _must_be_live(remote: RemoteSession) -> None:
    if not remote.session.live:
        raise SessionEndedError("the session has ended (its stream broke, or no heartbeat came): open another")


def _ended_by(request: Message) -> Claim | None:
    """The claim that a request lets go of."""
    if isinstance(request, pb.ReleaseRequest):
        return True, request.lease_id
    if isinstance(request, pb.CommitRequest | pb.AbortRequest):
        return False, request.reservation_id
    return None


def _digest(token: bytes) -> bytes:
    """What tokens are looked up by, so that the time it takes says nothing about them."""
    return hashlib.sha256(token).digest()
