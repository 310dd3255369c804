"""The default policy: what is worth least goes first, by a hazard model of reuse that is learnt while it runs."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore.prefix_index.block_table import NO_PARENT, At
from kvstore.prefix_index.policies.hazard_ages import Floats, Ints
from kvstore.prefix_index.policies.hazard_episodes import EpisodeLog
from kvstore.prefix_index.policies.hazard_features import (
    LATER_OUTPUT,
    OFFSETS,
    OUTPUT,
    PARTIAL,
    USES_TOLD_APART,
    RequestFacts,
    features,
    output_value,
    set_request,
    strata,
)
from kvstore.prefix_index.policies.hazard_ghosts import GhostRuns
from kvstore.prefix_index.policies.hazard_refit import Learner, RefitHere
from kvstore.prefix_index.policies.hazard_runs import Runs
from kvstore.prefix_index.policies.hazard_worth import first_model_and_worth
from kvstore.prefix_index.policies.hazard_yardstick import LruYardstick
from kvstore.prefix_index.policy import EvictionPolicy, Use

_FIRST_FIT, _FIT_SHARE, _FIT_MOST = 64, 10, 512
_EVICTIONS_MIN, _EVICTIONS_SHARE = 64, 64
_OPEN_REQUESTS = 256
_RUNS_AS_THEY_COME = 64
_GHOST_SHARE = 2
_DEMOTED = -1e12
_FEW_BLOCKS = 1024


@dataclass(slots=True)
class _Open:
    """A request that has used what was found of its prompt, and may store the rest."""

    number: int
    facts: RequestFacts
    n_found: int
    runs: Ints
    unbroken: bool


class HazardPolicy(EvictionPolicy):
    """Ranks by the most uses per second of room that a block may still bring (``hazard_worth``), given its run's age,
    uses, and what is known of the request that used it last; learns that from what becomes of runs, also of those that
    have left the table, for as long as their blocks are remembered.

    Before anything is learnt, and while LRU would have found more (``hazard_yardstick``), the order is leaf-first LRU.
    ``refit``: how the model is brought up to date; by default at once, in the call that makes it due, so that equal
    calls give equal ranks. Ranks move with time; they come into force every 64 evictions or a 64th of a tier's blocks.
    """

    name = "hazard"
    moves = True

    def __init__(self, refit: Learner | None = None) -> None:
        self._refit = refit if refit is not None else RefitHere()
        self._model, self._worth = first_model_and_worth()
        self._learnt = False
        self._runs = Runs()
        self._episodes = EpisodeLog()
        self._ghosts = GhostRuns()
        self._yardstick = LruYardstick()
        self._run_of: NDArray[np.int32] = np.zeros(0, np.int32)
        self._depth: NDArray[np.int32] = np.zeros(0, np.int32)
        self._is_demoted: NDArray[np.bool_] = np.zeros(0, np.bool_)
        self._open: OrderedDict[int, _Open] = OrderedDict()
        self._now_s = -math.inf
        self._n_requests = 0
        self._fit_at = _FIRST_FIT
        self._lowest = _DEMOTED
        self._follows_lru = True
        self._held: dict[int, int] = {}
        self._evictions: dict[int, int] = {}

    # Uses ----------------------------------------------------------------------------------------

    def accessed(self, ids: At, use: Use) -> float:
        if use.is_again or not len(ids):
            return math.inf
        self._begin(use)
        ids = self._in_runs(ids)
        runs = self._run_of[ids].astype(np.int64)
        starts = _starts(runs)
        n_blocks = np.diff(np.append(starts, len(ids)))
        old = runs[starts]
        facts = self._facts(use, int(old[-1]), len(ids))
        unbroken, n_lru = self._under_lru(old, n_blocks, unbroken=True)
        self._yardstick.count(len(ids), len(ids), n_lru)
        uses, first_s = self._runs.uses[old] + 1, self._runs.first_s[old]
        self._leave(old, n_blocks, hit=True)
        mine = self._enter(ids, starts, n_blocks, uses, first_s, self._n_requests, facts, unbroken)
        self._open[int(ids[-1])] = _Open(self._n_requests, facts, len(ids), mine, unbroken)
        if len(self._open) > _OPEN_REQUESTS:
            self._open.popitem(last=False)
        lowest = self._put(ids)
        self._learn()
        return lowest

    def inserted(self, ids: At, use: Use) -> None:
        if not len(ids):
            return
        self._fit_columns()
        self._is_demoted[ids] = False
        parents = self.table.parent[ids]
        if len(ids) > 1 and not (parents[1:] == ids[:-1]).all():
            self._insert_unknown(ids, use)
            return
        above = int(parents[0])
        opened = self._open.pop(above, None)
        if opened is not None and self._runs.request[self._run_of[above]] != opened.number:
            opened = None  # the id has become another block's
        if opened is None:
            self._begin(use)
        self._now_s = max(self._now_s, use.now_s)
        number = opened.number if opened is not None else self._n_requests
        ghosts = self._ghosts.take(self.table.key[ids])
        depth = 0 if above == NO_PARENT else int(self._depth[above]) + 1
        self._depth[ids] = np.arange(depth, depth + len(ids))
        starts = _starts(ghosts)
        n_blocks = np.diff(np.append(starts, len(ids)))
        old = ghosts[starts]
        is_ghost = old >= 0
        n_known = 0 if is_ghost.all() else int(starts[int((~is_ghost).argmax())])
        n_known = len(ids) if is_ghost.all() else n_known
        facts = self._facts_of_new(use, opened, ghosts, n_known, len(ids))
        unbroken = opened.unbroken if opened is not None else above == NO_PARENT
        unbroken, n_lru = self._under_lru(old, n_blocks, unbroken=unbroken)
        self._yardstick.count(len(ids), 0, n_lru)
        uses = np.where(is_ghost, self._runs.uses[old] + 1, 1) if len(self._runs.uses) else np.ones(len(old), np.int64)
        first_s = (
            np.where(is_ghost, self._runs.first_s[old], use.now_s) if is_ghost.any() else np.full(len(old), use.now_s)
        )
        self._leave(old[is_ghost], n_blocks[is_ghost], hit=True)
        mine = self._enter(ids, starts, n_blocks, uses, first_s, number, facts, unbroken)
        if use.n_tokens and use.block_tokens and use.n_tokens < (depth + len(ids)) * use.block_tokens:
            self._split_partial(ids, mine)
        self._put(ids)
        if use.hints is not None and use.hints.no_reuse:
            self.demoted(ids)
        self._learn()

    def ended(self, ids: At, use: Use) -> None:
        if use.output_tokens <= 0 or not len(ids):
            return
        runs = np.unique(self._run_of[ids].astype(np.int64))
        rows = self._runs.features[runs]
        unknown = rows[:, OUTPUT] == OFFSETS[OUTPUT]
        runs, rows = runs[unknown], rows[unknown]
        if not len(runs):
            return
        value = output_value(use.output_tokens)
        rows[:, OUTPUT] = OFFSETS[OUTPUT] + value
        rows[:, LATER_OUTPUT] = OFFSETS[LATER_OUTPUT] + np.where(self._runs.turn[runs] > 1, value, 0)
        self._set_features(runs, rows)  # in force with the next snapshot

    def demoted(self, ids: At) -> None:
        self._fit_columns()
        self._is_demoted[ids] = True
        self.set_ranks(ids, np.arange(self._lowest, self._lowest - len(ids), -1))
        self._lowest -= len(ids)

    # Comings and goings --------------------------------------------------------------------------

    def entered(self, ids: At, tier: int) -> None:
        self._held[tier] = self._held.get(tier, 0) + len(ids)

    def left(self, ids: At, tier: int) -> None:
        self._held[tier] = self._held.get(tier, 0) - len(ids)
        n = self._evictions[tier] = self._evictions.get(tier, 0) + len(ids)
        if n >= max(_EVICTIONS_MIN, self._held[tier] // _EVICTIONS_SHARE):
            self._evictions[tier] = 0
            self.version += 1

    def evicted(self, ids: At) -> None:
        if not len(ids):
            return
        n_left = self.table.n_blocks - len(ids)
        self._yardstick.room_blocks = n_left
        forgotten = self._ghosts.fit(_GHOST_SHARE * n_left)
        runs = self._run_of[ids].astype(np.int64)
        self._forget(np.concatenate((forgotten, self._ghosts.add(self.table.key[ids], runs))))

    def rank(self, ids: At, tier: int) -> Floats:
        runs = self._run_of[ids].astype(np.int64)
        ranks = self._worth_of(runs)
        demoted = self._is_demoted[ids]
        if demoted.any():
            ranks[demoted] = self.table.ranks(tier)[ids[demoted]]
        return ranks

    # Own -----------------------------------------------------------------------------------------

    def _begin(self, use: Use) -> None:
        self._now_s = max(self._now_s, use.now_s)
        self._n_requests += 1

    def _in_runs(self, ids: At) -> At:
        """The same blocks with those of a run together, if several paths are mixed."""
        runs = self._run_of[ids]
        self._is_demoted[ids] = False
        if np.count_nonzero(runs[1:] != runs[:-1]) < _RUNS_AS_THEY_COME:
            return ids
        _, first, which = np.unique(runs, return_index=True, return_inverse=True)
        return ids[np.argsort(first[which.reshape(-1)], kind="stable")]

    def _facts(self, use: Use, before: int, n_found: int) -> RequestFacts:
        """Of a request that finds blocks the last of which are of the run ``before``."""
        runs = self._runs
        n_blocks = -(-use.n_tokens // use.block_tokens) if use.block_tokens else n_found
        hinted = use.hints.turn if use.hints is not None else 0
        return RequestFacts(
            hinted or int(runs.turn[before]) + 1, max(use.now_s - float(runs.used_s[before]), 0.0),
            max(n_blocks - n_found, 0), use.n_tokens, use.output_tokens,
        )  # fmt: skip

    def _facts_of_new(self, use: Use, opened: _Open | None, ghosts: Ints, n_known: int, n: int) -> RequestFacts:
        """Of the request that stores blocks of which the first ``n_known`` were stored before; where that tells more
        than what was found, it is told to the runs of what was found, too."""
        hinted = use.hints.turn if use.hints is not None else 0
        if n_known:
            before = int(ghosts[n_known - 1])
            facts = self._facts(use, before, 0)
        elif opened is not None:
            facts = opened.facts
        else:
            facts = RequestFacts(hinted or 1, -1.0, 0, use.n_tokens, use.output_tokens)
        facts.n_unseen = n - n_known
        if opened is not None:
            facts.output_tokens = max(facts.output_tokens, opened.facts.output_tokens)
            mine = opened.runs[self._runs.request[opened.runs] == opened.number]
            mine = mine[self._runs.blocks[mine] > 0]
            rows = self._runs.features[mine]
            set_request(rows, facts)
            self._runs.turn[mine] = facts.turn
            self._set_features(mine, rows)
        return facts

    def _under_lru(self, old: Ints, n_blocks: Ints, *, unbroken: bool) -> tuple[bool, int]:
        """Whether LRU would have found all of these runs' blocks, and if all before them how many from the first on."""
        if not unbroken:
            return False, 0
        known = old >= 0
        requests = np.where(known, self._runs.request[old], -2) if len(self._runs.request) else np.full(len(old), -2)
        found = self._yardstick.found(requests, n_blocks)
        short = found < n_blocks
        if not short.any():
            return True, int(found.sum())
        return False, int(found[: int(short.argmax()) + 1].sum())

    def _leave(self, old: Ints, n_blocks: Ints, *, hit: bool) -> None:
        """Blocks of these runs are used, or forgotten; a run may come several times."""
        if not len(old):
            return
        self._episodes.add(self._runs, old, n_blocks, self._now_s, hit=hit)
        self._yardstick.moved(self._runs.request[old], n_blocks)
        if len(old) > 1:
            old, at = np.unique(old, return_inverse=True)
            n_blocks = np.bincount(at.reshape(-1), n_blocks).astype(np.int64)
        self._runs.take_away(old, n_blocks)

    def _forget(self, runs: Ints) -> None:
        if len(runs):
            which, n_blocks = np.unique(runs, return_counts=True)
            self._leave(which, n_blocks, hit=False)

    def _enter(
        self, ids: At, starts: Ints, n_blocks: Ints, uses: Ints, first_s: Floats, request: int, facts: RequestFacts,
        unbroken: bool, *, counts: bool = True,
    ) -> Ints:  # fmt: skip
        """New runs of these blocks; neighbours that have been used equally often are one."""
        alike = np.minimum(uses, USES_TOLD_APART)
        if len(starts) > 1:
            heads = _starts(alike)
            starts, uses, first_s = starts[heads], uses[heads], first_s[heads]
            n_blocks = np.diff(np.append(starts, len(ids)))
        runs, at = self._runs, self._runs.allocate(len(starts))
        now_s = self._now_s
        rows = features(facts, self._depth[ids[starts]].astype(np.int64), uses, np.maximum(now_s - first_s, 0.0))
        runs.request[at], runs.used_s[at], runs.first_s[at] = request, now_s, first_s
        runs.blocks[at], runs.uses[at], runs.turn[at] = n_blocks, uses, facts.turn
        runs.strata[at], runs.counts[at], runs.unbroken[at] = strata(uses), counts, unbroken
        self._set_features(at, rows)
        self._run_of[ids] = np.repeat(at, n_blocks)
        self._yardstick.used(request, len(ids))
        return at

    def _split_partial(self, ids: At, mine: Ints) -> None:
        """The last of these blocks is short: a run of its own."""
        runs, last = self._runs, int(mine[-1])
        if runs.uses[last] > 1:
            return
        at = mine[-1:]
        if runs.blocks[last] > 1:
            at = runs.allocate(1)
            for name in ("request", "used_s", "first_s", "uses", "turn", "counts", "unbroken", "features"):
                column = getattr(runs, name)
                column[at] = column[last]
            runs.blocks[at] = 1
            runs.blocks[last] -= 1
            self._run_of[ids[-1:]] = at
        runs.strata[at] = PARTIAL
        self._set_features(at, runs.features[at])

    def _insert_unknown(self, ids: At, use: Use) -> None:
        """Blocks of several paths that are there from before, parents first: nothing is known of their uses."""
        self._now_s = max(self._now_s, use.now_s)
        parents = self.table.parent[ids]
        starts = np.flatnonzero(np.concatenate(([True], parents[1:] != ids[:-1])))
        ends = np.append(starts[1:], len(ids))
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            above = int(parents[start])
            depth = 0 if above == NO_PARENT else int(self._depth[above]) + 1
            self._depth[ids[start:end]] = np.arange(depth, depth + end - start)
        self._n_requests += 1
        n = np.diff(np.append(starts, len(ids)))
        at = self._runs.allocate(len(starts))
        runs, facts = self._runs, RequestFacts(1, -1.0, 0)
        one = np.ones(len(starts), np.int64)
        rows = features(facts, self._depth[ids[starts]].astype(np.int64), one, np.zeros(len(starts)))
        runs.request[at], runs.used_s[at], runs.first_s[at] = self._n_requests, self._now_s, self._now_s
        runs.blocks[at], runs.uses[at], runs.turn[at] = n, 1, 1
        runs.strata[at], runs.counts[at], runs.unbroken[at] = strata(one), False, False
        self._set_features(at, rows)
        self._run_of[ids] = np.repeat(at, n)
        self._yardstick.used(self._n_requests, len(ids))
        self._put(ids)

    def _set_features(self, at: Ints, rows: Ints) -> None:
        self._runs.features[at] = rows
        self._runs.thetas[:, at] = self._model.thetas(rows)

    def _worth_of(self, runs: Ints) -> Floats:
        if self._follows_lru:
            ranks: Floats = self._runs.request[runs].astype(np.float64)
            return ranks
        if len(runs) <= _FEW_BLOCKS:
            starts = _starts(runs)
            worth = self._runs.worth(runs[starts], self._worth, self._now_s)
            return np.repeat(worth, np.diff(np.append(starts, len(runs))))
        # Each run once; a mark per run costs less than sorting.
        marks = np.zeros(int(runs.max()) + 1, np.bool_)
        marks[runs] = True
        which = np.flatnonzero(marks)
        of_run = np.empty(len(marks))
        of_run[which] = self._runs.worth(which, self._worth, self._now_s)
        return of_run[runs]

    def _put(self, ids: At) -> float:
        """Ranks in force for blocks that are not demoted. Returns the lowest."""
        ranks = self._worth_of(self._run_of[ids].astype(np.int64))
        self.set_ranks(ids, ranks)
        return float(ranks.min())

    def _learn(self) -> None:
        """Take a new model if one is ready, have one made if it is due, and follow whoever does better."""
        if self._n_requests >= self._fit_at and self._refit.is_free:
            self._refit.begin(self._model, self._episodes.with_runs(self._runs, self._now_s))
            self._fit_at = self._n_requests + max(_FIRST_FIT, min(_FIT_MOST, self._n_requests // _FIT_SHARE))
        learnt = self._refit.take()
        if learnt is not None:
            self._model, self._worth = learnt
            self._runs.set_model(self._model)
            self._learnt = True
            self.version += 1
        follows = not self._learnt or self._yardstick.loses
        if follows != self._follows_lru:
            self._follows_lru = follows
            self.version += 1

    def _fit_columns(self) -> None:
        """Columns by block id as long as the table."""
        n = self.table.capacity_blocks
        if len(self._run_of) < n:
            for name in ("_run_of", "_depth", "_is_demoted"):
                column = getattr(self, name)
                longer = np.zeros(n, column.dtype)
                longer[: len(column)] = column
                setattr(self, name, longer)


def _starts(values: Ints) -> Ints:
    """Where a value differs from the one before."""
    starts: Ints = np.flatnonzero(np.concatenate(([True], values[1:] != values[:-1])))
    return starts
