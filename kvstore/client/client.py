"""The client: put blocks in, find them by prefix, read them in place or copied.

A daemon that is down, slow or restarted makes misses, by the deadline, and never an exception from the
calls on the path of a request (match, lease, get_into, put). Wrong arguments always raise BadInputError.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvstore.client.lease import Lease, WriteReservation, rows_of
from kvstore.client.session import Session
from kvstore.config import check_socket_path, default_socket_path
from kvstore.errors import BadInputError, EndedError, ProtocolError, UnavailableError
from kvstore.tokens import hash_array, token_array
from kvstore.types import ExtraKey, Namespace, Root, RowKind
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.framing import Method

DEFAULT_ROOT = Root()


@dataclass(frozen=True, slots=True)
class Match:
    """The longest stored prefix of a prompt: whole blocks, and tokens of one further block."""

    n_blocks: int
    n_tokens: int
    partial_tokens: int
    reason: str = ""
    """Why nothing is known, if the daemon could not be asked."""


@dataclass(frozen=True, slots=True)
class PutResult:
    """What became of the blocks of a put; the four counts add up to the blocks given."""

    n_present: int
    n_stored: int
    n_duplicate: int
    n_skipped: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class GetResult:
    """Blocks copied, and how many tokens of the prompt they and the blocks before them cover."""

    n_blocks: int
    n_tokens: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Pinned:
    """Blocks kept from eviction until ``unpin`` or the end of their time."""

    id: int
    n_blocks: int
    ttl_s: float


class Client:
    """A connection to the daemon of this machine. Usable from several threads; a context manager.

    ``timeout_s`` bounds every call. With ``required=False`` a daemon that is down at the start is no error:
    everything is a miss until it comes up. Raises UnavailableError otherwise. A forked child connects anew
    on its first call.
    """

    def __init__(
        self,
        socket_path: str | os.PathLike[str] | None = None,
        tenant: str = "default",
        timeout_s: float = 1.0,
        *,
        required: bool = True,
        name: str = "",
    ) -> None:
        Namespace.check_tenant(tenant)
        if not 0 < timeout_s < 86400:
            raise BadInputError(f"timeout_s is {timeout_s!r}; it must be a positive number of seconds")
        path = Path(socket_path) if socket_path is not None else default_socket_path()
        check_socket_path(path)
        self.tenant = tenant
        self._session = Session(path, tenant, name or Path(sys.argv[0] or "python").name, timeout_s, required=required)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def healthy(self) -> bool:
        """Whether the daemon answered last time; if not, calls are misses without waiting."""
        return self._session.healthy

    @property
    def server_version(self) -> str:
        """Version of the daemon last spoken to."""
        return self._session.server_version

    def wait_healthy(self, timeout_s: float) -> bool:
        """Block until the daemon answers (again), at most ``timeout_s``; False if it did not."""
        return self._session.wait_healthy(timeout_s)

    def open(self, namespace: Namespace, name: str = "") -> NamespaceHandle:
        """Use a namespace. ``name``, optional, is bound to this description within the tenant.

        Raises SpecMismatchError, naming the fields, if the name stands for another one. If the daemon is
        unreachable the namespace is opened with the first call that reaches it.
        """
        if not isinstance(namespace, Namespace):
            raise BadInputError(f"namespace is {namespace!r:.80}; give a kvstore.Namespace")
        if namespace.tenant != self.tenant:
            raise BadInputError(f"the namespace belongs to tenant {namespace.tenant!r}, this client to {self.tenant!r}")
        handle = NamespaceHandle(self._session, namespace, name)
        with contextlib.suppress(UnavailableError):
            handle.ensure_open()
        return handle

    def attach(self, lease_id: int, block_bytes: int) -> Lease:
        """Read through a lease that another client of this tenant took. Raises EndedError if it has ended.

        Both must release; the blocks stay until both have.
        """
        request = pb.AttachLeaseRequest(lease_id=_count("lease_id", lease_id, 1 << 64))
        with self._session.exclusive():
            reply = self._session.call(Method.ATTACH_LEASE, request, pb.LeaseReply)
            try:
                return Lease(self._session, reply, block_bytes, _attached_first_block(reply))
            except BaseException:
                self._session.acknowledge(Method.RELEASE, pb.ReleaseRequest(lease_id=reply.lease_id))
                raise

    def stats(self) -> dict[str, float | str]:
        """Counters and gauges of the daemon by name. Raises UnavailableError if it can't be asked."""
        reply = self._session.call(Method.STATS, pb.StatsRequest(), pb.StatsReply)
        return {**reply.numbers, **reply.texts}

    def close(self) -> None:
        """End the session. Leases end; arrays that are still alive keep their slots until this process ends."""
        self._session.close()


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
        """How much of a prompt is stored. Holds nothing: it may be gone a moment later."""
        request = pb.MatchRequest()
        self._fill(request.prompt, tokens, root, extras)
        try:
            request.prompt.namespace = self.ensure_open()
            reply = self._session.call(Method.MATCH, request, pb.MatchReply)
        except (UnavailableError, EndedError) as error:
            return Match(0, 0, 0, str(error))
        return Match(reply.n_blocks, reply.n_tokens, reply.partial_tokens)

    def lease(
        self,
        tokens: ArrayLike,
        *,
        root: Root = DEFAULT_ROOT,
        extras: Sequence[ExtraKey] = (),
        first_block: int = 0,
        max_blocks: int | None = None,
        ttl_s: float | None = None,
        policy_time_s: float | None = None,
        category: int = 0,
    ) -> Lease:
        """Find the longest stored prefix and hold it for reading in place.

        Blocks before ``first_block`` must match but are not held; at most ``max_blocks`` of the prompt are
        considered. Moves no KV bytes. Use it as a context manager; a miss is a falsy lease.
        """
        request = pb.LeaseRequest(
            first_block=_count("first_block", first_block),
            max_blocks=_count("max_blocks", max_blocks or 0),
            ttl_s=_seconds("ttl_s", ttl_s),
        )
        self._fill(request.prompt, tokens, root, extras, policy_time_s, category)
        if max_blocks == 0:
            return self._no_lease("max_blocks is 0")
        try:
            request.prompt.namespace = self.ensure_open()
            with self._session.exclusive():
                reply = self._session.call(Method.LEASE, request, pb.LeaseReply)
                try:
                    return Lease(self._session, reply, self.block_bytes, first_block)
                except BaseException:
                    self._session.acknowledge(Method.RELEASE, pb.ReleaseRequest(lease_id=reply.lease_id))
                    raise
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
        threads: int = 1,
        policy_time_s: float | None = None,
        category: int = 0,
    ) -> GetResult:
        """Copy the stored blocks of a prompt from ``first_block`` on to ``out`` ([m, ...], C-contiguous).

        At most m whole blocks. A staged read: after the copy, lease and slot generations are checked, and
        what can't be vouched for counts as a miss.
        """
        room = rows_of(out, self.block_bytes)
        if len(room) == 0:
            return GetResult(0, 0)
        with self.lease(
            tokens, root=root, extras=extras, first_block=first_block, max_blocks=first_block + len(room),
            policy_time_s=policy_time_s, category=category,
        ) as lease:  # fmt: skip
            n = lease.copy_into(room, threads)
            return GetResult(n, (first_block + n) * self.block_tokens if n else 0, lease.reason)

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
            first_block=_count("first_block", first_block),
            n_blocks=_count("n_blocks", n_blocks),
            ttl_s=_seconds("ttl_s", ttl_s),
        )
        self._fill(request.prompt, tokens, root, extras, policy_time_s, category)
        if n_blocks == 0:
            return WriteReservation(self._session, pb.ReserveReply(), self.block_bytes, 0)
        try:
            request.prompt.namespace = self.ensure_open()
            with self._session.exclusive():
                reply = self._session.call(Method.RESERVE, request, pb.ReserveReply)
                try:
                    return WriteReservation(self._session, reply, self.block_bytes, n_blocks)
                except BaseException:
                    self._session.acknowledge(Method.ABORT, pb.AbortRequest(reservation_id=reply.reservation_id))
                    raise
        except (UnavailableError, EndedError, ProtocolError) as error:
            return WriteReservation(
                self._session, pb.ReserveReply(skipped_reason=str(error)), self.block_bytes, n_blocks
            )

    def put(
        self,
        tokens: ArrayLike,
        blocks: NDArray[Any],
        *,
        first_block: int = 0,
        root: Root = DEFAULT_ROOT,
        extras: Sequence[ExtraKey] = (),
        threads: int = 1,
        policy_time_s: float | None = None,
        category: int = 0,
    ) -> PutResult:
        """Store ``blocks`` ([n, ...], C-contiguous) as blocks ``first_block ..`` of a prompt.

        What is stored already is not copied. Copies the rest into this client's own region and makes it
        visible at once, all of it or, if the right ended meanwhile, nothing.
        """
        rows = rows_of(blocks, self.block_bytes)
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
        """Keep the stored prefix of a prompt from being evicted. Raises UnavailableError if that can't be promised."""
        request = pb.PinRequest(ttl_s=_seconds("ttl_s", ttl_s))
        self._fill(request.prompt, tokens, root, extras)
        request.prompt.namespace = self.ensure_open()
        reply = self._session.call(Method.PIN, request, pb.PinReply)
        return Pinned(reply.pin_id, reply.n_blocks, reply.ttl_s)

    def unpin(self, pinned: Pinned) -> bool:
        """Let go of a pin; False if it had ended already. Raises UnavailableError."""
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
        if self.namespace.row_kind is RowKind.HASHES:
            prompt.rows = hash_array(tokens, self.namespace.hash_bytes).tobytes()
        else:
            prompt.rows = token_array(tokens).tobytes()
        if root is not DEFAULT_ROOT:
            if not isinstance(root, Root):
                raise BadInputError(f"root is {root!r:.80}; give a kvstore.Root")
            prompt.salt, prompt.lora = root.salt, root.lora
        for extra in extras or ():
            prompt.extras.add(start_token=extra.start_token, n_tokens=extra.n_tokens, digest=extra.digest)
        if policy_time_s is not None:
            prompt.policy_time_s = _seconds("policy_time_s", policy_time_s)
        if category:
            prompt.category = _count("category", category, 256)

    def _no_lease(self, reason: str) -> Lease:
        return Lease(self._session, pb.LeaseReply(), self.block_bytes, 0, reason)


def _seconds(name: str, value: float | None) -> float:
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise BadInputError(f"{name} is {value!r:.80}; it must be a number of seconds")
    return float(value)


def _count(name: str, value: int, end: int = 1 << 31) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 0 <= value < end:
        raise BadInputError(f"{name} is {value!r}; it must be a whole number, 0 or more")
    return int(value)


def _attached_first_block(reply: pb.LeaseReply) -> int:
    n_held = len(reply.slots.ids) // 8
    return reply.n_blocks + (reply.partial_tokens > 0) - n_held
