"""Reading without a lease: one call says where blocks are, and what they were is known after the copy.

The daemon holds nothing for it, so that a block may go, and its slot be filled anew, while it is copied. Then the
slot's generation has moved on, and the copy is worth nothing: whoever meets that takes a lease instead.
"""

from __future__ import annotations

import threading
from typing import Protocol

from google.protobuf.message import Message

from kvstore.client.era import Era
from kvstore.client.mapping import Regions
from kvstore.client.slots import Bytes, MappedSlots, MappingSession
from kvstore.client.transport import ReplyT
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.framing import Method


class GlancingSession(MappingSession, Protocol):
    """What a glance needs of a session."""

    era: Era
    epoch: int
    regions: Regions

    @property
    def can_wait(self) -> bool:
        """Whether requests may wait for slower tiers."""
        ...

    def exclusive(self) -> threading.RLock:
        """Its lock."""
        ...

    def call_waiting(self, method: Method, request: Message, kind: type[ReplyT], wait_s: float) -> ReplyT:
        """As ``call``; the daemon may take ``wait_s`` longer."""
        ...

    def release(self, request: pb.ReleaseRequest) -> None:
        """Give up a lease."""
        ...


def glance(session: GlancingSession, request: pb.LeaseRequest, rows: Bytes, threads: int) -> pb.LeaseReply | None:
    """See ``Session.read_at_once``. None also where a region is not mapped yet, which takes a lease the first time."""
    # Slots that were lent in this era are not reused, not even by a daemon that comes after, as long as this is kept.
    era, epoch = session.era, session.epoch
    request.glance = True
    if request.wait_s and session.can_wait:
        reply = session.call_waiting(Method.LEASE, request, pb.LeaseReply, request.wait_s)
    else:
        reply = session.call(Method.LEASE, request, pb.LeaseReply)
    request.glance = False
    try:
        n = min(reply.n_blocks - request.first_block, len(rows))
        if n <= 0:
            return reply
        region_ids = [layout.id for layout in reply.slots.regions]
        with session.exclusive():
            mappings = session.regions.find(region_ids, writable=False)
        if len(mappings) < len(region_ids):
            return None
        slots = MappedSlots(session, reply.slots, rows.shape[1], writable=False, mappings=mappings)
        there = n <= len(slots) and slots.copy_out(rows[:n], threads)
        return reply if there and session.epoch == epoch and session.era is era else None
    finally:
        if reply.lease_id:  # of a daemon that knows no glances
            session.release(pb.ReleaseRequest(lease_id=reply.lease_id))
