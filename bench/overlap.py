"""What a routing hint costs and how true its times are: beside a match, and beside the loads that it foretells.

Prompts of several lengths lie on NVMe, some in DRAM, too. In random order each is asked for its overlap and then leased
and copied to ordinary memory. What was foretold is compared with what it took, for the first loads (``first``),
of which the daemon learns, and for those after them: all, those that had something to read from NVMe, and the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvstore.bench.measure import ordinary_array, paired
from kvstore.client import Client, NamespaceHandle
from kvstore.errors import BadInputError, IntegrityError
from kvstore.types import KVSpec, Namespace

BLOCK_TOKENS = 16
TIMEOUT_S = 30.0
MIB = 1 << 20
BATCH = 32
"""Prompts of one call in the figures of batches."""


@dataclass(frozen=True, slots=True)
class OverlapOptions:
    """``prompts`` prompts of up to ``blocks_max`` blocks, loaded ``loads`` times; calls are measured in ``pairs``."""

    pairs: int = 40
    calls: int = 50
    prompts: int = 48
    blocks_max: int = 64
    block_bytes: int = 256 << 10
    loads: int = 150
    learnt_after: int = 30
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("pairs", "calls", "prompts", "block_bytes", "learnt_after"):
            if getattr(self, name) < 1:
                raise BadInputError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.blocks_max < 2:
            raise BadInputError(f"blocks_max is {self.blocks_max}; it must be at least 2")
        if self.loads <= self.learnt_after:
            raise BadInputError(f"loads is {self.loads}; it must be more than learnt_after, {self.learnt_after}")

    @property
    def dram_bytes(self) -> int:
        """Room for a third of the prompts: the daemon must have so much."""
        return max(self.prompts * self.blocks_max * self.block_bytes // 6, 64 * MIB)

    @property
    def namespace(self) -> Namespace:
        """Where they are."""
        return Namespace(f"bench:overlap:{self.seed}", KVSpec.opaque(BLOCK_TOKENS, self.block_bytes))

    @property
    def n_blocks(self) -> int:
        """Of all prompts, at most."""
        return self.prompts * self.blocks_max


def run(options: OverlapOptions, socket_path: Path, step: Callable[[str], None] = lambda _: None) -> dict[str, float]:
    """Figures by name. Blocks for some seconds; the daemon needs an NVMe tier.

    Raises UnavailableError if no daemon is at ``socket_path``, IntegrityError for wrong bytes.
    """
    with Client(socket_path, timeout_s=TIMEOUT_S, name="bench overlap") as client:
        side = _Side(client, options)
        step(f"storing {options.prompts} prompts")
        side.store()
        step(f"{options.loads} loads beside what was foretold")
        figures = side.foretold()
        step("overlap beside match")
        return figures | side.costs()


class _Side:
    """The client, and its prompts."""

    def __init__(self, client: Client, options: OverlapOptions) -> None:
        self._options = options
        self._rng = np.random.default_rng(options.seed)
        self._cache: NamespaceHandle = client.open(options.namespace)
        sizes = np.geomspace(1, options.blocks_max, options.prompts).round().astype(int)
        self._prompts = [self._rng.integers(0, 1 << 32, n * BLOCK_TOKENS, dtype=np.uint32) for n in sizes.tolist()]
        words = self._rng.integers(0, 1 << 64, options.blocks_max * options.block_bytes // 8 + 1, dtype=np.uint64)
        self._bytes = words.view(np.uint8)[: options.blocks_max * options.block_bytes].reshape(options.blocks_max, -1)
        self._out = ordinary_array(self._bytes.nbytes).reshape(self._bytes.shape)

    def store(self) -> None:
        """Have all prompts on NVMe. Raises BadInputError if they don't fit."""
        for prompt in self._prompts:
            n = len(prompt) // BLOCK_TOKENS
            if self._cache.put(prompt, self._bytes[:n], durable_within_s=TIMEOUT_S).n_durable != n:
                raise BadInputError("not all blocks could be made durable: give the daemon a larger NVMe tier")

    def foretold(self) -> dict[str, float]:
        """Loads beside what was said of them."""
        rows = np.array([self._load(int(i)) for i in self._rng.integers(len(self._prompts), size=self._options.loads)])
        cold, late = rows[:, 2] > 0, np.arange(len(rows)) >= self._options.learnt_after
        figures = {"loads": float(len(rows)), "loads_from_nvme": float(cold.sum())}
        for name, chosen in (("nvme", late & cold), ("dram", late & ~cold), ("all", late), ("first", ~late)):
            if chosen.any():
                figures |= _accuracy(name, rows[chosen, 0], rows[chosen, 1])
        figures["error_told"] = float(np.median(rows[late, 3]))
        return figures

    def _load(self, i: int) -> tuple[float, float, int, float]:
        prompt = self._prompts[i]
        n = len(prompt) // BLOCK_TOKENS
        told = self._cache.overlap(prompt)
        room = self._out[:n]
        begun_s = time.perf_counter()
        got = self._cache.get_into(prompt, room, wait="wait")
        took_s = time.perf_counter() - begun_s
        if got.n_blocks != n or not np.array_equal(room, self._bytes[:n]):
            raise IntegrityError(f"{got.n_blocks} of {n} blocks were read, or other bytes: {got.reason}")
        room.fill(0)
        return told.load_s, took_s, told.n_nvme_tokens, told.load_error

    def costs(self) -> dict[str, float]:
        """A call, one of ``BATCH`` prompts by the prompt, and a match, of the longest prompt."""
        cache, prompt = self._cache, self._prompts[-1]
        batch = [prompt] * BATCH
        calls = {"overlap": lambda: cache.overlap(prompt), "overlap_in_batch": lambda: cache.overlaps(batch)}
        figures: dict[str, float] = {}
        for name, call in calls.items():
            n = BATCH if name.endswith("batch") else 1
            pairs = paired(
                self._options.pairs, lambda _: self._burst_s(call, n),  # noqa: B023 - called here
                lambda _: self._burst_s(lambda: cache.match(prompt)),
            )  # fmt: skip
            figures[f"{name}_us"], figures["match_us"] = (np.median(pairs, axis=0) * 1e6).tolist()
            figures[f"{name}_to_match"] = float(np.median(pairs[:, 0] / pairs[:, 1]))
        return figures

    def _burst_s(self, call: Callable[[], object], n_in_call: int = 1) -> float:
        times = []
        for _ in range(max(1, self._options.calls // n_in_call)):
            begun_s = time.perf_counter()
            call()
            times.append(time.perf_counter() - begun_s)
        return float(np.median(times)) / n_in_call


def _accuracy(name: str, told_s: NDArray[np.float64], took_s: NDArray[np.float64]) -> dict[str, float]:
    """Told / took: the median and the range of the middle 80 %; and the typical factor by which it was off."""
    ratios = told_s / took_s
    low, middle, high = np.percentile(ratios, [10, 50, 90])
    return {
        f"{name}_told_to_took_p10": float(low), f"{name}_told_to_took": float(middle),
        f"{name}_told_to_took_p90": float(high), f"{name}_off_by": float(np.exp(np.median(np.abs(np.log(ratios))))),
        f"{name}_took_ms": float(np.median(took_s)) * 1e3,
    }  # fmt: skip
