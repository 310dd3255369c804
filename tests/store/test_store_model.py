"""The store against plain dictionaries that share no code with it.

The model knows which blocks are stored, who holds what and what every byte must be. The one thing that it
takes from the store is which blocks an eviction chose; that those were free to go is checked.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from kvstore.errors import BadInputError, EndedError
from kvstore.store.requests import LeaseLimits

KIB = 1 << 10
WIDTH = 2  # tokens in a block
CAPACITY_BYTES = 144 * KIB
SPACES = [("a", 4 * KIB), ("a", 12 * KIB), ("b", 4 * KIB)]
"""Tenant and block size of each namespace; the index in this list names it."""

Tokens = tuple[int, ...]
Key = tuple[int, Tokens]
"""A block: its namespace and all tokens up to its end."""

DICE = st.integers(0, (1 << 32) - 1).map(random.Random)
TTLS_S = [0.0, 3.0, 900.0]


@cache
def block_of(key: Key) -> bytes:
    """What the block must hold."""
    seed = hashlib.sha256(repr(key).encode()).digest()
    size = SPACES[key[0]][1]
    return (seed * (size // len(seed) + 1))[:size]


@cache
def keys_of(prompt: Key) -> tuple[Key, ...]:
    """The blocks of a prompt, a short last one included."""
    space, tokens = prompt
    ends = range(WIDTH, len(tokens) + WIDTH, WIDTH)
    return tuple((space, tokens[:end]) for end in ends)


def parent_of(key: Key) -> Key | None:
    space, tokens = key
    above = tokens[: (len(tokens) - 1) // WIDTH * WIDTH]
    return (space, above) if above else None


@cache
def common(a: Tokens, b: Tokens) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@dataclass
class Held:
    """A lease, reservation or pin as the model knows it."""

    id: int
    space: int
    deadline_s: float
    rights: dict[int, bool]
    keys: tuple[Key, ...]
    """Leased or pinned blocks; for a reservation the ancestors that must stay."""
    slots: list[int] = field(default_factory=list)
    generations: list[int] = field(default_factory=list)
    content: list[bytes] = field(default_factory=list)
    writes: tuple[Key, ...] = ()
    """For a reservation: the block that each of its slots is for."""

    @property
    def ended(self) -> bool:
        return not any(self.rights.values())


@dataclass
class Session:
    tenant: str
    live: bool = True


class StoreMachine(RuleBasedStateMachine):
    def __init__(self, rig_class: Callable[..., Any]) -> None:
        super().__init__()
        self.rig = rig_class(CAPACITY_BYTES, 24 * KIB, 8 * KIB, LeaseLimits(10.0, 40.0))
        self.store = self.rig.store
        self.namespaces = [self.rig.namespace(size, tenant) for tenant, size in SPACES]
        self.sessions: dict[int, Session] = {}
        self.asked: dict[Key, Any] = {}
        self.stored: set[Key] = set()
        self.leases: list[Held] = []
        self.writes: list[Held] = []
        self.pins: list[Held] = []
        self.moving: tuple[Any, Any, Key, int] | None = None
        self.n_sessions = 0
        self.prompt_clients = True
        """Whether clients unmap retired regions at once, or now and then."""

    def teardown(self) -> None:
        for session in list(self.sessions):
            self.store.forget_session(session)
        self.rig.unmap_retired()
        if self.moving is not None:
            self.store.cancel_reclaim(self.moving[1])
            self.store.finish_reserve(self.moving[0])
        self.store.check()
        facts = self.rig.dram.stats()
        assert facts["reserved_bytes"] == facts["quarantined_bytes"] == facts["retired_mapped_bytes"] == 0
        assert not self.store.index.table.refs.any()
        self.rig.dram.close()

    # What the model does itself ------------------------------------------------------------------

    @property
    def now_s(self) -> float:
        return float(self.rig.clock.now_s())

    def draw_prompt(self, dice: random.Random) -> Key:
        """Few different tokens: prompts share prefixes, part within blocks and end in short rows."""
        return dice.randrange(3), tuple(dice.randrange(2) for _ in range(dice.randrange(1, 14)))

    def live(self, space: int | None = None) -> list[int]:
        return [
            number
            for number, session in self.sessions.items()
            if session.live and (space is None or session.tenant == SPACES[space][0])
        ]

    def ask(self, prompt: Key) -> Any:
        if prompt not in self.asked:
            self.asked[prompt] = self.make(prompt)
        return self.asked[prompt]._replace(time_s=self.now_s)

    def make(self, prompt: Key) -> Any:
        return self.rig.prompt(prompt[1], self.namespaces[prompt[0]])

    def depth(self, prompt: Key) -> int:
        """Whole blocks of the prompt that are stored from its start."""
        depth = 0
        for key in keys_of(prompt):
            if key not in self.stored or len(key[1]) % WIDTH:
                break
            depth += 1
        return depth

    def partial(self, prompt: Key) -> tuple[int, list[bytes]]:
        """Tokens that match in one more block, and the bytes of all blocks that match so far."""
        space, tokens = prompt
        at = self.depth(prompt) * WIDTH
        next_ones = [
            (common(key[1][at:], tokens[at:]), key)
            for key in self.stored
            if key[0] == space and key[1][:at] == tokens[:at] and at < len(key[1]) <= at + WIDTH
        ]
        best = max((n for n, _ in next_ones), default=0)
        return best, [block_of(key) for n, key in next_ones if n == best]

    def protected(self) -> set[Key]:
        kept = {key for held in self.leases + self.writes + self.pins for key in held.keys}
        if self.moving is not None and not self.moving[0].ended:
            kept.update(keys_of(self.moving[2])[: self.moving[3]])
        return kept

    def evicting(self, act: Callable[[], Any]) -> Any:
        """Let the store do what may evict; learn what went."""
        before = self.store.counters["evicted_blocks"]
        result = act()
        table = self.store.index.table
        there = {table.key[block].tobytes() for block in table.alive()}
        gone = {
            key for key in self.stored if (path := self.ask(key)).path.keys(path.root_key)[-1].tobytes() not in there
        }
        assert not gone & self.protected()
        assert len(gone) == self.store.counters["evicted_blocks"] - before
        self.stored -= gone
        return result

    def write_into(self, held: Held) -> None:
        for slot, content in zip(held.slots, held.content, strict=True):
            self.rig.dram.view(slot)[: len(content)] = np.frombuffer(content, np.uint8)

    def snapshot(self, held: Held, slots: Any) -> None:
        size = SPACES[held.space][1]
        held.slots = slots.tolist()
        held.generations = self.rig.dram.locate(slots).generations.tolist()
        held.content = self.rig.bytes_at(slots, size)

    # Sessions ------------------------------------------------------------------------------------

    @initialize(dice=DICE)
    def connect_three(self, dice: random.Random) -> None:
        self.prompt_clients = dice.random() < 0.7
        for tenant in ("a", "a", "b"):
            self.n_sessions += 1
            self.sessions[self.n_sessions] = Session(tenant)

    def connect(self, dice: random.Random) -> None:
        if len(self.sessions) > 4:
            return
        tenant = dice.choice("ab")
        self.n_sessions += 1
        self.sessions[self.n_sessions] = Session(tenant)

    def cut_off(self, dice: random.Random) -> None:
        if not self.live():
            return
        number = dice.choice(self.live())
        self.store.end_rights(number)
        self.sessions[number].live = False
        for held in self.leases + self.writes:
            if number in held.rights:
                held.rights[number] = False
        self.pins = [held for held in self.pins if number not in held.rights]

    def come_back(self, dice: random.Random) -> None:
        if not any(not session.live for session in self.sessions.values()):
            return
        number = dice.choice([n for n, session in self.sessions.items() if not session.live])
        self.sessions[number].live = True

    def process_gone(self, dice: random.Random) -> None:
        if len(self.sessions) < 2:
            return
        number = dice.choice(list(self.sessions))
        self.store.forget_session(number)
        del self.sessions[number]
        for held in self.leases:
            held.rights.pop(number, None)
        self.leases = [held for held in self.leases if held.rights]
        self.writes = [held for held in self.writes if number not in held.rights]
        self.pins = [held for held in self.pins if number not in held.rights]

    def unmap(self, _dice: random.Random) -> None:
        self.rig.unmap_retired()

    # Writing -------------------------------------------------------------------------------------

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
        tail_there = depth == len(keys) - 1 and 0 < self.partial(prompt)[0] == tail_tokens
        known = min(depth - first, n)
        assert reservation.n_present == min(known + tail_there, n)
        assert reservation.n_present + reservation.n_wanted == n
        self.go_on(reservation, prompt, depth, may_wait=dice.random() < 0.5)

    def go_on(self, reservation: Any, prompt: Key, depth: int, *, may_wait: bool) -> None:
        """Make room; a move may be left half done for other steps to come in between."""
        for _ in range(6):
            stand_in = Held(0, prompt[0], 0.0, {reservation.writer: True}, keys_of(prompt)[:depth])
            if not reservation.ended:
                self.writes.append(stand_in)  # what evictions must leave alone
            pending = self.evicting(lambda: self.store.make_room(reservation))
            if not reservation.ended:
                self.writes.remove(stand_in)
            if pending is None:
                break
            if may_wait:
                self.moving = (reservation, pending, prompt, depth)
                return
            pending.copy()
            self.store.finish_reclaim(pending)
        self.hand_out(reservation, prompt, depth)

    def hand_out(self, reservation: Any, prompt: Key, depth: int) -> None:
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
            reservation.id, prompt[0], reservation.deadline_s, {reservation.writer: True}, keys[:depth],
            writes=keys[first : first + n],
        )  # fmt: skip
        self.rig.map_regions(reservation.writer, reservation.slots, writable=True)
        self.snapshot(held, reservation.slots)
        held.content = [block_of(key) for key in held.writes]
        self.write_into(held)
        self.writes.append(held)

    def end_move(self, dice: random.Random) -> None:
        if self.moving is None:
            return
        reservation, pending, prompt, depth = self.moving
        copied = dice.random() < 0.8
        if copied:
            pending.copy()
            self.store.finish_reclaim(pending)
        else:
            self.store.cancel_reclaim(pending)
        self.moving = None
        if copied:
            self.go_on(reservation, prompt, depth, may_wait=dice.random() < 0.5)
        else:
            self.hand_out(reservation, prompt, depth)

    def commit(self, dice: random.Random) -> None:
        if not self.writes:
            return
        held = dice.choice(self.writes)
        (writer,) = held.rights
        n = dice.choice([len(held.slots), dice.randint(1, len(held.slots))])
        self.writes.remove(held)
        if held.ended or held.deadline_s <= self.now_s:
            with pytest.raises(EndedError):
                self.store.commit(writer, held.id, n)
            return
        fresh = [key for key in held.writes[:n] if key not in self.stored]
        done = self.store.commit(writer, held.id, 0 if n == len(held.slots) else n)
        assert (done.n_committed, done.n_duplicate) == (len(fresh), n - len(fresh))
        self.stored.update(fresh)

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

    # Reading -------------------------------------------------------------------------------------

    def lease(self, dice: random.Random) -> None:
        prompt = self.draw_prompt(dice)
        readers = self.live(prompt[0])
        if not readers:
            return
        reader = dice.choice(readers)
        first, most, ttl_s = dice.choice([0, 0, 1, 2]), dice.choice([0, 0, 1, 3]), dice.choice(TTLS_S)
        n_blocks = self.depth(prompt)
        partial, candidates = self.partial(prompt)
        if most and n_blocks >= most:
            n_blocks, partial = most, 0
        lease = self.store.lease(reader, self.ask(prompt), first, most, ttl_s)
        assert (lease.n_blocks, lease.partial_tokens) == (n_blocks, partial)
        assert lease.n_tokens == n_blocks * WIDTH + partial
        keys = keys_of(prompt)[first:n_blocks]
        with_partial = partial > 0 and first <= n_blocks
        assert len(lease.ids) == len(keys) + with_partial
        if not len(lease.ids):
            assert lease.id == 0
            return
        held = Held(lease.id, prompt[0], self.now_s + min(ttl_s or 10.0, 40.0), {reader: True}, keys)
        self.snapshot(held, self.rig.slots_of(lease))
        assert held.content[: len(keys)] == [block_of(key) for key in keys]
        if with_partial:
            assert held.content[-1] in candidates
            (last,) = [key for key in self.stored if block_of(key) == held.content[-1]]
            held.keys = (*keys, last)
        self.rig.map_regions(reader, np.array(held.slots), writable=False)
        self.leases.append(held)

    def attach(self, dice: random.Random) -> None:
        if not self.leases or not self.live():
            return
        held = dice.choice(self.leases)
        number = dice.choice(self.live())
        tenant = self.sessions[number].tenant
        if held.ended or held.deadline_s <= self.now_s or tenant != SPACES[held.space][0]:
            with pytest.raises(EndedError):
                self.store.attach(number, tenant, held.id)
            return
        if held.rights.get(number):
            with pytest.raises(BadInputError):
                self.store.attach(number, tenant, held.id)
            return
        lease = self.store.attach(number, tenant, held.id)
        assert self.rig.slots_of(lease).tolist() == held.slots
        held.rights[number] = True

    def renew(self, dice: random.Random) -> None:
        if not self.leases:
            return
        ttl_s = dice.choice(TTLS_S)
        held = dice.choice(self.leases)
        number = dice.choice(list(self.sessions))
        if not held.rights.get(number) or held.deadline_s <= self.now_s:
            with pytest.raises(EndedError):
                self.store.renew(number, held.id, ttl_s)
            return
        granted_s = min(ttl_s or 10.0, 40.0)
        held.deadline_s = max(held.deadline_s, self.now_s + granted_s)
        assert self.store.renew(number, held.id, ttl_s) == pytest.approx(held.deadline_s - self.now_s)

    def release(self, dice: random.Random) -> None:
        if not self.leases:
            return
        held = dice.choice(self.leases)
        number = dice.choice(list(self.sessions))
        assert self.store.release(number, held.id) == (number in held.rights)
        held.rights.pop(number, None)
        if not held.rights:
            self.leases.remove(held)

    def pin(self, dice: random.Random) -> None:
        prompt, ttl_s = self.draw_prompt(dice), dice.choice(TTLS_S)
        if not self.live(prompt[0]) or len(self.pins) > 1:
            return
        number = dice.choice(self.live(prompt[0]))
        keys = keys_of(prompt)[: self.depth(prompt)]
        pin = self.store.pin(number, self.ask(prompt), ttl_s)
        assert len(pin.ids) == len(keys)
        assert bool(pin.id) == bool(keys)
        if keys:
            self.pins.append(Held(pin.id, prompt[0], self.now_s + min(ttl_s or 10.0, 40.0), {number: True}, keys))

    def unpin(self, dice: random.Random) -> None:
        if not self.pins:
            return
        held = dice.choice(self.pins)
        self.pins.remove(held)
        (number,) = held.rights
        assert self.store.unpin(number, held.id)
        assert not self.store.unpin(number, held.id)

    @rule(dice=DICE)
    def one_step(self, dice: random.Random) -> None:
        weights = {
            self.reserve: 8, self.commit: 8, self.lease: 6, self.release: 5, self.end_move: 4,
            self.come_back: 1, self.connect: 0.5, self.time_passes: 0.7, self.renew: 0.5, self.attach: 0.5,
            self.pin: 0.5, self.unpin: 0.3, self.write_late: 0.3, self.abort: 0.2, self.cut_off: 0.2,
            self.process_gone: 0.2, self.unmap: 1,
        }  # fmt: skip
        dice.choices(list(weights), list(weights.values()))[0](dice)
        if self.prompt_clients:
            self.rig.unmap_retired()

    @rule(dice=DICE)
    def many_steps(self, dice: random.Random) -> None:
        """So that the tier is full, and stays so, in most runs."""
        for _ in range(25):
            self.one_step(dice)
            self.parts_agree()
            self.every_byte_is_accounted_for()
            self.what_is_found_is_what_was_stored()
            self.held_slots_are_untouched()

    # Time ----------------------------------------------------------------------------------------

    def time_passes(self, dice: random.Random) -> None:
        self.rig.clock.advance(dice.choice([0.5, 1.0, 3.0, 10.0]))
        if dice.random() < 0.3:
            return
        due = {held.id for held in self.leases + self.writes if not held.ended and held.deadline_s <= self.now_s}
        ended = {claim.id for claim in self.store.expire() if claim.holders}
        if self.moving is not None:
            ended.discard(self.moving[0].id)
        assert ended == due
        for held in self.leases + self.writes:
            if held.id in due:
                held.rights = dict.fromkeys(held.rights, False)
        self.pins = [held for held in self.pins if held.deadline_s > self.now_s]

    # What must hold after every step -------------------------------------------------------------

    @invariant()
    def parts_agree(self) -> None:
        self.store.check()

    @invariant()
    def every_byte_is_accounted_for(self) -> None:
        facts = self.rig.dram.stats()
        parts = [facts[f"{name}_bytes"] for name in ("used", "reserved", "quarantined", "retired_mapped", "free")]
        assert min(parts) >= 0
        assert sum(parts) <= CAPACITY_BYTES
        assert facts["used_bytes"] == sum(SPACES[space][1] for space, _ in self.stored)
        assert facts["quarantined_bytes"] == sum(
            len(held.slots) * SPACES[held.space][1] for held in self.writes if held.ended
        )
        numbers = self.store.stats()[0]
        assert numbers["leases_ended_unacknowledged"] == sum(held.ended for held in self.leases)
        assert numbers["leases"] == sum(not held.ended for held in self.leases)

    @invariant()
    def what_is_found_is_what_was_stored(self) -> None:
        for key in self.stored:
            assert parent_of(key) is None or parent_of(key) in self.stored
        paths = self.stored | {key for held in self.writes for key in held.writes}
        for key in paths:
            prompt = self.ask(key)
            found = self.store.index.match(prompt.root_key, prompt.path)
            depth = self.depth(key)
            assert len(found.ids) == depth
            assert found.partial_tokens == self.partial(key)[0]
            if key in self.stored and depth * WIDTH == len(key[1]):
                (content,) = self.rig.bytes_at(self.store.index.slots(found.ids[-1:]), SPACES[key[0]][1])
                assert content == block_of(key)

    @invariant()
    def held_slots_are_untouched(self) -> None:
        for held in self.leases + self.writes:
            slots = np.array(held.slots, np.int64)
            assert self.rig.bytes_at(slots, SPACES[held.space][1]) == held.content
            assert self.rig.dram.locate(slots).generations.tolist() == held.generations


def test_the_store_is_what_plain_dictionaries_say(rig_class: Callable[..., Any]) -> None:
    run_state_machine_as_test(
        lambda: StoreMachine(rig_class),  # type: ignore[arg-type]
        settings=settings(
            max_examples=12,
            stateful_step_count=12,
            deadline=None,
            derandomize=True,
            phases=[
                Phase.explicit,
                Phase.generate,
            ],  # a failing run has hundreds of steps: shrinking takes too long
            suppress_health_check=list(HealthCheck),
        ),
    )
