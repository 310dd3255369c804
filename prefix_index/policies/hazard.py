"""The default policy: what is worth least goes first, by a hazard model of reuse that is learnt while it runs."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvstore.prefix_index.block_table import DRAM, NO_PARENT, NVME, At
from kvstore.prefix_index.policies.hazard_ages import Floats
from kvstore.prefix_index.policies.hazard_books import Books, Piece, Span, is_short_end, known_spans
from kvstore.prefix_index.policies.hazard_costs import PlaceCosts, log_costs
from kvstore.prefix_index.policies.hazard_features import (
    N_FEATURES,
    STRATUM_OF_USES,
    RequestFacts,
    has_output,
    of_request,
    of_run,
    with_output,
    with_request,
)
from kvstore.prefix_index.policies.hazard_refit import Learner, RefitHere
from kvstore.prefix_index.policies.hazard_requests import Entering, Opened, Recent, priority
from kvstore.prefix_index.policies.hazard_worth import place
from kvstore.prefix_index.policy import EvictionPolicy, Newcomers, Use

_FIRST_FIT, _FIT_SHARE, _FIT_MOST = 64, 10, 512
_EVICTIONS_MIN, _EVICTIONS_SHARE = 16, 64
_OPEN_REQUESTS = 256
_RUNS_AS_THEY_COME = 64
_GHOST_SHARE = 2
_DEMOTED = -1e12
_ROOM_KEPT = 0.999


class HazardPolicy(EvictionPolicy):
    """Ranks by the most uses per second of room that a block may still bring (``hazard_worth``), given its run's age,
    uses, and what is known of the request that used it last; learns that from what becomes of runs, also of those that
    have left the table, for as long as their blocks are remembered.

    Before anything is learnt, while LRU would have found more (``hazard_yardstick``), and while policy time has stood
    still for as many requests as LRU would hold blocks of, so that ages tell nothing, the order is leaf-first LRU.
    ``refit``: how the model is brought up to date; by default at once, in the call that makes it due, so that equal
    calls give equal ranks. Ranks move with time; they come into force every 16 evictions or a 64th of a tier's blocks.

    A request has a handful of runs, so that they are worked on one by one; blocks only in vectors.
    """

    name = "hazard"
    moves = True
    weighs = True
    margin = 1.0
    """Ranks are logarithms of worth: what promises a third of what the first to go does is kept out of a tier below."""

    def __init__(self, refit: Learner | None = None) -> None:
        self._refit = refit if refit is not None else RefitHere()
        self._books = Books()
        self._runs, self._ghosts, self._yardstick = self._books.runs, self._books.ghosts, self._books.yardstick
        self._costs = PlaceCosts()
        self._learnt = False
        self._run_of: NDArray[np.int32] = np.zeros(0, np.int32)
        self._depth: NDArray[np.int32] = np.zeros(0, np.int32)
        self._demoted: Floats = np.zeros(0)
        """Ranks below all others of blocks that are to go first, 0 of others."""
        self._any_demoted = False
        self._open: Recent[int, Opened] = Recent(_OPEN_REQUESTS)
        self._entering: Recent[bytes, Entering] = Recent(_OPEN_REQUESTS)
        self._n_requests = 0
        self._moved_s, self._moved_at = -math.inf, 0
        self._fit_at = _FIRST_FIT
        self._lowest = _DEMOTED
        self._room_is_made = False
        self._held: dict[int, int] = {}
        self._evictions: dict[int, int] = {}

    # Uses ----------------------------------------------------------------------------------------

    def accessed(self, ids: At, use: Use) -> float:
        if use.is_again or not len(ids):
            return math.inf
        self._begin(use)
        if self._yardstick.room_blocks < math.inf:
            self._yardstick.fit(max(self.table.n_blocks, self._yardstick.room_blocks * _ROOM_KEPT))
        ids, runs = self._in_runs(ids.astype(np.intp, copy=False))
        spans = self._spans(ids, runs)
        facts = self._books.facts(use, spans[-1][0], len(ids))
        unbroken, n_lru = self._books.under_lru(spans, unbroken=True)
        self._yardstick.count(len(ids), len(ids), n_lru)
        pieces = self._books.pieces(spans, facts)
        self._books.leave(spans)
        mine = self._books.enter(pieces, self._n_requests, facts, use, unbroken)
        counts = [piece.n for piece in pieces]
        self._open.keep(int(ids[-1]), Opened(self._n_requests, facts, ids, mine, counts, unbroken))
        lowest = self._put(ids, mine, counts, use)
        self._learn()
        return lowest

    def inserted(self, ids: At, use: Use) -> None:
        if not len(ids):
            return
        ids = ids.astype(np.intp, copy=False)
        self._books.see(use)
        self._learn()
        self._fit_columns()
        self._undemote(ids)
        if self._room_is_made and self._yardstick.room_blocks < math.inf:
            self._see_room(self.table.n_blocks)
        parents = self.table.parent[ids]
        if len(ids) > 1 and not (parents[1:] == ids[:-1]).all():
            self._insert_unknown(ids, use)
            return
        above = int(parents[0])
        depth = self._depth_below(above)
        self._depth[ids] = np.arange(depth, depth + len(ids))
        keys = self.table.key[ids]
        entering = self._entering.pop(keys[0].tobytes(), None) if self._entering else None
        if entering is not None:
            if entering.n_left < len(ids):
                self._let_in(entering, 0)
                entering = None
            else:
                runs, counts = self._let_in(entering, len(ids))
        if entering is None or not runs:
            runs, counts = self._arrive(Newcomers(keys, above, use), depth)
        self._put(ids, runs, counts, use)
        if use.hints is not None and use.hints.no_reuse:
            self.demoted(ids)

    def ended(self, ids: At, use: Use) -> None:
        if use.output_tokens <= 0 or not len(ids):
            return
        cells = self._runs.cells
        ids = ids.astype(np.intp, copy=False)
        for run, _, _ in self._spans(ids, self._run_of[ids]):
            if not has_output(cells.features[run]):
                self._books.set_features(run, with_output(cells.features[run], cells.turn[run], use.output_tokens))

    def demoted(self, ids: At) -> None:
        self._fit_columns()
        self._any_demoted = True
        ranks = np.arange(self._lowest, self._lowest - len(ids), -1)
        self._demoted[ids] = ranks
        self.set_ranks(ids, ranks)
        self._lowest -= len(ids)

    # Who is to come ------------------------------------------------------------------------------

    def weigh(self, newcomers: Newcomers) -> Floats:
        use, n = newcomers.use, len(newcomers.keys)
        self._room_is_made = True
        self._books.see(use)
        self._learn()
        if use.hints is not None and use.hints.no_reuse:
            return np.full(n, self._lowest)
        self._fit_columns()
        opened = self._opened(newcomers.parent)
        number = opened.number if opened is not None else self._n_requests + 1
        depth = self._depth_below(newcomers.parent)
        spans = known_spans(self._ghosts.find(newcomers.keys), n, depth)
        facts = self._books.facts_of_new(use, opened, spans, n)
        pieces = self._books.pieces(spans, facts, is_short=is_short_end(use, depth + n))
        said = priority(use)
        ranks = []
        for piece in pieces:
            young, old = self._books.sums(piece.features, 0, N_FEATURES)
            cell, young, _ = place(piece.stratum, young, old)
            ranks.append(self._books.rank_of_new(cell, young, number, said))
        counts = [piece.n for piece in pieces]
        of_block: Floats = np.repeat(ranks, counts)
        if use.attention_doubling_tokens and not self._books.follows_lru and not self.table.nvme:
            of_block += log_costs(np.arange(depth, depth + n), counts, use)
        return of_block

    def declined(self, newcomers: Newcomers, n_entering: int) -> None:
        keys = newcomers.keys
        self._fit_columns()
        runs, counts = self._arrive(newcomers, self._depth_below(newcomers.parent))
        if n_entering:
            gone = self._entering.keep(keys[0].tobytes(), Entering(runs, counts, n_entering))
            if gone is not None:
                self._let_in(gone, 0)
        of_block = np.repeat(np.array(runs, np.int64), counts)
        self._books.forget(self._ghosts.add(keys[n_entering:], of_block[n_entering:]))
        for tier in self.tiers:
            self._count_evictions(len(keys) - n_entering, tier)

    # Comings and goings --------------------------------------------------------------------------

    def entered(self, ids: At, tier: int) -> None:
        self._held[tier] = self._held.get(tier, 0) + len(ids)

    def left(self, ids: At, tier: int) -> None:
        self._held[tier] = self._held.get(tier, 0) - len(ids)
        self._count_evictions(len(ids), tier)

    def evicted(self, ids: At) -> None:
        if not len(ids):
            return
        ids = ids.astype(np.intp, copy=False)
        self._see_room(self.table.n_blocks - len(ids))
        forgotten = self._ghosts.fit(_GHOST_SHARE * (self.table.n_blocks - len(ids)))
        if len(forgotten):
            self._books.forget(forgotten)
        self._books.forget(self._ghosts.add(self.table.key[ids], self._run_of[ids].astype(np.int64)))

    def rank(self, ids: At, tier: int) -> Floats:
        by_run = self._books.ranks_of_blocks(self._run_of[ids].astype(np.int64))
        return self._ranked(ids, by_run, costs_count=self._costs_count(tier))

    def frozen(self, tier: int) -> Callable[[At], Floats]:
        by_run, costs_count = self._books.ranks_of_all(), self._costs_count(tier)

        def ranks(ids: At) -> Floats:
            return self._ranked(ids, by_run[self._run_of[ids]], costs_count=costs_count)

        return ranks

    def close(self) -> None:
        self._refit.close()

    # Own -----------------------------------------------------------------------------------------

    def _begin(self, use: Use) -> None:
        self._books.see(use)
        self._n_requests += 1
        if self._books.now_s > self._moved_s:
            self._moved_s, self._moved_at = self._books.now_s, self._n_requests

    def _time_stands_still(self) -> bool:
        return self._n_requests - self._moved_at >= max(_FIRST_FIT, len(self._yardstick))

    def _see_room(self, n_blocks: int) -> None:
        """There is room for so many blocks at least; nothing is known of it before the first eviction."""
        room = self._yardstick.room_blocks
        self._yardstick.fit(max(n_blocks, room if room < math.inf else 0))

    def _count_evictions(self, n: int, tier: int) -> None:
        room = self._held.get(tier, 0) if len(self.tiers) > 1 else min(self._yardstick.room_blocks, 1 << 40)
        due = max(_EVICTIONS_MIN, int(room) // _EVICTIONS_SHARE)
        n += self._evictions.get(tier, 0)
        if n >= due:
            self.version += 1
        self._evictions[tier] = n % due

    def _undemote(self, ids: At) -> None:
        if self._any_demoted:
            self._demoted[ids] = 0

    def _in_runs(self, ids: At) -> tuple[At, NDArray[np.int32]]:
        """The same blocks with those of a run together, if several paths are mixed, and their runs."""
        self._undemote(ids)
        runs = self._run_of[ids]
        if len(ids) <= _RUNS_AS_THEY_COME or np.count_nonzero(runs[1:] != runs[:-1]) < _RUNS_AS_THEY_COME:
            return ids, runs
        _, first, which = np.unique(runs, return_index=True, return_inverse=True)
        order = np.argsort(first[which.reshape(-1)], kind="stable")
        return ids[order], runs[order]

    def _spans(self, ids: At, runs: NDArray[np.int32]) -> list[Span]:
        starts = [0, *((runs[1:] != runs[:-1]).nonzero()[0] + 1).tolist()]
        ends = [*starts[1:], len(ids)]
        run_at, id_at, depth_at = runs.item, ids.item, self._depth.item
        return [(run_at(start), end - start, depth_at(id_at(start))) for start, end in zip(starts, ends, strict=True)]

    def _depth_below(self, above: int) -> int:
        return 0 if above == NO_PARENT else int(self._depth[above]) + 1

    def _opened(self, above: int) -> Opened | None:
        """The request that used the block before, if that is still the same block."""
        opened = self._open.get(above)
        if opened is not None and self._runs.cells.request[int(self._run_of[above])] != opened.number:
            return None
        return opened

    def _arrive(self, newcomers: Newcomers, depth: int) -> tuple[list[int], list[int]]:
        """A request has these blocks stored: the runs that they make, and the blocks of each."""
        above, use, n = newcomers.parent, newcomers.use, len(newcomers.keys)
        opened = self._opened(above)
        self._open.pop(above, None)
        if opened is None:
            self._begin(use)
        self._books.see(use)
        number = opened.number if opened is not None else self._n_requests
        spans = known_spans(self._ghosts.take(newcomers.keys), n, depth)
        facts = self._books.facts_of_new(use, opened, spans, n)
        if opened is not None:
            self._tell(opened, facts)
        unbroken = opened.unbroken if opened is not None else above == NO_PARENT
        unbroken, n_lru = self._books.under_lru(spans, unbroken=unbroken)
        self._yardstick.count(n, 0, n_lru)
        pieces = self._books.pieces(spans, facts, is_short=is_short_end(use, depth + n))
        self._books.leave(spans)
        return self._books.enter(pieces, number, facts, use, unbroken), [piece.n for piece in pieces]

    def _let_in(self, entering: Entering, n: int) -> tuple[list[int], list[int]]:
        """The first ``n`` of the blocks that were expected are inserted now; the others are not watched any more."""
        runs, counts = [], []
        for run, count in zip(entering.runs, entering.counts, strict=True):
            comes = min(count, n)
            if comes:
                runs.append(run)
                counts.append(comes)
            never = min(count, entering.n_left) - comes
            if never > 0:
                self._runs.take_away(run, never)
            entering.n_left -= min(count, entering.n_left)
            n -= comes
        return runs, counts

    def _tell(self, opened: Opened, facts: RequestFacts) -> None:
        """What was stored tells more of the request than what was found: the runs of what was found hear of it."""
        cells, values = self._runs.cells, of_request(facts)
        for run in opened.runs:
            if cells.request[run] == opened.number and cells.blocks[run] > 0:
                cells.turn[run] = facts.turn
                self._books.set_features(run, with_request(cells.features[run], values))
        of_block = np.repeat(np.array(opened.runs, np.int32), opened.counts)
        still = self._run_of[opened.ids] == of_block
        ids, ranks = opened.ids[still], np.repeat(self._books.ranks_of_used(opened.runs), opened.counts)[still]
        self._rank_in_tiers(ids, ranks)

    def _insert_unknown(self, ids: At, use: Use) -> None:
        """Blocks of several paths that are there from before, parents first: nothing is known of their uses."""
        self._begin(use)
        parents = self.table.parent[ids]
        starts = np.flatnonzero(np.concatenate(([True], parents[1:] != ids[:-1])))
        counts = np.diff(np.append(starts, len(ids))).tolist()
        facts = RequestFacts(1, -1.0, 0)
        pieces = []
        for start, n in zip(starts.tolist(), counts, strict=True):
            depth = self._depth_below(int(parents[start]))
            self._depth[ids[start : start + n]] = np.arange(depth, depth + n)
            pieces.append(Piece(n, 1, self._books.now_s, STRATUM_OF_USES[1], of_request(facts) | of_run(depth, 1, 0.0)))
        self._put(ids, self._books.enter(pieces, self._n_requests, facts, use, False, counts=False), counts, use)

    def _put(self, ids: At, runs: list[int], counts: list[int], use: Use) -> float:
        """Blocks are of these new runs, and have the ranks of those. Returns at most the lowest."""
        ranks = self._books.ranks_of_used(runs)
        if self._costs.are_known or use.attention_doubling_tokens:
            self._costs.note(ids, self._depth[ids], counts, use, len(self._depth))
        if len(runs) == 1:
            self._run_of[ids] = runs[0]
            self._rank_in_tiers(ids, ranks[0])
        else:
            self._run_of[ids] = np.repeat(np.array(runs, np.int32), counts)
            self._rank_in_tiers(ids, np.repeat(ranks, counts))
        return min(ranks)

    def _rank_in_tiers(self, ids: At, ranks: float | Floats) -> None:
        """Put ranks by runs in force."""
        for tier in self.tiers:
            self.table.ranks(tier)[ids] = ranks + self._costs.of(ids) if self._costs_count(tier) else ranks

    def _ranked(self, ids: At, by_run: Floats, *, costs_count: bool) -> Floats:
        ranks = by_run + self._costs.of(ids) if costs_count else by_run
        if self._any_demoted:
            demoted = self._demoted[ids]
            return np.where(demoted < 0, demoted, ranks)
        return ranks

    def _costs_count(self, tier: int) -> bool:
        """Whether ranks are also by what computing blocks again costs: if the tier is the last one, as what leaves
        another comes back by a load, which costs the same at any place. LRU asks for no cost."""
        return self._costs.are_known and not self._books.follows_lru and tier == (NVME if self.table.nvme else DRAM)

    def _learn(self) -> None:
        """Take a new model if one is ready, have one made if it is due, and follow whoever does better.

        After an access and before an arrival, so that room is made in the same order whenever it is made.
        """
        if self._n_requests >= self._fit_at and self._refit.is_free:
            self._refit.begin(self._books.model, self._books.episodes.with_runs(self._runs, self._books.now_s))
            self._fit_at = self._n_requests + max(_FIRST_FIT, min(_FIT_MOST, self._n_requests // _FIT_SHARE))
        learnt = self._refit.take()
        if learnt is not None:
            self._books.take_model(learnt)
            self._learnt = True
            self.version += 1
        follows = not self._learnt or self._yardstick.loses or self._time_stands_still()
        if follows != self._books.follows_lru:
            self._books.follows_lru = follows
            self.version += 1

    def _fit_columns(self) -> None:
        """Columns by block id as long as the table."""
        n = self.table.capacity_blocks
        if len(self._run_of) < n:
            for name in ("_run_of", "_depth", "_demoted"):
                column = getattr(self, name)
                longer = np.zeros(n, column.dtype)
                longer[: len(column)] = column
                setattr(self, name, longer)
