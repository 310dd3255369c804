"""Leases, reservations and pins: who may read or fill what, until when, and who still could.

Two things end separately (invariant 4). The *right* ends at the deadline, at disconnect, or with the
epoch. The *hold* on the slots ends only when every client that could have them mapped has said that it
stopped (release, abort), or its process is gone. Between the two a claim is "ended": it can't be used
or renewed, and its slots can't be reused.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import BadInputError
from kvstore.prefix_index.history import Left
from kvstore.prefix_index.policy import Use
from kvstore.prefix_index.rivals import Rivals
from kvstore.prefix_index.rows import RowPath


@dataclass(slots=True)
class Claim:
    """What leases, reservations and pins have in common. ``holders`` maps session id -> right still valid."""

    id: int
    tenant: str
    deadline_s: float
    holders: dict[int, bool]

    @property
    def ended(self) -> bool:
        """No holder has the right any more."""
        return not any(self.holders.values())

    def ended_at(self, now_s: float) -> bool:
        """As ``ended``, also if the deadline has passed and nobody has processed that yet."""
        return self.deadline_s <= now_s or self.ended

    def right_of(self, session_id: int, now_s: float) -> bool:
        """Whether this session may use the claim now."""
        return self.holders.get(session_id, False) and now_s < self.deadline_s


class HeldPart(NamedTuple):
    """Parts of blocks that a lease holds: those numbered ``number`` of the ``n`` blocks from ``first_block`` on."""

    number: int
    first_block: int
    n: int


@dataclass(slots=True)
class Lease(Claim):
    """The right to read blocks in place. ``ids`` are pinned in the index until the hold ends."""

    ids: NDArray[np.integer[Any]]
    n_blocks: int
    partial_tokens: int
    n_tokens: int
    n_pending: int = 0
    """Blocks that matched too but are not in DRAM (yet)."""
    n_nvme: int = 0
    """Of the blocks held: those that were read from NVMe for it."""
    shards: tuple[bytes, ...] = ()
    """Over a family: the digest of each shard. ``ids`` are equally many blocks of each, in this order."""
    parts: tuple[HeldPart, ...] = ()
    """Of a hybrid namespace: what ``ids`` has behind the blocks."""
    namespace: bytes = b""
    """Its digest, unless it is over a family; ``block_bytes`` is that of a block there (of a hybrid one: part 0)."""
    block_bytes: int = 0
    hbm_slots: NDArray[np.int64] | None = None
    """Where each of ``ids`` lies in HBM, -1 where it does not; None for who does not read there."""

    @property
    def n_held(self) -> int:
        """Blocks of the prompt that it holds, of each shard."""
        return (len(self.ids) - sum(part.n for part in self.parts)) // max(len(self.shards), 1)

    @property
    def first_block(self) -> int:
        """The block of the prompt that the first one held is."""
        return self.n_blocks + (self.partial_tokens > 0) - self.n_held

    def check_reader(self, namespace: bytes, block_bytes: int) -> None:
        """Raises BadInputError unless who reads it takes its blocks for what they are.

        ``namespace`` is the digest it has; who names none (empty) must have the size of a block right.
        """
        if self.shards:
            raise BadInputError(
                f"lease {self.id} is over a family of {len(self.shards)} shards: say which to attach to"
            )
        if namespace and namespace != self.namespace:
            raise BadInputError(
                f"lease {self.id} is over another namespace, {self.namespace.hex()}, not {namespace.hex():.40}: "
                "attach to it through the namespace that it was taken in"
            )
        if not namespace and block_bytes != self.block_bytes:
            raise BadInputError(
                f"lease {self.id} is over blocks of {self.block_bytes} bytes, not {block_bytes}: attach to it through "
                "the namespace that it was taken in"
            )

    def ids_of(self, shard: bytes) -> NDArray[np.integer[Any]]:
        """The blocks of one shard. Raises BadInputError if the lease is not over a family with this shard."""
        if shard not in self.shards:
            whose = f"has {len(self.shards)} shards, and not" if self.shards else "is over one namespace, without"
            raise BadInputError(f"lease {self.id} {whose} shard {shard.hex()!r:.40}: name one it was taken for")
        start = self.shards.index(shard) * self.n_held
        return self.ids[start : start + self.n_held]


NO_SESSION = 0
"""Stands for a holder that no client is: sessions count from 1."""


@dataclass(slots=True)
class Pin(Claim):
    """Blocks that must stay, without a right to read them. ``n_blocks``: of the prompt, if it isn't all ``ids``.

    One whose holder is ``NO_SESSION`` ends with its time, or when anybody of its tenant lets go of it.
    """

    ids: NDArray[np.integer[Any]]
    n_blocks: int | None = None


class RoomRequest(Protocol):
    """Who wants how many DRAM slots, and what was done for it so far."""

    writer: int
    tenant: str
    slot_bytes: int
    n_wanted: int
    evict_bytes_left: int
    """What may still be evicted for it; -1 before the first time."""
    leaving_bytes_before: int
    moved: bool
    """Whether idle room was gathered on the way."""
    spares_own: bool
    """Whether its tenant has no more than is due to it: before its own go others give, and idle room is gathered."""
    rivals: Callable[[], Rivals] | None
    """Makes candidates for eviction of what is to fill them; None: it is to be stored in any case."""
    n_declined: int
    """Slots not wanted any more, as what was to fill them is worth less than what would have to go."""


class Unstored(NamedTuple):
    """Rows of a prompt that are not stored, and why."""

    first_row: int
    end_row: int
    left: Left


@dataclass(slots=True)
class Reservation(Claim):
    """The right to fill slots that nobody can see yet. ``prefix_ids``, ancestors that only DRAM holds, stay pinned.

    It is a ``RoomRequest`` too. ``namespace`` is the number of its namespace in this daemon.
    """

    writer: int
    namespace: int
    root_key: bytes
    path: RowPath
    slot_bytes: int
    block_bytes: int
    first_block: int
    n_present: int
    n_wanted: int
    prefix_ids: NDArray[np.integer[Any]]
    use: Use
    part: int = 0
    """Which part of the blocks it is for, see ``OpenNamespace.parts``."""
    root: tuple[str, str] = ("", "")
    """Salt and LoRA identity, of which ``root_key`` is made."""
    skipped_reason: str = ""
    unstored: list[Unstored] = field(default_factory=list)
    """The prompt's blocks that are not stored with it although they were to be."""
    slots: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    quarantined: bool = False
    n_held: int = 0
    """Slots that count as its tenant's."""
    evict_bytes_left: int = -1
    leaving_bytes_before: int = 0
    moved: bool = False
    spares_own: bool = False
    rivals: Callable[[], Rivals] | None = None
    n_declined: int = 0

    @property
    def owner(self) -> int:
        """The session that holds it: the writer, or the one that the daemon writes for."""
        return next(iter(self.holders))


ClaimT = TypeVar("ClaimT", bound=Claim)


class ClaimTable(Generic[ClaimT]):
    """Claims of one kind by id, with their deadlines. Not thread-safe; never blocks."""

    def __init__(self) -> None:
        self._claims: dict[int, ClaimT] = {}
        self._by_session: dict[int, set[int]] = {}
        self._deadlines: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._claims)

    def __iter__(self) -> Iterator[ClaimT]:
        return iter(self._claims.values())

    def get(self, claim_id: int) -> ClaimT | None:
        return self._claims.get(claim_id)

    def add(self, claim: ClaimT) -> None:
        self._claims[claim.id] = claim
        for session_id in claim.holders:
            self._by_session.setdefault(session_id, set()).add(claim.id)
        heapq.heappush(self._deadlines, (claim.deadline_s, claim.id))

    def join(self, claim: ClaimT, session_id: int) -> None:
        """Make another session a holder with the same right."""
        claim.holders[session_id] = True
        self._by_session.setdefault(session_id, set()).add(claim.id)

    def renew(self, claim: ClaimT, deadline_s: float) -> None:
        """Move the deadline; the claim must not have ended."""
        claim.deadline_s = deadline_s
        heapq.heappush(self._deadlines, (deadline_s, claim.id))

    def drop_holder(self, claim: ClaimT, session_id: int) -> bool:
        """The session stopped using it. True if that was the last hold: the claim is gone."""
        claim.holders.pop(session_id, None)
        held = self._by_session.get(session_id)
        if held is not None:
            held.discard(claim.id)
            if not held:
                del self._by_session[session_id]
        if claim.holders:
            return False
        self._claims.pop(claim.id, None)
        return True

    def count_of(self, session_id: int) -> int:
        """How many claims a session holds."""
        return len(self._by_session.get(session_id, ()))

    def of_session(self, session_id: int) -> list[ClaimT]:
        """The claims a session holds, with or without a right."""
        return [self._claims[claim_id] for claim_id in sorted(self._by_session.get(session_id, ()))]

    def expire(self, now_s: float, most: int) -> list[ClaimT]:
        """End the right of at most ``most`` claims past their deadline and return those it ended."""
        ended: list[ClaimT] = []
        while self._deadlines and self._deadlines[0][0] <= now_s and len(ended) < most:
            deadline_s, claim_id = heapq.heappop(self._deadlines)
            claim = self._claims.get(claim_id)
            # A renewed claim has a later entry; one that is gone or ended needs nothing.
            if claim is None or claim.deadline_s != deadline_s or claim.ended:
                continue
            for session_id in claim.holders:
                claim.holders[session_id] = False
            ended.append(claim)
        if len(self._deadlines) > 64 + 4 * len(self._claims):
            self._deadlines = [(c.deadline_s, c.id) for c in self._claims.values()]
            heapq.heapify(self._deadlines)
        return ended
