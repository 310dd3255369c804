"""The reading side of a store: match, load, lease."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import BadInputError, EndedError
from kvstore.lease import Lease
from kvstore.onboard import Load, Part
from kvstore.prefix_index.block_table import DRAM, HBM, NVME, At
from kvstore.prefix_index.index import Match
from kvstore.store.hybrid import Hybrids
from kvstore.store.outcome import Outcome, unused
from kvstore.store.requests import Prompt, Reach


class Reading(Hybrids):
    """See ``Store``."""

    def match(self, prompt: Prompt, max_blocks: int = 0) -> Match:
        """Longest stored prefix, of at most ``max_blocks`` (0: no limit). Pure: changes nothing, pins nothing."""
        self.counters.add("matches")
        return self.hit(prompt, max_blocks)

    def hit(self, prompt: Prompt, max_blocks: int = 0) -> Match:
        """As ``match``, but is not counted as one."""
        if prompt.namespace.parts:
            return self.hybrid_match(prompt, max_blocks)
        found = self._found(prompt)
        if max_blocks and len(found.ids) >= max_blocks:
            return Match(found.ids[:max_blocks], -1, 0, max_blocks * prompt.path.block_tokens)
        return found

    def begin_load(
        self, prompt: Prompt, first_block: int = 0, max_blocks: int = 0, *, reads_hbm: bool = False
    ) -> Load | None:
        """Start reading what matches but lies on NVMe only; None if there is nothing to read.

        For who ``reads_hbm`` what is there need not be read.

        Once it is done, or not waited for any longer, take the lease and then ``end_load``, which must follow
        in any case.
        """
        if self.hierarchy is None:
            return None
        if prompt.namespace.parts:
            return self.begin_hybrid_load(prompt, first_block, max_blocks)
        reach = self._reach(prompt, first_block, max_blocks)
        read_ids = reach.wanted[~self._are_there(reach.wanted, reads_hbm=reads_hbm and self._hbm_serves)]
        if not len(read_ids):
            return None
        opened = prompt.namespace
        # Of blocks found on disk the tier's word is not needed any more: the prompt proves whose they are.
        self.index.tenants.move(reach.ids, opened.ordinal)
        return self.hierarchy.onboarder.begin(opened.namespace.tenant, reach.wanted, [Part(opened.ordinal, read_ids)])

    def end_load(self, load: Load) -> None:
        """See ``begin_load``. Idempotent."""
        if self.hierarchy is not None:
            self.hierarchy.onboarder.end(load)

    def lease(
        self,
        session_id: int,
        prompt: Prompt,
        first_block: int = 0,
        max_blocks: int = 0,
        ttl_s: float = 0.0,
        load: Load | None = None,
        *,
        glance: bool = False,
        reads_hbm: bool = False,
    ) -> Lease:
        """Match, then pin what is in DRAM from ``first_block`` on; counts as an access for the policy.

        ``load`` is the one that was waited for, if any. A miss is a lease with id 0 that holds nothing and
        needs no release. So is a ``glance``, which says where blocks are without holding them; there is none at
        hybrid namespaces, where it is a lease.

        Who ``reads_hbm`` is told where blocks are there, too, and need not have these in DRAM; blocks that are used so
        get copies there in time. Not at hybrid namespaces.
        """
        if prompt.namespace.parts:
            return self.hybrid_lease(session_id, prompt, first_block, max_blocks, ttl_s, load)
        ttl_s = self.limits.ttl_s(ttl_s)
        reads_hbm = reads_hbm and self._hbm_serves
        reach = self._reach(prompt, first_block, max_blocks)
        self.counters.add("matches")
        wanted, n_blocks, partial_tokens = reach.wanted, reach.n_blocks, reach.partial_tokens
        n_pending = 0
        there = self._are_there(wanted, reads_hbm=reads_hbm)
        if self.hierarchy is not None and not there.all():
            n_there = int(there.argmin())
            n_pending = len(wanted) - n_there
            wanted, partial_tokens, n_blocks = wanted[:n_there], 0, first_block + n_there
        n_tokens = n_blocks * prompt.namespace.namespace.spec.block_tokens + partial_tokens
        n_unused, why = unused(load, reach.wanted, len(wanted))
        hbm_slots = self.hbm.slots(wanted) if reads_hbm and self.hbm is not None else None
        n_hbm = int(np.count_nonzero(hbm_slots[: n_blocks - first_block] >= 0)) if hbm_slots is not None else 0
        n_nvme = 0
        if load is not None:
            # Of whole blocks, as all hits. What came to HBM since it was read is a hit there, once.
            whole = slice(n_blocks - first_block)
            read = wanted[whole] if hbm_slots is None else wanted[whole][hbm_slots[whole] < 0]
            n_nvme = int(np.isin(read, load.read_ids).sum())
        outcome = Outcome(
            prompt.path.n_rows, n_blocks, n_tokens, n_nvme, prompt.namespace.token_bytes, n_unused, why, max_blocks,
            n_hbm,
        )  # fmt: skip
        self._ended(prompt, reach.ids[: reach.n_blocks], outcome)
        self._looked_up(session_id, prompt, reach.ids[: reach.n_blocks], outcome)
        use = prompt.use()
        if len(reach.ids):
            self.index.touch(reach.ids, use)
            self._note_use(prompt, reach.ids)
        if glance or not len(wanted):
            lease = Lease(
                0, prompt.namespace.namespace.tenant, 0.0, {}, wanted, n_blocks, partial_tokens, n_tokens, n_pending,
                n_nvme,
            )  # fmt: skip
        else:
            self._check_room_for_claim(session_id, self.leases)
            self.index.pin(wanted)
            lease = Lease(
                next(self._ids), prompt.namespace.namespace.tenant, self.clock.now_s() + ttl_s, {session_id: True},
                wanted, n_blocks, partial_tokens, n_tokens, n_pending, n_nvme,
                namespace=prompt.namespace.digest, block_bytes=prompt.namespace.block_bytes, hbm_slots=hbm_slots,
            )  # fmt: skip
            self.leases.add(lease)
        if hbm_slots is not None and self.hbm is not None:
            worth = self.index.admitted(wanted, use, HBM)
            self.hbm.promoter.used(prompt.namespace.namespace.tenant, prompt.namespace.block_bytes, worth)
        if self.hierarchy is not None and len(wanted):
            self.hierarchy.offloader.accessed(self.index.admitted(reach.ids, use, NVME))
        return lease

    def attach(
        self,
        session_id: int,
        tenant: str,
        lease_id: int,
        shards: Sequence[bytes] = (),
        namespace: bytes = b"",
        block_bytes: int = 0,
    ) -> Lease:
        """Make this session a holder of a lease of its tenant too. Raises EndedError if there is none.

        ``shards``: those of a lease over a family that it is going to read. Of another lease ``namespace`` is the
        digest of the one it was taken in, or else ``block_bytes`` the size of its blocks. Raises BadInputError if it
        is over something else.
        """
        lease = self.leases.get(lease_id)
        if lease is None or lease.ended_at(self.clock.now_s()) or lease.tenant != tenant:
            raise EndedError(f"lease {lease_id} is unknown or has ended: match and lease the prefix again")
        if not shards:
            lease.check_reader(namespace, block_bytes)
        for shard in shards:
            lease.ids_of(shard)
        if lease.holders.get(session_id):
            raise BadInputError(f"this client holds lease {lease_id} already: share the object it has")
        self._check_room_for_claim(session_id, self.leases)
        self.leases.join(lease, session_id)
        return lease

    def renew(self, session_id: int, lease_id: int, ttl_s: float = 0.0) -> float:
        """New life of a lease in seconds from now. Raises EndedError if its right has ended."""
        ttl_s = self.limits.ttl_s(ttl_s)
        lease = self.leases.get(lease_id)
        if lease is None or not lease.right_of(session_id, self.clock.now_s()):
            raise EndedError(f"lease {lease_id} is unknown or has ended: it can't be renewed, lease the prefix again")
        # Others may hold it too: nobody can shorten it for them.
        deadline_s = max(lease.deadline_s, self.clock.now_s() + ttl_s)
        self.leases.renew(lease, deadline_s)
        return deadline_s - self.clock.now_s()

    def release(self, session_id: int, lease_id: int) -> bool:
        """The session stopped reading. Idempotent: False if it held no such lease."""
        lease = self.leases.get(lease_id)
        if lease is None or session_id not in lease.holders:
            return False
        if self.leases.drop_holder(lease, session_id):
            self.index.unpin(lease.ids)
        return True

    @property
    def _hbm_serves(self) -> bool:
        return self.hbm is not None and self.hbm.serves

    def _are_there(self, ids: At, *, reads_hbm: bool) -> NDArray[np.bool_]:
        """Which of these blocks need not be read from NVMe for a reader."""
        here = self.index.resident(ids, DRAM)
        return here | self.index.resident(ids, HBM) if reads_hbm else here

    def _reach(self, prompt: Prompt, first_block: int, max_blocks: int) -> Reach:
        found = self._found(prompt)
        ids = found.ids.astype(np.intp)
        partial_tokens = found.partial_tokens
        if max_blocks and len(ids) >= max_blocks:
            ids, partial_tokens = ids[:max_blocks], 0
        n_blocks = len(ids)
        if partial_tokens:
            ids = np.append(ids, found.partial_id)
        return Reach(ids, ids[first_block:] if first_block else ids, n_blocks, partial_tokens)
