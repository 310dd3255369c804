"""The books of the default policy: which runs there are, what becomes of them, and what they are worth."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np

from kvstore.prefix_index.policies.hazard_ages import Floats, Ints
from kvstore.prefix_index.policies.hazard_episodes import EpisodeLog
from kvstore.prefix_index.policies.hazard_features import (
    N_FEATURES,
    N_OF_REQUEST,
    PARTIAL,
    STRATUM_OF_USES,
    USES_TOLD_APART,
    RequestFacts,
    of_request,
    of_run,
)
from kvstore.prefix_index.policies.hazard_ghosts import GhostRuns
from kvstore.prefix_index.policies.hazard_refit import Learnt
from kvstore.prefix_index.policies.hazard_requests import Kinds, Opened, hinted_turn, priority, reuse_value
from kvstore.prefix_index.policies.hazard_runs import TIE, Runs
from kvstore.prefix_index.policies.hazard_worth import first_model_and_worth, place
from kvstore.prefix_index.policies.hazard_yardstick import LruYardstick
from kvstore.prefix_index.policy import Use

_WORTH_OF_PRIORITY = math.log(2) / 10
UNKNOWN = -1

Span = tuple[int, int, int]
"""A run or UNKNOWN, how many blocks of it, and where in the prompt the first of them is."""


@dataclass(slots=True)
class Piece:
    """What is to be a run."""

    n: int
    uses: int
    first_s: float
    stratum: int
    features: int


class Books:
    """Runs, and all that is known of them. It knows no blocks but by how many there are of a run.

    ``now_s``: policy time. ``follows_lru``: ranks are those of LRU.
    """

    def __init__(self) -> None:
        self.model, self.worth = first_model_and_worth()
        self.betas = self.model.betas.tolist()
        self.runs = Runs()
        self.episodes = EpisodeLog()
        self.ghosts = GhostRuns()
        self.yardstick = LruYardstick()
        self.kinds = Kinds()
        self.now_s = -math.inf
        self.follows_lru = True

    def take_model(self, learnt: Learnt) -> None:
        """A new model is in force."""
        self.model, self.worth = learnt
        self.betas = self.model.betas.tolist()
        self.runs.set_model(self.model)

    def see(self, use: Use) -> None:
        """Time goes on, never back."""
        self.now_s = max(self.now_s, use.now_s)

    def facts(self, use: Use, before: int, n_found: int) -> RequestFacts:
        """Of a request that finds blocks the last of which are of the run ``before``."""
        cells = self.runs.cells
        n_blocks = -(-use.n_tokens // use.block_tokens) if use.block_tokens else n_found
        return RequestFacts(
            hinted_turn(use) or cells.turn[before] + 1, max(use.now_s - cells.used_s[before], 0.0),
            max(n_blocks - n_found, 0), use.n_tokens, use.output_tokens, self.kinds.of(use), reuse_value(use),
        )  # fmt: skip

    def facts_of_new(self, use: Use, opened: Opened | None, spans: list[Span], n: int) -> RequestFacts:
        """Of the request that stores ``n`` blocks, some of which were stored before. Changes nothing."""
        n_known, before = 0, UNKNOWN
        for run, count, _ in spans:
            if run == UNKNOWN:
                break
            n_known, before = n_known + count, run
        if n_known:
            facts = self.facts(use, before, 0)
        elif opened is not None:
            facts = replace(opened.facts)
        else:
            kind, reuse = self.kinds.of(use), reuse_value(use)
            facts = RequestFacts(hinted_turn(use) or 1, -1.0, 0, use.n_tokens, use.output_tokens, kind, reuse)
        facts.n_unseen = n - n_known
        if opened is not None:
            facts.output_tokens = max(use.output_tokens, facts.output_tokens, opened.facts.output_tokens)
        return facts

    def under_lru(self, spans: list[Span], *, unbroken: bool) -> tuple[bool, int]:
        """Whether LRU would have found all of these blocks, and if all before them how many from the first on."""
        if not unbroken:
            return False, 0
        requests = self.runs.cells.request
        counts = [n for _, n, _ in spans]
        found = self.yardstick.found([requests[run] if run != UNKNOWN else UNKNOWN for run, _, _ in spans], counts)
        return found == sum(counts), found

    def leave(self, spans: list[Span], *, hit: bool = True) -> None:
        """Blocks of these runs are used, or forgotten; a run may come several times."""
        for run, n, _ in spans:
            if run != UNKNOWN:
                self.episodes.add(self.runs, run, n, self.now_s, hit=hit)
                self.yardstick.moved(self.runs.cells.request[run], n)
                self.runs.take_away(run, n)

    def forget(self, runs: Ints) -> None:
        if len(runs):
            counts = Counter(runs.tolist())
            self.leave([(run, counts[run], 0) for run in sorted(counts)], hit=False)

    def pieces(self, spans: list[Span], facts: RequestFacts, *, is_short: bool = False) -> list[Piece]:
        """What these blocks are from now on; neighbours that have been used equally often are one. ``is_short``: the
        last block is."""
        cells, now_s, values = self.runs.cells, self.now_s, of_request(facts)
        pieces: list[Piece] = []
        before = 0
        for run, n, depth in spans:
            uses, first_s = (1, now_s) if run == UNKNOWN else (cells.uses[run] + 1, cells.first_s[run])
            alike = min(uses, USES_TOLD_APART)
            if alike == before:
                pieces[-1].n += n
                continue
            before = alike
            features = values | of_run(depth, uses, max(now_s - first_s, 0.0))
            pieces.append(Piece(n, uses, first_s, STRATUM_OF_USES[alike], features))
        if is_short and pieces[-1].uses == 1:
            last = pieces[-1] = replace(pieces[-1], n=pieces[-1].n - 1)
            if not last.n:
                pieces.pop()
            pieces.append(replace(last, n=1, stratum=PARTIAL))
        return pieces

    def enter(
        self, pieces: list[Piece], number: int, facts: RequestFacts, use: Use, unbroken: bool, *, counts: bool = True
    ) -> list[int]:
        """New runs."""
        self.runs.reserve(len(pieces))
        cells, now_s, said = self.runs.cells, self.now_s, priority(use)
        young_of_request, old_of_request = self.sums(pieces[0].features, 0, N_OF_REQUEST)
        mine = []
        for piece in pieces:
            run = self.runs.allocate()
            mine.append(run)
            cells.request[run], cells.used_s[run], cells.first_s[run] = number, now_s, piece.first_s
            cells.blocks[run], cells.uses[run], cells.turn[run] = piece.n, piece.uses, facts.turn
            cells.strata[run], cells.features[run] = piece.stratum, piece.features
            cells.counts[run], cells.unbroken[run], cells.priority[run] = counts, unbroken, said
            young, old = self.sums(piece.features, N_OF_REQUEST, N_FEATURES)
            sums = young_of_request + young, old_of_request + old
            cells.cell[run], cells.young[run], cells.old[run] = place(piece.stratum, *sums)
            self.yardstick.used(number, piece.n)
        return mine

    def sums(self, packed: int, first: int, end: int) -> tuple[float, float]:
        """Sums of betas of the features from ``first`` to ``end``."""
        young_betas, old_betas = self.betas
        young = old = 0.0
        packed >>= 4 * first
        for at in range(16 * first, 16 * end, 16):
            value = at + (packed & 15)
            young += young_betas[value]
            old += old_betas[value]
            packed >>= 4
        return young, old

    def set_features(self, run: int, packed: int) -> None:
        cells = self.runs.cells
        cells.features[run] = packed
        sums = self.sums(packed, 0, N_FEATURES)
        cells.cell[run], cells.young[run], cells.old[run] = place(cells.strata[run], *sums)

    def rank_of_new(self, cell: int, young: float, number: int, said: float) -> float:
        """Of a run at this ``place`` that is just being used."""
        if self.follows_lru:
            return number + said * self._lru_step()
        return self.worth.look_up_new(cell, young) + said * _WORTH_OF_PRIORITY + number * TIE

    def _lru_step(self) -> float:
        """Under LRU a priority of 100 counts as a use one turnover of the cache later."""
        return len(self.yardstick) / 100

    def ranks_of_blocks(self, runs: Ints) -> Floats:
        """Ranks of blocks by their runs."""
        if self.follows_lru:
            return self._ranks(runs)
        # Each run once; a mark per run costs less than sorting.
        marks = np.zeros(int(runs.max(initial=-1)) + 1, np.bool_)
        marks[runs] = True
        which = np.flatnonzero(marks)
        of_run = np.empty(len(marks))
        of_run[which] = self._ranks(which)
        return of_run[runs]

    def ranks_of_all(self) -> Floats:
        """Ranks by run; those of free ones mean nothing."""
        return self._ranks(slice(self.runs.n_known))

    def _ranks(self, at: Ints | slice) -> Floats:
        columns = self.runs
        said = columns.priority[at]
        if self.follows_lru:
            ranks: Floats = columns.request[at] + said * self._lru_step()
            return ranks
        ranks = columns.worth(at, self.worth, self.now_s)
        ranks += said * _WORTH_OF_PRIORITY
        return ranks

    def ranks_of_used(self, runs: list[int]) -> list[float]:
        """Ranks of runs that have just been used."""
        cells = self.runs.cells
        return [
            self.rank_of_new(cells.cell[run], cells.young[run], cells.request[run], cells.priority[run]) for run in runs
        ]


def known_spans(runs: Ints | None, n: int, depth: int) -> list[Span]:
    """Spans of ``n`` blocks of a path, by the runs they are remembered to be of, -1 of none."""
    if runs is None:
        return [(UNKNOWN, n, depth)]
    starts = [0, *(np.flatnonzero(runs[1:] != runs[:-1]) + 1).tolist()]
    ends = [*starts[1:], n]
    known = zip(runs[starts].tolist(), starts, ends, strict=True)
    return [(run, end - start, depth + start) for run, start, end in known]


def is_short_end(use: Use, n_blocks: int) -> bool:
    """Whether the last of a prompt's first so many blocks is short."""
    return bool(use.n_tokens and use.block_tokens) and use.n_tokens < n_blocks * use.block_tokens
