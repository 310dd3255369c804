"""The index's own figures: what a match costs beside comparing the tokens once, and what a block weighs.

Every time is a ratio of two sides that alternate in one run; medians of at least 20 pairs. The numpy
compare is ``(a == b).all()`` over two arrays of 131,072 uint32 tokens. Memory is what tracemalloc sees
(Python objects and numpy arrays, growth slack included) less the bytes of the rows. With an NVMe tier, an
eviction is compared with one of an index that has none, and a reopened tier is measured by itself.
"""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from functools import partial
from statistics import median
from time import perf_counter_ns

import numpy as np
from numpy.typing import NDArray

from kvstore.prefix_index.index import PrefixIndex
from kvstore.prefix_index.policies import make_policy
from kvstore.prefix_index.policy import Use
from kvstore.prefix_index.rows import RowPath
from kvstore.types import KEY_BYTES

PROMPT_TOKENS = 131_072
_ROOT = b"index-speed-root"

Tokens = NDArray[np.uint32]


def run(
    pairs: int = 40,
    large_blocks: int = 1_000_000,
    memory_blocks: int = 50_000,
    children: int = 10_000,
    step: Callable[[str], None] = lambda _: None,
) -> dict[str, float]:
    """All figures by name; ``step`` is told what is measured next. Takes one to two minutes and about 0.7 GB."""
    figures: dict[str, float] = {"pairs": pairs, "prompt_tokens": PROMPT_TOKENS}
    for block_tokens in (16, 512):
        for edges in (16, 256):
            step(f"a match over {edges} edges, blocks of {block_tokens} tokens")
            _edges(figures, block_tokens, edges, pairs)
    step(f"trees of {large_blocks:,} and of 10,000 blocks")
    _size(figures, large_blocks, pairs)
    for block_tokens in (16, 512):
        step(f"{children:,} children under one node, blocks of {block_tokens} tokens")
        _children(figures, block_tokens, children, pairs)
    for block_tokens in (16, 512):
        step(f"memory, blocks of {block_tokens} tokens")
        _memory(figures, block_tokens, memory_blocks if block_tokens == 16 else memory_blocks // 10)
    step("eviction")
    _eviction(figures, min(large_blocks, 100_000))
    step("eviction from two tiers")
    _tier_eviction(figures, min(large_blocks, 50_000))
    step(f"an NVMe tier of {large_blocks:,} blocks reopened")
    _reopen(figures, large_blocks, pairs)
    return figures


def _tokens(seed: int, n: int = PROMPT_TOKENS) -> Tokens:
    return np.random.default_rng(seed).integers(0, 150_000, n, dtype=np.uint32)


def _insert(index: PrefixIndex, tokens: Tokens, block_tokens: int) -> None:
    path = RowPath.from_tokens(tokens, block_tokens)
    first = len(index.match(_ROOT, path).ids)
    index.insert(_ROOT, path, first, np.zeros(path.n_rows - first, np.int64), 1, Use())


def _split_index(prompt: Tokens, block_tokens: int, edges: int) -> PrefixIndex:
    """An index where ``prompt`` lies on exactly ``edges`` edges: another prompt leaves it at each cut."""
    index = PrefixIndex(make_policy("lru"))
    _insert(index, prompt, block_tokens)
    step = len(prompt) // edges
    for cut in range(step, len(prompt), step):
        other = prompt[: cut + block_tokens].copy()
        other[cut] ^= 1
        _insert(index, other, block_tokens)
    return index


def _alternate(left: Callable[[], object], right: Callable[[], object], pairs: int) -> tuple[float, float, float]:
    """(median ratio left / right, median left in us, median right in us), the two sides in turn."""
    times: list[tuple[int, int]] = []
    for _ in range(pairs + 3):
        start = perf_counter_ns()
        left()
        middle = perf_counter_ns()
        right()
        times.append((middle - start, perf_counter_ns() - middle))
    kept = times[3:]
    return (
        median(a / b for a, b in kept),
        median(a for a, _ in kept) / 1000,
        median(b for _, b in kept) / 1000,
    )


def _edges(figures: dict[str, float], block_tokens: int, edges: int, pairs: int) -> None:
    prompt = _tokens(1)
    index = _split_index(prompt, block_tokens, edges)
    asked, stored = prompt.copy(), prompt.copy()

    def match() -> object:
        return index.match(_ROOT, RowPath.from_tokens(asked, block_tokens))

    found = index.match(_ROOT, RowPath.from_tokens(asked, block_tokens))
    if found.n_tokens != len(prompt):
        raise RuntimeError(f"the probe matched {found.n_tokens} of {len(prompt)} tokens")
    name = f"edges_{edges}_block_{block_tokens}"
    ratio, match_us, compare_us = _alternate(match, lambda: bool((asked == stored).all()), pairs)
    figures[f"{name}_ratio"] = ratio
    figures[f"{name}_us"] = match_us
    figures[f"{name}_compare_us"] = compare_us


def _filled(prompt: Tokens, n_blocks: int) -> PrefixIndex:
    """The probe on 16 edges among ``n_blocks`` 16-token blocks: prompts of 64 blocks, half of each shared."""
    index = _split_index(prompt, 16, 16)
    rng = np.random.default_rng(2)
    shared = rng.integers(0, 150_000, 32 * 16, dtype=np.uint32)
    while index.n_blocks < n_blocks:
        own = rng.integers(0, 150_000, 32 * 16, dtype=np.uint32)
        if rng.random() < 0.1:
            shared = rng.integers(0, 150_000, 32 * 16, dtype=np.uint32)
        _insert(index, np.concatenate((shared, own)), 16)
    return index


def _size(figures: dict[str, float], large_blocks: int, pairs: int) -> None:
    prompt = _tokens(1)
    small, large = _filled(prompt, 10_000), _filled(prompt, large_blocks)
    path = RowPath.from_tokens(prompt.copy(), 16)
    ratio, large_us, small_us = _alternate(
        lambda: large.match(_ROOT, path), lambda: small.match(_ROOT, path), max(pairs, 100)
    )
    figures.update(size_large_blocks=large.n_blocks, size_small_blocks=small.n_blocks)
    figures.update(size_ratio=ratio, size_large_us=large_us, size_small_us=small_us)


def _bushy(block_tokens: int, children: int) -> tuple[PrefixIndex, Tokens]:
    """``children`` prompts that share 8 blocks and, of the next one, all tokens but the last."""
    index = PrefixIndex(make_policy("lru"))
    base = _tokens(3, 9 * block_tokens)
    for i in range(children):
        base[-1] = 1_000_000 + 2 * i
        _insert(index, base, block_tokens)
    return index, base


def _children(figures: dict[str, float], block_tokens: int, children: int, pairs: int) -> None:
    few, _ = _bushy(block_tokens, 2)
    many, probe = _bushy(block_tokens, children)
    probe[-1] = 1_000_001  # stored nowhere: both sides look for the nearest child
    path = RowPath.from_tokens(probe, block_tokens)
    ratio, many_us, few_us = _alternate(
        lambda: many.match(_ROOT, path), lambda: few.match(_ROOT, path), max(pairs, 200)
    )
    name = f"children_{children}_block_{block_tokens}"
    figures.update({f"{name}_ratio": ratio, f"{name}_us": many_us, f"{name}_few_us": few_us})


def _memory(figures: dict[str, float], block_tokens: int, n_blocks: int) -> None:
    """Bytes a block for three shapes, chat prompts, one leaf per block, every second block a fork; and of the first
    with an NVMe tier."""
    shapes: dict[str, Callable[[PrefixIndex, np.random.Generator], None]] = {
        "chat": lambda index, rng: _insert(index, rng.integers(0, 150_000, 64 * block_tokens, np.uint32), block_tokens),
        "flat": lambda index, rng: _insert(index, rng.integers(0, 150_000, block_tokens, np.uint32), block_tokens),
        "forks": lambda index, rng: _comb(index, rng, block_tokens),
    }
    sides = [(shape, add, False) for shape, add in shapes.items()] + [("nvme_chat", shapes["chat"], True)]
    for shape, add, nvme in sides:
        rng = np.random.default_rng(4)
        gc.collect()
        tracemalloc.start()
        index = PrefixIndex(make_policy("lru"), reserve_blocks=16, nvme=nvme)
        while index.n_blocks < n_blocks:
            add(index, rng)
        gc.collect()
        held_bytes = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        row_bytes = index.n_blocks * block_tokens * 4
        figures[f"bytes_per_block_{shape}_block_{block_tokens}"] = (held_bytes - row_bytes) / index.n_blocks
        del index


def _comb(index: PrefixIndex, rng: np.random.Generator, block_tokens: int) -> None:
    prompt = rng.integers(0, 150_000, 64 * block_tokens, np.uint32)
    _insert(index, prompt, block_tokens)
    for cut in range(block_tokens, len(prompt), block_tokens):
        other = prompt[: cut + block_tokens].copy()
        other[cut] ^= 1
        _insert(index, other, block_tokens)


def _eviction(figures: dict[str, float], n_blocks: int) -> None:
    index = PrefixIndex(make_policy("lru"))
    rng = np.random.default_rng(5)
    while index.n_blocks < n_blocks:
        _insert(index, rng.integers(0, 150_000, 64 * 16, np.uint32), 16)
    slices: list[int] = []
    while index.n_blocks:
        start = perf_counter_ns()
        index.evict(64)
        slices.append(perf_counter_ns() - start)
    figures["evict_64_p50_us"] = median(slices) / 1000
    figures["evict_64_max_us"] = max(slices) / 1000


def _persisted(index: PrefixIndex) -> PrefixIndex:
    """All blocks on NVMe too."""
    ids = index.chain_unpersisted(index.table.alive())
    index.add_nvme(ids, np.arange(len(ids)))
    return index


def _chats(n_blocks: int, *, nvme: bool) -> PrefixIndex:
    index = PrefixIndex(make_policy("lru"), nvme=nvme)
    rng = np.random.default_rng(5)
    while index.n_blocks < n_blocks:
        _insert(index, rng.integers(0, 150_000, 64 * 16, np.uint32), 16)
    return index


def _tier_eviction(figures: dict[str, float], n_blocks: int) -> None:
    """64 copies at a time out of DRAM and off NVMe, each beside an index without NVMe."""
    n_pairs = n_blocks // 64 - 3
    unwritten, written = _chats(n_blocks, nvme=True), _persisted(_chats(n_blocks, nvme=True))
    sides: dict[str, Callable[[], object]] = {
        "unwritten": lambda: unwritten.evict(64),
        "written": lambda: written.evict(64),
        "nvme": lambda: written.evict_nvme(64),
    }
    for name, evict in sides.items():
        alone = _chats(n_blocks, nvme=False)
        ratio, tier_us, _ = _alternate(evict, partial(alone.evict, 64), n_pairs)
        figures.update({f"evict_64_{name}_ratio": ratio, f"evict_64_{name}_us": tier_us})


def _reopen(figures: dict[str, float], n_blocks: int, pairs: int) -> None:
    """Blocks known by key only: chains of 64, and the prompt of 131,072 tokens in blocks of 16 among them."""
    path = RowPath.from_tokens(_tokens(1), 16)
    own = path.keys(_ROOT)
    others = np.random.default_rng(6).integers(0, 256, (n_blocks, KEY_BYTES), np.uint8)
    keys = np.concatenate((others, own))
    parents = np.concatenate((keys[:1], keys[:-1]))
    parents[: n_blocks + 1 : 64] = np.frombuffer(_ROOT, np.uint8)
    parents[n_blocks] = np.frombuffer(_ROOT, np.uint8)
    n = len(keys)
    facts = np.arange(n), np.full(n, 1, np.uint32), np.zeros(n, np.uint32)
    gc.collect()
    tracemalloc.start()
    index = PrefixIndex(make_policy("lru"), reserve_blocks=16, nvme=True)
    index.insert_cold(keys, parents, *facts, 0.0)
    figures["bytes_per_block_cold"] = tracemalloc.get_traced_memory()[0] / n
    tracemalloc.stop()
    rates: list[float] = []
    firsts: list[float] = []
    for _ in range(3):
        index = PrefixIndex(make_policy("lru"), reserve_blocks=16, nvme=True)
        start = perf_counter_ns()
        index.insert_cold(keys, parents, *facts, 0.0)
        middle = perf_counter_ns()
        found = index.match(_ROOT, path)
        firsts.append((perf_counter_ns() - middle) / 1000)
        rates.append(n / (middle - start) * 1e9)
        if len(found.ids) != len(own):
            raise RuntimeError(f"of {len(own)} cold blocks {len(found.ids)} were found")
    figures.update(reopen_blocks=n, reopen_blocks_per_s=median(rates), cold_match_first_us=median(firsts))
    miss = RowPath.from_tokens(_tokens(7, 64 * 16), 16)
    empty = PrefixIndex(make_policy("lru"))
    _, cold_us, plain_us = _alternate(lambda: index.match(_ROOT, miss), lambda: empty.match(_ROOT, miss), pairs)
    figures.update(cold_miss_us=cold_us, plain_miss_us=plain_us)
