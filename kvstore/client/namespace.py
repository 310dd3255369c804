"""A namespace as one client sees it: the calls that find, read and store blocks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from numpy.typing import ArrayLike, NDArray

from kvstore.client.lease import Bytes, Lease, WriteReservation, rows_of
from kvstore.client.prompts import DEFAULT_ROOT, count, fill_prompt, rows_of_prompt, seconds, tokens_asked_for
from kvstore.client.results import GetResult, Match, Persist, Pinned, Prefetch, PutResult
from kvstore.client.session import Session
from kvstore.client.waiting import Wait, checked_wait_s, wait_seconds
from kvstore.errors import BadInputError, EndedError, ProtocolError, UnavailableError
from kvstore.types import ExtraKey, Namespace, Root
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.framing import Method


class NamespaceHandle:
    """A namespace as seen by one client. ``tokens`` below are the prompt:

    integers (numpy array of any integer type, or a sequence, which is converted once), or for a namespace of
    engine hashes a uint8 array [n, hash_bytes] (or a sequence of equally long bytes).
    """

    def __init__(self, session: Session, namespace: Namespace, name: str) -> None:
        self.namespace = namespace
        self.block_bytes = namespace.spec.block_bytes
        self.block_tokens = namespace.spec.block_tokens
        self._session = session
        self._name = name
        self._digest = namespace.digest()
        self._opened_epoch = 0

    def ensure_open(self) -> bytes:
        """Tell the daemon what this namespace is, once per daemon process; returns its digest.

        The digest goes with every call, so that a daemon that was restarted meanwhile can't take it for another
        namespace. May raise what ``open`` raises.
        """
        if self._opened_epoch != self._session.epoch or not self._opened_epoch:
            request = pb.OpenNamespaceRequest(description_json=json.dumps(self.namespace.to_dict()), name=self._name)
            with self._session.exclusive():
                self._session.call(Method.OPEN_NAMESPACE, request, pb.OpenNamespaceReply)
                self._opened_epoch = self._session.epoch
        return self._digest

    def match(self, tokens: ArrayLike, *, root: Root = DEFAULT_ROOT, extras: Sequence[ExtraKey] = ()) -> Match:
        """How much of a prompt is stored, in any tier. Holds nothing: it may be gone a moment later."""
        request = pb.MatchRequest()
        self._fill(request.prompt, tokens, root, extras)
        try:
            request.prompt.namespace = self.ensure_open()
            reply = self._session.call(Method.MATCH, request, pb.MatchReply)
        except (UnavailableError, EndedError) as error:
            return Match(0, 0, 0, str(error))
        return Match(reply.n_blocks, reply.n_tokens, reply.partial_tokens, n_dram_blocks=reply.n_dram_blocks)

    def lease(
        self,
        tokens: ArrayLike,
        *,
        root: Root = DEFAULT_ROOT,
        extras: Sequence[ExtraKey] = (),
        first_block: int = 0,
        max_blocks: int | None = None,
        wait: Wait = "wait",
        ttl_s: float | None = None,
        policy_time_s: float | None = None,
        category: int = 0,
    ) -> Lease:
        """Find the longest stored prefix and hold it for reading in place.

        Blocks before ``first_block`` must match but are not held; at most ``max_blocks`` of the prompt are
        considered. What lies on NVMe is read into DRAM first, as long as ``wait`` allows (see ``Wait``); the
        lease holds the leading blocks that are there then, ``n_pending`` counts the others. Moves no KV bytes
        otherwise. Use it as a context manager; a lease that holds nothing, a miss for example, is falsy.
        """
        request = pb.LeaseRequest(
            first_block=count("first_block", first_block),
            max_blocks=count("max_blocks", max_blocks or 0),
            ttl_s=seconds("ttl_s", ttl_s),
        )
        self._fill(request.prompt, tokens, root, extras, policy_time_s, category)
        if max_blocks == 0:
            return self._no_lease("max_blocks is 0")
        request.wait_s = self._wait_s(wait, request)
        try:
            request.prompt.namespace = self.ensure_open()
            return self._session.granted(
                Method.LEASE,
                request,
                pb.LeaseReply,
                lambda reply: Lease(self._session, reply, self.block_bytes, first_block),
                request.wait_s,
            )
        except (UnavailableError, EndedError, ProtocolError) as error:
            return self._no_lease(str(error))

    def get_into(
        self,
        tokens: ArrayLike,
        out: NDArray[Any],
        *,
        root: Root = DEFAULT_ROOT,
        extras: Sequence[ExtraKey] = (),
        first_block: int = 0,
        wait: Wait = "wait",
        threads: int = 1,
        policy_time_s: float | None = None,
        category: int = 0,
    ) -> GetResult:
        """Copy the stored blocks of a prompt from ``first_block`` on to ``out`` ([m, ...], C-contiguous).

        At most m whole blocks; ``wait`` as in ``lease``. A staged read: after the copy, lease and slot generations
        are checked, and what can't be vouched for counts as a miss.
        """
        room = rows_of(out, self.block_bytes)
        if len(room) == 0:
            return GetResult(0, 0)
        with self.lease(
            tokens, root=root, extras=extras, first_block=first_block, max_blocks=first_block + len(room),
            wait=wait, policy_time_s=policy_time_s, category=category,
        ) as lease:  # fmt: skip
            n = lease.copy_into(room, threads)
            return GetResult(n, (first_block + n) * self.block_tokens if n else 0, lease.reason, lease.n_pending)

    def prefetch(
        self,
        tokens: ArrayLike,
        *,
        root: Root = DEFAULT_ROOT,
        extras: Sequence[ExtraKey] = (),
        first_block: int = 0,
        max_blocks: int | None = None,
        wait: Wait = "best_effort",
        policy_time_s: float | None = None,
    ) -> Prefetch:
        """Have what is stored of a prompt read into DRAM, ahead of the lease that will need it.

        Returns at once unless told to ``wait`` (see ``Wait``). Holds nothing, and counts as no access.
        """
        request = pb.PrefetchRequest(
            first_block=count("first_block", first_block), max_blocks=count("max_blocks", max_blocks or 0)
        )
        self._fill(request.prompt, tokens, root, extras, policy_time_s)
        if max_blocks == 0:
            return Prefetch(0, 0, 0, 0.0, "max_blocks is 0")
        request.wait_s = self._wait_s(wait, request)
        try:
            request.prompt.namespace = self.ensure_open()
            reply = self._session.granted(
                Method.PREFETCH, request, pb.PrefetchReply, lambda reply: reply, request.wait_s
            )
        except (UnavailableError, EndedError, ProtocolError) as error:
            return Prefetch(0, 0, 0, 0.0, str(error))
        return Prefetch(reply.n_blocks, reply.n_ready, reply.n_pending, reply.eta_s)

    def persist(
        self,
        tokens: ArrayLike,
        wait_s: float = 0.0,
        *,
        root: Root = DEFAULT_ROOT,
        extras: Sequence[ExtraKey] = (),
        n_blocks: int | None = None,
    ) -> Persist:
        """Have what is stored of a prompt (of its first ``n_blocks``) made durable, whatever the write policy.

        Blocks ``wait_s`` seconds at most for that. The ``n_durable`` leading blocks outlive a crash of the
        daemon and of the machine; without an NVMe tier there are none.
        """
        request = pb.PersistRequest(wait_s=checked_wait_s("wait_s", wait_s))
        fill_prompt(request.prompt, rows_of_prompt(self.namespace, tokens, n_blocks), root, extras)
        try:
            request.prompt.namespace = self.ensure_open()
            reply = self._session.granted(Method.PERSIST, request, pb.PersistReply, lambda reply: reply, request.wait_s)
        except (UnavailableError, EndedError, ProtocolError) as error:
            return Persist(0, 0, 0, str(error))
        return Persist(reply.n_blocks, reply.n_durable, reply.n_pending, reply.reason)

    def reserve(
        self,
        tokens: ArrayLike,
        *,
        n_blocks: int,
        first_block: int = 0,
        root: Root = DEFAULT_ROOT,
        extras: Sequence[ExtraKey] = (),
        ttl_s: float | None = None,
        policy_time_s: float | None = None,
        category: int = 0,
    ) -> WriteReservation:
        """Slots for blocks ``first_block .. first_block + n_blocks - 1`` of a prompt, to be filled in place.

        Those already stored are left out; there may be fewer slots than asked for, see ``n_skipped`` and
        ``reason``. The blocks before ``first_block`` must be stored.
        """
        request = pb.ReserveRequest(
            first_block=count("first_block", first_block),
            n_blocks=count("n_blocks", n_blocks),
            ttl_s=seconds("ttl_s", ttl_s),
        )
        self._fill(request.prompt, tokens, root, extras, policy_time_s, category)
        if n_blocks == 0:
            return WriteReservation(self._session, pb.ReserveReply(), self.block_bytes, 0)
        try:
            request.prompt.namespace = self.ensure_open()
            return self._session.granted(
                Method.RESERVE,
                request,
                pb.ReserveReply,
                lambda reply: WriteReservation(self._session, reply, self.block_bytes, n_blocks),
            )
        except (UnavailableError, EndedError, ProtocolError) as error:
            nothing = pb.ReserveReply(skipped_reason=str(error))
            return WriteReservation(self._session, nothing, self.block_bytes, n_blocks)

    def put(
        self,
        tokens: ArrayLike,
        blocks: NDArray[Any],
        *,
        first_block: int = 0,
        root: Root = DEFAULT_ROOT,
        extras: Sequence[ExtraKey] = (),
        durable_within_s: float | None = None,
        threads: int = 1,
        policy_time_s: float | None = None,
        category: int = 0,
    ) -> PutResult:
        """Store ``blocks`` ([n, ...], C-contiguous) as blocks ``first_block ..`` of a prompt.

        What is stored already is not copied. Copies the rest into this client's own region and makes it
        visible at once, all of it or, if the right ended meanwhile, nothing. With ``durable_within_s`` it
        then waits so long for all of them to be durable, and ``n_durable`` says how many are.
        """
        if durable_within_s is not None:
            checked_wait_s("durable_within_s", durable_within_s)
        rows = rows_of(blocks, self.block_bytes)
        result = self._put(tokens, rows, first_block, root, extras, threads, policy_time_s, category)
        if durable_within_s is None or not len(rows):
            return result
        end = first_block + len(rows)
        done = self.persist(tokens, durable_within_s, root=root, extras=extras, n_blocks=end)
        n_durable = min(max(done.n_durable - first_block, 0), len(rows))
        return replace(result, n_durable=n_durable, reason=result.reason or done.reason)

    def _put(
        self,
        tokens: ArrayLike,
        rows: Bytes,
        first_block: int,
        root: Root,
        extras: Sequence[ExtraKey],
        threads: int,
        policy_time_s: float | None,
        category: int,
    ) -> PutResult:
        n = len(rows)
        with self.reserve(
            tokens, n_blocks=n, first_block=first_block, root=root, extras=extras,
            policy_time_s=policy_time_s, category=category,
        ) as reservation:  # fmt: skip
            n_slots = len(reservation)
            if n_slots == 0:
                return PutResult(reservation.n_present, 0, 0, reservation.n_skipped, reservation.reason)
            try:
                reservation.fill(rows[reservation.n_present : reservation.n_present + n_slots], threads)
            except EndedError as error:
                return PutResult(reservation.n_present, 0, 0, n - reservation.n_present, str(error))
            n_stored, n_duplicate = reservation.commit()
            n_skipped = n - reservation.n_present - n_stored - n_duplicate
            return PutResult(reservation.n_present, n_stored, n_duplicate, n_skipped, reservation.reason)

    def pin(
        self,
        tokens: ArrayLike,
        *,
        root: Root = DEFAULT_ROOT,
        extras: Sequence[ExtraKey] = (),
        ttl_s: float | None = None,
    ) -> Pinned:
        """Keep the stored prefix of a prompt from being evicted, until ``unpin`` or for ``ttl_s`` seconds.

        Without ``ttl_s`` for the daemon's ``--lease-default`` (30 s); never longer than its ``--lease-max``, see
        ``Pinned.ttl_s``. Raises UnavailableError if that can't be promised.
        """
        request = pb.PinRequest(ttl_s=seconds("ttl_s", ttl_s))
        self._fill(request.prompt, tokens, root, extras)
        request.prompt.namespace = self.ensure_open()
        reply = self._session.call(Method.PIN, request, pb.PinReply)
        return Pinned(reply.pin_id, reply.n_blocks, reply.ttl_s)

    def unpin(self, pinned: Pinned) -> bool:
        """Let go of a pin; False if it had ended already. Raises UnavailableError."""
        if not isinstance(pinned, Pinned):
            raise BadInputError(f"pinned is {pinned!r:.80}; give what pin() returned")
        reply = self._session.call(Method.UNPIN, pb.UnpinRequest(pin_id=pinned.id), pb.UnpinReply)
        return reply.found

    def _fill(
        self,
        prompt: pb.Prompt,
        tokens: ArrayLike,
        root: Root,
        extras: Sequence[ExtraKey],
        policy_time_s: float | None = None,
        category: int = 0,
    ) -> None:
        fill_prompt(prompt, rows_of_prompt(self.namespace, tokens), root, extras, policy_time_s, category)

    def _wait_s(self, wait: Wait, request: pb.LeaseRequest | pb.PrefetchRequest) -> float:
        n_tokens = tokens_asked_for(self.namespace, request.prompt, request.first_block, request.max_blocks)
        return wait_seconds(wait, n_tokens, self._session.timeout_s)

    def _no_lease(self, reason: str) -> Lease:
        return Lease(self._session, pb.LeaseReply(), self.block_bytes, 0, reason)
