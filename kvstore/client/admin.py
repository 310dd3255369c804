"""Operators' calls of a client: which namespaces there are and what they hold, clearing them, who holds what.

They cover the client's own tenant. ``all_tenants`` is for who may use the daemon's local socket. Unlike the calls on
the path of a request they raise UnavailableError when the daemon can't be asked.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict, Unpack

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvstore.client.finding import unpin
from kvstore.client.prompts import DEFAULT_ROOT, count
from kvstore.client.recording import Recording
from kvstore.client.session import Session
from kvstore.client.tenants import TenantInfo, ask_tenants
from kvstore.client.waiting import checked_wait_s
from kvstore.client.watching import Watch
from kvstore.errors import BadInputError
from kvstore.metrics import Distribution
from kvstore.types import KEY_BYTES, ExtraKey, Namespace, Root
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.framing import Method
from kvstore.wire.packing import F64, I32, U8, U32, U64, unpack


@dataclass(frozen=True, slots=True)
class NamespaceInfo:
    """A namespace that the daemon knows, and what it holds there.

    ``namespace`` is None where only blocks found on NVMe tell of it. Lookups count since the daemon started;
    ``idle_s`` is the time since the last of them, None if there was none.
    """

    digest: bytes
    namespace: Namespace | None
    names: tuple[str, ...]
    is_open: bool
    n_blocks: int
    n_dram_blocks: int
    n_nvme_blocks: int
    dram_bytes: int
    nvme_bytes: int
    n_pinned_blocks: int
    n_lookups: int
    n_lookup_blocks: int
    n_hit_blocks: int
    idle_s: float | None


@dataclass(frozen=True, slots=True)
class ClearedNamespace:
    """How many blocks of a namespace could be found before, and had a copy where."""

    digest: bytes
    n_blocks: int
    n_dram_blocks: int
    n_nvme_blocks: int


@dataclass(frozen=True, slots=True)
class Cleared:
    """What ``clear`` has taken away. Nothing of it is found any more."""

    namespaces: tuple[ClearedNamespace, ...]
    n_ended_reservations: int
    n_left_blocks: int
    """Blocks that are still there: somebody reads them, or they are about to go."""
    n_left_names: int
    """Names on NVMe that were not gone in time: those that are left after a crash are found again."""

    @property
    def n_blocks(self) -> int:
        """Of all the namespaces."""
        return sum(each.n_blocks for each in self.namespaces)

    @property
    def durable(self) -> bool:
        """Whether no crash can bring a block back."""
        return self.n_left_names == 0


@dataclass(frozen=True, slots=True)
class Inspection:
    """What is stored of a prompt, block by block: arrays [n], from the first block asked for on.

    ``keys`` is uint8 [n, 16]; ``hits``, up to 255, is empty where the daemon doesn't count them. The last block may
    match in its first ``partial_tokens`` only. ``ends`` says why the match goes no further; ``differs_at_token`` is the
    first token of the prompt for which the closest stored block has another one, None if it is not that.
    """

    n_rows: int
    n_blocks: int
    partial_tokens: int
    keys: NDArray[np.uint8]
    in_dram: NDArray[np.bool_]
    on_nvme: NDArray[np.bool_]
    in_hbm: NDArray[np.bool_]
    size_bytes: NDArray[np.uint32]
    hits: NDArray[np.uint8]
    idle_s: NDArray[np.float64]
    pins: NDArray[np.int32]
    ends: str
    differs_at_token: int | None
    hints: tuple[dict[str, Any], ...]
    """What is known of each block by ``Hints``, ``ttl_s`` as seconds that are left; empty if nobody ever gave any."""


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """A client of the daemon. ``pid`` is below 0 for one on another host; one that is not ``live`` was cut off."""

    id: int
    tenant: str
    client_name: str
    pid: int
    live: bool
    silent_s: float


@dataclass(frozen=True, slots=True)
class ClaimInfo:
    """A lease, reservation or pin, by whom, for how long (below 0: over since), on how many blocks."""

    kind: str
    id: int
    tenant: str
    session_ids: tuple[int, ...]
    left_s: float
    ended: bool
    n_blocks: int


@dataclass(frozen=True, slots=True)
class Claims:
    """Who is there, and holds what."""

    sessions: tuple[SessionInfo, ...]
    claims: tuple[ClaimInfo, ...]
    truncated: bool
    """There are more claims than are listed."""


@dataclass(slots=True)
class Verified:
    """What a check of a running daemon has found. ``problems`` are contradictions in its tables, in words."""

    n_blocks: int = 0
    n_frames: int = 0
    n_bytes: int = 0
    n_corrupt: int = 0
    n_unreadable: int = 0
    n_unread: int = 0
    """Frames that the disk did not give in time."""
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether all was checked, and all is well."""
        return not (self.n_corrupt or self.n_unreadable or self.n_unread or self.problems)

    def count(self, reply: pb.VerifyReply) -> None:
        """Add a slice."""
        self.n_blocks += reply.n_blocks
        self.n_frames += reply.n_frames
        self.n_bytes += reply.n_bytes
        self.n_corrupt += reply.n_corrupt
        self.n_unreadable += reply.n_unreadable
        self.n_unread += reply.n_unread
        self.problems += reply.problems


@dataclass(frozen=True, slots=True)
class Latency:
    """How long requests of one method (lower case) took at the daemon, in seconds.

    ``waited``: those that waited for something, blocks from NVMe say; else those that were answered at once.
    """

    method: str
    waited: bool
    distribution: Distribution


class Wanted(TypedDict, total=False):
    """Which namespaces are meant: those that fit all that is given.

    ``name``: the one bound to it. ``digest_prefix``: hexadecimal digits that its digest begins with. ``revision``: of
    the model; ``tp_rank``, ``pp_rank``: of the shard. None: whichever.
    """

    name: str
    digest_prefix: str
    model: str
    revision: str | None
    tp_rank: int | None
    pp_rank: int | None


class AdminCalls:
    """See the module. ``Client`` has these methods."""

    _session: Session

    def namespaces(
        self,
        *,
        all_tenants: bool = False,
        **wanted: Unpack[Wanted],
    ) -> list[NamespaceInfo]:
        """The namespaces that fit all that is given.

        Raises BadInputError, DeniedError, UnavailableError.
        """
        request = pb.NamespacesRequest(filter=_filter(**wanted), all_tenants=all_tenants)
        reply = self._session.call(Method.NAMESPACES, request, pb.NamespacesReply)
        return [_namespace_info(each) for each in reply.namespaces]

    def clear(
        self,
        *,
        everything: bool = False,
        all_tenants: bool = False,
        dry_run: bool = False,
        wait_s: float = 10.0,
        **wanted: Unpack[Wanted],
    ) -> Cleared:
        """No block of the namespaces that fit is found from now on, whoever uses it: the weights have changed, say.

        Blocks in use stay until they are released; the rest leaves every tier. Reservations end, as what they are
        filled with is of what is cleared. Blocks ``wait_s`` seconds at most for the names on NVMe to be gone: see
        ``Cleared.durable``. With ``dry_run`` it only counts. Raises BadInputError, DeniedError, UnavailableError.
        """
        request = pb.ClearRequest(
            filter=_filter(**wanted),
            everything=everything,
            all_tenants=all_tenants,
            dry_run=dry_run,
            wait_s=checked_wait_s("wait_s", wait_s),
        )
        reply = self._session.call_waiting(Method.CLEAR, request, pb.ClearReply, request.wait_s)
        return Cleared(
            tuple(
                ClearedNamespace(each.digest, each.n_blocks, each.n_dram_blocks, each.n_nvme_blocks)
                for each in reply.namespaces
            ),
            reply.n_ended_reservations,
            reply.n_left_blocks,
            reply.n_left_names,
        )

    def watch(
        self,
        after_seq: int | None = None,
        *,
        kinds: Collection[str] = (),
        all_tenants: bool = False,
        **wanted: Unpack[Wanted],
    ) -> Watch:
        """Blocks that come to tiers and leave them, from now on, or those behind number ``after_seq``.

        Only of namespaces that fit all that is given, as for ``namespaces``, and only of these kinds ("stored",
        "moved", "removed"), if any are given. Raises BadInputError, DeniedError, UnavailableError.
        """
        if isinstance(kinds, str) or not all(isinstance(each, str) for each in kinds):
            raise BadInputError(f"kinds is {kinds!r:.80}; give several texts, as in kinds=('removed',)")
        return Watch(self._session, after_seq, all_tenants=all_tenants, wanted=_filter(**wanted), kinds=kinds)

    def unpin(self, pin_id: int) -> bool:
        """Let go of a pin of this client, or of a kept one of its tenant; False if there is none. See ``pin``.

        Raises BadInputError, UnavailableError.
        """
        return unpin(self._session, count("pin_id", pin_id, 1 << 64))

    def latencies(self) -> list[Latency]:
        """How long requests of each method took, since the daemon started. Raises UnavailableError."""
        reply = self._session.call(Method.STATS, pb.StatsRequest(), pb.StatsReply)
        bounds_s = tuple(unpack("bounds_s", reply.bounds_s, F64).tolist())
        return [
            Latency(
                each.method,
                each.waited,
                Distribution(
                    bounds_s, tuple(unpack("counts", each.counts, U64, len(bounds_s) + 1).tolist()), each.total_s
                ),
            )
            for each in reply.latencies
        ]

    def verify(
        self,
        *,
        frames: bool = True,
        slice_wait_s: float = 10.0,
        progress: Callable[[int, int], object] = lambda _done, _total: None,
    ) -> Verified:
        """Have the daemon check all that it holds, slice by slice: its tables, and frames on NVMe if ``frames``.

        Bad frames are never served again. Blocks until all is checked; each slice for ``slice_wait_s`` at most for
        its frames. ``progress`` is called with block ids done and in all. Only over the daemon's own socket: raises
        DeniedError elsewhere, UnavailableError when the daemon can't be asked.
        """
        wait_s = checked_wait_s("slice_wait_s", slice_wait_s)
        done = Verified()
        request = pb.VerifyRequest(frames=frames, wait_s=wait_s)
        while True:
            reply = self._session.call_waiting(Method.VERIFY, request, pb.VerifyReply, wait_s)
            done.count(reply)
            progress(min(reply.next_id, reply.end_id), reply.end_id)
            if reply.next_id >= reply.end_id or reply.next_id <= request.first_id:
                return done
            request.first_id = reply.next_id

    def tenants(self, *, all_tenants: bool = False) -> tuple[TenantInfo, ...]:
        """Who has how much of the tiers and what is due to whom, the largest first. Raises DeniedError,
        UnavailableError."""
        return ask_tenants(self._session, all_tenants=all_tenants)

    def claims(self, *, all_tenants: bool = False) -> Claims:
        """Who is connected, and who holds what. Raises BadInputError, DeniedError, UnavailableError."""
        reply = self._session.call(Method.CLAIMS, pb.ClaimsRequest(all_tenants=all_tenants), pb.ClaimsReply)
        return Claims(
            tuple(
                SessionInfo(each.id, each.tenant, each.client_name, each.pid, each.live, each.silent_s)
                for each in reply.sessions
            ),
            tuple(
                ClaimInfo(
                    each.kind, each.id, each.tenant, tuple(each.session_ids), each.left_s, each.ended, each.n_blocks
                )
                for each in reply.claims
            ),
            reply.truncated,
        )


class Inspecting:
    """What a handle of one namespace can tell of a prompt, and of those that others ask."""

    _session: Session
    _fill: Callable[..., None]
    _name: Callable[[pb.Prompt], None]
    ensure_open: Callable[[], bytes]

    def record(self) -> Recording:
        """The requests that anybody looks up in this namespace from now on: see ``Recording``."""
        return Recording(self._session, self.ensure_open)

    def inspect(
        self,
        tokens: ArrayLike,
        *,
        root: Root = DEFAULT_ROOT,
        extras: Sequence[ExtraKey] = (),
        first_block: int = 0,
    ) -> Inspection:
        """What is stored of a prompt, block by block, and why no more is. Raises UnavailableError; counts as no use.

        Of a hybrid namespace it is about the groups that every block has.
        """
        request = pb.InspectRequest(first_block=count("first_block", first_block))
        self._fill(request.prompt, tokens, root, extras)
        self._name(request.prompt)
        return _inspection(self._session.call(Method.INSPECT, request, pb.InspectReply))


def _inspection(reply: pb.InspectReply) -> Inspection:
    tiers = unpack("tiers", reply.tiers, U8)
    n = len(tiers)
    return Inspection(
        n_rows=reply.n_rows,
        n_blocks=reply.n_blocks,
        partial_tokens=reply.partial_tokens,
        keys=unpack("keys", reply.keys, U8, n * KEY_BYTES).reshape(n, KEY_BYTES),
        in_dram=(tiers & 1) != 0,
        on_nvme=(tiers & 2) != 0,
        in_hbm=(tiers & 4) != 0,
        size_bytes=unpack("sizes", reply.sizes, U32, n),
        hits=unpack("hits", reply.hits, U8, n if reply.hits else 0),
        idle_s=unpack("idle_s", reply.idle_s, F64, n),
        pins=unpack("pins", reply.pins, I32, n),
        ends=reply.ends,
        differs_at_token=None if reply.differs_at_token < 0 else reply.differs_at_token,
        hints=tuple(json.loads(reply.hints_json)) if reply.hints_json else (),
    )


def _filter(
    name: str = "",
    digest_prefix: str = "",
    model: str = "",
    revision: str | None = None,
    tp_rank: int | None = None,
    pp_rank: int | None = None,
) -> pb.NamespaceFilter:
    for what, text in (("name", name), ("digest_prefix", digest_prefix), ("model", model), ("revision", revision)):
        if not isinstance(text, str) and (what, text) != ("revision", None):
            raise BadInputError(f"{what} is {text!r:.80}; it must be a text")
    wanted = pb.NamespaceFilter(name=name, digest_prefix=digest_prefix, model=model)
    if revision is not None:
        wanted.revision = revision
    if tp_rank is not None:
        wanted.tp_rank = count("tp_rank", tp_rank, 1 << 16)
    if pp_rank is not None:
        wanted.pp_rank = count("pp_rank", pp_rank, 1 << 16)
    return wanted


def _namespace_info(info: pb.NamespaceInfo) -> NamespaceInfo:
    described = json.loads(info.description_json) if info.description_json else None
    return NamespaceInfo(
        digest=info.digest,
        namespace=None if described is None else Namespace.from_dict(described),
        names=tuple(info.names),
        is_open=info.is_open,
        n_blocks=info.n_blocks,
        n_dram_blocks=info.n_dram_blocks,
        n_nvme_blocks=info.n_nvme_blocks,
        dram_bytes=info.dram_bytes,
        nvme_bytes=info.nvme_bytes,
        n_pinned_blocks=info.n_pinned_blocks,
        n_lookups=info.n_lookups,
        n_lookup_blocks=info.n_lookup_blocks,
        n_hit_blocks=info.n_hit_blocks,
        idle_s=None if info.idle_s < 0 else info.idle_s,
    )
