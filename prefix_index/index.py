"""The prefix index of a daemon: which blocks are stored for a prompt, where, and which to give up first.

A block has copies in DRAM, on NVMe or both. One thread uses the index; nothing here blocks, waits or does I/O.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from kvstore.config.tenants import TenantOptions
from kvstore.errors import BadInputError, IntegrityError
from kvstore.prefix_index import lineage
from kvstore.prefix_index.above import Above
from kvstore.prefix_index.adding import Inserted, MissingParent, add_blocks
from kvstore.prefix_index.block_table import DRAM, HBM, NVME, PART, At, BlockTable, Ids
from kvstore.prefix_index.cold import ColdBlocks
from kvstore.prefix_index.copies import Copies, Witness
from kvstore.prefix_index.explain import Explanation, explain
from kvstore.prefix_index.hiding import Hiding
from kvstore.prefix_index.hint_columns import HintColumns
from kvstore.prefix_index.history import History
from kvstore.prefix_index.integrity import check_index
from kvstore.prefix_index.kin import Kin
from kvstore.prefix_index.leaving import Evicted, Leaving
from kvstore.prefix_index.parts import Parts, recognised
from kvstore.prefix_index.policy import EvictionPolicy, Use
from kvstore.prefix_index.reopen import Found, take_in
from kvstore.prefix_index.rivals import Rivals
from kvstore.prefix_index.rows import RowPath
from kvstore.prefix_index.search import Match, Search
from kvstore.prefix_index.shares import Standing
from kvstore.prefix_index.spot_check import contradictions
from kvstore.prefix_index.tenants import Asker, Tenants
from kvstore.prefix_index.tree import RadixTree, Stop, as_ids
from kvstore.types import KEY_BYTES

__all__ = ["Evicted", "Inserted", "Match", "MissingParent", "PrefixIndex"]

_MAX_SIZE_BYTES = (1 << 32) - 1


class PrefixIndex:
    """Radix tree, block table, copies and eviction order behind one face.

    ``reserve_blocks``: room made at once, so that the table needn't be copied to grow; untouched room
    takes no memory. ``nvme``, ``hbm``: whether there are such tiers; methods that name one need True. ``tenants``: how
    they share the tiers; as long as all blocks are of one, that makes no difference.

    Copies on NVMe are closed towards the head of a prompt, but for blocks whose copy broke; copies in DRAM
    need not be. A block leaves the index with its last copy if nothing follows it, else it stays as *broken*
    (alive, never matched) until it is stored again or the last block behind it leaves. A pinned block loses
    no copy, unless that breaks, and stays.
    """

    def __init__(
        self,
        policy: EvictionPolicy,
        reserve_blocks: int = 1 << 16,
        nvme: bool = False,
        tenants: TenantOptions | None = None,
        hbm: bool = False,
    ) -> None:
        self.table = BlockTable(reserve_blocks, nvme, hbm)
        self.tenants = Tenants(self.table, tenants)
        """Whose the blocks are, and how much each tenant has."""
        self._policy = policy
        policy.attach(self.table, (DRAM, *((NVME,) if nvme else ()), *((HBM,) if hbm else ())))
        self._tree = RadixTree(self.table)
        self._copies = Copies(self.table, policy, self.tenants)
        self.above = self._copies.above = Above(self.table, policy, self._copies) if hbm else None
        """The copies in HBM."""
        self._cold = ColdBlocks(self.table)
        self.parts = Parts(self.table, self._copies, policy)
        """What groups of layers with a shorter memory have of the blocks."""
        self.kin = Kin(self.table)
        """Which blocks are of one row of a shard family."""
        self.hints = HintColumns(self.table)
        """What callers have said about blocks."""
        self.history = self._copies.history = History(self.table, self.hints)
        """Why blocks are gone, once it has begun."""
        self._useless_of: set[int] = set()
        """The tenants of what has become worth nothing."""
        self._search = Search(self._tree, self.table, self._copies, self._cold)
        self._leaving = Leaving(self._tree, self.table, policy, self._copies, self._cold)
        self.hiding = Hiding(self._tree, self.table, self._copies, self._cold, self._leaving)
        """Blocks that must not be found any more."""

    @property
    def policy(self) -> EvictionPolicy:
        """What decides the order of eviction."""
        return self._policy

    @property
    def witness(self) -> Witness | None:
        """Who is told of every copy that comes or goes; mostly nobody."""
        return self._copies.witness

    @witness.setter
    def witness(self, witness: Witness | None) -> None:
        self._copies.witness = witness

    @property
    def n_blocks(self) -> int:
        """Blocks alive, broken ones and parts of blocks included."""
        return self.table.n_blocks

    @property
    def n_parts(self) -> int:
        """Parts of blocks among them, hidden ones left out."""
        if not (self.table.n_parts and self.table.n_hidden):
            return self.table.n_parts
        return int(np.count_nonzero(self.table.state[: self.table.n_used] == PART))

    @property
    def n_dram_blocks(self) -> int:
        """Blocks with a copy in DRAM."""
        return self._copies.n[DRAM]

    @property
    def n_nvme_blocks(self) -> int:
        """Blocks with a copy on NVMe."""
        return self._copies.n[NVME]

    @property
    def n_broken_blocks(self) -> int:
        """Blocks without a copy that stay for what is behind them, or because they are pinned."""
        return self._copies.n_broken

    @property
    def n_cold_blocks(self) -> int:
        """Blocks that no prompt has shown the rows of since they were made known by key."""
        return self._cold.n

    @property
    def n_hidden_blocks(self) -> int:
        """Blocks that nobody finds any more, and that are still to go."""
        return self.table.n_hidden

    @property
    def n_roots(self) -> int:
        """Roots with at least one block that is not cold."""
        return len(self._tree.roots)

    # Questions -----------------------------------------------------------------------------------

    def match(self, root_key: bytes, path: RowPath) -> Match:
        """The longest stored prefix, whichever tiers hold it. A pure question: touches and pins nothing.

        Cold blocks that the prompt shows the rows of are not cold any more; of those the prompt must show a
        whole row, for a short last block exactly its tail. Raises BadInputError when the root holds rows of
        another size or kind.
        """
        return self._search.match(root_key, path)

    def explain(self, root_key: bytes, path: RowPath) -> Explanation:
        """As ``match``, with the reason why it ends where it does."""
        return explain(self._tree, self.table, self._search, root_key, path)

    def resident(self, ids: At, tier: int) -> NDArray[np.bool_]:
        """Which of the blocks have a copy in a tier."""
        return self.table.resident(ids.astype(np.intp, copy=False), tier)

    def slots(self, ids: At) -> NDArray[np.int64]:
        """Where the bytes of these blocks lie in DRAM, -1 where they don't; a copy."""
        return self.table.slot[ids.astype(np.intp, copy=False)]

    def nvme_slots(self, ids: At) -> NDArray[np.int64]:
        """The NVMe tier's handles of these blocks, -1 where it has none; a copy."""
        return self.table.nvme_slot[ids.astype(np.intp, copy=False)]

    def frame_rows(self, ids: Ids) -> list[tuple[bytes, bytes]]:
        """Per block its row's bytes as hashed and the digest of its extra keys, or b"".

        Raises BadInputError for a cold block.
        """
        return lineage.frame_rows(self.table, ids)

    def is_block(self, at: At) -> NDArray[np.bool_]:
        """Which of the ids are blocks, and not parts of blocks."""
        return self.table.part[at] == 0 if self.table.parts else np.ones(len(at), np.bool_)

    def short_row_bytes(self, ids: Ids) -> NDArray[np.uint32]:
        """How many bytes the rows of these blocks have where they are short, 0 where they are not known to be."""
        return lineage.short_row_bytes(self.table, ids)

    def parent_keys(self, ids: Ids) -> NDArray[np.uint8]:
        """Keys of the blocks before these, uint8 [n, 16]; the root key for a first block."""
        return lineage.parent_keys(self.table, self._cold, ids)

    def chain_unpersisted(self, ids: Ids) -> Ids:
        """These blocks and all their ancestors, as far as they are not on NVMe: each once, parents first.

        Nothing at or behind a block that can't be written is returned: a broken one, or a cold one that is
        in DRAM only.
        """
        return lineage.chain_unpersisted(self.table, self._copies, ids)

    def coldest(self, n: int, tier: int = DRAM) -> Ids:
        """The up to ``n`` leaves of a tier that would be evicted next, in order; changes nothing."""
        evictor = self._copies.evictors[tier]
        evictor.begin(ahead=True)
        ids = array("I")
        while len(ids) < n and (block := evictor.pop()) >= 0:
            ids.append(block)
            evictor.pass_over(block)
        evictor.take_back()
        return as_ids(ids)

    def contradictions(self, ids: Ids) -> Iterator[str]:
        """In words what contradicts what, of these living blocks: ``check`` for a few at a time."""
        return contradictions(self.table, self._cold, ids)

    def check(self) -> None:
        """Verify every structural invariant. Raises IntegrityError that names the one broken. Slow."""
        check_index(self._tree, self.table, self._copies, self._cold)

    # Use -----------------------------------------------------------------------------------------

    def touch(self, ids: At, use: Use) -> None:
        """Use of blocks of one path, given from its head; the head counts as more recent."""
        if len(ids):
            at = ids.astype(np.intp, copy=False)
            self.table.used(at, use.now_s, use.category, is_access=not use.is_again)
            self._copies.changed(at, self._policy.accessed(at, use))

    def ended(self, ids: At, use: Use) -> None:
        """What became of the request that used these blocks is known: how much it generated."""
        if len(ids):
            self._policy.ended(ids.astype(np.intp, copy=False), use)

    def admitted(self, ids: At, use: Use, tier: int) -> At:
        """Those of a request's blocks that the policy wants written to a tier below DRAM."""
        return ids[self._policy.of(tier).admits(ids.astype(np.intp, copy=False), use, tier)]

    def rank(self, ids: At, tier: int = DRAM) -> NDArray[np.float64]:
        """What the policy thinks of these blocks now, in a tier or if they were there: lower goes first."""
        return self._policy.of(tier).rank(ids.astype(np.intp, copy=False), tier)

    def demote(self, ids: At) -> None:
        """These blocks, and their parts, go before all others, until they are used again; those that are pinned now
        stay as they are."""
        at = ids.astype(np.intp, copy=False)
        if self.table.n_parts:
            at = np.concatenate((at, self.parts.of(at)))
        at = at[self.table.refs[at] == 0]
        if len(at):
            self._policy.demoted(at)
            self._copies.changed(at)

    def pin(self, ids: At) -> None:
        """Keep all copies of these blocks (distinct ids) until as many ``unpin``."""
        self.table.refs[ids.astype(np.intp, copy=False)] += 1

    def pin_each(self, ids: At) -> None:
        """As ``pin``, for ids that may come several times."""
        np.add.at(self.table.refs, ids.astype(np.intp, copy=False), 1)

    def unpin_each(self, ids: At) -> None:
        """Undo ``pin_each``. Raises IntegrityError, and changes nothing, for one that isn't pinned as often."""
        unique, counts = np.unique(ids.astype(np.intp, copy=False), return_counts=True)
        if (self.table.refs[unique] < counts).any():
            raise IntegrityError("a block is unpinned more often than it was pinned")
        self.table.refs[unique] -= (counts - 1).astype(np.int32)
        self.unpin(unique)

    def unpin(self, ids: At) -> None:
        """Undo one ``pin`` of these blocks (distinct ids). Raises IntegrityError if one isn't pinned."""
        at = ids.astype(np.intp, copy=False)
        refs = self.table.refs[at]
        if len(refs) and refs.min() <= 0:
            raise IntegrityError(f"block {ids[int(refs.argmin())]} is unpinned more often than it was pinned")
        self.table.refs[at] = refs - 1
        if self.above is not None:
            self.above.unpinned(at)
        self._copies.changed(at)
        if self._copies.n_broken:
            self._leaving.sweep(at)

    # Gains ---------------------------------------------------------------------------------------

    def insert(
        self,
        root_key: bytes,
        path: RowPath,
        first_row: int,
        slots: NDArray[np.int64],
        size_bytes: int,
        use: Use,
    ) -> Inserted:
        """Store rows ``first_row`` to ``first_row + len(slots) - 1``, whose bytes lie in ``slots``, in a namespace.

        A row that is in DRAM keeps its block and slot; one that is on NVMe only, or broken, takes the new slot.
        Taking a slot counts as an access. A short last row becomes a short leaf. Raises MissingParent when an
        earlier row isn't stored, BadInputError for rows the path doesn't have; nothing changes then.
        """
        end = first_row + len(slots)
        if len(root_key) != KEY_BYTES:
            raise BadInputError(f"root_key is {len(root_key)} bytes; it has {KEY_BYTES}")
        if first_row < 0 or end > path.n_rows:
            raise BadInputError(f"rows {first_row} to {end - 1} of a path with {path.n_rows} rows")
        if not 0 <= size_bytes <= _MAX_SIZE_BYTES:
            raise BadInputError(f"size_bytes is {size_bytes}; it must be in 0..{_MAX_SIZE_BYTES}")
        if first_row == end:
            return Inserted(np.empty(0, np.uint32), np.empty(0, np.bool_))
        stop = self._search.locate(root_key, path, end)
        if stop is None:
            if first_row:
                raise MissingParent(f"row {first_row} of a path of which nothing is stored: insert row 0 first")
            stop = Stop(self._tree.make_root(root_key, path, use.namespace), 0, 0, array("I"))
        stored = self._search.before_broken(root_key, path, stop).n_rows
        if stored < first_row:
            raise MissingParent(f"row {first_row} of a path stored up to row {stored}: insert the rows between")
        old = as_ids(stop.ids)[first_row:]
        new = add_blocks(self._tree, self.table, self._copies, root_key, path, stop, end, slots[len(old) :])
        if len(new):
            self.table.size_bytes[new] = size_bytes
            self.table.namespace[new] = use.namespace
            self.table.used(new, use.now_s, use.category)
            self.tenants.stored(use.namespace, len(new), size_bytes)
            if self.witness is not None:
                self.witness.gained(new.astype(np.intp), DRAM, first=np.ones(len(new), np.bool_))
            try:
                self._policy.inserted(new, use)
                self._policy.entered(new, DRAM)
            finally:
                self._copies.evictors[DRAM].changed(new[-1:])
        is_new = np.ones(end - first_row, np.bool_)
        is_new[: len(old)] = ~self.table.resident(old, DRAM) if self.table.nvme else False
        if len(new) < np.count_nonzero(is_new):
            back = old[is_new[: len(old)]].astype(np.intp)
            self._copies.gain(back, DRAM, slots[is_new][: len(back)])
            self.touch(back, use)
        return Inserted(np.concatenate((old, new)), is_new)

    def insert_cold(
        self,
        keys: NDArray[np.uint8],
        parents: NDArray[np.uint8],
        slots: NDArray[np.int64],
        size_bytes: NDArray[np.uint32],
        namespaces: NDArray[np.uint32],
        now_s: float,
        tier: int = NVME,
    ) -> Ids:
        """Blocks that a tier still has from before, known by key only, uint8 [n, 16]; returns their ids.

        Parents come before their children, otherwise the order counts as that of their last use, oldest first.
        A parent key that no block has is a root key. A key that is known already, from another tier, gains
        this copy. Call it before the first ``insert`` or ``match``. Raises BadInputError for a key given twice
        or a parent behind its child, IntegrityError where a block has its copy already, for a parent that is
        not on NVMe as its child is, and when there are blocks that are not cold; nothing has changed then.
        Parts of blocks are told by their keys, and are not cold.
        """
        if self.n_blocks != self._cold.n + self.n_parts:
            raise IntegrityError("blocks from before are made known first, before any prompt")
        found = Found(keys, parents, slots, size_bytes, namespaces, recognised(keys, parents, namespaces))
        return take_in(self.table, self._copies, self._cold, self._policy, self.parts, found, now_s, tier)

    def may_join_nvme(self, ids: Ids) -> NDArray[np.bool_]:
        """Which blocks ``add_nvme`` would take, in this order. A parent's copy may have broken meanwhile."""
        return self._copies.may_join_nvme(ids)

    def add_nvme(self, ids: Ids, nvme_slots: NDArray[np.int64]) -> None:
        """These blocks are on NVMe now. Raises IntegrityError, and changes nothing, where one is there already
        or its parent is neither there nor earlier in ``ids``."""
        refused = ~self._copies.may_join_nvme(ids)
        if refused.any():
            raise IntegrityError(
                f"block {ids[refused][0]} is on NVMe already or its parent is not: ask may_join_nvme first"
            )
        self._copies.gain(ids, NVME, nvme_slots)

    def add_dram(self, ids: Ids, slots: NDArray[np.int64]) -> None:
        """These blocks are in DRAM now too. Raises IntegrityError if one was; nothing changed then."""
        self._copies.gain(ids, DRAM, slots)

    def relocate(self, ids: Ids, slots: NDArray[np.int64]) -> None:
        """The bytes of these blocks lie in other DRAM slots now."""
        self.table.slot[ids] = slots

    # Losses --------------------------------------------------------------------------------------

    def evict(
        self, n: int, asker: Asker | None = None, of: Sequence[int] | None = None, rivals: Rivals | None = None
    ) -> Evicted:
        """Drop from DRAM the ``n`` copies to go first: never a pinned one, of a path the tail first.

        That is what the policy values least, of tenants that have more than is due to them (see ``shares``) once
        ``asker`` has what it wants, or of these tenants (``of``). Fewer when nothing else may go, or ``rivals`` should
        rather be declined. Slice a long burst.
        """
        return self._evicted(self._leaving.evict(n, DRAM, asker, of, rivals))

    def evict_among(
        self, n: int, worth: Callable[[int], int], most_passed: int, asker: Asker | None = None,
        of: Sequence[int] | None = None,
    ) -> Evicted:  # fmt: skip
        """As ``evict``, until the copies given up are worth ``n``: ``worth(slot)`` says what each one counts. Blocks of
        negative worth are passed over and keep their place; after ``most_passed`` of them it ends."""
        return self._evicted(self._leaving.evict_among(n, worth, most_passed, asker, of))

    def evict_useless(self) -> Evicted | None:
        """Drop from DRAM as many copies as have become worth nothing by evictions since the last call; None if none.

        Those that still have others behind them stay, at the front of the order. Call it until it returns None.
        """
        slots = self.kin.take_useless()
        if not slots:
            return None
        of, self._useless_of = sorted(self._useless_of), set()
        whose = of if self.tenants.n_present[DRAM] > 1 else None
        return self._evicted(
            self._leaving.evict_among(len(slots), lambda slot: 1 if slot in slots else -1, 64, None, whose)
        )

    def evict_nvme(self, n: int, asker: Asker | None = None, of: Sequence[int] | None = None) -> Evicted:
        """As ``evict``, from NVMe. A last copy goes only when no block at all follows."""
        return self._evicted(self._leaving.evict(n, NVME, asker, of))

    def standing(self, asker: Asker) -> Standing:
        """What the asker will have of DRAM beside its share."""
        return self._copies.evictors[DRAM].standing(asker)

    def break_nvme(self, ids: Ids) -> NDArray[np.int64]:
        """The NVMe copies of these blocks are bad: dropped, pinned or not. Returns their slots there.

        Raises IntegrityError, and changes nothing, if one has no copy there or is given twice.
        """
        return self._leaving.break_nvme(ids)

    # Own -----------------------------------------------------------------------------------------

    def _evicted(self, evicted: Evicted) -> Evicted:
        """Without the blocks that are gone, those of the same row in other shards are worth nothing."""
        if self.kin and evicted.gone.any():
            others = self.kin.lost(evicted.ids[evicted.gone])
            self._useless_of.update(self.tenants.owners(others).tolist())
            self.demote(others)
        return evicted
