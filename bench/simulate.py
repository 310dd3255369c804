"""Replay on the index and a policy alone: no tiers, no bytes, no time.

The model: requests in order; a hit is the longest run of leading blocks that is present; then all of the
request's blocks are accessed and the absent ones inserted, and what is over the capacity is evicted.

With an NVMe tier below, blocks found there come up into DRAM, and each tier gives up what is over its own
capacity, DRAM first. Writing takes no time: ``through`` writes what is inserted at once, ``back`` what DRAM
is about to give up, ``selective`` what has been accessed often enough; ancestors that are not on NVMe are
written first.

With an HBM tier above, blocks in DRAM get a copy there with the use that is number ``promote_hits``, their insertion
included, a quarter of the tier (or an eighth of DRAM) at most with each request. What is read from HBM need not come up
into DRAM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.bench import workload as work
from kvstore.bench.generate import TokenTrace
from kvstore.bench.hbm_model import HbmModel
from kvstore.bench.workload import Workload
from kvstore.config import WRITE_POLICIES
from kvstore.errors import BadInputError
from kvstore.prefix_index.admission import outlasting
from kvstore.prefix_index.block_table import DRAM, HBM, NVME, Ids
from kvstore.prefix_index.index import Match, PrefixIndex
from kvstore.prefix_index.policies import make_policy, with_hbm
from kvstore.prefix_index.policy import EvictionPolicy, Use
from kvstore.prefix_index.rows import RowPath
from kvstore.recompute import checked_doubling_tokens, prefill_cost
from kvstore.types import Root

DEFAULT_PERCENTS = (1.0, 2.0, 5.0, 10.0, 25.0, 50.0, 100.0)

Progress = Callable[[int], None]
"""Called with the number of requests done since the last call."""


@dataclass(slots=True)
class HitCounts:
    """Totals of one run. ``token_hits`` is token-granular where the workload has token ids.

    ``evicted`` counts the blocks that no tier had any more. ``prefill`` is what computing all prompts costs, in units
    of a prompt's first token, ``prefill_saved`` of what was found: tokens, where the cost of attention is not known.
    """

    requests: int = 0
    block_accesses: int = 0
    block_hits: int = 0
    token_accesses: int = 0
    token_hits: int = 0
    any_hits: int = 0
    inserted: int = 0
    evicted: int = 0
    hbm_block_hits: int = 0
    dram_block_hits: int = 0
    nvme_block_hits: int = 0
    nvme_written: int = 0
    prefill: float = 0.0
    prefill_saved: float = 0.0

    @property
    def block_hit_ratio(self) -> float:
        """Block hits over block accesses."""
        return self.block_hits / self.block_accesses if self.block_accesses else 0.0

    @property
    def token_hit_ratio(self) -> float:
        """Prompt tokens found over prompt tokens."""
        return self.token_hits / self.token_accesses if self.token_accesses else 0.0

    @property
    def any_hit_ratio(self) -> float:
        """Requests that found at least one token over requests."""
        return self.any_hits / self.requests if self.requests else 0.0

    @property
    def prefill_saved_ratio(self) -> float:
        """Work of prefill that nobody had to do over all."""
        return self.prefill_saved / self.prefill if self.prefill else 0.0

    def count(
        self, blocks: int, hit_blocks: int, tokens: int, hit_tokens: int, attention_doubling_tokens: float = 0.0
    ) -> None:
        """Add one request."""
        self.requests += 1
        self.block_accesses += blocks
        self.block_hits += hit_blocks
        self.token_accesses += tokens
        self.token_hits += hit_tokens
        self.any_hits += hit_tokens > 0
        self.prefill += prefill_cost(tokens, attention_doubling_tokens)
        self.prefill_saved += prefill_cost(hit_tokens, attention_doubling_tokens)

    def add(self, other: HitCounts) -> None:
        """Add the totals of another run."""
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """One capacity of a sweep."""

    capacity_percent: float
    capacity_blocks: int
    counts: HitCounts


def simulate(
    workload: Workload,
    policy: str | EvictionPolicy = "lru",
    capacity_blocks: int | None = None,
    nvme_blocks: int | None = None,
    write_policy: str = "through",
    *,
    selective_hits: int = 2,
    hbm_blocks: int | None = None,
    promote_hits: int = 2,
    partial: bool = True,
    attention_doubling_tokens: float = 0.0,
    progress: Progress | None = None,
) -> HitCounts:
    """Hit counts of ``workload`` with room for ``capacity_blocks`` blocks (None: unlimited).

    ``hbm_blocks`` is that of an HBM tier above, to which blocks are promoted at their access number ``promote_hits``.
    ``nvme_blocks``: the capacity of an NVMe tier below (None: there is none), to which ``write_policy`` writes;
    ``selective`` writes a block at its access number ``selective_hits``, of which its insertion is the first.
    ``partial=False`` is a cache of whole blocks only: short last blocks are not kept, and the leading tokens
    of a block that differs later are no hit. It matters for workloads with token ids only.
    ``attention_doubling_tokens``: of the model (``kvstore.recompute``), for the policy and ``prefill_saved``.
    """
    doubling_tokens = checked_doubling_tokens(attention_doubling_tokens)
    for blocks in (capacity_blocks, nvme_blocks, hbm_blocks):
        if blocks is not None and blocks < 1:
            raise BadInputError(f"capacity is {blocks} blocks; it must be at least 1")
    if write_policy not in WRITE_POLICIES:
        raise BadInputError(f"write_policy is {write_policy!r}; known are {', '.join(WRITE_POLICIES)}")
    top = _Top(hbm_blocks, promote_hits) if hbm_blocks is not None else None
    if nvme_blocks is None:
        run = _Simulation(workload, policy, capacity_blocks, partial, top)
    else:
        run = _Hierarchy(workload, policy, capacity_blocks, partial, top, nvme_blocks, write_policy, selective_hits)
    run.doubling_tokens = doubling_tokens
    for index in range(workload.n_requests):
        run.step(index)
        if progress is not None:
            progress(1)
    return run.counts


def sweep(
    workload: Workload,
    policy: str = "lru",
    percents: Iterable[float] = DEFAULT_PERCENTS,
    *,
    partial: bool = True,
    attention_doubling_tokens: float = 0.0,
    progress: Progress | None = None,
) -> list[SweepPoint]:
    """``simulate`` at several capacities, in percent of the workload's unique blocks."""
    told = attention_doubling_tokens
    points = []
    for percent in percents:
        blocks = work.capacity_blocks(workload.unique_blocks, percent)
        counts = simulate(workload, policy, blocks, partial=partial, attention_doubling_tokens=told, progress=progress)
        points.append(SweepPoint(percent, blocks, counts))
    return points


class _Top(NamedTuple):
    n_blocks: int
    hits: int


class _Simulation:
    """One run: an index, and the model's four steps per request."""

    nvme = False
    doubling_tokens = 0.0

    def __init__(
        self,
        workload: Workload,
        policy: str | EvictionPolicy,
        capacity: int | None,
        partial: bool,
        top: _Top | None,
    ) -> None:
        self.counts = HitCounts()
        self._workload = workload
        self._has_tokens = isinstance(workload, TokenTrace)
        order = make_policy(policy) if isinstance(policy, str) else policy
        self._index = PrefixIndex(with_hbm(order) if top is not None else order, nvme=self.nvme, hbm=top is not None)
        self._hbm: HbmModel | None = None
        if top is not None and self._index.above is not None:
            self._hbm = HbmModel(self._index, self._index.above, top.n_blocks, top.hits, capacity)
        self._capacity = capacity
        self._partial = partial
        self._root_key = Root().key(work.namespace(workload, 1, "simulated").digest())
        self._next_slot = 0

    def step(self, index: int) -> None:
        """Replay one request."""
        request = self._workload.requests[index]
        path = work.row_path(self._workload, index)
        match = self._index.match(self._root_key, path)
        ids = match.ids
        if self._partial and match.partial_id >= 0:
            ids = np.append(ids, np.uint32(match.partial_id))
        whole, tokens = self._hits(index, path, match)
        self.counts.count(
            work.n_blocks(self._workload, index), whole, request.input_length, tokens, self.doubling_tokens
        )
        self._find(ids, whole, self._use(index, path, is_done=False))
        if self._hbm is not None:
            self._hbm.used(ids)
        n_new = (path.n_rows if self._partial else path.n_full_rows) - whole
        if n_new > 0:
            use = self._use(index, path, is_done=True)
            new = self._store(path, whole, n_new, use)
            if use.output_tokens:
                self._index.ended(np.concatenate((match.ids, new)), use)
        self._evict_excess()

    def _use(self, index: int, path: RowPath, *, is_done: bool) -> Use:
        """As a daemon sees the request: of hashes whole blocks only; length and output once the rest is stored."""
        workload = self._workload
        hints, block_tokens = work.hints(workload, index, is_done=is_done), workload.block_tokens
        n_tokens = path.n_full_rows * block_tokens + path.tail_tokens
        if is_done:
            n_tokens = min(n_tokens, work.prompt_tokens(workload, index))
        n_output = hints.output_tokens if hints is not None else 0
        return Use(
            workload.requests[index].timestamp_s, n_tokens, n_output, hints,
            block_tokens=block_tokens, attention_doubling_tokens=self.doubling_tokens,
        )  # fmt: skip

    def _hits(self, index: int, path: RowPath, match: Match) -> tuple[int, int]:
        """Blocks of which every token was found, and tokens found."""
        if not self._has_tokens:
            return len(match.ids), work.hit_tokens(self._workload, index, len(match.ids))
        tokens = match.n_tokens if self._partial else len(match.ids) * path.block_tokens
        return work.whole_blocks(self._workload, index, tokens), tokens

    def _find(self, ids: Ids, n_hits: int, use: Use) -> None:
        """Access what was found; the first ``n_hits`` of it are hits."""
        in_hbm = self._index.resident(ids[:n_hits], HBM)
        n_dram = int(np.count_nonzero(self._index.resident(ids[:n_hits], DRAM) & ~in_hbm))
        n_hbm = int(np.count_nonzero(in_hbm))
        self.counts.hbm_block_hits += n_hbm
        self.counts.dram_block_hits += n_dram
        self.counts.nvme_block_hits += n_hits - n_dram - n_hbm
        if len(ids):
            self._index.touch(ids, use)

    def _store(self, path: RowPath, first: int, n: int, use: Use) -> Ids:
        """Insert what was not found; returns the blocks that were not in DRAM before."""
        before = self._index.n_blocks
        inserted = self._index.insert(self._root_key, path, first, self._slots(n), 1, use)
        self.counts.inserted += self._index.n_blocks - before
        return inserted.ids[inserted.is_new]

    def _evict_excess(self) -> None:
        excess = self._excess()
        if excess > 0:
            self.counts.evicted += int(np.count_nonzero(self._index.evict(excess).gone))

    def _excess(self) -> int:
        return 0 if self._capacity is None else self._index.n_dram_blocks - self._capacity

    def _slots(self, n: int) -> NDArray[np.int64]:
        self._next_slot += n
        return np.arange(self._next_slot - n, self._next_slot, dtype=np.int64)


class _Hierarchy(_Simulation):
    """As above with an NVMe tier."""

    nvme = True

    def __init__(
        self,
        workload: Workload,
        policy: str | EvictionPolicy,
        capacity: int | None,
        partial: bool,
        top: _Top | None,
        nvme_blocks: int,
        write_policy: str,
        selective_hits: int,
    ) -> None:
        super().__init__(workload, policy, capacity, partial, top)
        self._nvme_blocks = nvme_blocks
        self._write_policy = write_policy
        self._selective_hits = selective_hits

    def _find(self, ids: Ids, n_hits: int, use: Use) -> None:
        super()._find(ids, n_hits, use)
        absent = ids[~(self._index.resident(ids, DRAM) | self._index.resident(ids, HBM))]
        self._index.add_dram(absent, self._slots(len(absent)))
        if self._write_policy == "selective":
            self._write(ids[self._index.table.hits[ids] >= self._selective_hits])

    def _store(self, path: RowPath, first: int, n: int, use: Use) -> Ids:
        ids = super()._store(path, first, n, use)
        if self._write_policy == "through":
            self._write(ids)
        return ids

    def _evict_excess(self) -> None:
        if self._write_policy == "back":
            for _ in range(self._excess()):
                self._write(self._index.coldest(1))
                self.counts.evicted += int(np.count_nonzero(self._index.evict(1).gone))
        super()._evict_excess()
        excess = self._index.n_nvme_blocks - self._nvme_blocks
        if excess > 0:
            self.counts.evicted += int(np.count_nonzero(self._index.evict_nvme(excess).gone))

    def _write(self, ids: Ids) -> None:
        if self._write_policy != "back":
            ids = ids[~self._index.resident(ids, NVME)]
            short = self._index.n_nvme_blocks + len(ids) - self._nvme_blocks
            ids = outlasting(self._index, ids, short, NVME)
        chain = self._index.chain_unpersisted(ids)
        self._index.add_nvme(chain, self._slots(len(chain)))
        self.counts.nvme_written += len(chain)
