"""The store of one node: finds, leases, reserves and commits blocks over the index and the tiers.

Every method is synchronous, runs on one thread and takes time proportional to the blocks it names. Whatever
takes longer is handed out for the caller to run elsewhere: moving blocks to free a region as a ``Reclaim``,
reading and writing NVMe as ``jobs``.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from kvstore.errors import BadInputError, EndedError
from kvstore.jobs import Job
from kvstore.lease import NO_SESSION, Claim, Pin
from kvstore.persist import Persist
from kvstore.prefix_index.hiding import Hidden
from kvstore.store.clearing import LastClear
from kvstore.store.facts import store_stats
from kvstore.store.integrity import check_agreement, check_held
from kvstore.store.overlap import Overlaps
from kvstore.store.requests import Prompt
from kvstore.store.writing import Writing
from kvstore.tiers.device_memory import HbmRegion
from kvstore.tiers.dram import Region

EXPIRE_BATCH = 256


class Store(Overlaps, Writing):
    """See the module. Sessions are integers; a session that may write is a tier's writer of that number."""

    # Pins -------------------------------------------------------------------------------------------

    def pin(self, session_id: int, prompt: Prompt, ttl_s: float = 0.0) -> Pin:
        """Keep the stored prefix of a prompt from being evicted; id 0 if nothing is stored.

        With ``NO_SESSION`` it outlives the client. Raises BadInputError for more than the tenant, or all together, may
        pin.
        """
        ttl_s = self.pin_limits.ttl_s(ttl_s)
        if prompt.namespace.parts:
            return self.hybrid_pin(session_id, prompt, ttl_s)
        ids = self._found(prompt).ids
        return self._pinned(session_id, prompt.namespace.namespace.tenant, ids, ttl_s)

    def unpin(self, session_id: int, pin_id: int, tenant: str = "") -> bool:
        """Let go of a pin of this session, or of one of this ``tenant`` that is no session's. Idempotent."""
        pin = self.pins.get(pin_id)
        if pin is None:
            return False
        if pin.tenant == tenant and NO_SESSION in pin.holders:
            session_id = NO_SESSION
        if session_id not in pin.holders:
            return False
        if self.pins.drop_holder(pin, session_id):
            self.pin_quota.give_back(pin.tenant, pin.ids)
            self.index.unpin(pin.ids)
        return True

    # Ends -------------------------------------------------------------------------------------------

    def expire(self) -> list[Claim]:
        """End what is past its deadline, a bounded number at a time; returns leases and reservations that ended.

        Those are among them that ``clear`` has ended since the last call.
        """
        now_s = self.clock.now_s()
        leases = self.leases.expire(now_s, EXPIRE_BATCH)
        reservations = self.reservations.expire(now_s, EXPIRE_BATCH)
        for reservation in reservations:
            self._quarantine(reservation)
        for pin in self.pins.expire(now_s, EXPIRE_BATCH):
            # A pin gives no access to memory: nobody has to acknowledge its end.
            for session_id in list(pin.holders):
                self.unpin(session_id, pin.id)
        self.counters.add("expired_leases", len(leases))
        self.counters.add("expired_reservations", len(reservations))
        cleared, self._cleared = self._cleared, []
        return [*leases, *reservations, *cleared]

    def end_rights(self, session_id: int) -> None:
        """The session was cut off (disconnect, no heartbeat): its rights end, its holds stay."""
        for lease in self.leases.of_session(session_id):
            lease.holders[session_id] = False
        for reservation in self.reservations.of_session(session_id):
            reservation.holders[session_id] = False
            self._quarantine(reservation)
        for pin in self.pins.of_session(session_id):
            self.unpin(session_id, pin.id)

    def is_used_by(self, session_id: int) -> bool:
        """Whether the session may still read or write memory of the store, or hold some."""
        claims = (self.leases, self.reservations, self.pins)
        return any(each.of_session(session_id) for each in claims) or self.mapped.is_mapped_by(session_id)

    def forget_session(self, session_id: int) -> None:
        """The session's process is gone, or it said that it uses nothing any more: its holds end too."""
        for lease in self.leases.of_session(session_id):
            self.release(session_id, lease.id)
        for reservation in self.reservations.of_session(session_id):
            self._drop_reservation(reservation, session_id)
        for pin in self.pins.of_session(session_id):
            self.unpin(session_id, pin.id)
        self.mapped.drop_client(session_id)

    @property
    def n_reservations_in_force(self) -> int:
        """Reservations whose right has not ended."""
        return sum(not reservation.ended for reservation in self.reservations)

    def clear(self, namespaces: Collection[int]) -> dict[int, Hidden]:
        """No block of these namespaces (their numbers) is found from now on; says how many were, by number.

        Reservations in them end: what they are filled with belongs to what is cleared. Leases stay, and so does
        what they hold until it is released. The rest goes bit by bit: see ``clearing``.
        """
        for reservation in self.reservations:
            if reservation.namespace in namespaces and not reservation.ended:
                for session_id in reservation.holders:
                    reservation.holders[session_id] = False
                self._quarantine(reservation)
                self._cleared.append(reservation)
        hidden = self.clearing.begin(namespaces)
        now_s = self.clock.now_s()
        self.last_clears |= {number: LastClear(now_s, each.n_blocks) for number, each in hidden.items()}
        return hidden

    # NVMe -------------------------------------------------------------------------------------------

    def finish(self, job: Job) -> None:
        """After ``job.run()``: takes the result in; further jobs may follow."""
        job.done()

    @property
    def has_work(self) -> bool:
        """Whether jobs wait, or ``pump`` would make some or do something itself. Cheap."""
        offloads = self.hierarchy is not None and self.hierarchy.offloader.has_work
        promotions = self.hbm is not None and self.hbm.promoter.has_work
        return bool(self.jobs) or offloads or promotions or self.requests.has_work

    def pump(self) -> None:
        """Make jobs of what requests have queued, which need not keep them waiting for their answer.

        A slice of what is left of recording them is done here: call it again soon while ``requests.has_work``.
        """
        if self.hierarchy is not None and self.hierarchy.offloader.has_work:
            self.hierarchy.offloader.pump()
        if self.hbm is not None and self.hbm.promoter.has_work:
            self.hbm.promoter.pump()
        self.requests.work()

    def tick(self) -> None:
        """Deadlines of disk reads and writes, retries, upkeep; call it often (every 50 ms)."""
        if self.hierarchy is not None:
            self.hierarchy.tick(self.clock.now_s())
        self._demote_overdue()
        self.clearing.tick()
        now_s = self.clock.now_s()
        self.events.tick(now_s)
        self.requests.tick(now_s)
        self.misses.settle(now_s)

    def _demote_overdue(self) -> None:
        """Blocks whose time is over are found by nobody; they go first."""
        overdue = self.index.hints.take_overdue(self.clock.now_s())
        if len(overdue):
            self.index.demote(overdue)
            self.counters.add("overdue_blocks", len(overdue))

    def end_session(self, root_key: bytes, session_id: str) -> int:
        """No request of this session follows below this root: what only it has used goes first from now on.

        Says how many blocks that are.
        """
        ids = self.index.hints.end_session(root_key, session_id)
        self.index.demote(ids)
        self.counters.add("ended_sessions")
        return len(ids)

    def begin_persist(self, prompt: Prompt) -> Persist | None:
        """Have the stored prefix of a prompt written to NVMe; None without an NVMe tier or a stored prefix.

        Follow with ``n_durable`` at any time, and ``end_persist`` in any case.
        """
        if prompt.namespace.parts:
            return self.begin_hybrid_persist(prompt)
        found = self._found(prompt)
        ids = found.ids
        if self._ends_with(prompt, found):
            ids = np.append(ids, np.uint32(found.partial_id))
        if self.hierarchy is None or not len(ids):
            return None
        return self.hierarchy.offloader.begin_persist(ids)

    def n_durable(self, persist: Persist) -> int:
        """How many of its leading blocks are durable now."""
        return self.hierarchy.offloader.n_durable(persist) if self.hierarchy is not None else 0

    def why_not_durable(self, persist: Persist) -> str:
        """What keeps its other blocks from being durable, in words."""
        return self.hierarchy.offloader.why_not_durable(persist) if self.hierarchy is not None else ""

    def end_persist(self, persist: Persist) -> None:
        """See ``begin_persist``. Idempotent; the writing goes on."""
        if self.hierarchy is not None:
            self.hierarchy.offloader.end_persist(persist)

    # Memory -----------------------------------------------------------------------------------------

    def share_region(self, session_id: int, tenant: str, region_id: int, *, writable: bool) -> Region:
        """A region whose descriptor the session may have; from now on it counts as mapping it.

        Raises EndedError for one that is gone or another tenant's (which it is not told apart from), and
        BadInputError for asking to write where another client writes.
        """
        region = self.dram.regions.get(region_id)
        if region is None or region.tenant != tenant:
            raise EndedError(f"region {region_id} is not there (any more): lease or reserve again")
        mine = region.writer == session_id
        if writable and (not mine or region.sealed):
            raise BadInputError(f"region {region_id} can't be mapped for writing: it is sealed or another client's")
        if not mine and not region.sealed:
            raise EndedError(f"region {region_id} is still being set up by its writer: try again")
        self.dram.add_mapper(region_id, session_id)
        return region

    def share_hbm(self, session_id: int, tenant: str, region_id: int) -> HbmRegion:
        """A region of HBM that the session may open; from now on it counts as having it open.

        Raises EndedError for one that is gone or another tenant's, BadInputError where there is no HBM tier.
        """
        if self.hbm is None:
            raise BadInputError("the daemon has no HBM tier (--hbm-device, --hbm)")
        region = self.hbm.tier.regions.get(region_id)
        if region is None or region.tenant != tenant:
            raise EndedError(f"region {region_id} is not there (any more): lease again")
        self.hbm.tier.add_mapper(region_id, session_id)
        return region

    def seal_region(self, session_id: int, region_id: int) -> None:
        """The writer has its mapping. Raises BadInputError for anybody else's region."""
        region = self.dram.regions.get(region_id)
        if region is None or region.writer != session_id:
            raise BadInputError(f"region {region_id} is not this client's to seal")
        try:
            self.dram.seal(region_id)
        except OSError as error:
            raise BadInputError(
                f"region {region_id} can't be sealed ({error.strerror}): nobody else will get it"
            ) from error

    # Facts ------------------------------------------------------------------------------------------

    def stats(self) -> tuple[dict[str, float], dict[str, str]]:
        """Counters and gauges, and facts in words, flat, by name."""
        self.misses.settle(self.clock.now_s(), at_once=True)
        numbers, texts = store_stats(
            self.counters, self.index, self.dram, self.hierarchy, self.hbm, self.leases, self.reservations, self.pins,
            len(self.namespaces),
        )  # fmt: skip
        return numbers | self.pin_quota.stats() | {"tenants": float(self.index.tenants.n_with_blocks)}, texts

    def check(self) -> None:
        """Verify index and tier, and that they and the claims agree; raises IntegrityError. Slow."""
        self.index.check()
        self.dram.check()
        self.pin_quota.check()
        reads = self.hierarchy.onboarder.held() if self.hierarchy is not None else []
        check_held(self.index, self.reservations, reads)
        if self.hierarchy is not None:
            self.hierarchy.nvme.check()
        check_agreement(
            self.index, self.dram, self.hierarchy, self.hbm, [*self.leases, *self.pins], self.reservations,
            self._room.pending,
        )  # fmt: skip
