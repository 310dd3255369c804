"""The store of one node: finds, leases, reserves and commits blocks over the index and the DRAM tier.

Every method is synchronous, runs on one thread and takes time proportional to the blocks it names. The
only bulk copying, moving blocks to free a region, is handed out as a ``Reclaim`` for the caller to run
elsewhere.
"""

from __future__ import annotations

import itertools
import secrets

import numpy as np
from numpy.typing import NDArray

from kvstore.clock import Clock
from kvstore.errors import BadInputError, EndedError
from kvstore.lease import Claim, ClaimTable, Lease, Pin, Reservation
from kvstore.metrics import Counters
from kvstore.prefix_index.index import Match, MissingParent, PrefixIndex
from kvstore.prefix_index.rows import RowPath
from kvstore.store.integrity import check_agreement
from kvstore.store.namespaces import Namespaces
from kvstore.store.requests import Commit, LeaseLimits, Prompt
from kvstore.store.room import PendingReclaim, RoomMaker
from kvstore.tiers.dram import DramTier, Region
from kvstore.types import SLOT_BITS

CLAIMS_PER_SESSION_MAX = 65536
EXPIRE_BATCH = 256


class Store:
    """See the module. Sessions are integers; a session that may write is a tier's writer of that number."""

    def __init__(
        self,
        index: PrefixIndex,
        dram: DramTier,
        clock: Clock,
        limits: LeaseLimits | None = None,
        spare_bytes: int = 64 << 20,
    ) -> None:
        """``spare_bytes``: see RoomMaker; best the size of a region."""
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

    # Questions -----------------------------------------------------------------------------------

    def match(self, prompt: Prompt) -> Match:
        """Longest stored prefix. Pure: changes nothing, pins nothing."""
        self.counters.add("matches")
        return self.index.match(prompt.root_key, prompt.path)

    # Leases --------------------------------------------------------------------------------------

    def lease(
        self, session_id: int, prompt: Prompt, first_block: int = 0, max_blocks: int = 0, ttl_s: float = 0.0
    ) -> Lease:
        """Match, then pin what matched from ``first_block`` on; counts as an access for the policy.

        A miss is a lease with id 0 that holds nothing and needs no release.
        """
        ttl_s = self.limits.ttl_s(ttl_s)
        found = self.match(prompt)
        ids = found.ids.astype(np.intp)
        partial_tokens = found.partial_tokens
        if max_blocks and len(ids) >= max_blocks:
            ids, partial_tokens = ids[:max_blocks], 0
        n_blocks = len(ids)
        if partial_tokens:
            ids = np.append(ids, found.partial_id)
        n_tokens = n_blocks * prompt.namespace.namespace.spec.block_tokens + partial_tokens
        self._count_hits(prompt.path, n_blocks, n_tokens)
        wanted = ids[first_block:] if first_block else ids
        if len(ids):
            self.index.touch(ids, prompt.time_s, prompt.category)
        if not len(wanted):
            return Lease(0, prompt.namespace.namespace.tenant, 0.0, {}, wanted, n_blocks, partial_tokens, n_tokens)
        self._check_room_for_claim(session_id, self.leases)
        self.index.pin(wanted)
        lease = Lease(
            next(self._ids), prompt.namespace.namespace.tenant, self.clock.now_s() + ttl_s, {session_id: True},
            wanted, n_blocks, partial_tokens, n_tokens,
        )  # fmt: skip
        self.leases.add(lease)
        return lease

    def attach(self, session_id: int, tenant: str, lease_id: int) -> Lease:
        """Make this session a holder of a lease of its tenant too. Raises EndedError if there is none."""
        lease = self.leases.get(lease_id)
        if lease is None or lease.ended_at(self.clock.now_s()) or lease.tenant != tenant:
            raise EndedError(f"lease {lease_id} is unknown or has ended: match and lease the prefix again")
        if lease.holders.get(session_id):
            raise BadInputError(f"this client holds lease {lease_id} already: share the object it has")
        self._check_room_for_claim(session_id, self.leases)
        self.leases.join(lease, session_id)
        return lease

    def renew(self, session_id: int, lease_id: int, ttl_s: float = 0.0) -> float:
        """New life of a lease in seconds from now. Raises EndedError if its right has ended."""
        ttl_s = self.limits.ttl_s(ttl_s)
        lease = self.leases.get(lease_id)
        if lease is None or not lease.right_of(session_id, self.clock.now_s()):
            raise EndedError(f"lease {lease_id} is unknown or has ended: it can't be renewed, lease the prefix again")
        # Others may hold it too: nobody can shorten it for them.
        deadline_s = max(lease.deadline_s, self.clock.now_s() + ttl_s)
        self.leases.renew(lease, deadline_s)
        return deadline_s - self.clock.now_s()

    def release(self, session_id: int, lease_id: int) -> bool:
        """The session stopped reading. Idempotent: False if it held no such lease."""
        lease = self.leases.get(lease_id)
        if lease is None or session_id not in lease.holders:
            return False
        if self.leases.drop_holder(lease, session_id):
            self.index.unpin(lease.ids)
        return True

    # Writing -------------------------------------------------------------------------------------

    def begin_reserve(
        self, session_id: int, prompt: Prompt, first_block: int, n_blocks: int, ttl_s: float = 0.0
    ) -> Reservation:
        """First of three steps: match, pin the ancestors, say what is missing. Reserves no slot yet.

        Follow with ``make_room`` until it returns None, then ``finish_reserve``.
        """
        ttl_s = self.limits.ttl_s(ttl_s)
        path = prompt.path
        if first_block < 0 or n_blocks < 1 or first_block + n_blocks > path.n_rows:
            raise BadInputError(
                f"blocks {first_block}..{first_block + n_blocks - 1} were asked for; "
                f"the prompt has {path.n_rows} blocks"
            )
        self._check_room_for_claim(session_id, self.reservations)
        found = self.index.match(prompt.root_key, path)
        prefix = found.ids
        n_rows = len(prefix)
        if n_rows == path.n_full_rows and 0 < found.partial_tokens == path.tail_tokens:
            n_rows += 1  # a block that is there starts with the short last row: storing that would add nothing
        n_present = min(max(n_rows - first_block, 0), n_blocks)
        n_missing = n_blocks - n_present
        reason = ""
        if n_rows < first_block:
            reason = f"the blocks before are not stored: {len(prefix)} of {first_block} are"
            n_missing = 0
            self.counters.add("skipped_blocks", n_blocks)
        slot_bytes = self.dram.slot_bytes(prompt.namespace.block_bytes)
        fitting = self.dram.capacity_bytes // slot_bytes
        if n_missing > fitting:
            # Nobody's blocks go for what can't be stored anyway.
            reason = f"the DRAM tier has room for {fitting} blocks of this size at most"
            self.counters.add("skipped_blocks", n_missing - fitting)
            n_missing = fitting
        self.index.pin(prefix)
        reservation = Reservation(
            next(self._ids), prompt.namespace.namespace.tenant, self.clock.now_s() + ttl_s, {session_id: True},
            writer=session_id, root_key=prompt.root_key, path=path,
            slot_bytes=slot_bytes, block_bytes=prompt.namespace.block_bytes,
            first_block=first_block, n_present=n_present, n_wanted=n_missing, prefix_ids=prefix, skipped_reason=reason,
            time_s=prompt.time_s, category=prompt.category,
        )  # fmt: skip
        self.reservations.add(reservation)
        return reservation

    def make_room(self, reservation: Reservation) -> PendingReclaim | None:
        """Evict until the reservation's blocks fit; a reclaim to be copied and finished, or None when done."""
        if reservation.n_wanted == 0 or reservation.ended:
            return None
        try:
            return self._room.make(reservation)
        except BaseException:
            self._drop_reservation(reservation, reservation.writer)
            raise

    def room_is_coming(self, reservation: Reservation) -> bool:
        """Whether the room it lacks is there as soon as clients have unmapped what was retired for it."""
        return self.reservations.get(reservation.id) is reservation and self._room.is_coming(reservation)

    def finish_reclaim(self, pending: PendingReclaim) -> None:
        """After ``pending.copy()``: the moved blocks lie in their new slots, the old region is retired."""
        self._room.finish(pending)

    def cancel_reclaim(self, pending: PendingReclaim) -> None:
        """Instead of copying: everything stays where it is."""
        self._room.cancel(pending)

    def finish_reserve(self, reservation: Reservation) -> Reservation:
        """Hand out the slots there are; fewer than wanted is not an error, the rest is skipped and counted."""
        if self.reservations.get(reservation.id) is not reservation:
            return reservation  # its session went away while blocks were moved
        if reservation.n_wanted and not reservation.ended:
            reservation.slots = self.dram.allocate(
                reservation.writer, reservation.tenant, reservation.slot_bytes, reservation.n_wanted
            )
        skipped = reservation.n_wanted - len(reservation.slots)
        if skipped and not reservation.skipped_reason:
            reservation.skipped_reason = (
                "the reservation ended while room was made"
                if reservation.ended
                else "the DRAM tier is full of blocks in use"
            )
        if skipped:
            self.counters.add("skipped_blocks", skipped)
        if not len(reservation.slots):
            self._drop_reservation(reservation, reservation.writer)
        return reservation

    def commit(self, session_id: int, reservation_id: int, n_blocks: int = 0) -> Commit:
        """Make the first ``n_blocks`` filled slots (0: all) visible and free the others.

        Raises EndedError if the right has ended; then nothing became visible and the slots are free again,
        as the caller has just said that it does not write any more.
        """
        reservation = self.reservations.get(reservation_id)
        if reservation is None or session_id not in reservation.holders:
            raise EndedError(f"reservation {reservation_id} is unknown or has ended: reserve and write again")
        if not reservation.right_of(session_id, self.clock.now_s()):
            self._drop_reservation(reservation, session_id)
            raise EndedError(f"reservation {reservation_id} ended before the commit: nothing was stored, write again")
        if not 0 <= n_blocks <= len(reservation.slots):
            raise BadInputError(
                f"commit of {n_blocks} blocks; the reservation {reservation_id} has {len(reservation.slots)}"
            )
        n_blocks = n_blocks or len(reservation.slots)
        slots = reservation.slots[:n_blocks]
        first_row = reservation.first_block + reservation.n_present
        try:
            self._seal_regions_of(slots)
            inserted = self.index.insert(
                reservation.root_key, reservation.path, first_row, slots, reservation.block_bytes,
                reservation.time_s, reservation.category,
            )  # fmt: skip
        except EndedError:
            self._drop_reservation(reservation, session_id)
            raise
        except MissingParent as error:
            self._drop_reservation(reservation, session_id)
            raise EndedError(
                f"reservation {reservation_id} lost its parent block ({error}): nothing was stored"
            ) from error
        fresh = slots[inserted.is_new]
        self.dram.commit(fresh, inserted.ids[inserted.is_new].astype(np.int64))
        whole_path = np.concatenate([reservation.prefix_ids, inserted.ids])
        self.index.touch(whole_path, reservation.time_s, reservation.category)
        reservation.slots = np.concatenate([slots[~inserted.is_new], reservation.slots[n_blocks:]])
        self._drop_reservation(reservation, session_id)
        n_duplicate = int(len(slots) - len(fresh))
        self.counters.add("committed_blocks", len(fresh))
        self.counters.add("committed_bytes", len(fresh) * reservation.block_bytes)
        self.counters.add("duplicate_blocks", n_duplicate)
        return Commit(len(fresh), n_duplicate)

    def _seal_regions_of(self, slots: NDArray[np.int64]) -> None:
        """Readers may come from now on. Raises EndedError if a writer has kept the kernel from sealing."""
        for region_id in np.unique(slots >> SLOT_BITS).tolist():
            try:
                self.dram.seal(region_id)
            except OSError as error:
                raise EndedError(
                    f"region {region_id} can't be sealed ({error.strerror}): nothing was stored"
                ) from error

    def abort(self, session_id: int, reservation_id: int) -> bool:
        """The session stopped writing; nothing becomes visible. Idempotent."""
        reservation = self.reservations.get(reservation_id)
        if reservation is None or session_id not in reservation.holders:
            return False
        self._drop_reservation(reservation, session_id)
        return True

    # Pins ----------------------------------------------------------------------------------------

    def pin(self, session_id: int, prompt: Prompt, ttl_s: float = 0.0) -> Pin:
        """Keep the stored prefix of a prompt from being evicted; id 0 if nothing is stored."""
        ttl_s = self.limits.ttl_s(ttl_s)
        ids = self.index.match(prompt.root_key, prompt.path).ids
        if not len(ids):
            return Pin(0, prompt.namespace.namespace.tenant, 0.0, {}, ids)
        self._check_room_for_claim(session_id, self.pins)
        self.index.pin(ids)
        pin = Pin(
            next(self._ids),
            prompt.namespace.namespace.tenant,
            self.clock.now_s() + ttl_s,
            {session_id: True},
            ids,
        )
        self.pins.add(pin)
        return pin

    def unpin(self, session_id: int, pin_id: int) -> bool:
        """Let go of a pin. Idempotent."""
        pin = self.pins.get(pin_id)
        if pin is None or session_id not in pin.holders:
            return False
        if self.pins.drop_holder(pin, session_id):
            self.index.unpin(pin.ids)
        return True

    # Ends ----------------------------------------------------------------------------------------

    def expire(self) -> list[Claim]:
        """End what is past its deadline, a bounded number at a time; returns leases and reservations it ended."""
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
        return [*leases, *reservations]

    def end_rights(self, session_id: int) -> None:
        """The session was cut off (disconnect, no heartbeat): its rights end, its holds stay."""
        for lease in self.leases.of_session(session_id):
            lease.holders[session_id] = False
        for reservation in self.reservations.of_session(session_id):
            reservation.holders[session_id] = False
            self._quarantine(reservation)
        for pin in self.pins.of_session(session_id):
            self.unpin(session_id, pin.id)

    def forget_session(self, session_id: int) -> None:
        """The session's process is gone, or it said that it uses nothing any more: its holds end too."""
        for lease in self.leases.of_session(session_id):
            self.release(session_id, lease.id)
        for reservation in self.reservations.of_session(session_id):
            self._drop_reservation(reservation, session_id)
        for pin in self.pins.of_session(session_id):
            self.unpin(session_id, pin.id)
        self.dram.drop_client(session_id)

    # Memory --------------------------------------------------------------------------------------

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

    # Facts ---------------------------------------------------------------------------------------

    def stats(self) -> tuple[dict[str, float], dict[str, str]]:
        """Counters and gauges, and facts in words, flat, by name."""
        numbers, texts = self.counters.snapshot(), {}
        for name, value in self.dram.stats().items():
            if isinstance(value, str):
                texts[f"dram_{name}"] = value
            else:
                numbers[f"dram_{name}"] = float(value)
        numbers["blocks"] = self.index.n_blocks
        numbers["namespaces"] = len(self.namespaces)
        for name, table in (("leases", self.leases), ("reservations", self.reservations)):
            ended = sum(claim.ended for claim in table)
            numbers[name] = len(table) - ended
            numbers[f"{name}_ended_unacknowledged"] = ended
        numbers["pins"] = len(self.pins)
        return numbers, texts

    def check(self) -> None:
        """Verify index and tier, and that they and the claims agree; raises IntegrityError. Slow."""
        self.index.check()
        self.dram.check()
        check_agreement(self.index, self.dram, [*self.leases, *self.pins], self.reservations, self._room.pending)

    # Own -----------------------------------------------------------------------------------------

    def _count_hits(self, path: RowPath, n_blocks: int, n_tokens: int) -> None:
        add = self.counters.add
        add("lookups")
        add("lookup_blocks", path.n_rows)
        add("hit_blocks", n_blocks)
        add("hit_tokens", n_tokens)
        add("lookup_hits", n_tokens > 0)

    def _check_room_for_claim(
        self, session_id: int, table: ClaimTable[Lease] | ClaimTable[Reservation] | ClaimTable[Pin]
    ) -> None:
        if table.count_of(session_id) >= CLAIMS_PER_SESSION_MAX:
            raise BadInputError(
                f"the session holds {CLAIMS_PER_SESSION_MAX} claims of this kind already: "
                f"release what is no longer read"
            )

    def _quarantine(self, reservation: Reservation) -> None:
        if not reservation.quarantined and len(reservation.slots):
            self.dram.quarantine(reservation.slots)
            reservation.quarantined = True

    def _drop_reservation(self, reservation: Reservation, session_id: int) -> None:
        if len(reservation.slots):
            self.dram.free(reservation.slots)
        self.index.unpin(reservation.prefix_ids)
        self.reservations.drop_holder(reservation, session_id)
