"""A shard family as one client sees it: one question for all ranks, one lease over what each of them holds."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from kvstore.client.finding import Finding
from kvstore.client.lease import Hold, Lease
from kvstore.client.namespace import NamespaceHandle
from kvstore.client.prompts import DEFAULT_ROOT, count
from kvstore.client.session import Session
from kvstore.errors import BadInputError, EndedError
from kvstore.hybrid import parts_of
from kvstore.shards import check_family
from kvstore.types import Namespace, Root, Shard
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.framing import Method


class FamilyHandle(Finding["FamilyLease"]):
    """The shards of a family, in the order given. What it finds is what every shard has: the smallest hit.

    Every rank stores its own shard's blocks through a ``NamespaceHandle``; ``shards`` has them, for a process that
    stores for several.
    """

    def __init__(self, session: Session, shards: Sequence[NamespaceHandle]) -> None:
        """Raises BadInputError, naming the field, if their namespaces are no family."""
        must_be_family([handle.namespace for handle in shards])
        super().__init__(session, shards[0].namespace)
        self.shards = tuple(shards)

    def __len__(self) -> int:
        return len(self.shards)

    def attach(self, lease_id: int) -> FamilyLease:
        """Read through a lease that another client of this tenant took over this family.

        Raises EndedError if it has ended, BadInputError if it is over others. Both must release.
        """
        request = pb.AttachLeaseRequest(lease_id=count("lease_id", lease_id, 1 << 64), shards=self.ensure_open())
        return self._session.granted(
            Method.ATTACH_LEASE, request, pb.LeaseReply, lambda reply: self._leased(reply, reply.first_block)
        )

    def end_session(self, session_id: str, root: Root = DEFAULT_ROOT) -> int:
        """As of a ``NamespaceHandle``, for every shard; returns the blocks of all of them."""
        return sum(handle.end_session(session_id, root) for handle in self.shards)

    def position(self, shard: int | Shard) -> int:
        """Where a shard, or number, stands in the family. Raises BadInputError for one that is not there."""
        if isinstance(shard, Shard):
            found = [i for i, handle in enumerate(self.shards) if handle.namespace.shard == shard]
            if not found:
                raise BadInputError(f"the family has no {shard}; it has {len(self)} others")
            return found[0]
        if isinstance(shard, bool) or not isinstance(shard, int) or not 0 <= shard < len(self):
            raise BadInputError(f"shard is {shard!r:.80}; give a Shard or a number from 0 to {len(self) - 1}")
        return shard

    def ensure_open(self) -> bytes:
        """Tell the daemon what the shards are, once per daemon process; returns their digests, one after the other."""
        return b"".join([handle.ensure_open() for handle in self.shards])

    def _name(self, prompt: pb.Prompt) -> None:
        prompt.shards = self.ensure_open()

    def _leased(self, reply: pb.LeaseReply, first_block: int, reason: str = "") -> FamilyLease:
        return FamilyLease(self, _Whole(self._session, reply, first_block, reason))


def must_be_family(namespaces: Sequence[Namespace]) -> None:
    """Raises BadInputError, naming the field, unless these can be asked together."""
    for namespace in namespaces:
        if not isinstance(namespace, Namespace):
            raise BadInputError(f"a shard is {namespace!r:.80}; give a kvstore.Namespace for each")
    check_family(namespaces)
    if any(parts_of(namespace.spec) for namespace in namespaces):
        raise BadInputError("hybrid namespaces can't be asked together as a family: ask each shard, take the least")


class FamilyLease:
    """The right to read, in every shard, the blocks found for a prompt. A context manager; falsy if it holds nothing.

    It maps no memory: ``shard`` gives what a rank reads in this process, and any client of the tenant can attach
    to ``id``, for one shard (``Client.attach``) or all (``FamilyHandle.attach``). ``n_blocks`` and the other counts
    are of the prompt and hold for every shard alike.
    """

    def __init__(self, family: FamilyHandle, whole: _Whole) -> None:
        self._family = family
        self._whole = whole
        self.id = whole.id
        self.first_block, self.n_blocks = whole.first_block, whole.n_blocks
        self.n_tokens, self.partial_tokens = whole.n_tokens, whole.partial_tokens
        self.n_pending, self.eta_s, self.n_nvme = whole.n_pending, whole.eta_s, whole.n_nvme
        """As of a ``Lease``: blocks that some shard has yet to read from NVMe, or has read from there."""
        self.reason = whole.reason

    def __bool__(self) -> bool:
        return bool(self.id)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        return (
            f"FamilyLease(id={self.id!r}, n_shards={len(self._family)}, first_block={self.first_block!r}, "
            f"n_blocks={self.n_blocks!r}, n_tokens={self.n_tokens!r}, partial_tokens={self.partial_tokens!r}, "
            f"n_pending={self.n_pending!r}, valid={self.valid!r})"
        )

    @property
    def valid(self) -> bool:
        """Whether the right still holds."""
        return self._whole.valid

    def shard(self, shard: int | Shard) -> ShardLease:
        """The lease as one rank reads it: its blocks only, mapped now. ``shard``: a number in the family, or a Shard.

        Blocks for one round trip. It ends with this lease; releasing it lets go of this shard's memory here, no more.
        Raises EndedError if the lease has ended, UnavailableError if the daemon can't be asked.
        """
        handle = self._family.shards[self._family.position(shard)]
        if not self.valid:
            raise EndedError(f"the lease over a family {self.id} has ended: lease the prefix again")
        return self._whole.part(handle)

    def end(self, why: str) -> None:
        """The right is over as of now; ``release`` has yet to follow. Never blocks."""
        self._whole.end(why)

    def renew(self, ttl_s: float = 0.0) -> bool:
        """Ask for more time, for all shards; False if the right is gone. Blocks for one round trip."""
        return self._whole.renew(ttl_s)

    def release(self) -> None:
        """Say that nothing is read any more, of any shard. Idempotent. Arrays that are still alive keep the blocks."""
        self._whole.release()


class _Whole(Lease):
    """The right that the parts share: it has no slots, they have no claim of their own."""

    def __init__(self, session: Session, reply: pb.LeaseReply, first_block: int, reason: str) -> None:
        super().__init__(session, reply, 0, first_block, reason)
        self._parts: weakref.WeakSet[ShardLease] = weakref.WeakSet()

    def part(self, handle: NamespaceHandle) -> ShardLease:
        """See ``FamilyLease.shard``."""
        request = pb.LeaseShardRequest(lease_id=self.id, shard=handle.ensure_open())
        return self._session.granted(
            Method.LEASE_SHARD, request, pb.LeaseReply, lambda reply: self._part(reply, handle.block_bytes)
        )

    def _part(self, reply: pb.LeaseReply, block_bytes: int) -> ShardLease:
        part = ShardLease(self, self._session, reply, block_bytes, self._hold)
        self._parts.add(part)
        return part

    def abandon(self, why: str) -> None:
        self._let_go(why)
        super().abandon(why)

    def release(self) -> None:
        for part in list(self._parts):
            part.must_be_back()
        self._let_go("it was released")
        super().release()

    def _let_go(self, why: str) -> None:
        for part in list(self._parts):
            part.abandon(why)


class ShardLease(Lease):
    """One shard of a lease over a family."""

    def __init__(
        self, whole: _Whole, session: Session, reply: pb.LeaseReply, block_bytes: int, hold: Hold | None
    ) -> None:
        super().__init__(session, reply, block_bytes, reply.first_block, shared=hold)
        self._whole = whole

    @property
    def valid(self) -> bool:
        return super().valid and self._whole.valid

    def renew(self, ttl_s: float = 0.0) -> bool:
        return self._whole.renew(ttl_s)

    def release(self) -> None:
        """Let go of this shard's memory here; the lease over the family goes on."""
        self.abandon("it was released")
