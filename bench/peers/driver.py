"""The process in which one system is measured: it speaks JSON lines with the harness.

A program of its own, run by the interpreter of the system's environment: it needs numpy, nothing of this package. All
systems, this store and the limits among them, are driven and timed by these very lines. One request a line on standard
input, one answer a line on standard output:

    {"do": "setup", ...}                 makes the system ready, or another one in its place; answers with its version
    {"do": "put" | "get" | "lookup"}     one batch of blocks; answers with seconds, and whether all was as it must be
    {"do": "end"}                        ends the system; another may be set up
    {"do": "close"}                      ends the process

A batch has a number. Those stored last are kept; ``get`` and ``lookup`` ask for the one that was stored longest ago.
What is not the operation itself (making keys and data, dropping what is too old, comparing bytes) is not timed.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
from numpy.typing import NDArray

BLOCK_TOKENS = 16
OPERATIONS = ("put", "get", "lookup")
_ARRAYS = 2
"""Source and target arrays, used in turn: an operation does not find in the cache what the one before left there."""

_LOOKUPS, _FIRST_LOOKUPS = 20, 3
"""A lookup is timed in a burst, behind some that wake everybody up."""

_ALIGNMENT_BYTES = 4096
_TEXT_MAX = 600

Blocks = NDArray[np.uint8]


@dataclass(frozen=True)
class Setup:
    """What a system is to be made ready for. ``kept`` batches of ``n_blocks`` blocks must find room in it."""

    block_bytes: int
    n_blocks: int
    kept: int
    folder: str
    """A directory of this system's own, on the disk that is measured."""
    options: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    @property
    def batch_bytes(self) -> int:
        """What one operation moves."""
        return self.n_blocks * self.block_bytes

    @property
    def kept_bytes(self) -> int:
        """What lies in the system at a time: the batches kept and the one that is being stored."""
        return (self.kept + 1) * self.batch_bytes


@dataclass(frozen=True)
class Batch:
    """Which blocks are meant: as tokens for a system that finds prompts, as ready-made keys for one that has keys."""

    number: int
    tokens: NDArray[np.uint32]
    keys: list[str]


class System(Protocol):
    """What a module in ``systems/`` makes with ``open_system(setup)``.

    It raises whatever says best why it can't; the harness shows it as the reason.
    """

    version: str

    def put(self, batch: Batch, blocks: Blocks) -> int:
        """Store uint8 [n, block_bytes]; returns how many blocks are stored then."""
        ...

    def get(self, batch: Batch, out: Blocks) -> int:
        """Bring the blocks into ``out``, uint8 [n, block_bytes], an ordinary array; returns how many came."""
        ...

    def lookup(self, batch: Batch) -> int:
        """How many of the blocks are stored."""
        ...

    def drop(self, batch: Batch) -> None:
        """Not timed: the batch will not be asked for again. Nothing to do for a system that evicts by itself."""
        ...

    def pids(self) -> list[int]:
        """Processes of the system besides this one, whose processor time counts."""
        ...

    def close(self) -> None:
        """End it and all its processes."""
        ...


def cpu_s(pids: list[int]) -> float:
    """Processor time (user and system) that these processes have taken so far, in seconds; gone ones count nothing."""
    total = 0.0
    for pid in pids:
        with contextlib.suppress(OSError):
            total += time.clock_gettime((~pid << 3) | 2)  # what clock_getcpuclockid(3) makes of a process id
    return total


class Bench:
    """One system with its arrays."""

    def __init__(self, system: System, setup: Setup) -> None:
        self._system = system
        self._setup = setup
        self._next = 0
        rng = np.random.default_rng([setup.seed, setup.block_bytes])
        words = -(-setup.batch_bytes // 8)
        # A system whose memory has to be registered makes the arrays itself, once.
        make: Callable[[], Blocks] = getattr(system, "array", self._array)
        self._sources = [make() for _ in range(_ARRAYS)]
        for each in self._sources:
            random = rng.integers(0, 1 << 64, words, dtype=np.uint64).view(np.uint8)
            each.reshape(-1)[:] = random[: setup.batch_bytes]
        self._targets = [make() for _ in range(_ARRAYS)]
        # The disk's limit has its own stopwatch and brings no bytes; all others are timed and compared here.
        self._clock: Callable[[], float] = getattr(system, "clock", time.perf_counter)
        self._compared: bool = getattr(system, "brings_bytes", True)

    def put(self) -> dict[str, Any]:
        """Store the next batch."""
        number, self._next = self._next, self._next + 1
        if number >= self._setup.kept:
            self._system.drop(self._batch(number - self._setup.kept))
        batch, blocks = self._batch(number), self._stamped(number)
        return self._timed(lambda: self._system.put(batch, blocks))

    def get(self) -> dict[str, Any]:
        """Read the oldest batch that is kept, and compare it."""
        number = self._oldest()
        batch, out = self._batch(number), self._targets[number % _ARRAYS]
        out[:, ::512] ^= 0xFF  # what an earlier read left here must not pass for this one's bytes
        figures = self._timed(lambda: self._system.get(batch, out))
        if self._compared:
            expected = self._stamped(number)
            figures["wrong"] = 0 if np.array_equal(out, expected) else int(np.any(out != expected, axis=1).sum())
        return figures

    def lookup(self) -> dict[str, Any]:
        """Ask for the oldest batch that is kept; times are per call."""
        batch = self._batch(self._oldest())
        for _ in range(_FIRST_LOOKUPS):
            self._system.lookup(batch)
        figures = self._timed(lambda: min(self._system.lookup(batch) for _ in range(_LOOKUPS)))
        return {name: value / _LOOKUPS for name, value in figures.items()}

    def _timed(self, operation: Callable[[], int]) -> dict[str, float]:
        pids = [os.getpid(), *self._system.pids()]
        cpu_before, before = cpu_s(pids), self._clock()
        n = operation()
        after, cpu_after = self._clock(), cpu_s(pids)
        if n != self._setup.n_blocks:
            raise RuntimeError(f"{n} of {self._setup.n_blocks} blocks")
        return {"seconds": after - before, "cpu_s": cpu_after - cpu_before}

    def _oldest(self) -> int:
        return max(0, self._next - self._setup.kept)

    def _batch(self, number: int) -> Batch:
        setup = self._setup
        rng = np.random.default_rng([setup.seed, setup.block_bytes, number])
        tokens = rng.integers(0, 1 << 31, setup.n_blocks * BLOCK_TOKENS, dtype=np.uint32)
        return Batch(number, tokens, [f"{setup.block_bytes}.{number}.{i:06}" for i in range(setup.n_blocks)])

    def _stamped(self, number: int) -> Blocks:
        """The blocks of that number: random bytes, with number and place in the first ones of each."""
        blocks = self._sources[number % _ARRAYS]
        places = np.arange(self._setup.n_blocks, dtype="<u8") | np.uint64(number << 32)
        blocks[:, :8] = places.view(np.uint8).reshape(-1, 8)
        return blocks

    def _array(self) -> Blocks:
        """An ordinary array with all of its pages present, page-aligned as engines have them."""
        n_bytes = self._setup.batch_bytes
        array = np.ones(n_bytes + _ALIGNMENT_BYTES, dtype=np.uint8)
        start = -array.ctypes.data % _ALIGNMENT_BYTES
        return array[start : start + n_bytes].reshape(self._setup.n_blocks, -1)


def serve(module: Path, requests: IO[str], answer: Callable[[dict[str, Any]], None]) -> None:
    """Until ``close``, or the end of the requests. A request that fails is answered with ``error`` and the reason."""
    system: System | None = None
    bench: Bench | None = None
    try:
        for line in requests:
            request = json.loads(line)
            what = request.pop("do")
            try:
                if what in ("setup", "end"):
                    bench = None
                    if system is not None:
                        was, system = system, None
                        was.close()
                if what == "end":
                    answer({"ended": True})
                elif what == "setup":
                    setup = Setup(**{each.name: request[each.name] for each in fields(Setup)})
                    system = runpy.run_path(str(module))["open_system"](setup)
                    bench = Bench(system, setup)
                    answer({"version": system.version})
                elif what == "close":
                    break
                elif bench is None or what not in OPERATIONS:
                    answer({"error": f"no such request now: {what!r}"})
                else:
                    answer(getattr(bench, what)())
            except Exception as error:
                traceback.print_exc()
                answer({"error": f"{what}: {type(error).__name__}: {error}"[:_TEXT_MAX]})
    finally:
        if system is not None:
            system.close()
    answer({"closed": True})


def main() -> None:
    """``driver.py MODULE``."""
    # Libraries print what they like: standard output is kept for answers, and what they say goes to standard error.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def answer(what: dict[str, Any]) -> None:
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    serve(Path(sys.argv[1]), sys.stdin, answer)


if __name__ == "__main__":
    main()
