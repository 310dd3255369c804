"""The calls that find what is stored of a prompt: in one namespace, or in all shards of a family."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Generic, TypeVar

from numpy.typing import ArrayLike

from kvstore.client.lease import Lease
from kvstore.client.prompts import (
    DEFAULT_ROOT,
    count,
    fill_hints,
    fill_prompt,
    rows_of_prompt,
    seconds,
    tokens_asked_for,
)
from kvstore.client.results import Match, Overlap, Persist, Pinned, Prefetch
from kvstore.client.session import Session
from kvstore.client.waiting import Wait, checked_wait_s, wait_seconds
from kvstore.errors import BadInputError, EndedError, ProtocolError, UnavailableError
from kvstore.hints import Hints
from kvstore.types import ExtraKey, Namespace, Root
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.framing import Method
from kvstore.wire.packing import F64, U64, unpack

OVERLAPS_PER_CALL = 256

LeaseT = TypeVar("LeaseT")


class Finding(Generic[LeaseT]):
    """``tokens`` below are the prompt:

    integers (numpy array of any integer type, or a sequence, which is converted once), or for a namespace of
    engine hashes a uint8 array [n, hash_bytes] (or a sequence of equally long bytes).
    """

    def __init__(self, session: Session, namespace: Namespace) -> None:
        """``namespace``: what a row is, and how many tokens a block has, is the same in all shards of a family."""
        self.namespace = namespace
        self.block_tokens = namespace.spec.block_tokens
        self._session = session
        self._copy = 0, 0.0, False

    def __repr__(self) -> str:
        space = self.namespace
        return (
            f"<{type(self).__name__} of model {space.model!r}, tenant {space.tenant!r}, digest {space.digest().hex()}, "
            f"{self.block_tokens} tokens a block, at {self._session}>"
        )

    def _name(self, prompt: pb.Prompt) -> None:
        """Say in a request where it is to be looked; opens what the daemon does not know yet."""
        raise NotImplementedError

    def _leased(self, reply: pb.LeaseReply, first_block: int, reason: str = "") -> LeaseT:
        """What a caller gets of a lease."""
        raise NotImplementedError

    def _matched(self, reply: pb.MatchReply) -> Match:
        return Match(reply.n_blocks, reply.n_tokens, reply.partial_tokens, n_dram_blocks=reply.n_dram_blocks)

    def match(self, tokens: ArrayLike, *, root: Root = DEFAULT_ROOT, extras: Sequence[ExtraKey] = ()) -> Match:
        """How much of a prompt is stored, in any tier. Holds nothing: it may be gone a moment later."""
        request = pb.MatchRequest()
        self._fill(request.prompt, tokens, root, extras)
        try:
            self._name(request.prompt)
            reply = self._session.call(Method.MATCH, request, pb.MatchReply)
        except (UnavailableError, EndedError) as error:
            return Match(0, 0, 0, str(error))
        return self._matched(reply)

    def overlap(self, tokens: ArrayLike, *, root: Root = DEFAULT_ROOT, extras: Sequence[ExtraKey] = ()) -> Overlap:
        """How much of a prompt is stored in which tier, and how long loading it would take. For routers.

        Holds and loads nothing, and is no access to policies: ask every replica's store, and send the request where it
        is served soonest. As cheap as ``match``.
        """
        return self.overlaps([tokens], root=root, extras=[extras])[0]

    def overlaps(
        self,
        prompts: Sequence[ArrayLike],
        *,
        root: Root = DEFAULT_ROOT,
        extras: Sequence[Sequence[ExtraKey]] = (),
    ) -> list[Overlap]:
        """``overlap`` of several prompts, in one round trip for each ``OVERLAPS_PER_CALL`` of them.

        ``extras``: those of each prompt, if any has some. Their times are each as if the others were not loaded.
        """
        if extras and len(extras) != len(prompts):
            raise BadInputError(f"extras are given for {len(extras)} prompts, and there are {len(prompts)}")
        messages = [pb.Prompt() for _ in prompts]
        for i, (message, tokens) in enumerate(zip(messages, prompts, strict=True)):
            self._fill(message, tokens, root, extras[i] if extras else ())
        starts = range(0, len(messages), OVERLAPS_PER_CALL)
        return [each for start in starts for each in self._overlaps(messages[start : start + OVERLAPS_PER_CALL])]

    def _overlaps(self, messages: list[pb.Prompt]) -> list[Overlap]:
        try:
            for message in messages:
                self._name(message)
            reply = self._session.call(Method.OVERLAP, pb.OverlapRequest(prompts=messages), pb.OverlapReply)
        except (UnavailableError, EndedError) as error:
            return [Overlap(0, 0, 0, 0, 0.0, 1.0, str(error))] * len(messages)
        n = len(messages)
        columns = (
            unpack(name, getattr(reply, name), U64, n).tolist()
            for name in ("n_tokens", "n_dram_tokens", "n_loading_tokens")
        )
        times = (unpack(name, getattr(reply, name), F64, n).tolist() for name in ("load_s", "load_error"))
        in_hbm = unpack("n_hbm_tokens", reply.n_hbm_tokens, U64, n).tolist() if reply.n_hbm_tokens else [0] * n
        return [
            Overlap(n_tokens, n_dram, n_tokens - n_dram, n_loading, load_s, error, n_hbm_tokens=n_hbm)
            for n_tokens, n_dram, n_loading, load_s, error, n_hbm in zip(*columns, *times, in_hbm, strict=True)
        ]

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
        hints: Hints | None = None,
        hbm: bool = False,
    ) -> LeaseT:
        """Find the longest stored prefix and hold it for reading in place.

        Blocks before ``first_block`` must match but are not held; at most ``max_blocks`` of the prompt are
        considered. What lies on NVMe is read into DRAM first, as long as ``wait`` allows (see ``Wait``); the
        lease holds the leading blocks that are there then, ``n_pending`` counts the others. Moves no KV bytes
        otherwise. Use it as a context manager; a lease that holds nothing, a miss for example, is falsy.

        With ``hbm``, after ``Client.use_hbm``, blocks that are in HBM need not be in DRAM: see ``Lease.hbm``. Blocks
        that are used so again and again get copies there. Not in hybrid namespaces and families. Raises BadInputError
        for it before ``Client.use_hbm``.
        """
        if hbm and self._session.hbm is None:
            raise BadInputError("hbm=True reads HBM with a device that this client was not given: call use_hbm first")
        request = pb.LeaseRequest(
            first_block=count("first_block", first_block),
            max_blocks=count("max_blocks", max_blocks or 0),
            ttl_s=seconds("ttl_s", ttl_s),
        )
        self._fill(request.prompt, tokens, root, extras, policy_time_s, category, hints)
        if max_blocks == 0:
            return self._leased(pb.LeaseReply(), 0, "max_blocks is 0")
        request.wait_s = self._wait_s(wait, request)
        request.hbm = hbm and self._session.reads_hbm
        lease = self._take(request)
        if request.hbm and not self._session.reads_hbm:
            request.hbm = False  # what is there can't be opened: then from DRAM
            lease = self._take(request)
        return lease

    def _note_copy(self, n_bytes: int, took_s: float, after_read: bool) -> None:
        """So much was copied, and took so long, not counting a wait for NVMe (``after_read``: there was one).

        The daemon hears of it with the next request, for what it tells routers.
        """
        self._copy = n_bytes, took_s, after_read

    def _tell_copy(self, request: pb.LeaseRequest) -> None:
        copy, self._copy = self._copy, (0, 0.0, False)
        request.copied_bytes, request.copied_s, request.copied_after_read = copy

    def _take(self, request: pb.LeaseRequest) -> LeaseT:
        """The lease asked for, complete but for the name of what it is in."""
        asked_s = time.perf_counter()
        self._tell_copy(request)
        try:
            self._name(request.prompt)
            lease = self._session.granted(
                Method.LEASE,
                request,
                pb.LeaseReply,
                lambda reply: self._leased(reply, request.first_block),
                request.wait_s,
            )
            if isinstance(lease, Lease):
                lease.tell_copies(self._note_copy, time.perf_counter() - asked_s)
            return lease
        except (UnavailableError, EndedError, ProtocolError) as error:
            return self._leased(pb.LeaseReply(), 0, str(error))

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
        hints: Hints | None = None,
    ) -> Prefetch:
        """Have what is stored of a prompt read into DRAM, ahead of the lease that will need it.

        Returns at once unless told to ``wait`` (see ``Wait``). Holds nothing, and counts as no access.
        """
        request = pb.PrefetchRequest(
            first_block=count("first_block", first_block), max_blocks=count("max_blocks", max_blocks or 0)
        )
        self._fill(request.prompt, tokens, root, extras, policy_time_s, hints=hints)
        if max_blocks == 0:
            return Prefetch(0, 0, 0, 0.0, "max_blocks is 0")
        request.wait_s = self._wait_s(wait, request)
        try:
            self._name(request.prompt)
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
            self._name(request.prompt)
            reply = self._session.granted(Method.PERSIST, request, pb.PersistReply, lambda reply: reply, request.wait_s)
        except (UnavailableError, EndedError, ProtocolError) as error:
            return Persist(0, 0, 0, str(error))
        return Persist(reply.n_blocks, reply.n_durable, reply.n_pending, reply.reason)

    def pin(
        self,
        tokens: ArrayLike,
        *,
        root: Root = DEFAULT_ROOT,
        extras: Sequence[ExtraKey] = (),
        ttl_s: float | None = None,
        keep: bool = False,
    ) -> Pinned:
        """Keep the stored prefix of a prompt from being evicted, until ``unpin`` or for ``ttl_s`` seconds.

        Without ``ttl_s`` for the daemon's ``--pin-default`` (30 s); never longer than its ``--pin-max``, see
        ``Pinned.ttl_s``, nor than this client lives, unless ``keep``. Raises BadInputError if the tenant, or all
        together, would have more pinned than they may, UnavailableError if nothing can be promised.
        """
        request = pb.PinRequest(ttl_s=seconds("ttl_s", ttl_s), keep=keep)
        self._fill(request.prompt, tokens, root, extras)
        self._name(request.prompt)
        reply = self._session.call(Method.PIN, request, pb.PinReply)
        return Pinned(reply.pin_id, reply.n_blocks, reply.ttl_s)

    def unpin(self, pinned: Pinned) -> bool:
        """Let go of a pin; False if it had ended already. Raises UnavailableError."""
        if not isinstance(pinned, Pinned):
            raise BadInputError(f"pinned is {pinned!r:.80}; give what pin() returned")
        return unpin(self._session, pinned.id)

    def _fill(
        self,
        prompt: pb.Prompt,
        tokens: ArrayLike,
        root: Root,
        extras: Sequence[ExtraKey],
        policy_time_s: float | None = None,
        category: int = 0,
        hints: Hints | None = None,
    ) -> None:
        fill_prompt(prompt, rows_of_prompt(self.namespace, tokens), root, extras, policy_time_s, category)
        if hints is not None:
            fill_hints(prompt, hints)

    def _wait_s(self, wait: Wait, request: pb.LeaseRequest | pb.PrefetchRequest) -> float:
        n_tokens = tokens_asked_for(self.namespace, request.prompt, request.first_block, request.max_blocks)
        return wait_seconds(wait, n_tokens, self._session.timeout_s)


def unpin(session: Session, pin_id: int) -> bool:
    """Let go of a pin of this client, or a kept one of its tenant; False if there is none. Raises UnavailableError."""
    return session.call(Method.UNPIN, pb.UnpinRequest(pin_id=pin_id), pb.UnpinReply).found
