"""Room made before blocks are stored: what is held in the end is what would be, had they been stored first."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvstore.prefix_index.block_table import NO_PARENT
from kvstore.prefix_index.index import PrefixIndex
from kvstore.prefix_index.policies.hazard import HazardPolicy
from kvstore.prefix_index.policies.hazard_refit import RefitHere
from kvstore.prefix_index.policy import EvictionPolicy, Newcomers, Use
from kvstore.prefix_index.rivals import Rivals
from kvstore.prefix_index.rows import RowPath

ROOT = b"r" * 16
BLOCK_TOKENS = 2


class NeverLearns(RefitHere):
    is_free = False


class Cache:
    """An index with room for ``capacity`` blocks, that makes room before or after it stores."""

    def __init__(self, policy: EvictionPolicy, capacity: int, *, before: bool) -> None:
        self.policy = policy
        self.index = PrefixIndex(policy, reserve_blocks=16)
        self.n_declined = 0
        self._capacity = capacity
        self._before = before

    def request(self, path: RowPath, use: Use) -> int:
        """Blocks found; stores the rest as far as the policy wants."""
        index = self.index
        found = index.match(ROOT, path).ids
        index.touch(found, use)
        n_new = min(path.n_rows - len(found), self._capacity)
        if self._before and n_new:
            index.pin(found)
            short = index.n_blocks + n_new - self._capacity
            if short > 0:
                rivals = self._rivals(path, found, n_new, use)
                index.evict(short, rivals=rivals)
                rivals.conclude()
                n_new = min(n_new - rivals.n_declined, self._capacity - index.n_blocks)
                self.n_declined += rivals.n_declined
            index.unpin(found)
        index.insert(ROOT, path, len(found), np.zeros(n_new, np.int64), 1, use)
        if not self._before:
            index.evict(max(0, index.n_blocks - self._capacity))
        assert index.n_blocks <= self._capacity
        return len(found)

    def held(self) -> set[bytes]:
        table = self.index.table
        return {table.key[block].tobytes() for block in table.alive().tolist()}

    def _rivals(self, path: RowPath, found: np.ndarray, n: int, use: Use) -> Rivals:
        parent = int(found[-1]) if len(found) else NO_PARENT
        above = self.index.table.key[parent].tobytes() if len(found) else ROOT
        return Rivals(self.policy, Newcomers(path.chain(above, len(found), len(found) + n), parent, use))


def requests(seed: int, n: int, n_sessions: int = 12) -> list[tuple[RowPath, Use]]:
    """Prompts that come back and grow, among as many that come once."""
    dice = random.Random(seed)
    sessions = [[dice.randrange(50) for _ in range(dice.randrange(2, 9))] for _ in range(n_sessions)]
    out = []
    for number in range(n):
        if dice.random() < 0.5:
            rows = dice.choice(sessions)
            rows.extend(dice.randrange(50) for _ in range(dice.randrange(3) if len(rows) < 40 else 0))
        else:
            rows = [1000 + number, *(dice.randrange(50) for _ in range(dice.randrange(8)))]
        path = RowPath.from_tokens(np.repeat(np.array(rows, np.uint32), BLOCK_TOKENS), BLOCK_TOKENS)
        n_tokens = len(rows) * BLOCK_TOKENS - dice.randrange(2)  # as of engine hashes, of which the last may be short
        out.append((path, Use(number * 3.0, n_tokens, block_tokens=BLOCK_TOKENS)))
    return out


@pytest.mark.parametrize("capacity", [200, 400])
def test_room_made_before_is_as_room_made_after(capacity: int) -> None:
    before = Cache(HazardPolicy(), capacity, before=True)
    after = Cache(HazardPolicy(), capacity, before=False)
    n_before = n_after = n_accesses = n_same = 0
    trace = requests(5, 2500, n_sessions=60)
    for path, use in trace:
        n_before += before.request(path, use)
        n_after += after.request(path, use)
        n_accesses += path.n_rows
        n_same += before.held() == after.held()
    assert before.n_declined > 20, "else nothing is tested"
    assert abs(n_before - n_after) <= 0.005 * n_accesses
    assert n_same > len(trace) // 10, "as long as nothing has been different once"
    before.index.check()


def test_before_anything_is_learnt_both_hold_the_same() -> None:
    before, after = (Cache(HazardPolicy(NeverLearns()), 40, before=before) for before in (True, False))
    for path, use in requests(3, 400):
        assert before.request(path, use) == after.request(path, use)
        assert before.held() == after.held()
    assert before.n_declined == 0


def test_what_was_to_enter_and_never_came_is_not_watched() -> None:
    """The head of a prompt was let in, and its writer went away."""
    policy = HazardPolicy()
    index = PrefixIndex(policy, reserve_blocks=16)
    path = RowPath.from_tokens(np.arange(8, dtype=np.uint32), BLOCK_TOKENS)
    use = Use(1.0, 8, block_tokens=BLOCK_TOKENS)
    policy.declined(Newcomers(path.chain(ROOT, 0, 4), NO_PARENT, use), 3)
    index.insert(ROOT, path, 0, np.zeros(2, np.int64), 1, use)
    runs = policy._runs
    assert int(runs.blocks[runs.live()].sum()) == 3, "two that are stored, and one that is remembered"
