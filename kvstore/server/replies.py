"""What handlers answer with, and the messages that more than one of them fills."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import NamedTuple

import numpy as np
from google.protobuf.message import Message
from numpy.typing import NDArray

from kvstore.lease import Lease, Reservation
from kvstore.store.store import Store
from kvstore.tiers.dram import DramTier
from kvstore.tiers.hbm import HbmTier
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.packing import I64, U32, U64, pack


class Reply(NamedTuple):
    """A message and the descriptors that travel with it."""

    message: Message
    descriptors: tuple[int, ...] = ()


Result = Reply | Awaitable[Reply]


def life_s(store: Store, deadline_s: float) -> float:
    """Seconds that are left to a claim."""
    return max(deadline_s - store.clock.now_s(), 0.0)


def lease_reply(store: Store, lease: Lease) -> pb.LeaseReply:
    """A lease, or a glance, and its slots; of one over a family what all shards have in common, and no slots."""
    reply = pb.LeaseReply(
        lease_id=lease.id,
        n_blocks=lease.n_blocks,
        partial_tokens=lease.partial_tokens,
        n_tokens=lease.n_tokens,
        n_nvme=lease.n_nvme,
    )
    if lease.id:
        reply.ttl_s = life_s(store, lease.deadline_s)
    if len(lease.ids):
        reply.first_block = lease.first_block
        if not lease.shards:
            slots = store.index.slots(lease.ids)
            if lease.hbm_slots is not None and store.hbm is not None:
                _fill_hbm(reply.hbm, store.hbm.tier, lease.hbm_slots)
            _fill(reply.slots, store.dram, slots[: lease.n_held])
            at = lease.n_held
            for part in lease.parts:
                held = reply.parts.add(part=part.number, first_block=part.first_block)
                _fill(held.slots, store.dram, slots[at : at + part.n])
                at += part.n
    return reply


def shard_reply(store: Store, lease: Lease, shard: bytes) -> pb.LeaseReply:
    """A lease over a family as one of its shards sees it. Raises BadInputError for a shard it does not have."""
    reply = lease_reply(store, lease)
    _fill(reply.slots, store.dram, store.index.slots(lease.ids_of(shard)))
    return reply


def reserve_reply(store: Store, reservation: Reservation) -> pb.ReserveReply:
    """A reservation and its slots."""
    reply = pb.ReserveReply(
        n_present=reservation.n_present,
        n_reserved=len(reservation.slots),
        skipped_reason=reservation.skipped_reason,
    )
    if len(reservation.slots):
        reply.reservation_id = reservation.id
        reply.ttl_s = life_s(store, reservation.deadline_s)
        _fill(reply.slots, store.dram, reservation.slots)
    return reply


def no_persist(store: Store, n_blocks: int) -> pb.PersistReply:
    """Nothing can be made durable of a prompt of which ``n_blocks`` whole blocks are stored."""
    no_tier = "" if store.hierarchy is not None else "the daemon has no NVMe tier (--nvme-dir)"
    return pb.PersistReply(n_blocks=n_blocks, reason=no_tier or "nothing of the prompt is stored")


def _fill_hbm(message: pb.HbmSlots, tier: HbmTier, slots: NDArray[np.int64]) -> None:
    at = np.flatnonzero(slots >= 0)
    message.at = pack(at, U32)
    _fill(message.slots, tier, slots[at])


def _fill(message: pb.Slots, tier: DramTier | HbmTier, slots: NDArray[np.int64]) -> None:
    here = slots >= 0
    described = tier.describe(slots if here.all() else slots[here])
    message.ids = pack(slots, I64)
    message.generations = pack(described.generations, U64)
    for region_id, slot_bytes, base in zip(
        described.region_ids, described.slot_bytes, described.generation_bases, strict=True
    ):
        message.regions.add(id=region_id, slot_bytes=slot_bytes, generation_base=base)
