"""Copies that go: eviction from a tier, bad copies, and blocks that leave the index with their last copy."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import IntegrityError
from kvstore.prefix_index.block_table import (
    COLD,
    DRAM,
    FREE,
    HIDDEN,
    NO_PARENT,
    NVME,
    At,
    BlockTable,
    Ids,
    residency_bit,
)
from kvstore.prefix_index.cold import ColdBlocks
from kvstore.prefix_index.copies import Copies, Loss
from kvstore.prefix_index.parts import forget, is_part
from kvstore.prefix_index.policy import EvictionPolicy
from kvstore.prefix_index.rivals import Rivals
from kvstore.prefix_index.tenants import Asker
from kvstore.prefix_index.tree import RadixTree, as_ids

_COLD_RUN_MAX = 64


class Evicted(NamedTuple):
    """Blocks that lost their copy in a tier, in the order they went."""

    ids: Ids
    slots: NDArray[np.int64]
    """Where the copies lay, in the tier they are gone from."""
    size_bytes: NDArray[np.int64]
    keys: NDArray[np.uint8]
    """Block keys, [n, 16]."""
    gone: NDArray[np.bool_]
    """Who left the index, as no other tier has it and nothing follows it. Their ids may be reused at once."""


class Leaving:
    """Takes copies and blocks away and keeps tree, table, counts and evictors in step."""

    def __init__(
        self, tree: RadixTree, table: BlockTable, policy: EvictionPolicy, copies: Copies, cold: ColdBlocks
    ) -> None:
        self._tree = tree
        self._table = table
        self._policy = policy
        self._copies = copies
        self._cold = cold
        self._left = array("I")

    def evict(
        self,
        n: int,
        tier: int,
        asker: Asker | None = None,
        of: Sequence[int] | None = None,
        rivals: Rivals | None = None,
    ) -> Evicted:
        """Drop the ``n`` copies of a tier that are to go first; see ``FairOrder.begin`` for ``asker`` and ``of``.

        Fewer by as many of ``rivals`` as would go before them. Tenants that share a tier have no rivals in each other.
        """
        evictor = self._copies.evictors[tier]
        evictor.begin(asker, of)
        rivals = None if evictor.is_shared else rivals
        out, gone = array("I"), bytearray()
        while len(out) < n and (block := evictor.pop()) >= 0:
            if rivals is not None and self._table.ranks(tier)[block] >= rivals.lowest_rank:
                n -= 1
                rivals.decline()
                evictor.pass_over(block)
                evictor.take_back()
                continue
            tail = self._tail(block, n - len(out))
            if len(tail) > 1:
                del tail[evictor.run(as_ids(tail)) :]
            if len(tail) > 1 and rivals is not None:
                before = self._table.ranks(tier)[as_ids(tail)[1:]] >= rivals.lowest_rank
                del tail[1 + (int(before.argmax()) if before.any() else len(before)) :]
            gone += self._drop(tail, tier)
            out.extend(tail)
        return self._finish(out, gone, tier, asker)

    def evict_among(
        self,
        n: int,
        worth: Callable[[int], int],
        most_passed: int,
        asker: Asker | None = None,
        of: Sequence[int] | None = None,
    ) -> Evicted:
        """As ``evict`` from DRAM, until the slots given up are worth ``n``: see ``PrefixIndex.evict_among``."""
        evictor, table = self._copies.evictors[DRAM], self._table
        evictor.begin(asker, of)
        out, gone = array("I"), bytearray()
        gained = n_passed = 0
        while gained < n and n_passed <= most_passed and (block := evictor.pop()) >= 0:
            value = worth(int(table.slot[block]))
            if value >= 0:
                gained += value
                gone += self._drop(array("I", (block,)), DRAM)
                out.append(block)
            else:
                n_passed += 1
                evictor.pass_over(block)
        evictor.take_back()
        return self._finish(out, gone, DRAM, asker)

    def break_nvme(self, ids: Ids) -> NDArray[np.int64]:
        """The NVMe copies are bad. Returns their slots; raises IntegrityError if a block has none there."""
        table = self._table
        at = ids.astype(np.intp)
        if len(np.unique(at)) != len(at) or not table.resident(at, NVME).all():
            raise IntegrityError("only blocks on NVMe can break there, each once; look up who is resident first")
        slots = table.nvme_slot[at]
        self._copies.lost_nvme(at)
        self.sweep(at)
        return slots

    def sweep(self, at: At) -> None:
        """Let those of the blocks leave that are broken, without children, not pinned and not hidden."""
        table = self._table
        ended = (table.residency[at] == 0) & (table.n_children[at] == 0) & (table.refs[at] == 0)
        ended &= table.state[at] != HIDDEN
        for block in at[ended].tolist():
            if block not in self._left:  # it may have gone with the block behind it
                self._copies.n_broken -= 1
                self._leave(array("I", (block,)))
        self._free()

    def unused_tail(self, leaf: int, most: int) -> Ids:
        """``leaf``, which nobody uses, and the blocks before it that nobody uses, that nothing else follows and that
        are not on NVMe; the last one first, at most ``most``."""
        table, tail = self._table, as_ids(self._tail(leaf, most))
        stays = (table.refs[tail] != 0) | (table.n_children[tail] > 1) | table.resident(tail, NVME)
        stays[0] = False
        n = int(stays.argmax()) if stays.any() else len(tail)
        return tail[:n]

    def leave(self, tail: Ids) -> None:
        """Blocks without copies go, as ``unused_tail`` gives them."""
        self._leave(array("I", tail.tobytes()))
        self._free()

    def _tail(self, block: int, most: int) -> array[int]:
        """``block`` and the blocks before it on its edge, or before it and cold like it; at most ``most``."""
        table = self._table
        node = table.node[block]
        if node is None:
            tail = array("I", (block,))
            while len(tail) < min(most, _COLD_RUN_MAX):
                block = int(table.parent[block])
                if block == NO_PARENT or table.node[block] is not None:
                    break
                tail.append(block)
            return tail
        ids: array[int] = node.ids
        end = len(ids)
        if ids[-1] != block:
            end = int((as_ids(ids) == block).argmax()) + 1
        tail = ids[max(end - most, 0) : end]
        tail.reverse()
        return tail

    def _drop(self, tail: array[int], tier: int) -> bytes:
        """Drop the copies of ``tail``, a run of the tier's evictor. Per block 1 if it left the index."""
        table, copies = self._table, self._copies
        n = len(tail)
        copies.n[tier] -= n
        at = as_ids(tail)
        if not table.nvme:
            table.residency[at] = 0
            copies.last_lost(at)
            self._leave(tail)
            return b"\1" * n
        residency = int(table.residency[tail[0]]) & ~residency_bit(tier)
        table.residency[at] = residency
        children = copies.children(tier)
        parent = int(table.parent[tail[-1]])
        if parent != NO_PARENT:
            left = int(children[parent]) - 1
            children[parent] = left
            if left == 0:
                copies.evictors[tier].became_leaf(parent)
        if residency == 0:
            copies.last_lost(at)
        if residency == 0 and table.n_children[tail[0]] == 0:
            self._leave(tail)
            return b"\1" * n
        if residency == 0:
            copies.n_broken += n
        children[at[1:]] = 0
        return bytes(n)

    def _leave(self, chain: array[int]) -> None:
        """Out of the tree: blocks without copies, each followed at most by the one before it in ``chain``."""
        table, copies = self._table, self._copies
        while True:
            node = table.node[chain[0]]
            if node is None:
                at = as_ids(chain)
                cold = at[table.state[at] == COLD]
                table.state[cold] = FREE
                self._cold.left(len(cold))
                if is_part(table, chain[0]):
                    forget(table, chain[0])
            else:
                self._tree.remove_leaves(node, len(chain))
            self._left.extend(chain)
            parent = int(table.parent[chain[-1]])
            if parent == NO_PARENT:
                return
            left = int(table.n_children[parent]) - 1
            table.n_children[parent] = left
            if left:
                return
            if table.residency[parent] != 0 or table.refs[parent] != 0 or table.state[parent] == HIDDEN:
                # Without NVMe this is the DRAM evictor's only notice; with it, the last copy on NVMe may go now.
                copies.evictors[-1].became_leaf(parent)
                return
            copies.n_broken -= 1
            chain = array("I", (parent,))

    def _finish(self, out: array[int], gone: bytearray, tier: int, asker: Asker | None) -> Evicted:
        table, ids = self._table, as_ids(out)
        slots = self._copies.slots(tier)
        evicted = Evicted(
            ids, slots[ids], table.size_bytes[ids].astype(np.int64), table.key[ids], np.frombuffer(gone, np.bool_)
        )
        if table.nvme:
            slots[ids] = -1
        if self._copies.witness is not None:
            self._copies.witness.lost(ids.astype(np.intp), tier, Loss.EVICTED, table.residency[ids] == 0)
        if self._copies.history and len(ids):
            if not table.nvme:
                self._copies.history.evicted(ids, evicted.keys, tier)
            elif (last := table.residency[ids] == 0).any():
                self._copies.history.evicted(ids[last], evicted.keys[last], tier)
        self._policy.left(ids, tier)
        self._copies.tenants.evicted(ids, tier, asker)
        self._free()
        return evicted

    def _free(self) -> None:
        left, self._left = as_ids(self._left), array("I")
        self._policy.evicted(left)
        self._table.free(left)
