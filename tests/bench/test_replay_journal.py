"""What must outlive a crash, by hand and against a model of LRU."""

from __future__ import annotations

import json
import random
from collections import OrderedDict

import pytest

from kvstore.bench.replay_journal import Journal, must_be_found


def journal_of(*accesses: tuple[int, float, float], durable: dict[int, int]) -> Journal:
    return Journal(list(accesses), dict(durable))


def test_the_newest_requests_count_until_their_blocks_fill_the_room() -> None:
    paths = [[1, 2, 3], [1, 4, 5], [1, 6, 7]]
    journal = journal_of((0, 0, 1), (1, 2, 3), (2, 4, 5), durable={0: 3, 1: 2, 2: 1})
    # From the start of request 2 on: 1 6 7; of request 1: 1 4 5 6 7; of request 0: seven.
    assert must_be_found(journal, paths, 8) == {2: 1, 1: 2, 0: 3}
    assert must_be_found(journal, paths, 7) == {2: 1, 1: 2}
    assert must_be_found(journal, paths, 5) == {2: 1}
    assert must_be_found(journal, paths, 3) == {}


def test_requests_that_were_not_acknowledged_take_room_and_need_not_be_found() -> None:
    paths = [[1, 2, 3], [4, 5, 6]]
    journal = journal_of((0, 0, 1), (1, 2, 3), durable={0: 3})
    assert must_be_found(journal, paths, 7) == {0: 3}
    assert must_be_found(journal, paths, 6) == {}


def test_what_ran_at_the_same_time_counts_as_later() -> None:
    paths = [[1], [2], [3]]
    # Request 1 began before request 0 and ended after its start: its block may be the newer one.
    journal = journal_of((0, 5, 6), (1, 0, 5.5), (2, 0, 4), durable={0: 1})
    assert must_be_found(journal, paths, 3) == {0: 1}
    assert must_be_found(journal, paths, 2) == {}


def test_clients_are_merged_by_the_numbers_of_the_whole() -> None:
    first = journal_of((0, 0, 1), (1, 4, 5), durable={1: 2})
    second = journal_of((0, 2, 3), durable={0: 7})
    whole = Journal.merged([(first, range(0, 3, 2)), (second, range(1, 3, 2))])
    assert sorted(whole.accesses) == [(0, 0, 1), (1, 2, 3), (2, 4, 5)]
    assert whole.durable == {2: 2, 1: 7}


def test_a_journal_survives_json() -> None:
    journal = journal_of((3, 0.25, 1.5), durable={3: 9})
    assert Journal.from_plain(json.loads(json.dumps(journal.to_plain()))) == journal


@pytest.mark.parametrize("seed", range(20))
def test_an_lru_of_that_size_keeps_all_that_must_be_found(seed: int) -> None:
    """A model: every request accesses its blocks at one moment between its start and its end."""
    rng = random.Random(seed)
    capacity = rng.randint(30, 70)
    parents = [-1] + [rng.randrange(at) for at in range(1, 120)]
    paths = []
    for _ in range(80):
        path, block = [], rng.randrange(120)
        while block >= 0:
            path.append(block)
            block = parents[block]
        paths.append(path[::-1])
    moments = sorted((rng.random() * 100, request) for request in range(80))
    cache: OrderedDict[int, None] = OrderedDict()
    for _, request in moments:
        for block in reversed(paths[request]):
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > capacity:
            cache.popitem(last=False)
    accesses = [(request, at - rng.random(), at + rng.random()) for at, request in moments]
    durable = {request: len(paths[request]) for request in rng.sample(range(80), 60)}
    must = must_be_found(Journal(accesses, durable), paths, capacity)
    assert must
    for request, n_blocks in must.items():
        assert all(block in cache for block in paths[request][:n_blocks])
    assert len(must_be_found(Journal(accesses, durable), paths, 10**9)) == len(durable)
