"""What every part of a store shares: index, tiers, claims, limits and numbers."""

from __future__ import annotations

import itertools
import secrets

from kvstore.clock import Clock
from kvstore.errors import BadInputError
from kvstore.jobs import Jobs
from kvstore.lease import ClaimTable, Lease, Pin, Reservation
from kvstore.metrics import Counters
from kvstore.prefix_index.index import PrefixIndex
from kvstore.room import RoomMaker
from kvstore.store.hierarchy import Hierarchy, WriteBehind
from kvstore.store.namespaces import Namespaces
from kvstore.store.requests import LeaseLimits
from kvstore.tiers.dram import DramTier
from kvstore.tiers.nvme.tier import NvmeTier

CLAIMS_PER_SESSION_MAX = 65536


class StoreParts:
    """See ``Store``."""

    def __init__(
        self,
        index: PrefixIndex,
        dram: DramTier,
        clock: Clock,
        limits: LeaseLimits | None = None,
        spare_bytes: int = 64 << 20,
        nvme: NvmeTier | None = None,
        write: WriteBehind | None = None,
    ) -> None:
        """``spare_bytes``: see RoomMaker; best the size of a region. Takes in what lies on ``nvme``."""
        self.index = index
        self.dram = dram
        self.clock = clock
        self.limits = limits or LeaseLimits()
        self.namespaces = Namespaces()
        self.counters = Counters()
        self.leases: ClaimTable[Lease] = ClaimTable()
        self.reservations: ClaimTable[Reservation] = ClaimTable()
        self.pins: ClaimTable[Pin] = ClaimTable()
        self._room = RoomMaker(index, dram, self.counters, spare_bytes)
        self._ids = itertools.count(secrets.randbits(40) << 20 | 1)
        self.jobs: Jobs = Jobs()
        self.hierarchy: Hierarchy | None = None
        if nvme is not None:
            self.hierarchy = Hierarchy(
                index, dram, nvme, self._room, self.namespaces, self.jobs, self.counters, clock, write or WriteBehind()
            )
            self.counters.add("recovered_blocks", self.hierarchy.recover(clock.now_s()))

    def _check_room_for_claim(
        self, session_id: int, table: ClaimTable[Lease] | ClaimTable[Reservation] | ClaimTable[Pin]
    ) -> None:
        if table.count_of(session_id) >= CLAIMS_PER_SESSION_MAX:
            raise BadInputError(
                f"the session holds {CLAIMS_PER_SESSION_MAX} claims of this kind already: "
                f"release what is no longer read"
            )
