"""What every part of a store shares: index, tiers, claims, limits and numbers."""

from __future__ import annotations

import itertools
import secrets

import numpy as np

from kvstore.clock import Clock
from kvstore.config import PinOptions
from kvstore.errors import BadInputError
from kvstore.jobs import Jobs
from kvstore.lease import ClaimTable, Lease, Pin, Reservation
from kvstore.metrics import Counters
from kvstore.prefix_index.block_table import At
from kvstore.prefix_index.index import Match, PrefixIndex
from kvstore.room import RoomMaker
from kvstore.store.clearing import Clearing, LastClear
from kvstore.store.events import EventLog
from kvstore.store.hbm import Hbm, HbmSetup
from kvstore.store.hierarchy import Hierarchy, WriteBehind
from kvstore.store.kinship import Kinship
from kvstore.store.mapped import Mapped
from kvstore.store.misses import Misses
from kvstore.store.namespaces import Namespaces
from kvstore.store.outcome import MISSES, Outcome
from kvstore.store.pins import PinQuota
from kvstore.store.request_log import RequestLog
from kvstore.store.requests import LeaseLimits, Prompt
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
        skips_generated: bool = False,
        history_blocks: int = 0,
        knows_idle: bool = True,
        pins: PinOptions | None = None,
        hbm: HbmSetup | None = None,
    ) -> None:
        """``spare_bytes``: see RoomMaker; best the size of a region. Takes in what lies on ``nvme``.

        ``skips_generated``: blocks that hold a generated token are not stored, whoever wants it. ``history_blocks`` and
        ``knows_idle``: see ``History.begin``.
        """
        self.skips_generated = skips_generated
        self.index = index
        index.history.begin(history_blocks, clock.now_s, knows_idle=knows_idle)
        self.dram = dram
        self.clock = clock
        self.limits = limits or LeaseLimits()
        self.namespaces = Namespaces(index.tenants)
        self.counters = Counters()
        for name in MISSES.values():
            self.counters.add(name, 0)
        self.leases: ClaimTable[Lease] = ClaimTable()
        self.kinship = Kinship(index)
        self.reservations: ClaimTable[Reservation] = ClaimTable()
        self.pins: ClaimTable[Pin] = ClaimTable()
        pins = pins or PinOptions(default_s=self.limits.default_s, max_s=self.limits.max_s)
        self.pin_limits = LeaseLimits(pins.default_s, pins.max_s)
        self.pin_quota = PinQuota(index, self.pins, self.counters, pins, dram.capacity_bytes)
        self._room = RoomMaker(index, dram, self.counters, spare_bytes)
        self._ids = itertools.count(secrets.randbits(40) << 20 | 1)
        self.jobs: Jobs = Jobs()
        self.hierarchy: Hierarchy | None = None
        if nvme is not None:
            self.hierarchy = Hierarchy(
                index, dram, nvme, self._room, self.namespaces, self.jobs, self.counters, clock, write or WriteBehind()
            )
            self.counters.add("recovered_blocks", self.hierarchy.recover(clock.now_s()))
        self.hbm: Hbm | None = None
        if hbm is not None:
            self.hbm = Hbm(index, dram, hbm, self.jobs, self.counters, clock)
        self.mapped = Mapped(dram, hbm.tier if hbm is not None else None)
        self._cleared: list[Reservation] = []
        """Reservations that ended by it, until their clients have been told."""
        self.last_clears: dict[int, LastClear] = {}
        """By number of the namespace."""
        self.events = EventLog(index)
        self.misses = Misses(index, self.counters, self.reservations)
        self.requests = RequestLog(index)
        self.clearing = Clearing(index, dram, self.hierarchy, self.namespaces, self.jobs, self.counters)

    def _found(self, prompt: Prompt) -> Match:
        """The longest stored prefix of a prompt whose time is not over."""
        found, hints = self.index.match(prompt.root_key, prompt.path), self.index.hints
        if not hints.has_ttl:
            return found
        now_s = self.clock.now_s()
        n_alive = hints.n_alive(found.ids, now_s)
        if n_alive == len(found.ids):
            if found.partial_id < 0 or not hints.is_over(np.array([found.partial_id]), now_s)[0]:
                return found
            n_alive = len(found.ids)
        return Match(found.ids[:n_alive], -1, 0, n_alive * prompt.path.block_tokens)

    def _ended(self, prompt: Prompt, ids: At, outcome: Outcome) -> None:
        """Count what became of a lookup, and what ended the hit."""
        outcome.count(self.counters)
        self.misses.note(prompt, ids, outcome, self.clock.now_s())

    def _looked_up(self, session_id: int, prompt: Prompt, ids: At, outcome: Outcome) -> None:
        """Take down that a prompt was looked up, whose leading blocks ``ids`` are stored, and what became of it."""
        now_s = self.clock.now_s()
        prompt.namespace.looked_up(prompt.path.n_rows, outcome.n_blocks, now_s)
        self.requests.note(session_id, prompt, ids, now_s, asks_again=outcome.n_unused > 0)

    def _note_use(self, prompt: Prompt, ids: At) -> None:
        """Write down what the request says about the blocks that it uses."""
        if prompt.hints is not None:
            self.counters.add("hinted_requests")
            now_s = self.clock.now_s()
            self.index.hints.used(ids, prompt.root_key, prompt.hints, now_s, prompt.time_s)

    def _pinned(self, session_id: int, tenant: str, ids: At, ttl_s: float) -> Pin:
        """A pin of these blocks; id 0 if there are none. Raises BadInputError beyond the quota."""
        if not len(ids):
            return Pin(0, tenant, 0.0, {}, ids)
        self.pin_quota.take(tenant, ids, self.clock.now_s())
        self.index.pin(ids)
        pin = Pin(next(self._ids), tenant, self.clock.now_s() + ttl_s, {session_id: True}, ids)
        self.pins.add(pin)
        return pin

    def _check_room_for_claim(self, session_id: int, table: ClaimTable[Lease] | ClaimTable[Reservation]) -> None:
        if table.count_of(session_id) >= CLAIMS_PER_SESSION_MAX:
            raise BadInputError(
                f"the session holds {CLAIMS_PER_SESSION_MAX} claims of this kind already: "
                f"release what is no longer read"
            )

    def _ends_with(self, prompt: Prompt, found: Match) -> bool:
        """Whether the short last block of a prompt is stored as such.

        One that goes on would do as well for now, but not after a restart, when blocks are found by key.
        """
        path, table = prompt.path, self.index.table
        if not 0 < found.partial_tokens == path.tail_tokens or len(found.ids) != path.n_full_rows:
            return False
        parent_key = table.key[found.ids[-1]].tobytes() if len(found.ids) else prompt.root_key
        key = path.chain(parent_key, path.n_full_rows, path.n_rows)[0]
        return bool((key == table.key[found.partial_id]).all())
