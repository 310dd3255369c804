"""The most that any policy could hit: Belady's rule with bypass, exact for requests that use prefixes.

After each request any of the blocks held and of those just used may be kept, as many as there is room for. What is
used again latest is given up first; of what the same request uses, the deepest. As nothing uses a block without those
before it, what is kept is closed towards the head, and every block kept until its next use is a hit.
"""

from __future__ import annotations

from heapq import heappop, heappush

from kvstore.bench import workload as work
from kvstore.bench.path_runs import NEVER, Runs, runs_after
from kvstore.bench.simulate import HitCounts
from kvstore.bench.trace import Trace
from kvstore.errors import BadInputError


class OptimalPolicy:
    """OPT over one trace: what is asked for several capacities is prepared once."""

    def __init__(self, trace: Trace, attention_doubling_tokens: float = 0.0) -> None:
        """``attention_doubling_tokens``: of the model, for what prefill the hits save; the aim is hits in any case."""
        self._trace = trace
        self._doubling_tokens = attention_doubling_tokens
        self._runs: Runs = runs_after(trace)

    def hits(self, capacity_blocks: int) -> HitCounts:
        """Hits with room for so many blocks, at least 1. Blocks that are let go never count as inserted."""
        if capacity_blocks < 1:
            raise BadInputError(f"capacity is {capacity_blocks} blocks; it must be at least 1")
        trace, runs = self._trace, self._runs
        firsts, requests = runs.firsts.tolist(), runs.requests.tolist()
        starts, ends = runs.starts.tolist(), runs.ends.tolist()
        kept = [0] * len(requests)
        hits = [0] * trace.n_requests
        due: list[list[int]] = [[] for _ in range(trace.n_requests)]
        latest: list[tuple[int, int, int]] = []
        counts, held = HitCounts(), 0
        for index, request in enumerate(trace.requests):
            for run in due[index]:
                held -= kept[run]
                hits[index] += kept[run]
            due[index].clear()
            for run in range(firsts[index], firsts[index + 1]):
                if requests[run] != NEVER:
                    kept[run] = ends[run] - starts[run]
                    held += kept[run]
                    due[requests[run]].append(run)
                    heappush(latest, (-requests[run], -starts[run], run))
            while held > capacity_blocks:
                run = latest[0][2]
                less = min(kept[run], held - capacity_blocks)
                kept[run] -= less
                held -= less
                if not kept[run]:
                    heappop(latest)
            tokens = work.hit_tokens(trace, index, hits[index])
            n_blocks = work.n_blocks(trace, index)
            counts.count(n_blocks, hits[index], request.input_length, tokens, self._doubling_tokens)
        return counts
