"""Hybrid namespaces: what a hit, a load, a lease, a pin or a wait for durability needs of which part of the blocks.

A hit behind block n needs block 0 to n themselves, and of every other part those of the last blocks before its end
(see ``prefix_index.parts``). Everything here comes down to that set: it is loaded, pinned, touched and counted as one.
A part of a block is an id of the block table as a block is one, so that the rest of the store makes no difference.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import BadInputError
from kvstore.lease import HeldPart, Lease, Pin, Reservation
from kvstore.onboard import Load, Part
from kvstore.persist import Persist
from kvstore.prefix_index.block_table import DRAM, NVME, Ids
from kvstore.prefix_index.index import Inserted, Match, MissingParent
from kvstore.prefix_index.parts import ANY_TIER, Span
from kvstore.prefix_index.policy import Use
from kvstore.store.outcome import GONE, Outcome
from kvstore.store.parts import StoreParts
from kvstore.store.requests import Prompt


class HybridReach(NamedTuple):
    """A hit: the whole blocks of it, a partly matching one behind them (or -1), and the other parts it needs.

    ``held``: those of the blocks that were asked for, the partly matching one included.
    """

    path: NDArray[np.intp]
    partial_id: int
    partial_tokens: int
    held: NDArray[np.intp]
    spans: tuple[Span, ...]
    stored: NDArray[np.intp]
    """The whole blocks that are stored, whatever of them is."""

    @property
    def ids(self) -> NDArray[np.intp]:
        """Everything that is to be held: blocks, then parts."""
        return np.concatenate([self.held, *(span.ids for span in self.spans)])

    @property
    def end(self) -> int:
        """Blocks of the prompt up to its end, a partly matching one included."""
        return len(self.path) + (self.partial_id >= 0)


class Hybrids(StoreParts):
    """See ``Store``. Every prompt here is of a namespace with parts. Counts are of whole blocks of the prompt."""

    def hybrid_match(self, prompt: Prompt, max_blocks: int) -> Match:
        """The longest hit, as ``index.match`` gives one: of the blocks themselves."""
        reach = self._hybrid_reach(prompt, 0, max_blocks)
        n_tokens = len(reach.path) * prompt.path.block_tokens + reach.partial_tokens
        return Match(reach.path.astype(np.uint32), reach.partial_id, reach.partial_tokens, n_tokens)

    def hybrid_in_dram(self, prompt: Prompt, max_blocks: int = 0) -> int:
        """Whole blocks of the longest hit that needs nothing from another tier."""
        return len(self._hybrid_reach(prompt, 0, max_blocks, DRAM).path)

    def reach_by_part(self, prompt: Prompt) -> list[int]:
        """Per part how many blocks a hit could have if there were no other parts but the blocks themselves."""
        path = self._stored_path(prompt)
        rules = prompt.namespace.rules
        return [len(path), *(self.index.parts.reach(path, [rule]) for rule in rules)]

    def begin_hybrid_load(self, prompt: Prompt, first_block: int, max_blocks: int) -> Load | None:
        """See ``begin_load``."""
        if self.hierarchy is None:
            return None
        reach = self._hybrid_reach(prompt, first_block, max_blocks)
        ids = reach.ids
        if self.index.resident(ids, DRAM).all():
            return None
        opened = prompt.namespace
        # Of what was found on disk the tier's word is not needed any more: the prompt proves whose it is.
        self.index.tenants.move(reach.path, opened.ordinal)
        wanted = [(opened.ordinal, reach.held)]
        for span in reach.spans:
            ordinal = opened.stored[span.number].ordinal
            self.index.tenants.move(span.ids, ordinal)
            wanted.append((ordinal, span.ids))
        parts = [Part(ordinal, at[~self.index.resident(at, DRAM)]) for ordinal, at in wanted]
        return self.hierarchy.onboarder.begin(
            opened.namespace.tenant, ids, [part for part in parts if len(part.read_ids)]
        )

    def hybrid_lease(
        self, session_id: int, prompt: Prompt, first_block: int, max_blocks: int, ttl_s: float, load: Load | None
    ) -> Lease:
        """See ``lease``: holds the blocks from ``first_block`` on, and of other parts what the hit needs of those."""
        ttl_s = self.limits.ttl_s(ttl_s)
        found = held = self._hybrid_reach(prompt, first_block, max_blocks)
        self.counters.add("matches")
        n_pending = 0
        if not self.index.resident(found.ids, DRAM).all():
            held = self._hybrid_reach(prompt, first_block, max_blocks, DRAM)
            n_pending = max(found.end - max(held.end, first_block), 0)
        n_blocks, tenant = len(held.path), prompt.namespace.namespace.tenant
        n_tokens = n_blocks * prompt.path.block_tokens + held.partial_tokens
        n_nvme = int(np.isin(held.held, load.read_ids).sum()) if load is not None else 0
        outcome = Outcome(
            prompt.path.n_rows, n_blocks, n_tokens, n_nvme, prompt.namespace.token_bytes,
            n_pending, load.why() if load is not None else GONE, max_blocks,
        )  # fmt: skip
        self._ended(prompt, found.stored, outcome)
        self._looked_up(session_id, prompt, found.stored, outcome)
        use = prompt.use()
        self._touch(found, prompt, use)
        ids = held.ids
        if not len(ids):
            return Lease(0, tenant, 0.0, {}, ids, n_blocks, held.partial_tokens, n_tokens, n_pending)
        self._check_room_for_claim(session_id, self.leases)
        self.index.pin(ids)
        lease = Lease(
            next(self._ids), tenant, self.clock.now_s() + ttl_s, {session_id: True},
            ids, n_blocks, held.partial_tokens, n_tokens, n_pending, n_nvme,
            parts=tuple(HeldPart(span.number, span.first_row, len(span.ids)) for span in held.spans),
            namespace=prompt.namespace.digest, block_bytes=prompt.namespace.block_bytes,
        )  # fmt: skip
        self.leases.add(lease)
        if self.hierarchy is not None:
            used = np.concatenate([found.path, *(span.ids for span in found.spans)])
            self.hierarchy.offloader.accessed(self.index.admitted(used, use, NVME))
        return lease

    def hybrid_pin(self, session_id: int, prompt: Prompt, ttl_s: float) -> Pin:
        """See ``pin``: keeps what the longest hit needs."""
        reach = self._hybrid_reach(prompt)
        pin = self._pinned(session_id, prompt.namespace.namespace.tenant, reach.ids, ttl_s)
        pin.n_blocks = len(reach.path)
        return pin

    def begin_hybrid_persist(self, prompt: Prompt) -> Persist | None:
        """See ``begin_persist``: what counts as durable is the longest hit that NVMe alone would give."""
        reach = self._hybrid_reach(prompt)
        if self.hierarchy is None or not len(reach.path):
            return None
        rules = prompt.namespace.rules
        offloader = self.hierarchy.offloader
        persist = offloader.begin_persist(reach.ids.astype(np.uint32))
        persist.n_blocks = len(reach.path)
        persist.n_durable = lambda: self.index.parts.reach(reach.path[: offloader.n_leading(reach.path)], rules, NVME)
        return persist

    # Writing -------------------------------------------------------------------------------------

    def _part_place(self, prompt: Prompt, first_block: int, n_blocks: int) -> tuple[Ids, int]:
        """The stored blocks of a prompt, and how many of those asked for have their part already, leading ones."""
        path = self._stored_path(prompt)
        at = path[first_block : first_block + n_blocks]
        there = self.index.parts.is_there(at, prompt.part)
        n_present = len(there) if there.all() else int(there.argmin())
        return path.astype(np.uint32), n_present

    def _insert_parts(self, reservation: Reservation, first_row: int, slots: NDArray[np.int64]) -> Inserted:
        """Raises MissingParent when a block is not stored any more; nothing has changed then."""
        opened = self.namespaces.by_ordinal(reservation.namespace)
        prompt = Prompt(opened, reservation.root_key, reservation.path, reservation.use.now_s, part=reservation.part)
        path = self._stored_path(prompt)
        if len(path) < first_row + len(slots):
            raise MissingParent(f"blocks up to {len(path)} are stored, parts up to {first_row + len(slots)} were to be")
        new = self.index.parts.insert(
            path,
            first_row,
            opened.rules[reservation.part - 1],
            slots,
            reservation.block_bytes,
            reservation.use,
        )
        return Inserted(*new)

    def _check_rows(self, prompt: Prompt, end_block: int) -> None:
        """Raises BadInputError for a short last block where no hit could ever end inside of it."""
        if end_block > prompt.path.n_full_rows and any(rule.is_state for rule in prompt.namespace.rules):
            raise BadInputError(
                f"block {end_block - 1} is a short one, and a state is there behind whole blocks only: "
                f"store the {prompt.path.n_full_rows} whole blocks of the prompt"
            )

    # Own -----------------------------------------------------------------------------------------

    def _stored_path(self, prompt: Prompt) -> NDArray[np.intp]:
        """The blocks that are stored of a prompt, whatever parts they have; its short last one too, if as such."""
        found = self.index.match(prompt.root_key, prompt.path)
        ids = found.ids.astype(np.intp)
        return np.append(ids, found.partial_id) if self._ends_with(prompt, found) else ids

    def _hybrid_reach(
        self, prompt: Prompt, first_block: int = 0, max_blocks: int = 0, tier: int = ANY_TIER
    ) -> HybridReach:
        """The longest hit; with a tier, one of which everything from ``first_block`` on is there."""
        found = self._found(prompt)
        rules, parts = prompt.namespace.rules, self.index.parts
        path = stored = found.ids.astype(np.intp)
        partial_id, partial_tokens = found.partial_id, found.partial_tokens
        if max_blocks and len(path) >= max_blocks:
            path, partial_id = path[:max_blocks], -1
        n = parts.reach(path, rules, tier, first_block)
        if partial_id < 0 or n < len(path) or not parts.reaches_into(partial_id, rules, tier):
            partial_id, partial_tokens = -1, 0
        path = path[:n]
        held, spans = path[first_block:], parts.needed(path, first_block, rules)
        if partial_id >= 0:
            inside = np.array([partial_id], np.intp)
            held = np.append(held, inside)
            spans = [
                Span(span.number, span.first_row, np.append(span.ids, parts.ids(inside, span.number)).astype(np.intp))
                for span in spans
            ]
        elif n <= first_block:
            spans = []
        return HybridReach(path, partial_id, partial_tokens, held, tuple(spans), stored)

    def _touch(self, reach: HybridReach, prompt: Prompt, use: Use) -> None:
        """An access. Parts before blocks: under LRU, of one path, they go first, as they have to."""
        for span in reach.spans:
            self.index.parts.touch(span.ids, use)
        whole = np.append(reach.path, reach.partial_id) if reach.partial_id >= 0 else reach.path
        if len(whole):
            self.index.touch(whole, use)
            self._note_use(prompt, whole)
