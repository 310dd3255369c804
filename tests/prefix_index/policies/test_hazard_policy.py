"""The default policy in an index: its books against plain ones, block by block, and what it finds against LRU."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from kvstore.bench.generate import ConversationOptions, generate_trace
from kvstore.bench.simulate import HitCounts, simulate
from kvstore.bench.trace import Trace, TraceRequest
from kvstore.hints import Hints
from kvstore.prefix_index import evictor as evictor_module
from kvstore.prefix_index.index import PrefixIndex
from kvstore.prefix_index.policies.hazard import HazardPolicy
from kvstore.prefix_index.policies.hazard_refit import RefitInChild
from kvstore.prefix_index.policy import Use
from kvstore.prefix_index.rows import RowPath

ROOT = b"r" * 16
LOSS_MOST = 0.002
Request = tuple[float, list[int]]


def trace_of(requests: list[Request], name: str = "made") -> Trace:
    """Of times and rows; equal leading rows are the same blocks."""
    known: dict[tuple[int, ...], int] = {}
    ids: list[int] = []
    offsets = [0]
    plain = []
    for time_s, rows in requests:
        ids.extend(known.setdefault(tuple(rows[: n + 1]), len(known)) for n in range(len(rows)))
        offsets.append(len(ids))
        plain.append(TraceRequest(time_s, 512 * len(rows), 100))
    return Trace(name, tuple(plain), np.array(offsets, np.int64), np.array(ids, np.uint64), 512)


def hits(trace: Trace, percent: float, policy: str | HazardPolicy = "hazard") -> HitCounts:
    return simulate(trace, policy, max(1, int(trace.unique_blocks * percent / 100)))


# Books -------------------------------------------------------------------------------------------


def _check_books(policy: HazardPolicy, index: PrefixIndex, used: Counter[bytes]) -> None:
    """Every block is in one run, whose uses are its own; every run has as many blocks as point to it."""
    table, runs = index.table, policy._runs
    alive = table.alive()
    run_of = policy._run_of[alive].astype(np.int64)
    watched = Counter(run_of.tolist())
    ghosts = policy._ghosts
    watched.update((ghosts._runs[ghosts._runs != 0].astype(np.int64) - 1).tolist())
    assert {run: int(runs.blocks[run]) for run in runs.live().tolist()} == dict(watched)
    assert runs.n == len(watched)
    for block, run in zip(alive.tolist(), run_of.tolist(), strict=True):
        uses, known = used[table.key[block].tobytes()], int(runs.uses[run])
        assert known == uses if uses < 12 else known >= 12
    for block in alive.tolist():
        parent = int(table.parent[block])
        assert policy._depth[block] == (0 if parent == 0xFFFFFFFF else policy._depth[parent] + 1)


@pytest.mark.parametrize("seed", range(6))
def test_runs_are_what_plain_books_say(seed: int) -> None:
    dice = random.Random(seed)
    policy = HazardPolicy()
    index = PrefixIndex(policy, reserve_blocks=16)
    used: Counter[bytes] = Counter()
    capacity = dice.randrange(5, 40)
    for number in range(150):
        tokens = [dice.randrange(3) for _ in range(dice.randrange(1, 17))]
        path = RowPath.from_tokens(np.array(tokens, np.uint32), 2)
        use = Use(number * dice.random(), len(tokens), block_tokens=2)
        found = index.match(ROOT, path).ids
        index.touch(found, use)
        slots = np.zeros(path.n_rows - len(found), np.int64)
        stored = index.insert(ROOT, path, len(found), slots, 1, use)
        ids = np.concatenate((found, stored.ids))
        is_used = [*[True] * len(found), *stored.is_new.tolist()]
        used.update(index.table.key[block].tobytes() for block in ids[is_used].tolist())
        if dice.random() < 0.3:
            index.ended(ids, Use(use.now_s, len(tokens), dice.randrange(1, 99), block_tokens=2))
        if dice.random() < 0.2:
            index.demote(ids[-1:])
        index.evict(max(0, index.n_blocks - capacity))
        if number % 10 == 9:
            _check_books(policy, index, used)


@pytest.mark.parametrize("percent", [3.0, 20.0])
def test_the_yardstick_counts_what_lru_finds(percent: float, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = conversations(3)
    found_by_lru: list[int] = []
    policy = HazardPolicy()
    count = policy._yardstick.count

    def note(n_accessed: int, n_found: int, n_lru: int) -> None:
        found_by_lru.append(n_lru)
        count(n_accessed, n_found, n_lru)

    monkeypatch.setattr(policy._yardstick, "count", note)
    own = hits(trace, percent, policy).block_hits
    lru = hits(trace, percent, "lru").block_hits
    assert own != lru, "else nothing is tested"
    assert abs(sum(found_by_lru) - lru) <= 0.002 * trace.block_accesses


# What it finds -----------------------------------------------------------------------------------


def conversations(seed: int, sessions: int = 150, block_tokens: int = 128) -> Trace:
    return generate_trace(
        ConversationOptions(sessions=sessions, seed=seed, block_tokens=block_tokens, sessions_per_s=2.0)
    ).block_view


def loop(seed: int) -> Trace:
    """The same prompts over and over, more than fit."""
    return trace_of([(float(n), [n % 60 + 60 * seed, 1, 2, 3]) for n in range(1200)])


def uniform(seed: int) -> Trace:
    dice = random.Random(seed)
    return trace_of([(float(n), [dice.randrange(200), 1, 2]) for n in range(1200)])


def popular(seed: int) -> Trace:
    """A few prompts often, many seldom, and which they are shifts."""
    dice = random.Random(seed)
    return trace_of([(n / 4, [int(dice.paretovariate(0.8)) + n // 300 * 7, 1, 2, 3]) for n in range(1500)])


def bursts(seed: int) -> Trace:
    """A prompt comes many times within seconds, then never again."""
    dice = random.Random(seed)
    times = [(dice.randrange(400) + dice.expovariate(0.5), name) for name in range(300) for _ in range(4)]
    return trace_of([(time_s, [name, 1, 2, 3, 4]) for time_s, name in sorted(times)])


def agents(seed: int) -> Trace:
    """Growing prompts behind one of three shared heads, a step every few seconds, among prompts used once."""
    dice = random.Random(seed)
    steps: list[Request] = []
    for run in range(60):
        time_s, rows = dice.uniform(0, 600), [dice.randrange(3), 7, 7, 1000 + run]
        for step in range(dice.randrange(3, 14)):
            rows = [*rows, *range(step, step + dice.randrange(1, 4))]
            steps.append((time_s, rows))
            time_s += dice.expovariate(0.2)
    steps += [(dice.uniform(0, 700), [5000 + once, *range(12)]) for once in range(400)]
    return trace_of(sorted(steps))


@pytest.mark.parametrize("make", [conversations, loop, popular, bursts, agents])
@pytest.mark.parametrize("percent", [3.0, 25.0])
def test_never_worse_than_lru(make: Callable[[int], Trace], percent: float) -> None:
    trace = make(1)
    lru, own = hits(trace, percent, "lru"), hits(trace, percent)
    n_lost = lru.block_hits - own.block_hits
    a_prompt = trace.block_accesses / trace.n_requests
    assert n_lost <= max(LOSS_MOST * trace.block_accesses, 2 * a_prompt)


def test_what_nothing_foretells_is_found_as_often_as_by_lru() -> None:
    """By chance either finds more: of so many prompts so many, give or take."""
    traces = [uniform(seed) for seed in range(3)]
    n_prompts = sum(trace.n_requests for trace in traces)
    n_lost = sum(hits(trace, 25.0, "lru").block_hits - hits(trace, 25.0).block_hits for trace in traces) / 3
    deviation = (n_prompts * 0.25 * 0.75) ** 0.5
    assert n_lost <= LOSS_MOST * n_prompts + deviation


def test_it_learns_what_is_used_once() -> None:
    """Forty prompts come in turns, each among as many that come once: LRU has let go of every one when it is back."""
    requests = [(float(n), [n // 2 % 40 if n % 2 else 1000 + n, 1, 2, 3]) for n in range(2000)]
    trace = trace_of(requests)
    assert hits(trace, 5.0, "lru").block_hits == 0
    assert hits(trace, 5.0).block_hit_ratio > 0.1


def test_the_same_trace_gives_the_same_hits() -> None:
    trace = agents(3)
    assert hits(trace, 10.0) == hits(trace, 10.0)


@pytest.mark.parametrize("seed", range(4))
def test_ranks_that_are_asked_for_later_are_those_of_the_look(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a prompt were used together with more or fewer of those behind them, so that tails that go uncover
    blocks of other ages, while time goes on."""

    def evicted(ranked_later_min: int) -> list[bytes]:
        monkeypatch.setattr(evictor_module, "_RANKED_LATER_MIN", ranked_later_min)
        dice, policy = random.Random(seed), HazardPolicy()
        index = PrefixIndex(policy)
        gone: list[bytes] = []
        now_s = 0.0
        for name in range(400):
            now_s += dice.expovariate(0.1)
            _store(index, name, Use(now_s, 32, block_tokens=2), 16)
            path = RowPath.from_tokens(np.repeat(np.array([dice.randrange(name + 1), *range(1, 16)], np.uint32), 2), 2)
            found = index.match(ROOT, path).ids[: dice.randrange(16)]
            index.touch(found, Use(now_s, 32, block_tokens=2))
            while index.n_blocks > 600:
                gone += [key.tobytes() for key in index.evict(dice.randrange(1, 6)).keys]
        assert not policy._books.follows_lru
        return gone

    assert evicted(1 << 30) == evicted(1)


# Hints --------------------------------------------------------------------------------------------


def _store(index: PrefixIndex, name: int, use: Use, rows: int = 4) -> set[bytes]:
    """A prompt of its own is looked up and stored; its keys."""
    path = RowPath.from_tokens(np.repeat(np.array([name, *range(1, rows)], np.uint32), 2), 2)
    found = index.match(ROOT, path).ids
    index.touch(found, use)
    index.insert(ROOT, path, len(found), np.zeros(path.n_rows - len(found), np.int64), 1, use)
    return {key.tobytes() for key in path.keys(ROOT)}


def _held(index: PrefixIndex) -> set[bytes]:
    return {index.table.key[block].tobytes() for block in index.table.alive().tolist()}


@pytest.mark.parametrize("n_before", [10, 400])
def test_what_has_priority_stays_longer(n_before: int) -> None:
    """Before anything is learnt, and after."""
    policy = HazardPolicy()
    index = PrefixIndex(policy, reserve_blocks=16)
    for number in range(n_before):
        _store(index, number % 7 if number % 2 else number, Use(number * 2.0, 8, block_tokens=2))
        index.evict(max(0, index.n_blocks - 80))
    assert policy._books.follows_lru == (n_before < 64)
    now_s = n_before * 2.0 + 1
    low, high, plain = (
        _store(index, 5000 + said, Use(now_s, 8, hints=Hints(priority=said), block_tokens=2)) for said in (-100, 100, 0)
    )
    for number in range(8):
        _store(index, 6000 + number, Use(now_s + 1 + number, 8, block_tokens=2))
    gone_at: dict[bytes, int] = {}
    while index.n_blocks:
        gone_at |= {key.tobytes(): index.n_blocks for key in index.evict(1).keys}
    ends = [max(gone_at[key] for key in keys) for keys in (high, plain, low)]
    assert ends == sorted(ends), "the more blocks were left the earlier"
    assert len(set(ends)) == 3


def test_it_learns_what_kind_of_request_comes_again() -> None:
    def share_found(*, says_kind: bool) -> float:
        index = PrefixIndex(HazardPolicy(), reserve_blocks=16)
        n_found = 0
        for number in range(1500):
            is_chat = number % 4 == 0
            hints = Hints(request_type="chat" if is_chat else "batch") if says_kind else None
            # Each chat comes twice, the second time after 40 others.
            name = (number // 4 - 10 * (number // 4 // 10 % 2)) if is_chat else 10_000 + number
            path = RowPath.from_tokens(np.repeat(np.array([name, 1, 2, 3], np.uint32), 2), 2)
            n_found += len(index.match(ROOT, path).ids)
            _store(index, name, Use(number * 1.0, 8, hints=hints, block_tokens=2))
            index.evict(max(0, index.n_blocks - 60))
        return n_found / (1500 * 4)

    assert share_found(says_kind=True) > share_found(says_kind=False) + 0.05


def stack(seed: int, *, times_s: float) -> Trace:
    """Prompts come again by how long ago they came last, the shorter the likelier."""
    dice = random.Random(seed)
    order: list[int] = []
    requests: list[tuple[float, list[int]]] = []
    for n in range(1200):
        is_new = not order or dice.random() < 0.25
        name = n if is_new else order.pop(min(int(dice.expovariate(1 / 30)), len(order) - 1))
        order.insert(0, name)
        requests.append((n * times_s, [100 * name + at for at in range(12)]))
    return trace_of(requests)


@pytest.mark.parametrize("percent", [10.0, 60.0])
def test_while_time_stands_still_it_is_lru(percent: float) -> None:
    trace = stack(1, times_s=0.0)
    policy = HazardPolicy()
    own, lru = hits(trace, percent, policy).block_hits, hits(trace, percent, "lru").block_hits
    assert policy._learnt
    assert abs(own - lru) <= 0.0005 * trace.block_accesses


# Learning beside -----------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [("sh", "-c", "kill -9 $$"), ("sh", "-c", "cat > /dev/null; echo no")])
def test_without_a_model_it_is_lru(command: tuple[str, ...]) -> None:
    trace = agents(4)
    refit = RefitInChild(60.0, command)
    own = hits(trace, 5.0, HazardPolicy(refit))
    assert refit.wait(60.0)
    assert refit.n_failed > 0
    assert own.block_hits == hits(trace, 5.0, "lru").block_hits


def test_a_model_from_a_child_comes_into_force() -> None:
    policy = HazardPolicy(refit := RefitInChild())
    hits(agents(5), 5.0, policy)
    assert refit.wait(60.0)
    index = PrefixIndex(policy, reserve_blocks=16)
    path = RowPath.from_tokens(np.arange(4, dtype=np.uint32), 2)
    index.insert(ROOT, path, 0, np.zeros(2, np.int64), 1, Use(1e6, 4, block_tokens=2))
    assert refit.n_made > 0
    assert policy._learnt
    assert not policy._books.follows_lru or policy._yardstick.loses
