"""A namespace as one client sees it: the calls that find, read and store blocks."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from numpy.typing import ArrayLike, NDArray

from kvstore.client.borrowing import current
from kvstore.client.explaining import Explaining
from kvstore.client.finding import Finding
from kvstore.client.hbm import IpcDevice
from kvstore.client.lease import Lease, WriteReservation
from kvstore.client.prompts import DEFAULT_ROOT, count, seconds
from kvstore.client.results import GetResult, PutResult
from kvstore.client.session import Session
from kvstore.client.slots import Bytes, rows_of
from kvstore.client.waiting import Wait, checked_wait_s
from kvstore.errors import BadInputError, EndedError, ProtocolError, UnavailableError
from kvstore.hints import Hints, check_session_id
from kvstore.recompute import checked_doubling_tokens
from kvstore.types import ExtraKey, Namespace, Root
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.framing import Method

Stored = Literal["prompt", "all"]
"""What of a request is stored: only blocks of its prompt, or those with generated tokens too."""


class NamespaceHandle(Finding[Lease], Explaining):
    """A namespace as seen by one client: finds (see ``Finding``), reads and stores blocks."""

    def __init__(
        self,
        session: Session,
        namespace: Namespace,
        name: str,
        store: Stored = "all",
        attention_doubling_tokens: float = 0.0,
    ) -> None:
        super().__init__(session, namespace)
        if store not in ("prompt", "all"):
            raise BadInputError(f"store is {store!r:.80}; known are 'prompt' and 'all'")
        self._prompt_only = store == "prompt"
        self.block_bytes = namespace.spec.block_bytes
        self._dtype = namespace.spec.dtype
        self._bound_name = name
        self._doubling_tokens = checked_doubling_tokens(attention_doubling_tokens)
        self._digest = namespace.digest()
        self._opened_epoch = 0

    def ensure_open(self) -> bytes:
        """Tell the daemon what this namespace is, once per daemon process; returns its digest.

        The digest goes with every call, so that a daemon that was restarted meanwhile can't take it for another
        namespace. May raise what ``open`` raises.
        """
        if self._opened_epoch != self._session.epoch or not self._opened_epoch:
            description_json = json.dumps(self.namespace.to_dict())
            request = pb.OpenNamespaceRequest(
                description_json=description_json,
                name=self._bound_name,
                attention_doubling_tokens=self._doubling_tokens,
            )
            with self._session.exclusive():
                self._session.call(Method.OPEN_NAMESPACE, request, pb.OpenNamespaceReply)
                self._opened_epoch = self._session.epoch
        return self._digest

    def _name(self, prompt: pb.Prompt) -> None:
        prompt.namespace = self.ensure_open()

    def _leased(self, reply: pb.LeaseReply, first_block: int, reason: str = "") -> Lease:
        return Lease(self._session, reply, self.block_bytes, first_block, reason)

    @property
    def hbm_device(self) -> IpcDevice | None:
        """The device with which leases with ``hbm`` read; None before ``Client.use_hbm``, or if it can't."""
        regions = self._session.hbm
        return regions.device if regions is not None and not regions.failure else None

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
        hints: Hints | None = None,
    ) -> GetResult:
        """Copy the stored blocks of a prompt from ``first_block`` on to ``out`` ([m, ...], C-contiguous).

        At most m whole blocks; ``wait`` as in ``lease``. A staged read: after the copy, lease and slot generations
        are checked, and what can't be vouched for counts as a miss.
        """
        room = rows_of(out, self.block_bytes, self._dtype)
        if len(room) == 0:
            return GetResult(0, 0)
        request = pb.LeaseRequest(
            first_block=count("first_block", first_block), max_blocks=count("max_blocks", first_block + len(room))
        )
        self._fill(request.prompt, tokens, root, extras, policy_time_s, category, hints)
        request.wait_s = self._wait_s(wait, request)
        if room.flags.writeable and self._session.reads_at_once(room):
            got = self._read_at_once(request, room, threads)
            if got is not None:
                return got
        with self._take(request) as lease:
            n = lease.copy_into(room, threads)
            return self._got(n, first_block, lease.reason, lease.n_pending)

    def _read_at_once(self, request: pb.LeaseRequest, room: Bytes, threads: int) -> GetResult | None:
        """By one call; None if that takes a lease."""
        begun_s = time.perf_counter()
        self._tell_copy(request)
        try:
            self._name(request.prompt)
            reply = self._session.read_at_once(request, room, threads)
        except (UnavailableError, EndedError, ProtocolError) as error:
            return GetResult(0, 0, str(error))
        if reply is None:
            return None
        n = max(reply.n_blocks - request.first_block, 0)
        if n and threads == 1:
            took_s = time.perf_counter() - begun_s - reply.waited_s
            self._note_copy(n * self.block_bytes, took_s, reply.waited_s > 0)
        return self._got(n, request.first_block, "", reply.n_pending)

    def _got(self, n: int, first_block: int, reason: str, n_pending: int) -> GetResult:
        return GetResult(n, (first_block + n) * self.block_tokens if n else 0, reason, n_pending)

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
        hints: Hints | None = None,
        n_prompt_tokens: int | None = None,
    ) -> WriteReservation:
        """Slots for blocks ``first_block .. first_block + n_blocks - 1`` of a prompt, to be filled in place.

        Those already stored are left out; there may be fewer slots than asked for, see ``n_skipped`` and
        ``reason``. The blocks before ``first_block`` must be stored.

        ``n_prompt_tokens``: the tokens behind so many were generated (None: none was). Blocks that hold one of them
        are skipped if the handle was opened with ``store="prompt"``, or if the daemon stores none.
        """
        request = pb.ReserveRequest(
            first_block=count("first_block", first_block),
            n_blocks=count("n_blocks", n_blocks),
            ttl_s=seconds("ttl_s", ttl_s),
        )
        self._fill(request.prompt, tokens, root, extras, policy_time_s, category, hints)
        if n_prompt_tokens is not None:
            request.prompt.n_prompt_tokens = count("n_prompt_tokens", n_prompt_tokens)
            request.prompt.prompt_only = self._prompt_only
        if n_blocks == 0:
            return WriteReservation(self._session, pb.ReserveReply(), self.block_bytes, 0)
        try:
            self._name(request.prompt)
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
        hints: Hints | None = None,
        n_prompt_tokens: int | None = None,
    ) -> PutResult:
        """Store ``blocks`` ([n, ...], C-contiguous) as blocks ``first_block ..`` of a prompt.

        What is stored already is not copied. Copies the rest into this client's own region and makes it
        visible at once, all of it or, if the right ended meanwhile, nothing. With ``durable_within_s`` it
        then waits so long for all of them to be durable, and ``n_durable`` says how many are.
        ``n_prompt_tokens`` as in ``reserve``.
        """
        if durable_within_s is not None:
            checked_wait_s("durable_within_s", durable_within_s)
        rows = rows_of(blocks, self.block_bytes, self._dtype)
        with self.reserve(
            tokens, n_blocks=len(rows), first_block=first_block, root=root, extras=extras,
            policy_time_s=policy_time_s, category=category, hints=hints, n_prompt_tokens=n_prompt_tokens,
        ) as reservation:  # fmt: skip
            result = _filled(reservation, rows, threads)
        if durable_within_s is None or not len(rows):
            return result
        end = first_block + len(rows)
        done = self.persist(tokens, durable_within_s, root=root, extras=extras, n_blocks=end)
        n_durable = min(max(done.n_durable - first_block, 0), len(rows))
        return replace(result, n_durable=n_durable, reason=result.reason or done.reason)

    def end_session(self, session_id: str, root: Root = DEFAULT_ROOT) -> int:
        """No request with this ``Hints.session_id`` will follow below ``root``: what only it has used goes first now.

        The same id below another root is another session. Returns how many blocks those are. Raises UnavailableError
        if the daemon can't be told.
        """
        check_session_id(session_id)
        request = pb.EndSessionRequest(
            namespace=self.ensure_open(), session_id=session_id, salt=root.salt, lora=root.lora
        )
        return self._session.call(Method.END_SESSION, request, pb.EndSessionReply).n_blocks


def _filled(reservation: WriteReservation, rows: Bytes, threads: int) -> PutResult:
    """Copy what is missing of ``rows`` and commit it."""
    n_slots, n_present = len(reservation), reservation.n_present
    if n_slots == 0:
        return PutResult(n_present, 0, 0, reservation.n_skipped, reservation.reason)
    try:
        reservation.fill(rows[n_present : n_present + n_slots], threads, kept=True)
    except EndedError as error:
        return PutResult(n_present, 0, 0, len(rows) - n_present, str(error))
    current().must_be_wanted()
    n_stored, n_duplicate = reservation.commit()
    n_skipped = len(rows) - n_present - n_stored - n_duplicate
    return PutResult(n_present, n_stored, n_duplicate, n_skipped, reservation.reason)
