"""Whether index, tier and claims tell the same story. For tests and for doubt: looks at every block."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import IntegrityError
from kvstore.lease import Lease, Pin, Reservation
from kvstore.prefix_index.index import PrefixIndex
from kvstore.store.room import PendingReclaim
from kvstore.tiers.dram import DramTier, SlotState
from kvstore.types import SLOT_BITS


def check_agreement(
    index: PrefixIndex,
    dram: DramTier,
    pinning: Iterable[Lease | Pin],
    reservations: Iterable[Reservation],
    pending: PendingReclaim | None,
) -> None:
    """Raises IntegrityError when a block, a slot or a pin is known to one side only."""
    reservations = list(reservations)
    blocks = index.table.alive()
    slots = index.slots(blocks)
    _require(dram, slots, SlotState.LIVE, "a stored block")
    wrong = dram.tags(slots) != blocks
    if wrong.any():
        raise IntegrityError(f"the slot of block {blocks[wrong][0]} bears the tag of another")
    promised = [r.slots for r in reservations if not r.quarantined]
    held_back = [r.slots for r in reservations if r.quarantined]
    if pending is not None:
        promised.append(pending.reclaim.dst_slots)
    facts = dram.stats()
    for name, held, state in (
        ("used_bytes", [slots], SlotState.LIVE),
        ("reserved_bytes", promised, SlotState.RESERVED),
        ("quarantined_bytes", held_back, SlotState.QUARANTINED),
    ):
        together = np.concatenate([*held, np.empty(0, np.int64)])
        _require(dram, together, state, "a claim")
        size_bytes = _bytes_of(dram, together)
        if size_bytes != facts[name]:
            raise IntegrityError(f"{name} is {facts[name]}, but known blocks and claims have {size_bytes}")
    refs = np.zeros(len(index.table.refs), np.int32)
    for ids in [c.ids for c in pinning] + [r.prefix_ids for r in reservations]:
        refs[ids] += 1
    if pending is not None:
        refs[pending.ids] += 1
    wrong = refs[blocks] != index.table.refs[blocks]
    if wrong.any():
        raise IntegrityError(f"block {blocks[wrong][0]} is pinned more or less often than claims say")


def _require(dram: DramTier, slots: NDArray[np.int64], state: SlotState, whose: str) -> None:
    wrong = dram.states(slots) != state
    if wrong.any():
        raise IntegrityError(f"slot {slots[wrong][0]} of {whose} is not {state.name.lower()}")


def _bytes_of(dram: DramTier, slots: NDArray[np.int64]) -> int:
    region_ids, counts = np.unique(slots >> SLOT_BITS, return_counts=True)
    return sum(
        dram.region(region_id).slot_bytes * n for region_id, n in zip(region_ids.tolist(), counts.tolist(), strict=True)
    )
