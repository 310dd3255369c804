"""What of a prompt can be loaded: found and held, on the scheduler's thread, without waiting for any tier.

A hit is a lease over all ranks' shards: what was promised to the engine can't be evicted before workers have read it.
Blocks on NVMe start to load with the question; until they are there, up to a limit, the answer is PENDING.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvstore.client import HybridHandle, HybridLease
from kvstore.client.family import FamilyHandle, FamilyLease
from kvstore.clock import Clock
from kvstore.engine_adapter.counters import SharedCounters
from kvstore.engine_adapter.vllm.breaker import Breaker
from kvstore.engine_adapter.vllm.options import Options
from kvstore.engine_adapter.vllm.prompts import RequestPrompt

ASK_AGAIN_S_MIN, ASK_AGAIN_S_MAX = 0.002, 0.05
MISS_S = 0.02
"""A request that the engine has no room for is asked about in every step; a miss counts so long."""


PromptLease = FamilyLease | HybridLease


class Pending:
    """Blocks are on their way: ask again in a later step."""


PENDING: Final = Pending()


@dataclass(slots=True)
class Offer:
    """Blocks ``first_block .. first_block + n_blocks - 1`` of a prompt, held until the lease is released or ends."""

    lease: PromptLease
    first_block: int
    n_blocks: int
    n_disk: int
    """Those that had to come from NVMe."""
    stale_s: float
    """From then on a new lease is taken rather than one promised that may end before it is used."""


@dataclass(slots=True)
class Asked:
    """Where the questions of one request stand."""

    offer: Offer | None = None
    waiting: PromptLease | None = None
    """Holds what is there already while the rest loads."""
    pending_since_s: float | None = None
    n_pending_most: int = 0
    ask_again_s: float = 0.0

    def drop(self) -> None:
        """Give back whatever is held."""
        for lease in (self.waiting, self.offer.lease if self.offer else None):
            if lease is not None:
                lease.release()
        self.waiting = self.offer = None


class Lookups:
    """See the module. For one thread."""

    def __init__(
        self, family: FamilyHandle | HybridHandle, options: Options, clock: Clock, counters: SharedCounters
    ) -> None:
        """``family``: the shards of all ranks, or of one rank a hybrid namespace."""
        self._family, self._options, self._clock, self._counters = family, options, clock, counters
        self._breaker = Breaker(clock, options.lookup_timeout_s / 2)
        self._block_tokens = family.block_tokens

    def find(self, asked: Asked, prompt: RequestPrompt, first_block: int, end_block: int) -> Offer | Pending | None:
        """What is stored from ``first_block`` on, before ``end_block``. Blocks for one round trip at most."""
        offer = asked.offer
        now_s = self._clock.now_s()
        if offer is not None and offer.first_block == first_block and offer.lease.valid and now_s < offer.stale_s:
            return offer
        if now_s < asked.ask_again_s:
            return PENDING if asked.pending_since_s is not None else None
        if end_block - first_block < self._options.min_hit_blocks:
            return None
        if self._breaker.is_open():
            self._counters.add("lookups_skipped")
            asked.drop()
            return None
        return self._judge(asked, self._lease(asked, prompt, first_block, end_block), first_block, now_s)

    def _lease(self, asked: Asked, prompt: RequestPrompt, first_block: int, end_block: int) -> PromptLease:
        begin_s = self._clock.now_s()
        lease = self._family.lease(
            prompt.tokens(end_block * self._block_tokens),
            root=prompt.root,
            extras=prompt.extras,
            first_block=first_block,
            max_blocks=end_block,
            wait="best_effort",
            ttl_s=self._options.lease_s,
        )
        took_s = self._clock.now_s() - begin_s
        self._breaker.took(took_s)
        self._counters.add("lookups")
        self._counters.add("lookup_seconds", took_s)
        if lease.reason:
            self._counters.add("lookups_failed")
        asked.drop()
        return lease

    def _judge(self, asked: Asked, lease: PromptLease, first_block: int, now_s: float) -> Offer | Pending | None:
        if lease.n_pending:
            if asked.pending_since_s is None:
                asked.pending_since_s = now_s
                self._counters.add("lookups_pending")
            asked.n_pending_most = max(asked.n_pending_most, lease.n_pending)
            if now_s - asked.pending_since_s < self._options.pending_wait_s:
                asked.ask_again_s = now_s + min(max(lease.eta_s, ASK_AGAIN_S_MIN), ASK_AGAIN_S_MAX)
                asked.waiting = lease
                return PENDING
            self._counters.add("lookups_pending_too_long")
        asked.pending_since_s, asked.ask_again_s = None, 0.0
        n_blocks = lease.n_blocks - first_block
        if not lease or n_blocks < self._options.min_hit_blocks:
            lease.release()
            asked.ask_again_s = now_s + MISS_S
            return None
        n_disk, stale_s = min(asked.n_pending_most, n_blocks), now_s + self._options.lease_s / 2
        asked.offer = Offer(lease, first_block, n_blocks, n_disk, stale_s)
        return asked.offer
