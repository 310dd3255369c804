"""Hits of LRU at every capacity at once, from stack distances.

LRU holds the blocks used last, the head of a prompt counting as more recent than its tail, so that a block is a hit
exactly if fewer others were used since than there is room for. Blocks that the same request used last lie next to each
other in that order: one sum per run gives the distances of all of its blocks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.bench.path_runs import NEVER, runs_before
from kvstore.bench.simulate import HitCounts
from kvstore.bench.trace import Trace
from kvstore.recompute import prefill_cost


class LruCurve:
    """What leaf-first LRU hits in a trace, for any capacity."""

    def __init__(self, trace: Trace, attention_doubling_tokens: float = 0.0) -> None:
        """Goes over the trace once, in time proportional to its runs times the logarithm of its requests.

        ``attention_doubling_tokens``: of the model, for what prefill the hits save; then to its blocks as well.
        """
        self._trace = trace
        self._doubling_tokens = attention_doubling_tokens
        n = trace.unique_blocks + 2
        self._blocks, self._tokens, self._any = (np.zeros(n, np.int64) for _ in range(3))
        """Differences: what becomes a hit at capacities from this one on."""
        self._saved = np.zeros(n)
        steps = np.zeros(n, np.int64)
        runs, sizes = runs_before(trace), _Sums(trace.n_requests)
        firsts, requests = runs.firsts.tolist(), runs.requests.tolist()
        starts, ends = runs.starts.tolist(), runs.ends.tolist()
        n_blocks = np.diff(trace.offsets).tolist()
        for index, request in enumerate(trace.requests):
            for run in range(firsts[index], firsts[index + 1]):
                owner, n_run = requests[run], ends[run] - starts[run]
                if owner == NEVER:
                    continue
                above = sizes.after(owner)
                steps[above + 1] += 1
                steps[above + n_run + 1] -= 1
                if starts[run] == 0:
                    self._any[above + 1] += 1
                if ends[run] == n_blocks[index]:  # the last block of a prompt may be short
                    short = n_blocks[index] * trace.block_tokens - request.input_length
                    self._tokens[above + n_run] -= max(short, 0)
                if attention_doubling_tokens:
                    upto = np.arange(starts[run], ends[run] + 1) * trace.block_tokens
                    cost = prefill_cost(np.minimum(upto, request.input_length), attention_doubling_tokens)
                    self._saved[above + 1 : above + n_run + 1] += np.diff(cost)
            # Only now: distances are those at the request's beginning.
            for run in range(firsts[index], firsts[index + 1]):
                if requests[run] != NEVER:
                    sizes.add(requests[run], starts[run] - ends[run])
            sizes.add(index, n_blocks[index])
        self._blocks = np.cumsum(steps)
        self._tokens += self._blocks * trace.block_tokens
        self._blocks, self._tokens, self._any = (np.cumsum(each) for each in (self._blocks, self._tokens, self._any))
        self._saved = np.cumsum(self._saved) if attention_doubling_tokens else self._tokens.astype(np.float64)

    def hits(self, capacity_blocks: int) -> HitCounts:
        """Hits with room for so many blocks. What was inserted and evicted is not counted."""
        at = min(max(capacity_blocks, 0), len(self._blocks) - 1)
        trace = self._trace
        return HitCounts(
            requests=trace.n_requests,
            block_accesses=trace.block_accesses,
            block_hits=int(self._blocks[at]),
            token_accesses=int(trace.input_lengths.sum()),
            token_hits=int(self._tokens[at]),
            any_hits=int(self._any[at]),
            prefill=float(prefill_cost(trace.input_lengths, self._doubling_tokens).sum()),
            prefill_saved=float(self._saved[at]),
        )

    def block_hits(self) -> NDArray[np.int64]:
        """Block hits by capacity, from 0 blocks on to all of the trace's."""
        return self._blocks[:-1].copy()


class _Sums:
    """Numbers by place, with sums over all places after one: a Fenwick tree."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._tree = [0] * (n + 1)
        self._total = 0

    def add(self, at: int, number: int) -> None:
        self._total += number
        at += 1
        while at <= self._n:
            self._tree[at] += number
            at += at & -at

    def after(self, at: int) -> int:
        at, upto = at + 1, 0
        while at:
            upto += self._tree[at]
            at &= at - 1
        return self._total - upto
