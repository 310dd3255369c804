"""Conversations with a hybrid model: what storing each group by itself is worth beside blocks in one piece.

The engine that is played stores the full groups of every block, and of the others what a hit needs that ends with the
prompt or, every so many blocks, inside of it (a checkpoint, for prompts that share a beginning). In one piece every
block would have all groups. Both are simulated on the index alone, within the same bytes; the first is also replayed
through a daemon, and every byte of every group compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.bench import workload as work
from kvstore.bench.generate import ConversationOptions, TokenTrace, generate_trace
from kvstore.bench.payload import Payload, prefix_keys
from kvstore.bench.simulate import HitCounts, Progress, simulate
from kvstore.client import Client, HybridHandle, HybridLease
from kvstore.errors import BadInputError
from kvstore.hybrid import Part, parts_of, place_of
from kvstore.prefix_index.index import PrefixIndex
from kvstore.prefix_index.parts import Rule
from kvstore.prefix_index.policies import make_policy
from kvstore.prefix_index.policy import Use
from kvstore.prefix_index.rows import RowPath
from kvstore.types import KEY_BYTES, GroupKind, KVGroup, KVSpec, Namespace

MODELS: dict[str, tuple[KVGroup, ...]] = {
    "gemma3": (
        KVGroup(layers=10, kv_heads=1, head_dim=8),
        KVGroup(layers=52, kv_heads=1, head_dim=8, kind=GroupKind.SLIDING, window_tokens=1024),
    ),
    "gpt-oss": (
        KVGroup(layers=18, kv_heads=1, head_dim=8),
        KVGroup(layers=18, kv_heads=1, head_dim=8, kind=GroupKind.SLIDING, window_tokens=128),
    ),
    "qwen3-next": (
        KVGroup(layers=12, kv_heads=1, head_dim=16),
        KVGroup(layers=36, dtype="uint8", layout="opaque", page_bytes=32 << 10, kind=GroupKind.STATE),
    ),
}
"""Groups in the proportions of models that exist, each page 1/32 to 1/256 of its real size."""

DURABLE_EVERY, PERSIST_S_MAX = 16, 60.0
"""With NVMe the client waits for what it has stored after so many requests, at most so long for each."""

_ROOT_KEY = b"r" * KEY_BYTES


@dataclass(frozen=True, slots=True)
class HybridOptions:
    """``dram_percent``: room for that part of all different blocks, if they had all groups; so ``nvme_percent``, for
    an NVMe tier of the daemon (the simulations have none).

    ``checkpoint_blocks``: a hit may also end behind every so many blocks; 0 = only where a prompt ends.
    """

    model: str = "gemma3"
    conversations: ConversationOptions = field(default_factory=lambda: ConversationOptions(block_tokens=64))
    dram_percent: float = 5.0
    nvme_percent: float | None = None
    checkpoint_blocks: int = 8
    limit: int | None = None
    timeout_s: float = 10.0

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise BadInputError(f"model is {self.model!r}; known are {', '.join(sorted(MODELS))}")
        if not 0 <= self.checkpoint_blocks < 1 << 20:
            raise BadInputError(f"checkpoint_blocks is {self.checkpoint_blocks}; it must be 0 or more")
        work.capacity_blocks(1, self.dram_percent, "--dram-percent")
        if self.nvme_percent is not None:
            work.capacity_blocks(1, self.nvme_percent, "--nvme-percent")

    @property
    def spec(self) -> KVSpec:
        """What the blocks look like."""
        return KVSpec(self.conversations.block_tokens, MODELS[self.model])

    @property
    def namespace(self) -> Namespace:
        """What its blocks are stored as."""
        return Namespace(f"hybrid:{self.model}:{self.conversations.seed}", self.spec)

    def load(self) -> TokenTrace:
        """Generate the requests."""
        return generate_trace(self.conversations, self.limit)

    def capacity_blocks(self, workload: TokenTrace) -> int:
        """The room in DRAM in blocks that have all groups."""
        return work.capacity_blocks(workload.unique_blocks, self.dram_percent)

    def nvme_blocks(self, workload: TokenTrace) -> int | None:
        """The room on NVMe in blocks that have all groups; None without such a tier."""
        return None if self.nvme_percent is None else work.capacity_blocks(workload.unique_blocks, self.nvme_percent)

    def dram_bytes(self, workload: TokenTrace) -> int:
        """The same in bytes."""
        return work.dram_capacity_bytes(self.capacity_blocks(workload), self.spec.block_bytes)


@dataclass(slots=True)
class HybridReport:
    """Hits of both ways to store, simulated, and of the daemon, if there was one. ``whole`` blocks only count."""

    options: HybridOptions
    dram_bytes: int
    whole: HitCounts
    by_group: HitCounts
    daemon: HitCounts | None = None
    mismatches: int = 0
    skipped_blocks: int = 0
    """Blocks of any group that the daemon had no room for; a later hit ends before them."""
    bytes_read: int = 0
    longest_blocks: int = 0
    """Blocks of the longest prompt."""

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        spec = self.options.spec
        out: dict[str, Any] = {
            "mode": "hybrid",
            "model": self.options.model,
            "dram_bytes": self.dram_bytes,
            "dram_percent": self.options.dram_percent,
            "nvme_percent": self.options.nvme_percent,
            "checkpoint_blocks": self.options.checkpoint_blocks,
            "requests": self.by_group.requests,
            "longest_blocks": self.longest_blocks,
            "block_bytes": spec.block_bytes,
            "part_bytes": [part.block_bytes for part in parts_of(spec)],
            "token_hit_ratio_whole": self.whole.token_hit_ratio,
            "token_hit_ratio_by_group": self.by_group.token_hit_ratio,
        }
        if self.daemon is not None:
            out |= {
                "token_hit_ratio_daemon": self.daemon.token_hit_ratio,
                "block_hits_nvme": self.daemon.nvme_block_hits,
                "mismatches": self.mismatches,
                "skipped_blocks": self.skipped_blocks,
                "bytes_read": self.bytes_read,
            }
        return out


class Engine:
    """What the engine that is played has of each request: keys that say what its blocks hold, and what it stores."""

    def __init__(self, options: HybridOptions, workload: TokenTrace) -> None:
        self.spec = options.spec
        self.parts = parts_of(self.spec)
        self.workload = workload
        self._checkpoint_blocks = options.checkpoint_blocks

    @cached_property
    def rules(self) -> tuple[Rule, ...]:
        """What a hit needs of the parts from 1 on."""
        return tuple(Rule(part.number, part.window_blocks, part.is_state) for part in self.parts[1:])

    def n_blocks(self, index: int) -> int:
        """Whole blocks of a prompt; the rest is not stored."""
        return self.workload.requests[index].input_length // self.spec.block_tokens

    def keys(self, index: int) -> NDArray[np.uint64]:
        """A key per whole block that depends on all tokens up to its end."""
        width = self.spec.block_tokens
        return prefix_keys(self.workload.requests[index].tokens)[width - 1 :: width]

    def runs(self, part: Part, n_hit: int, n_blocks: int) -> Iterator[tuple[int, int]]:
        """The blocks, as runs from .. to, of which it stores this part after a hit of ``n_hit``."""
        if part.number == 0:
            if n_blocks > n_hit:
                yield n_hit, n_blocks
            return
        every = self._checkpoint_blocks
        ends = list(range((n_hit // every + 1) * every, n_blocks, every)) if every else []
        if n_blocks > n_hit:
            ends.append(n_blocks)
        done = n_hit
        run: tuple[int, int] | None = None
        for end in ends:
            first = max(end - part.window_blocks, done)
            if run is not None and first > run[1]:
                yield run
                run = None
            run = (first if run is None else run[0], end)
            done = end
        if run is not None:
            yield run


def run_hybrid(
    options: HybridOptions, workload: TokenTrace, progress: Progress | None = None, connect: str | None = None
) -> HybridReport:
    """Simulate both ways, and replay through the daemon at ``connect`` if one is given."""
    dram_bytes = options.dram_bytes(workload)
    engine = Engine(options, workload)
    whole = simulate(workload, "lru", options.capacity_blocks(workload), partial=False, progress=progress)
    report = HybridReport(options, dram_bytes, whole, simulate_by_group(engine, dram_bytes, progress))
    report.longest_blocks = max(map(engine.n_blocks, range(workload.n_requests)), default=0)
    if connect is not None:
        report.daemon = HitCounts()
        with Client(connect, timeout_s=options.timeout_s) as client:
            run = _Replay(client, engine, report)
            for index in range(workload.n_requests):
                run.step(index)
                if progress is not None:
                    progress(1)
            run.make_durable()
    return report


def simulate_by_group(engine: Engine, dram_bytes: int, progress: Progress | None = None) -> HitCounts:
    """Hits on the index alone, with ``dram_bytes`` for slots of all parts."""
    run = _Simulation(engine, dram_bytes)
    for index in range(engine.workload.n_requests):
        run.step(index)
        if progress is not None:
            progress(1)
    return run.counts


class _Simulation:
    def __init__(self, engine: Engine, dram_bytes: int) -> None:
        self.counts = HitCounts()
        self._engine = engine
        self._index = PrefixIndex(make_policy("lru"))
        self._left_bytes = dram_bytes
        self._slot_bytes = [work.dram_capacity_bytes(1, part.block_bytes) for part in engine.parts]

    def step(self, index: int) -> None:
        """One request: what a hit uses is used, what is missing is stored, what is too much goes."""
        engine, parts = self._engine, self._index.parts
        request = engine.workload.requests[index]
        path = RowPath.from_tokens(request.tokens, engine.spec.block_tokens)
        found = self._index.match(_ROOT_KEY, path).ids.astype(np.intp)
        n_hit, n_blocks = parts.reach(found, engine.rules), engine.n_blocks(index)
        use = Use(request.timestamp_s, request.input_length, block_tokens=engine.spec.block_tokens)
        self.counts.count(n_blocks, n_hit, request.input_length, n_hit * engine.spec.block_tokens)
        for span in parts.needed(found[:n_hit], 0, engine.rules) if n_hit else ():
            parts.touch(span.ids, use)
        self._index.touch(found[:n_hit], use)
        if n_blocks > len(found):
            new = np.zeros(n_blocks - len(found), np.int64)
            self._index.insert(_ROOT_KEY, path, len(found), new, self._slot_bytes[0], use)
            self._take(0, len(new))
        stored = self._index.match(_ROOT_KEY, path).ids.astype(np.intp)
        self._index.touch(stored, replace(use, is_again=True))
        for part, rule in zip(engine.parts[1:], engine.rules, strict=True):
            for first, end in engine.runs(part, n_hit, n_blocks):
                slots = np.zeros(end - first, np.int64)
                done = parts.insert(stored, first, rule, slots, self._slot_bytes[part.number], use)
                self._take(part.number, int(done.is_new.sum()))
        while self._left_bytes < 0:
            gone = self._index.evict(1)
            self._left_bytes += int(gone.size_bytes.sum())
            self.counts.evicted += len(gone.ids)

    def _take(self, number: int, n: int) -> None:
        self._left_bytes -= n * self._slot_bytes[number]
        self.counts.inserted += n


class _Replay:
    """The same through a daemon, with bytes."""

    def __init__(self, client: Client, engine: Engine, report: HybridReport) -> None:
        self._engine = engine
        self._report = report
        options = report.options
        seed = options.conversations.seed
        sizes = [place_of(engine.spec, group)[2] for group in range(len(engine.spec.groups))]
        self._payloads = [Payload(size, seed * len(sizes) + group) for group, size in enumerate(sizes)]
        self._namespace: HybridHandle = client.open_hybrid(options.namespace)
        self._not_durable: list[NDArray[np.uint32]] = []

    def step(self, index: int) -> None:
        """One request: read what is found, store what is missing."""
        engine, report = self._engine, self._report
        request, keys = engine.workload.requests[index], engine.keys(index)
        with self._namespace.lease(request.tokens, policy_time_s=request.timestamp_s) as lease:
            n_hit = min(lease.n_blocks, engine.n_blocks(index)) if lease else 0
            self._compare(lease, keys)
        if report.daemon is not None:
            report.daemon.count(len(keys), n_hit, request.input_length, n_hit * engine.spec.block_tokens)
            report.daemon.nvme_block_hits += min(lease.n_nvme, n_hit)
        for part in engine.parts:
            for first, end in engine.runs(part, n_hit, len(keys)):
                blocks = {group: (first, self._blocks(group, keys[first:end])) for group in part.groups}
                done = self._namespace.put(
                    request.tokens[: len(keys) * engine.spec.block_tokens], blocks, policy_time_s=request.timestamp_s
                )
                report.skipped_blocks += done.n_skipped
        if report.options.nvme_percent is not None:
            self._not_durable.append(request.tokens)
            if len(self._not_durable) >= DURABLE_EVERY:
                self.make_durable()

    def make_durable(self) -> None:
        """Wait for the disk: this stores faster than it writes."""
        for tokens in self._not_durable:
            self._namespace.persist(tokens, PERSIST_S_MAX)
        self._not_durable.clear()

    def _compare(self, lease: HybridLease, keys: NDArray[np.uint64]) -> None:
        """Every byte of every group that the lease holds of whole blocks."""
        for group, payload in enumerate(self._payloads):
            view = lease.group(group)
            n = min(len(view), max(lease.n_blocks - view.first_block, 0))
            if n == 0:
                continue
            masks = payload.masks(keys[view.first_block : view.first_block + n])
            for i, mask in enumerate(masks):
                self._report.mismatches += not payload.matches(view.view(i), mask)
            self._report.bytes_read += n * view.block_bytes

    def _blocks(self, group: int, keys: NDArray[np.uint64]) -> NDArray[np.uint8]:
        payload = self._payloads[group]
        blocks = np.empty((len(keys), payload.block_bytes), np.uint8)
        payload.fill(keys, blocks)
        return blocks
