"""RECORD: the requests of one namespace, as they were looked up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kvstore.errors import BadInputError
from kvstore.server.replies import Reply, Result
from kvstore.server.session import Session
from kvstore.store.store import Store
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.framing import Method
from kvstore.wire.packing import F64, U32, U64, pack

BLOCKS_PER_REPLY_MAX = 1 << 16
REQUESTS_PER_REPLY_MAX = 1024
"""About a millisecond's work."""


class RecordHandlers:
    """Handlers over one store. Called on the loop's thread only."""

    def __init__(self, store: Store, epoch: int) -> None:
        self._store = store
        self._epoch = epoch

    def register(self, by_method: dict[int, Callable[[Session, Any], Result]]) -> None:
        """Take the requests that are answered here."""
        by_method[Method.RECORD] = self.record

    def record(self, session: Session, request: pb.RecordRequest) -> Result:
        opened = self._store.namespaces.get(request.namespace)
        if opened is None or opened.namespace.tenant != session.tenant:
            raise BadInputError(
                f"tenant {session.tenant!r} has no open namespace {request.namespace.hex()!r:.80}: open it first"
            )
        log, number = self._store.requests, opened.ordinal
        log.watched(opened, self._store.clock.now_s())
        seq = log.last_seq(number) if request.from_now else request.after_seq
        came = log.after(number, seq, BLOCKS_PER_REPLY_MAX, REQUESTS_PER_REPLY_MAX)
        looked = came.requests
        reply = pb.RecordReply(
            next_seq=came.next_seq,
            epoch=self._epoch,
            n_lost=came.n_lost,
            gap=came.gap,
            times_s=pack(np.array([each.time_s for each in looked]), F64),
            n_tokens=pack(np.array([each.n_tokens for each in looked], np.uint64), U64),
            n_output=pack(np.array([each.n_output for each in looked]), U32),
            turns=pack(np.array([each.turn for each in looked]), U32),
            sessions=pack(np.array([each.session for each in looked], np.uint64), U64),
            types=[each.request_type for each in looked],
            n_rows=pack(np.array([len(each.keys) for each in looked]), U32),
            keys=pack(np.concatenate([each.keys for each in looked]), U64) if looked else b"",
        )
        return Reply(reply)
