"""Whether index, tiers and claims tell the same story. For tests and for doubt: looks at every block."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import IntegrityError
from kvstore.lease import Lease, Pin, Reservation
from kvstore.prefix_index.block_table import DRAM, HBM, NVME
from kvstore.prefix_index.index import PrefixIndex
from kvstore.room import PendingReclaim
from kvstore.store.hbm import Hbm
from kvstore.store.hierarchy import Hierarchy
from kvstore.tiers.dram import DramTier, SlotState
from kvstore.tiers.hbm import HbmTier
from kvstore.tiers.nvme.tier import NvmeTier
from kvstore.types import SLOT_BITS

Int64s = NDArray[np.int64]


def check_agreement(
    index: PrefixIndex,
    dram: DramTier,
    hierarchy: Hierarchy | None,
    hbm: Hbm | None,
    pinning: Iterable[Lease | Pin],
    reservations: Iterable[Reservation],
    moving: PendingReclaim | None,
) -> None:
    """Raises IntegrityError when a block, a slot or a pin is known to one side only."""
    reservations = list(reservations)
    blocks = index.table.alive()
    promised = [r.slots for r in reservations if not r.quarantined]
    held_back = [r.slots for r in reservations if r.quarantined]
    pins = [claim.ids for claim in pinning] + [r.prefix_ids for r in reservations]
    if moving is not None:
        promised.append(moving.reclaim.dst_slots)
        pins.append(moving.ids)
    if hierarchy is not None:
        promised += hierarchy.onboarder.reserved_slots()
        pins += hierarchy.onboarder.pinned() + hierarchy.offloader.pinned()
        _check_nvme(index, hierarchy.nvme, blocks)
    _check_slots(index, DRAM, dram, blocks, promised, held_back)
    if hbm is not None:
        pins += hbm.promoter.pinned()
        hbm.tier.check()
        _check_slots(index, HBM, hbm.tier, blocks, hbm.promoter.reserved_slots(), [hbm.above.held_slots()])
    refs = np.zeros(len(index.table.refs), np.int32)
    for ids in pins:
        np.add.at(refs, ids, 1)
    wrong = refs[blocks] != index.table.refs[blocks]
    if wrong.any():
        block = blocks[wrong][0]
        raise IntegrityError(f"block {block} is pinned {index.table.refs[block]} times, {refs[block]} times known")


def _check_slots(
    index: PrefixIndex,
    number: int,
    tier: DramTier | HbmTier,
    blocks: NDArray[np.uint32],
    promised: list[Int64s],
    held_back: list[Int64s],
) -> None:
    there = blocks[index.resident(blocks, number)]
    slots = index.slots(there) if number == DRAM else index.table.hbm_slot[there]
    _require(tier, slots, SlotState.LIVE, "a stored block")
    wrong = tier.tags(slots) != there
    if wrong.any():
        raise IntegrityError(f"the slot of block {there[wrong][0]} bears the tag of another")
    facts = tier.stats()
    for name, held, state in (
        ("used_bytes", [slots], SlotState.LIVE),
        ("reserved_bytes", promised, SlotState.RESERVED),
        ("quarantined_bytes", held_back, SlotState.QUARANTINED),
    ):
        together = np.concatenate([*held, np.empty(0, np.int64)])
        _require(tier, together, state, "a claim")
        size_bytes = _bytes_of(tier, together)
        if size_bytes != facts[name]:
            raise IntegrityError(f"{name} is {facts[name]}, but known blocks and claims have {size_bytes}")


def _check_nvme(index: PrefixIndex, nvme: NvmeTier, blocks: NDArray[np.uint32]) -> None:
    there = blocks[index.resident(blocks, NVME)]
    slots = index.table.nvme_slot[there]
    if len(np.unique(slots)) != len(slots):
        raise IntegrityError("two blocks have the same place on NVMe")
    if len(slots) != nvme.n_live:
        raise IntegrityError(f"{nvme.n_live} frames live on NVMe, but {len(slots)} blocks lie there")
    wrong = (nvme.keys(slots) != index.table.key[there]).any(axis=1)
    if wrong.any():
        raise IntegrityError(f"the frame of block {there[wrong][0]} on NVMe has the key of another")


def _require(tier: DramTier | HbmTier, slots: Int64s, state: SlotState, whose: str) -> None:
    wrong = tier.states(slots) != state
    if wrong.any():
        raise IntegrityError(f"slot {slots[wrong][0]} of {whose} is not {state.name.lower()}")


def _bytes_of(tier: DramTier | HbmTier, slots: Int64s) -> int:
    region_ids, counts = np.unique(slots >> SLOT_BITS, return_counts=True)
    return sum(
        tier.region(region_id).slot_bytes * n for region_id, n in zip(region_ids.tolist(), counts.tolist(), strict=True)
    )


def check_held(index: PrefixIndex, reservations: Iterable[Reservation], reads: Iterable[tuple[str, int]]) -> None:
    """Raises IntegrityError if slots that are being filled count otherwise than as their tenants'."""
    tenants = index.tenants
    held = np.zeros(len(tenants), np.int64)
    for each in reservations:
        held[tenants.number(each.tenant)] += each.n_held * each.slot_bytes
    for tenant, n_bytes in reads:
        held[tenants.number(tenant)] += n_bytes
    if not np.array_equal(held, tenants.held_bytes[DRAM]):
        raise IntegrityError(f"tenants fill {held.tolist()} bytes, {tenants.held_bytes[DRAM].tolist()} are counted")
