"""Requests as a client sees them that records traffic: when they came, how long they were, which blocks they had."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore.client.session import Session
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.framing import Method
from kvstore.wire.packing import F64, U32, U64, unpack

ANSWERS_PER_POLL = 64
"""Where requests keep coming a call ends all the same."""


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """A prompt that somebody looked up to use it. ``keys``: uint64 [blocks], each stands for the prompt up to there.

    ``session`` stands for the caller's session id as long as the recording goes on; 0 without one. ``n_output``:
    generated tokens, as far as the caller knew.
    """

    time_s: float
    n_tokens: int
    n_output: int
    request_type: str
    turn: int
    session: int
    keys: NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class RequestsLost:
    """Requests are missing here: ``n``, None if nobody counted them (a restart, or too long since the last call)."""

    n: int | None


class Recording:
    """The requests of one namespace from the moment of its making on; the daemon keeps them for a minute or so.

    Requests of more than 16,384 blocks are not kept, and count as lost. Not for several threads at once. Raises
    BadInputError if the daemon records too many namespaces already, of the tenant or in all, and UnavailableError.
    """

    def __init__(self, session: Session, ensure_open: Callable[[], bytes]) -> None:
        """``ensure_open`` has the namespace open at the daemon, and returns its digest."""
        self._session = session
        self._ensure_open = ensure_open
        self._seq = 0
        self._epoch: int | None = None
        self._take(self._ask(from_now=True))

    def poll(self) -> list[RecordedRequest | RequestsLost]:
        """What has come since the last call, or some of it; may be empty. Blocks for the daemon's answers only."""
        found: list[RecordedRequest | RequestsLost] = []
        for _ in range(ANSWERS_PER_POLL):
            more = self._take(self._ask())
            found += more
            if not any(isinstance(each, RecordedRequest) for each in more):
                break
        return found

    def _ask(self, *, from_now: bool = False) -> pb.RecordReply:
        request = pb.RecordRequest(namespace=self._ensure_open(), after_seq=self._seq, from_now=from_now)
        return self._session.call(Method.RECORD, request, pb.RecordReply)

    def _take(self, reply: pb.RecordReply) -> list[RecordedRequest | RequestsLost]:
        found: list[RecordedRequest | RequestsLost] = []
        if reply.gap or self._epoch not in (None, reply.epoch):
            found.append(RequestsLost(None))
        if reply.n_lost:
            found.append(RequestsLost(reply.n_lost))
        self._seq, self._epoch = reply.next_seq, reply.epoch
        return [*found, *_requests(reply)]


def _requests(reply: pb.RecordReply) -> list[RecordedRequest]:
    n = len(reply.types)
    times_s = unpack("times_s", reply.times_s, F64, n).tolist()
    n_tokens = unpack("n_tokens", reply.n_tokens, U64, n).tolist()
    counts = [unpack(name, getattr(reply, name), U32, n).tolist() for name in ("n_output", "turns", "n_rows")]
    sessions = unpack("sessions", reply.sessions, U64, n).tolist()
    keys = unpack("keys", reply.keys, U64, sum(counts[2]))
    ends = np.cumsum(counts[2], dtype=np.intp).tolist()
    return [
        RecordedRequest(time_s, tokens, n_output, kind, turn, session, keys[end - n_rows : end])
        for time_s, tokens, n_output, turn, n_rows, kind, session, end in zip(
            times_s, n_tokens, *counts, reply.types, sessions, ends, strict=True
        )
    ]
