"""Shard families: one prompt asked in several namespaces at once, whose smallest hit counts for all.

No rank may read beyond what every rank has. So a lease over a family holds equally many blocks of each shard. What is
used is touched row by row, so that where one order of eviction holds for all, the shards lose their tails together; and
blocks of one row are made known to each other, so that they do where each writer has a memory of its own: see
``kinship``.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.lease import Lease, Pin
from kvstore.onboard import READ_BYTES_MAX, Load, Part
from kvstore.prefix_index.block_table import DRAM, NVME
from kvstore.store.outcome import GONE, Outcome
from kvstore.store.reading import Reading
from kvstore.store.requests import Prompt

DRAM_SHARE = 32
"""What is read of all shards before the first goes on is at most this part of DRAM: if room runs out meanwhile, no
shard is far ahead of the others."""


class FamilyPrompt(NamedTuple):
    """One prompt below the same root in each shard's namespace, in the order of the family."""

    shards: tuple[Prompt, ...]

    @property
    def block_tokens(self) -> int:
        """Tokens of a block, the same in all shards."""
        return self.shards[0].namespace.namespace.spec.block_tokens

    @property
    def tenant(self) -> str:
        """Whose family it is."""
        return self.shards[0].namespace.namespace.tenant

    @property
    def digests(self) -> tuple[bytes, ...]:
        """The digests of the shards."""
        return tuple(prompt.namespace.digest for prompt in self.shards)


class FamilyReach(NamedTuple):
    """How far a prompt is stored in every shard. ``ids``: intp [shards, blocks], with a partly matching last one."""

    ids: NDArray[np.intp]
    n_blocks: int
    partial_tokens: int
    shortest: int
    """Which shard has the least."""


class Families(Reading):
    """See ``Store``."""

    def family_match(self, prompt: FamilyPrompt, max_blocks: int = 0) -> FamilyReach:
        """The smallest hit over all shards. Pure: changes nothing, pins nothing."""
        self.counters.add("matches")
        return self._family_reach(prompt, max_blocks)

    def family_in_dram(self, ids: NDArray[np.intp]) -> int:
        """How many leading blocks of ``ids`` [shards, blocks] are in DRAM in every shard."""
        if self.hierarchy is None:
            return int(ids.shape[1])
        missing = np.flatnonzero(~self.index.resident(ids, DRAM).all(axis=0))
        return int(missing[0]) if len(missing) else int(ids.shape[1])

    def begin_family_load(self, prompt: FamilyPrompt, first_block: int = 0, max_blocks: int = 0) -> Load | None:
        """As ``begin_load``, for what any shard lacks in DRAM of the smallest hit; follow with ``end_load``.

        Read a few rows at a time of every shard: a part of one shard is worth what the others have of it.
        """
        if self.hierarchy is None:
            return None
        reach = self._family_reach(prompt, max_blocks)
        wanted = reach.ids[:, first_block:]
        missing = ~self.index.resident(wanted, DRAM)
        if not missing.any():
            return None
        spaces = [shard.namespace for shard in prompt.shards]
        for opened, ids in zip(spaces, reach.ids, strict=True):
            self.index.tenants.move(ids, opened.ordinal)  # as for one prompt
        step_bytes = min(READ_BYTES_MAX * len(spaces), self.dram.capacity_bytes // DRAM_SHARE)
        rows = max(1, step_bytes // sum(opened.block_bytes for opened in spaces))
        parts = [
            Part(opened.ordinal, wanted[i, first : first + rows][missing[i, first : first + rows]])
            for first in range(0, wanted.shape[1], rows)
            for i, opened in enumerate(spaces)
        ]
        parts = [part for part in parts if len(part.read_ids)]
        return self.hierarchy.onboarder.begin(prompt.tenant, wanted.reshape(-1), parts)

    def family_lease(
        self,
        session_id: int,
        prompt: FamilyPrompt,
        first_block: int = 0,
        max_blocks: int = 0,
        ttl_s: float = 0.0,
        load: Load | None = None,
    ) -> Lease:
        """As ``lease``, over all shards: they are pinned together, up to the smallest hit that is in DRAM in each.

        ``n_pending`` and ``n_nvme`` count blocks of the prompt: those that any shard has yet to read, or has read.
        """
        ttl_s = self.limits.ttl_s(ttl_s)
        self.counters.add("matches")
        reach = self._family_reach(prompt, max_blocks)
        n_blocks, partial_tokens = reach.n_blocks, reach.partial_tokens
        wanted = reach.ids[:, first_block:]
        n_there = self.family_in_dram(wanted)
        n_pending = wanted.shape[1] - n_there
        if n_pending:
            wanted, partial_tokens, n_blocks = wanted[:, :n_there], 0, first_block + n_there
        n_tokens = n_blocks * prompt.block_tokens + partial_tokens
        n_nvme = int(np.isin(wanted, load.read_ids).any(axis=0).sum()) if load is not None else 0
        outcome = Outcome(
            prompt.shards[0].path.n_rows, n_blocks, n_tokens, n_nvme,
            sum(shard.namespace.token_bytes for shard in prompt.shards),
            n_pending, load.why() if load is not None else GONE, max_blocks,
        )  # fmt: skip
        whole = reach.ids[:, : reach.n_blocks]
        self._ended(prompt.shards[reach.shortest], whole[reach.shortest], outcome)
        for shard, ids in zip(prompt.shards, whole, strict=True):
            self._looked_up(session_id, shard, ids, outcome)
        first = prompt.shards[0]
        use = first.use()
        self.index.touch(reach.ids.T.reshape(-1), use)
        self.index.kin.link(reach.ids)
        for shard, shard_ids in zip(prompt.shards, reach.ids, strict=True):
            self._note_use(shard, shard_ids)
        if not wanted.size:
            return Lease(0, prompt.tenant, 0.0, {}, wanted.reshape(-1), n_blocks, partial_tokens, n_tokens, n_pending)
        self._check_room_for_claim(session_id, self.leases)
        ids = wanted.reshape(-1)
        self.index.pin(ids)
        lease = Lease(
            next(self._ids), prompt.tenant, self.clock.now_s() + ttl_s, {session_id: True},
            ids, n_blocks, partial_tokens, n_tokens, n_pending, n_nvme, prompt.digests,
        )  # fmt: skip
        self.leases.add(lease)
        if self.hierarchy is not None:
            for shard_ids in reach.ids:
                self.hierarchy.offloader.accessed(self.index.admitted(shard_ids, use, NVME))
        return lease

    def family_pin(self, session_id: int, prompt: FamilyPrompt, ttl_s: float = 0.0) -> Pin:
        """Keep the smallest hit of every shard from being evicted; id 0 if nothing is stored in one of them."""
        ttl_s = self.pin_limits.ttl_s(ttl_s)
        reach = self._family_reach(prompt, 0)
        ids = reach.ids[:, : reach.n_blocks].reshape(-1)
        return self._pinned(session_id, prompt.tenant, ids, ttl_s)

    def _family_reach(self, prompt: FamilyPrompt, max_blocks: int) -> FamilyReach:
        self.kinship.know([shard.namespace for shard in prompt.shards])
        reaches = [self._reach(shard, 0, max_blocks) for shard in prompt.shards]
        block_tokens = prompt.block_tokens
        n_tokens_each = [reach.n_blocks * block_tokens + reach.partial_tokens for reach in reaches]
        n_tokens = min(n_tokens_each)
        n_blocks, partial_tokens = divmod(n_tokens, block_tokens)
        # Where one shard ends inside a block, that block is the partly matching one of the others too.
        n = n_blocks + (partial_tokens > 0)
        ids = np.stack([reach.ids[:n] for reach in reaches])
        return FamilyReach(ids, n_blocks, partial_tokens, n_tokens_each.index(n_tokens))
