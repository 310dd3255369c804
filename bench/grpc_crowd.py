"""Many clients of a gRPC server at the same time: no call may be lost, and how long each took."""

from __future__ import annotations

import multiprocessing
import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvstore.bench.measure import Latency, leave_interrupts_to_parent
from kvstore.client import Client
from kvstore.errors import UnavailableError
from kvstore.types import KVSpec, Namespace

BLOCK_BYTES = 16 << 10
BLOCK_TOKENS = 16
N_BLOCKS = 4
PROCESSES = 2
TIMEOUT_S = 60.0
START_S, WORK_S = 120.0, 600.0

CALLS = ("put", "match", "get_into")


@dataclass(frozen=True, slots=True)
class Crowd:
    """``n_lost`` counts calls that were not answered as they should have been; ``mismatches`` wrong bytes."""

    clients: int
    n_calls: int
    n_lost: int
    mismatches: int
    latency: dict[str, Latency]
    calls_per_s: float

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        plain = {name: getattr(self, name) for name in ("clients", "n_calls", "n_lost", "mismatches", "calls_per_s")}
        return {**plain, "latency": {name: latency.to_dict() for name, latency in self.latency.items()}}


def measure_crowd(address: str, clients: int, rounds: int, seed: int) -> Crowd:
    """``clients`` connected at once, in two processes; each puts, matches and reads a prompt ``rounds`` times.

    Blocks for some seconds. Raises UnavailableError if they can't all connect.
    """
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    together: Any = context.Barrier(PROCESSES)
    counts = [clients // PROCESSES + (i < clients % PROCESSES) for i in range(PROCESSES)]
    processes = [
        context.Process(target=_work, args=(address, n, rounds, seed + 10_000 * i, together, results), daemon=True)
        for i, n in enumerate(counts)
    ]
    for process in processes:
        process.start()
    try:
        parts = [results.get(timeout=START_S + WORK_S) for _ in processes]
    finally:
        for process in processes:
            process.kill()
            process.join()
    if failed := [part for part in parts if isinstance(part, str)]:
        raise UnavailableError(f"the clients could not all connect: {failed[0]}")
    seconds = {name: np.concatenate([part["seconds"][name] for part in parts]) for name in CALLS}
    n_calls = sum(len(each) for each in seconds.values())
    return Crowd(
        clients,
        n_calls,
        # A thread that died made fewer calls than it was to make.
        sum(part["n_lost"] for part in parts) + clients * rounds * len(CALLS) - n_calls,
        sum(part["mismatches"] for part in parts),
        {name: Latency.from_seconds(each) for name, each in seconds.items()},
        n_calls / max(part["wall_s"] for part in parts),
    )


class _Worker:
    """One client on a thread of its own."""

    def __init__(self, address: str, rounds: int, seed: int) -> None:
        self._client = Client(address, timeout_s=TIMEOUT_S)
        self._namespace = self._client.open(Namespace("crowd", KVSpec.opaque(BLOCK_TOKENS, BLOCK_BYTES)))
        self._rng = np.random.default_rng(seed)
        self._rounds = rounds
        self.seconds: dict[str, list[float]] = {name: [] for name in CALLS}
        self.n_lost = self.mismatches = 0

    def run(self) -> None:
        for _ in range(self._rounds):
            self._round()

    def _round(self) -> None:
        namespace = self._namespace
        tokens = self._rng.integers(0, 1 << 31, N_BLOCKS * BLOCK_TOKENS, dtype=np.uint32)
        blocks = self._rng.integers(0, 256, (N_BLOCKS, BLOCK_BYTES), dtype=np.uint8)
        out = np.zeros_like(blocks)
        self._timed("put", lambda: namespace.put(tokens, blocks).n_stored)
        self._timed("match", lambda: namespace.match(tokens).n_blocks)
        n_read = self._timed("get_into", lambda: namespace.get_into(tokens, out).n_blocks)
        self.mismatches += int((out[:n_read] != blocks[:n_read]).any())

    def _timed(self, name: str, call: Any) -> int:
        start = time.perf_counter()
        n_blocks = int(call())
        self.seconds[name].append(time.perf_counter() - start)
        self.n_lost += n_blocks != N_BLOCKS
        return n_blocks

    def close(self) -> None:
        self._client.close()


def _work(address: str, n: int, rounds: int, seed: int, together: Any, results: Any) -> None:
    leave_interrupts_to_parent()
    try:
        workers = [_Worker(address, rounds, seed + i) for i in range(n)]
        together.wait(START_S)
    except Exception as error:
        results.put(repr(error))
        return
    threads = [threading.Thread(target=worker.run) for worker in workers]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wall_s = time.perf_counter() - start
    together.wait(WORK_S)  # nobody leaves before all are done
    for worker in workers:
        worker.close()
    results.put(
        {
            "seconds": {name: np.concatenate([worker.seconds[name] for worker in workers]) for name in CALLS},
            "n_lost": sum(worker.n_lost for worker in workers),
            "mismatches": sum(worker.mismatches for worker in workers),
            "wall_s": wall_s,
        }
    )
