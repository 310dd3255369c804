"""Steps of the model: reserve, fill, commit, abort; and writers that were stopped and go on too late."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvstore.errors import EndedError
from tests.store.copies import Event
from tests.store.model import TTLS_S, Held, StoreModel
from tests.store.oracle import WIDTH, Key, keys_of


class WritingSteps(StoreModel):
    """See ``StoreModel``."""

    def reserve(self, dice: random.Random) -> None:
        prompt = self.draw_prompt(dice)
        writers = self.live(prompt[0])
        if not writers:
            return
        keys = keys_of(prompt)
        first = dice.choice([0, 0, 0, dice.randrange(len(keys))])
        n = dice.randint(1, len(keys) - first)
        before = self.store.counters["skipped_blocks"]
        depth = self.depth(prompt)
        reservation = self.store.begin_reserve(dice.choice(writers), self.ask(prompt), first, n, dice.choice(TTLS_S))
        if depth < first:
            assert reservation.skipped_reason
            assert self.store.counters["skipped_blocks"] == before + n
            assert self.store.finish_reserve(reservation).slots.size == 0
            return
        # A short last row needs no block of its own where a stored block starts with it.
        tail_tokens = len(prompt[1]) % WIDTH
        at_tail = depth == len(keys) - 1 and tail_tokens > 0
        known = min(depth - first, n)
        assert reservation.n_present in {
            min(known + (at_tail and matching == tail_tokens), n) for matching in self.partial(prompt)[0]
        }
        assert reservation.n_present + reservation.n_wanted == n
        # Ancestors that are on NVMe may leave meanwhile: a prompt can be longer than DRAM.
        kept = tuple(key for key in keys[:depth] if key not in self.copies.nvme)
        self.go_on(reservation, prompt, kept, may_wait=dice.random() < 0.5)

    def go_on(self, reservation: Any, prompt: Key, kept: tuple[Key, ...], *, may_wait: bool) -> None:
        """Make room; a move may be left half done for other steps to come in between."""
        for _ in range(6):
            stand_in = Held(0, prompt[0], 0.0, {reservation.writer: True}, kept)
            if not reservation.ended:
                self.writes.append(stand_in)  # what evictions must leave alone
            pending = self.store.make_room(reservation)
            self.observe()
            if not reservation.ended:
                self.writes.remove(stand_in)
            if pending is None:
                break
            if may_wait:
                self.moving = (reservation, pending, prompt, kept)
                return
            pending.copy()
            self.store.finish_reclaim(pending)
        self.hand_out(reservation, prompt, kept)

    def hand_out(self, reservation: Any, prompt: Key, kept: tuple[Key, ...]) -> None:
        ended = reservation.ended or reservation.writer not in self.sessions
        self.store.finish_reserve(reservation)
        n = len(reservation.slots)
        assert n <= reservation.n_wanted
        if ended:
            assert n == 0
        if n < reservation.n_wanted and not ended:
            assert reservation.skipped_reason
        if not n:
            return
        first = reservation.first_block + reservation.n_present
        keys = keys_of(prompt)
        held = Held(
            reservation.id, prompt[0], reservation.deadline_s, {reservation.writer: True}, kept,
            writes=keys[first : first + n],
        )  # fmt: skip
        self.rig.map_regions(reservation.writer, reservation.slots, writable=True)
        self.snapshot(held, reservation.slots)
        held.content = [self.recorder.fill(key, self.spaces[held.space].block_bytes) for key in held.writes]
        self.write_into(held)
        self.writes.append(held)

    def end_move(self, dice: random.Random) -> None:
        if self.moving is None:
            return
        reservation, pending, prompt, kept = self.moving
        copied = dice.random() < 0.8
        if copied:
            pending.copy()
            self.store.finish_reclaim(pending)
        else:
            self.store.cancel_reclaim(pending)
        self.moving = None
        if copied:
            self.go_on(reservation, prompt, kept, may_wait=dice.random() < 0.5)
        else:
            self.hand_out(reservation, prompt, kept)

    def commit(self, dice: random.Random) -> None:
        if not self.writes:
            return
        held = dice.choice(self.writes)
        (writer,) = held.rights
        n = dice.choice([len(held.slots), dice.randint(1, len(held.slots))])
        self.writes.remove(held)
        # An ancestor that was on NVMe may have been evicted, or its copy have turned out to be bad.
        has_ancestors = self.copies.stored.issuperset(keys_of(held.writes[0])[:-1])
        if held.ended or held.deadline_s <= self.now_s or not has_ancestors:
            with pytest.raises(EndedError):
                self.store.commit(writer, held.id, n)
            return
        fresh = [key for key in held.writes[:n] if key not in self.copies.dram]
        for key, content in zip(held.writes[:n], held.content[:n], strict=True):
            if key in fresh:
                self.recorder.publish(content)
        done = self.store.commit(writer, held.id, 0 if n == len(held.slots) else n)
        assert (done.n_committed, done.n_duplicate) == (len(fresh), n - len(fresh))
        self.observe(Event(committed=frozenset(fresh)))

    def abort(self, dice: random.Random) -> None:
        if not self.writes:
            return
        held = dice.choice(self.writes)
        self.writes.remove(held)
        (writer,) = held.rights
        assert self.store.abort(writer, held.id)
        assert not self.store.abort(writer, held.id)
        with pytest.raises(EndedError):
            self.store.commit(writer, held.id)

    def write_late(self, dice: random.Random) -> None:
        """A writer that was stopped past its deadline goes on writing."""
        if not any(held.ended for held in self.writes):
            return
        held = dice.choice([held for held in self.writes if held.ended])
        held.content = [dice.randbytes(1) * len(content) for content in held.content]
        self.write_into(held)
