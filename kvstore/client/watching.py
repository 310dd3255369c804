"""Events as a client sees them: blocks that come to tiers and leave them, one after the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal, Self

from kvstore.client.prompts import count
from kvstore.client.session import Session
from kvstore.client.waiting import checked_wait_s
from kvstore.errors import ProtocolError
from kvstore.types import KEY_BYTES
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.framing import Method
from kvstore.wire.packing import U8, U32, U64, unpack

POLL_S = 20.0
"""How long one request waits for events."""


@dataclass(frozen=True, slots=True)
class BlockEvent:
    """A block came to a tier or left one.

    ``kind``: it is *stored* (found from now on), *moved* (has a copy in this tier too) or *removed* (had one).
    ``reason`` of a removal: evicted, cleared, expired or corrupt; ``last`` if no copy is left. ``parent`` is the key of
    the block before it, for a first block its root key; it is empty, and ``n_tokens`` 0, for removals.
    """

    seq: int
    time_s: float
    kind: Literal["stored", "moved", "removed"]
    tier: Literal["dram", "nvme"]
    reason: str
    namespace: bytes
    key: bytes
    parent: bytes
    n_tokens: int
    last: bool


@dataclass(frozen=True, slots=True)
class EventsLost:
    """Events are missing here: ``n`` of all tenants, None if nobody counted them (nobody watched, or a restart)."""

    n: int | None


class Watch:
    """An endless iterator over events, from the moment of its making on, or from what follows ``after_seq``.

    ``next`` blocks until there is one. Only those of namespaces that fit ``wanted``, and of these ``kinds`` (none: of
    all), are sent. Raises UnavailableError when the daemon can't be asked; going on then tries
    again. Not for several threads at once.
    """

    def __init__(
        self,
        session: Session,
        after_seq: int | None,
        *,
        all_tenants: bool,
        wanted: pb.NamespaceFilter,
        kinds: Collection[str],
    ) -> None:
        self._session = session
        self._meant = pb.WatchRequest(all_tenants=all_tenants, filter=wanted, kinds=kinds)
        self._ready: deque[BlockEvent | EventsLost] = deque()
        self._epoch: int | None = None
        self.seq = 0 if after_seq is None else count("after_seq", after_seq, 1 << 64)
        """The number up to which events have been taken from the daemon."""
        self._take(self._ask(0.0, from_now=after_seq is None))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> BlockEvent | EventsLost:
        while not self._ready:
            self._take(self._ask(POLL_S))
        return self._ready.popleft()

    def poll(self, wait_s: float = 0.0) -> list[BlockEvent | EventsLost]:
        """What has come, waiting ``wait_s`` seconds at most for the first; may be empty."""
        if not self._ready:
            self._take(self._ask(checked_wait_s("wait_s", wait_s)))
        ready = list(self._ready)
        self._ready.clear()
        return ready

    def _ask(self, wait_s: float, *, from_now: bool = False) -> pb.WatchReply:
        request = pb.WatchRequest(after_seq=self.seq, from_now=from_now, wait_s=wait_s)
        request.MergeFrom(self._meant)
        if not wait_s:
            return self._session.call(Method.WATCH, request, pb.WatchReply)
        return self._session.call_waiting(Method.WATCH, request, pb.WatchReply, wait_s)

    def _take(self, reply: pb.WatchReply) -> None:
        restarted = self._epoch not in (None, reply.epoch)
        if reply.gap or restarted:
            self._ready.append(EventsLost(None))
        if reply.n_lost:
            self._ready.append(EventsLost(reply.n_lost))
        events = [event for batch in reply.batches for event in _events(batch)]
        events.sort(key=lambda event: event.seq)
        self._ready.extend(events)
        self._epoch, self.seq = reply.epoch, reply.next_seq


def _events(batch: pb.EventBatch) -> Iterator[BlockEvent]:
    kind, tier = batch.kind, batch.tier
    if kind not in ("stored", "moved", "removed") or tier not in ("dram", "nvme"):
        raise ProtocolError(
            f"an event of kind {kind!r:.40} in tier {tier!r:.40}: is the daemon newer than this client?"
        )
    seqs = unpack("seqs", batch.seqs, U64).tolist()
    n = len(seqs)
    unpack("keys", batch.keys, U8, n * KEY_BYTES)
    unpack("parents", batch.parents, U8, n * KEY_BYTES if batch.parents else 0)
    n_tokens = unpack("n_tokens", batch.n_tokens, U32, n if batch.n_tokens else 0).tolist() or [0] * n
    last = unpack("last", batch.last, U8, n if batch.last else 0).tolist() or [0] * n
    for i, seq in enumerate(seqs):
        part = slice(i * KEY_BYTES, (i + 1) * KEY_BYTES)
        yield BlockEvent(
            seq, batch.time_s, kind, tier, batch.reason, batch.namespace,  # type: ignore[arg-type] # checked above
            batch.keys[part], batch.parents[part], n_tokens[i], bool(last[i]),
        )  # fmt: skip
