"""Families against plain dictionaries: random puts per shard, evictions, leases of two sessions and their ends."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from kvstore.lease import Lease
from tests.store.families import KIB, Family
from tests.store.rig import BLOCK_TOKENS, Rig

N_SHARDS = 3
ENGINE, OTHER = 10, 11
Tokens = tuple[int, ...]


class FamilyMachine(RuleBasedStateMachine):
    """``stored``: per shard the tokens up to the end of each block. Tokens are 0 and 1, so that prompts share much."""

    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig(8192 * KIB, 1024 * KIB, 64 * KIB)
        self.family = Family(self.rig, [4 * KIB, 8 * KIB, 4 * KIB])
        self.stored: list[set[Tokens]] = [set() for _ in range(N_SHARDS)]
        self.where: dict[bytes, tuple[int, Tokens]] = {}
        self.held: list[tuple[Lease, Tokens, set[int]]] = []
        """Leases, their prompts, and the sessions that have yet to let go."""

    def teardown(self) -> None:
        for session in (ENGINE, OTHER):
            self.rig.store.forget_session(session)
        assert not self.rig.store.index.table.refs.any()
        self.rig.close()

    # What dictionaries say ------------------------------------------------------------------------

    def expected(self, shard: int, tokens: Tokens) -> int:
        """How many tokens of a prompt a shard has."""
        n, there = 0, self.stored[shard]
        while n + BLOCK_TOKENS <= len(tokens) and tokens[: n + BLOCK_TOKENS] in there:
            n += BLOCK_TOKENS
        inside = [block for block in there if block[:n] == tokens[:n] and n < len(block) <= n + BLOCK_TOKENS]
        return n + max((common(block[n:], tokens[n:]) for block in inside), default=0)

    # Steps ----------------------------------------------------------------------------------------

    @rule(shard=st.integers(0, N_SHARDS - 1), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9).map(tuple))
    def put(self, shard: int, tokens: Tokens) -> None:
        prompt = self.rig.prompt(tokens, self.family.spaces[shard])
        before = self.expected(shard, tokens)
        self.rig.put(shard + 1, prompt)
        ends = [*range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS)]
        if len(tokens) % BLOCK_TOKENS and before < len(tokens):
            ends.append(len(tokens))
        keys = prompt.path.keys(prompt.root_key)
        for i, end in enumerate(ends):
            self.stored[shard].add(tokens[:end])
            self.where[keys[i].tobytes()] = (shard, tokens[:end])

    @rule(n=st.integers(1, 12))
    def evict(self, n: int) -> None:
        index = self.rig.store.index
        leased = np.concatenate([lease.ids for lease, _, _ in self.held] or [np.empty(0, np.int64)])
        evicted = index.evict(n)
        self.rig.dram.free(evicted.slots)
        assert not np.isin(evicted.ids, leased).any()
        for key in evicted.keys:
            shard, block = self.where[key.tobytes()]
            self.stored[shard].remove(block)

    @rule(
        session=st.sampled_from([ENGINE, OTHER]),
        tokens=st.lists(st.integers(0, 1), max_size=9).map(tuple),
        first_block=st.integers(0, 2),
        max_blocks=st.integers(0, 4),
    )
    def lease(self, session: int, tokens: Tokens, first_block: int, max_blocks: int) -> None:
        prompt = self.family.prompt(tokens)
        hit = min(self.expected(shard, tokens) for shard in range(N_SHARDS))
        if max_blocks:
            hit = min(hit, max_blocks * BLOCK_TOKENS)
        reach = self.rig.store.family_match(prompt, max_blocks)
        assert reach.n_blocks * BLOCK_TOKENS + reach.partial_tokens == hit
        lease = self.rig.store.family_lease(session, prompt, first_block, max_blocks)
        assert lease.n_tokens == hit
        assert lease.n_held == max(-(-hit // BLOCK_TOKENS) - first_block, 0)
        assert (lease.id != 0) == (lease.n_held > 0)
        if lease.id:
            assert lease.first_block == first_block
            self.held.append((lease, tokens, {session}))

    @rule(dice=st.randoms(use_true_random=False))
    def attach(self, dice: random.Random) -> None:
        if self.held:
            lease, _, holders = dice.choice(self.held)
            free = {ENGINE, OTHER} - holders
            if free:
                shard = dice.choice(self.family.spaces).digest
                self.rig.store.attach(free.copy().pop(), "default", lease.id, [shard])
                holders |= free

    @rule(dice=st.randoms(use_true_random=False))
    def release(self, dice: random.Random) -> None:
        if self.held:
            entry = dice.choice(self.held)
            session = dice.choice(sorted(entry[2]))
            assert self.rig.store.release(session, entry[0].id)
            entry[2].remove(session)
            if not entry[2]:
                self.held = [other for other in self.held if other is not entry]

    @rule(dice=st.randoms(use_true_random=False))
    def many(self, dice: random.Random) -> None:
        """So that runs get long enough for all of it to meet."""
        for _ in range(12):
            tokens = tuple(dice.choices((0, 1), k=dice.randint(1, 9)))
            steps: list[Any] = [
                lambda tokens=tokens: self.put(dice.randrange(N_SHARDS), tokens),
                lambda tokens=tokens: self.put(dice.randrange(N_SHARDS), tokens),
                lambda: self.evict(dice.randint(1, 6)),
                lambda tokens=tokens: self.lease(ENGINE, tokens, dice.randint(0, 1), dice.choice((0, 0, 3))),
                lambda: self.attach(dice),
                lambda: self.release(dice),
            ]
            dice.choice(steps)()
            self.check_bytes()

    @invariant()
    def check_bytes(self) -> None:
        """Whoever holds a lease sees in every shard what its rank has stored, whatever went on meanwhile."""
        for lease, tokens, _ in self.held:
            prompt = self.family.prompt(tokens)
            n_whole = max(lease.n_blocks - lease.first_block, 0)
            for shard in prompt.shards:
                slots = self.rig.store.index.slots(lease.ids_of(shard.namespace.digest))[:n_whole]
                got = self.rig.bytes_at(slots, shard.namespace.block_bytes)
                assert got == self.rig.expected(shard, lease.n_blocks, lease.first_block)


def common(one: Tokens, other: Tokens) -> int:
    """Equal leading tokens."""
    n = 0
    while n < min(len(one), len(other)) and one[n] == other[n]:
        n += 1
    return n


def test_families_are_what_plain_dictionaries_say() -> None:
    run_state_machine_as_test(
        FamilyMachine,
        settings=settings(
            max_examples=40,
            stateful_step_count=25,
            deadline=None,
            derandomize=True,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )
