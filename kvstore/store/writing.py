"""The writing side of a store: reserve, commit, abort."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import BadInputError, EndedError
from kvstore.lease import Reservation, Unstored
from kvstore.prefix_index.block_table import DRAM, NO_PARENT, NVME, Ids
from kvstore.prefix_index.history import Left
from kvstore.prefix_index.index import Inserted, MissingParent
from kvstore.prefix_index.policy import Newcomers
from kvstore.prefix_index.rivals import Rivals
from kvstore.room import PendingReclaim
from kvstore.store.hybrid import Hybrids
from kvstore.store.requests import Commit, Prompt
from kvstore.store.unstored import note_unstored
from kvstore.types import SLOT_BITS


class Writing(Hybrids):
    """See ``Store``."""

    def begin_reserve(
        self,
        session_id: int,
        prompt: Prompt,
        first_block: int,
        n_blocks: int,
        ttl_s: float = 0.0,
        writer: int | None = None,
    ) -> Reservation:
        """First of three steps: match, pin the ancestors, say what is missing. Reserves no slot yet.

        ``writer`` is who fills the slots, if not the session itself. Follow with ``make_room`` until it returns
        None, then ``finish_reserve``.
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
        stored = prompt.namespace.stored[prompt.part]
        if prompt.namespace.parts:
            self._check_rows(prompt, first_block + n_blocks)
        if prompt.part:
            prefix, n_present = self._part_place(prompt, first_block, n_blocks)
            n_rows = len(prefix)
        n_missing, reason = self._without_generated(prompt, first_block + n_present, n_blocks - n_present)
        first_row = first_block + n_present
        unstored = [Unstored(first_row + n_missing, first_block + n_blocks, Left.GENERATED)] if reason else []
        end_row = path.n_rows if prompt.part and prompt.ahead else n_rows
        if prompt.part and end_row >= first_block and n_missing > (left := end_row - first_block - n_present):
            reason = f"the blocks that these are parts of are stored up to {n_rows}: store part 0 first"
            self.counters.add("skipped_blocks", n_missing - left)
            n_missing, unstored = left, []
        if end_row < first_block:
            reason = f"the blocks before are not stored: {len(prefix)} of {first_block} are"
            n_missing, unstored = 0, []
            self.counters.add("skipped_blocks", n_blocks)
        slot_bytes = self.dram.slot_bytes(stored.block_bytes)
        fitting = self.dram.capacity_bytes // slot_bytes
        if n_missing > fitting:
            # Nobody's blocks go for what can't be stored anyway.
            reason = f"the DRAM tier has room for {fitting} blocks of this size at most"
            too = Left.TOO_LONG if fitting else Left.TOO_LARGE
            unstored.append(Unstored(first_row + fitting, first_row + n_missing, too))
            self.counters.add("skipped_blocks", n_missing - fitting)
            n_missing = fitting
        # An ancestor that is on NVMe may leave DRAM meanwhile: a prompt can be longer than DRAM.
        held = prefix if self.hierarchy is None else prefix[~self.index.resident(prefix, NVME)]
        self.index.pin(held)
        reservation = Reservation(
            next(self._ids), prompt.namespace.namespace.tenant, self.clock.now_s() + ttl_s, {session_id: True},
            writer=session_id if writer is None else writer, namespace=stored.ordinal,
            root_key=prompt.root_key, path=path,
            slot_bytes=slot_bytes, block_bytes=stored.block_bytes,
            first_block=first_block, n_present=n_present, n_wanted=n_missing, prefix_ids=held, skipped_reason=reason,
            use=prompt.use(stored.ordinal), part=prompt.part, root=prompt.root, unstored=unstored,
        )  # fmt: skip
        if self.index.policy.weighs and self.hierarchy is None and not prompt.part:
            reservation.rivals = partial(self._rivals, reservation)
        self.reservations.add(reservation)
        # What is there is stored again, although it is not written again and whatever becomes of the rest. A part that
        # is missing counts too: the block that it is of is there, and no commit of parts notes anything of blocks.
        n_again = n_present + (n_missing if prompt.part else 0)
        if n_again:
            there = prefix if n_rows == len(prefix) else np.append(prefix, found.partial_id)
            self._note_stored(reservation, there[: first_block + n_again])
        return reservation

    def _without_generated(self, prompt: Prompt, first_row: int, n_missing: int) -> tuple[int, str]:
        """How many of ``n_missing`` blocks from ``first_row`` on may be stored, and why not all."""
        if prompt.n_prompt_tokens is None or not (prompt.prompt_only or self.skips_generated):
            return n_missing, ""
        n_kept = min(n_missing, max(prompt.n_prompt_rows - first_row, 0))
        if n_kept == n_missing:
            return n_missing, ""
        self.counters.add("skipped_generated_blocks", n_missing - n_kept)
        why = "the daemon stores none of those" if self.skips_generated else "the namespace was opened for prompts only"
        return n_kept, f"{n_missing - n_kept} blocks hold generated tokens, and {why}"

    def make_room(self, reservation: Reservation) -> PendingReclaim | None:
        """Evict until the reservation's blocks fit; a reclaim to be copied and finished, or None when done."""
        if reservation.n_wanted == 0 or reservation.ended:
            return None
        try:
            return self._room.make(reservation)
        except BaseException:
            self._drop_reservation(reservation, reservation.owner)
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
            reservation.slots = self._room.allocate(reservation)
            self._hold(reservation, len(reservation.slots))
        reservation.rivals = None
        if reservation.n_declined and not reservation.skipped_reason:
            reservation.skipped_reason = "they would be the first to go: what is stored is worth more"
        skipped = reservation.n_wanted - len(reservation.slots)
        if skipped:
            why, words = Left.UNCOMMITTED, "the reservation ended while room was made"
            if not reservation.ended:
                why, words = self._room.why_short(reservation, skipped)
            reservation.skipped_reason = reservation.skipped_reason or words
            self.counters.add("skipped_blocks", skipped)
            first_row = reservation.first_block + reservation.n_present
            end_row = first_row + reservation.n_wanted
            reservation.unstored.append(Unstored(first_row + len(reservation.slots), end_row, why))
        if not len(reservation.slots):
            note_unstored(self.index, reservation, reservation.unstored)
            self._drop_reservation(reservation, reservation.owner)
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
            self._note_uncommitted(reservation)
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
            inserted = self._insert(reservation, first_row, slots)
        except EndedError:
            self._drop_reservation(reservation, session_id)
            raise
        except MissingParent as error:
            self._drop_reservation(reservation, session_id)
            raise EndedError(
                f"reservation {reservation_id} lost its parent block ({error}): nothing was stored"
            ) from error
        except Exception:
            self._keep_what_is_found(reservation)
            self._drop_reservation(reservation, session_id)
            raise
        fresh = slots[inserted.is_new]
        self.dram.commit(fresh, inserted.ids[inserted.is_new].astype(np.int64))
        # Before anything else can fail: what is shown now is not the reservation's to free.
        reservation.slots = np.concatenate([slots[~inserted.is_new], reservation.slots[n_blocks:]])
        if reservation.part:
            whole_path = inserted.ids[~self.index.parts.is_spare(inserted.ids)]
        else:
            whole_path = self._path_to(reservation, inserted.ids)
            # No access more: the insertion counts for new blocks, the lookup before it for the others.
            self.index.touch(whole_path, replace(reservation.use, is_again=True))
            if reservation.use.output_tokens:
                self.index.ended(whole_path, reservation.use)
            self.kinship.stored(
                reservation.namespace, reservation.root, reservation.path, first_row, inserted.ids, inserted.is_new
            )
            self._note_stored(reservation, whole_path, inserted)
        note_unstored(self.index, reservation, reservation.unstored)
        self._drop_reservation(reservation, session_id)
        n_duplicate = int(len(slots) - len(fresh))
        self.counters.add("committed_blocks", len(fresh))
        self.counters.add("committed_bytes", len(fresh) * reservation.block_bytes)
        self.counters.add("duplicate_blocks", n_duplicate)
        if self.hierarchy is not None:
            self.hierarchy.offloader.accessed(self.index.admitted(whole_path, reservation.use, NVME))
        return Commit(len(fresh), n_duplicate)

    def _keep_what_is_found(self, reservation: Reservation) -> None:
        """Storing it went wrong half-way: slots that the index shows by now have their bytes, and are not free."""
        ids = self.index.table.in_slots(reservation.slots)
        shown = self.index.table.slot[ids]
        self.dram.commit(shown, ids.astype(np.int64))
        reservation.slots = np.setdiff1d(reservation.slots, shown)

    def _note_stored(self, reservation: Reservation, path: Ids, inserted: Inserted | None = None) -> None:
        """Write down what the request says about the blocks of its prompt, the last of which were just stored."""
        hints = self.index.hints
        if reservation.use.hints is None and not hints.has_ttl:
            return
        is_new = np.zeros(len(path), np.bool_)
        if inserted is not None and len(inserted.ids):
            is_new[len(path) - len(inserted.ids) :] = inserted.is_new
        use = reservation.use
        hints.stored(path, is_new, reservation.root_key, use.hints, self.clock.now_s(), use.now_s)
        if not reservation.part and (inserted is None or not reservation.n_present):  # once a request
            self.counters.add("hinted_requests", reservation.use.hints is not None)

    def _note_uncommitted(self, reservation: Reservation) -> None:
        """Its right has ended before it was committed."""
        first_row = reservation.first_block + reservation.n_present
        end_row = first_row + len(reservation.slots)
        note_unstored(self.index, reservation, [Unstored(first_row, end_row, Left.UNCOMMITTED)])

    def _rivals(self, reservation: Reservation) -> Rivals:
        """What it is to store, as candidates for eviction."""
        above = reservation.prefix_ids
        first_row, n = reservation.first_block + reservation.n_present, reservation.n_wanted
        parent = int(above[-1]) if len(above) else NO_PARENT
        parent_key = self.index.table.key[parent].tobytes() if len(above) else reservation.root_key
        keys = reservation.path.chain(parent_key, first_row, first_row + n)
        return Rivals(self.index.policy, Newcomers(keys, parent, reservation.use))

    def _insert(self, reservation: Reservation, first_row: int, slots: NDArray[np.int64]) -> Inserted:
        if reservation.part:
            return self._insert_parts(reservation, first_row, slots)
        return self.index.insert(
            reservation.root_key, reservation.path, first_row, slots, reservation.block_bytes, reservation.use
        )

    def _path_to(self, reservation: Reservation, ids: Ids) -> Ids:
        """Blocks of a prompt up to ``ids``, which were just stored."""
        if self.hierarchy is None:
            return np.concatenate([reservation.prefix_ids, ids])
        found = self.index.match(reservation.root_key, reservation.path).ids
        return np.concatenate([found[: reservation.first_block + reservation.n_present], ids])

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

    def _quarantine(self, reservation: Reservation) -> None:
        if not reservation.quarantined and len(reservation.slots):
            self._note_uncommitted(reservation)
            self.dram.quarantine(reservation.slots)
            reservation.quarantined = True

    def _hold(self, reservation: Reservation, n_slots: int) -> None:
        """So many slots are its tenant's, in place of those before."""
        tenants = self.index.tenants
        n_bytes = (n_slots - reservation.n_held) * reservation.slot_bytes
        tenants.hold(tenants.number(reservation.tenant), DRAM, n_bytes)
        reservation.n_held = n_slots

    def _drop_reservation(self, reservation: Reservation, session_id: int) -> None:
        self._hold(reservation, 0)
        if len(reservation.slots):
            self.dram.free(reservation.slots)
        self.index.unpin(reservation.prefix_ids)
        self.reservations.drop_holder(reservation, session_id)
