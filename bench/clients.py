"""Many clients at once on a warm index: match, lease and release, each in a process of its own.

Every client takes a random prompt, round after round; none waits for another one. Beside them, in the same run, as
many clients of a bare echo server whose messages are as long: one thread in Python, as the daemon has. On few cores
the clients, not the server, may be what is measured: the share of a core that either server used says so.
"""

from __future__ import annotations

import multiprocessing
import queue
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.bench.client_process import CALLS, SLOT_BYTES, Phase, Prompts, Rounds, fill, work
from kvstore.bench.crowd_echo import CrowdEcho
from kvstore.bench.measure import Latency
from kvstore.bench.policy_share import PolicyShare
from kvstore.bench.processes import ChildWatch, Memory, memory_of, processor_s
from kvstore.errors import BadInputError, UnavailableError

START_S = 300.0
HEADSTART_S = 0.3
"""Between the time that all clients are ready and their first calls, so that all have heard of it."""


@dataclass(frozen=True, slots=True)
class ClientsOptions:
    """``clients`` processes for ``seconds``; ``blocks`` in the index, ``prompt_blocks`` of them a prompt."""

    clients: int = 64
    blocks: int = 500_000
    seconds: float = 60.0
    prompt_blocks: int = 32
    block_bytes: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("clients", "blocks", "prompt_blocks", "block_bytes"):
            if getattr(self, name) < 1:
                raise BadInputError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not 0.1 <= self.seconds <= 3600:
            raise BadInputError(f"seconds is {self.seconds}; it must be from 0.1 to 3600")
        if self.block_bytes > SLOT_BYTES:
            raise BadInputError(f"block_bytes is {self.block_bytes}; the most here is {SLOT_BYTES}")
        if self.blocks < self.prompt_blocks:
            raise BadInputError(f"blocks is {self.blocks}; one prompt has {self.prompt_blocks}")

    @property
    def prompts(self) -> Prompts:
        """What is in the index."""
        return Prompts(self.blocks // self.prompt_blocks, self.prompt_blocks, self.block_bytes, self.seed)

    @property
    def dram_bytes(self) -> int:
        """What the daemon must have: a slot a block, and some to spare."""
        return max(self.blocks * SLOT_BYTES * 9 // 8, 64 << 20) + (64 << 20)

    @property
    def echo_s(self) -> float:
        """How long echoes are measured, half of it before the daemon and half after."""
        return min(self.seconds / 3, 20.0)


@dataclass(frozen=True, slots=True)
class CallTimes:
    """Of one kind of call."""

    latency: Latency
    max_us: float

    @classmethod
    def of(cls, seconds: NDArray[np.float64]) -> CallTimes:
        """Of times in seconds; zeros if there are none."""
        return cls(Latency.from_seconds(seconds), float(seconds.max(initial=0.0)) * 1e6)

    def to_dict(self) -> dict[str, float]:
        """JSON-able."""
        return {**self.latency.to_dict(), "max_us": self.max_us}


@dataclass(frozen=True, slots=True)
class Served:
    """What all clients got of one server. A round is a match, a lease and its release.

    ``fairness``: rounds of the client that made fewest, divided by those of the one that made most. ``gap_s_max``: the
    longest time in which any client finished no round. Shares are of one core.
    """

    n_rounds: int
    rounds_per_s: float
    by_call: dict[str, CallTimes]
    fairness: float
    gap_s_max: float
    n_lost: int
    server_share: float
    clients_share: float

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        plain = {name: getattr(self, name) for name in self.__slots__ if name != "by_call"}
        return {**plain, "by_call": {name: times.to_dict() for name, times in self.by_call.items()}}


@dataclass(frozen=True, slots=True)
class BesideChildren:
    """Matches that ended while a child of the daemon worked (a refit, say), and those that ended while none did."""

    n_spans: int
    busy_s: float
    busy: CallTimes
    idle: CallTimes

    @property
    def p99_ratio(self) -> float | None:
        """Busy to idle; None where one of them has no calls."""
        busy_us, idle_us = self.busy.latency.p99_us, self.idle.latency.p99_us
        return busy_us / idle_us if busy_us and idle_us else None

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "n_spans": self.n_spans, "busy_s": self.busy_s, "busy": self.busy.to_dict(), "idle": self.idle.to_dict(),
            "p99_ratio": self.p99_ratio,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class ClientsReport:
    """Memory is that of the daemon's process before and after the clients' time. ``policy_us_per_block``: time that its
    eviction policy worked meanwhile, over the blocks looked up to use them."""

    options: ClientsOptions
    fill_s: float
    daemon: Served
    echo: Served
    children: BesideChildren
    before: Memory
    after: Memory
    rounds_by_client: tuple[int, ...]
    timeline: tuple[tuple[float, float], ...]
    """Rounds a second, and p99 of a match in microseconds, in each of up to 60 equal parts of the time."""
    policy_us_per_block: float = 0.0

    @property
    def ratio(self) -> float:
        """Rounds a second, the daemon's to the echo server's."""
        return self.daemon.rounds_per_s / self.echo.rounds_per_s if self.echo.rounds_per_s else 0.0

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "mode": "clients", "options": asdict(self.options), "fill_s": self.fill_s, "ratio": self.ratio,
            "policy_us_per_block": self.policy_us_per_block,
            "daemon": self.daemon.to_dict(), "echo": self.echo.to_dict(), "children": self.children.to_dict(),
            "memory": {"before": asdict(self.before), "after": asdict(self.after)},
            "rounds_by_client": list(self.rounds_by_client), "timeline": [list(each) for each in self.timeline],
        }  # fmt: skip


def run(options: ClientsOptions, address: str, pid: int, step: Callable[[str], None] = lambda _: None) -> ClientsReport:
    """Fill the daemon at ``address`` (process ``pid``) and measure; blocks for some minutes.

    Raises UnavailableError if a client can't take part, KVStoreError if the daemon has too little room.
    """
    step(f"filling the index with {options.blocks:,} blocks")
    begun_s = time.perf_counter()
    fill(address, options.prompts, lambda _: None)
    fill_s = time.perf_counter() - begun_s
    with tempfile.TemporaryDirectory(prefix="kvstore-echo-") as folder:
        echo_path = Path(folder) / "echo.sock"
        half = Phase(str(echo_path), is_echo=True, seconds=options.echo_s / 2)
        phases = [half, Phase(address, is_echo=False, seconds=options.seconds), half]
        with CrowdEcho(echo_path) as echo, _Crowd(options, phases).running() as crowd:
            step(f"{options.clients} clients of a bare echo server")
            first = crowd.phase(echo.pid)
            step(f"{options.clients} clients of the daemon for {options.seconds:g} s")
            with ChildWatch(pid) as watch, PolicyShare(address) as policy:
                main = crowd.phase(pid)
            step(f"{options.clients} clients of a bare echo server again")
            second = crowd.phase(echo.pid)
    if main.before is None or main.after is None:
        raise UnavailableError("the daemon ended while it was measured")
    return ClientsReport(
        options, fill_s, main.served(), _together(first, second), main.beside(watch.spans_s), main.before, main.after,
        tuple(len(each.ends_s) for each in main.rounds), main.timeline(),
        policy.us_per_block,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Measured:
    """One phase of all clients."""

    rounds: list[Rounds]
    start_s: float
    seconds: float
    server_s: float
    before: Memory | None
    after: Memory | None

    @property
    def seconds_of(self) -> NDArray[np.float64]:
        """Of each call of all clients, [rounds, 3]."""
        return np.concatenate([each.seconds for each in self.rounds])

    @property
    def ends_s(self) -> NDArray[np.float64]:
        """When each round of all clients ended."""
        return np.concatenate([each.ends_s for each in self.rounds])

    def served(self) -> Served:
        counts = [len(each.ends_s) for each in self.rounds]
        seconds = self.seconds_of
        end_s = self.start_s + self.seconds
        gaps = [np.diff([self.start_s, *each.ends_s, max([end_s, *each.ends_s[-1:]])]).max() for each in self.rounds]
        return Served(
            sum(counts), sum(counts) / self.seconds,
            {name: CallTimes.of(seconds[:, i]) for i, name in enumerate(CALLS)},
            min(counts) / max(1, *counts), float(max(gaps)), sum(each.n_lost for each in self.rounds),
            self.server_s / self.seconds, sum(each.processor_s for each in self.rounds) / self.seconds,
        )  # fmt: skip

    def beside(self, spans_s: list[tuple[float, float]]) -> BesideChildren:
        ends_s, match_s = self.ends_s, self.seconds_of[:, 0]
        is_busy = np.zeros(len(ends_s), np.bool_)
        for start_s, end_s in spans_s:
            is_busy |= (ends_s >= start_s) & (ends_s <= end_s)
        busy_s = sum(end_s - start_s for start_s, end_s in spans_s)
        return BesideChildren(len(spans_s), busy_s, CallTimes.of(match_s[is_busy]), CallTimes.of(match_s[~is_busy]))

    def timeline(self) -> tuple[tuple[float, float], ...]:
        n = min(60, max(1, int(self.seconds)))
        part = ((self.ends_s - self.start_s) * n / self.seconds).astype(int).clip(0, n - 1)
        match_s = self.seconds_of[:, 0]
        times = [CallTimes.of(match_s[part == i]).latency for i in range(n)]
        return tuple((each.n * n / self.seconds, each.p99_us) for each in times)


def _together(first: _Measured, second: _Measured) -> Served:
    """Two phases of one server as one: their times, and the means of what is a share or a rate."""
    parts, seconds = (first.served(), second.served()), np.concatenate([first.seconds_of, second.seconds_of])

    def mean(name: str) -> float:
        return float(np.mean([getattr(part, name) for part in parts]))

    return Served(
        sum(part.n_rounds for part in parts), mean("rounds_per_s"),
        {name: CallTimes.of(seconds[:, i]) for i, name in enumerate(CALLS)},
        min(part.fairness for part in parts), max(part.gap_s_max for part in parts), 0,
        mean("server_share"), mean("clients_share"),
    )  # fmt: skip


class _Crowd:
    """The clients' processes, which go through the phases together."""

    def __init__(self, options: ClientsOptions, phases: list[Phase]) -> None:
        self._n = options.clients
        self._phases = iter(phases)
        # Forked from one process that has imported everything: so many imports would take minutes, and their memory.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["kvstore.bench.client_process"])
        self._results: Any = context.Queue()
        self._together: Any = context.Barrier(self._n + 1)
        self._start_s: Any = context.Value("d", 0.0)
        shared = (self._together, self._start_s, self._results)
        self._processes = [
            context.Process(target=work, args=(phases, options.prompts, i, *shared), daemon=True)
            for i in range(self._n)
        ]

    @contextmanager
    def running(self) -> Iterator[_Crowd]:
        """They run as long as the block."""
        try:
            for process in self._processes:
                process.start()
            yield self
        finally:
            for process in self._processes:
                if process.pid is not None:
                    process.kill()
                    process.join()

    def phase(self, server_pid: int) -> _Measured:
        """The next phase, from its beginning to its end."""
        phase = next(self._phases)
        self._meet(START_S)
        before, used_s = _memory(server_pid), processor_s(server_pid)
        start_s = self._start_s.value = time.monotonic() + HEADSTART_S
        self._meet(START_S)
        time.sleep(max(start_s + phase.seconds - time.monotonic(), 0.0))
        server_s, after = processor_s(server_pid) - used_s, _memory(server_pid)
        rounds = [self._result(START_S) for _ in self._processes]
        self._meet(START_S)
        return _Measured(rounds, start_s, phase.seconds, server_s, before, after)

    def _meet(self, timeout_s: float) -> None:
        try:
            self._together.wait(timeout_s)
        except threading.BrokenBarrierError:
            raise UnavailableError(f"the clients could not all take part: {self._why()}") from None

    def _result(self, timeout_s: float) -> Rounds:
        result = self._results.get(timeout=timeout_s)
        if isinstance(result, str):
            raise UnavailableError(f"a client failed: {result}")
        rounds: Rounds = result
        return rounds

    def _why(self) -> str:
        ended = [process.exitcode for process in self._processes if process.exitcode]
        try:
            while not isinstance(result := self._results.get(timeout=1.0), str):
                continue
        except queue.Empty:
            return f"some ended with exit codes {ended}" if ended else "some were not ready in time"
        return str(result)


def _memory(pid: int) -> Memory | None:
    try:
        return memory_of(pid)
    except OSError:
        return None
