"""One of many clients, in a process of its own: rounds of match, lease and release, or of bare echoes of their size."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.bench.crowd_echo import EchoCaller
from kvstore.bench.measure import leave_interrupts_to_parent
from kvstore.client import Client, NamespaceHandle
from kvstore.errors import KVStoreError
from kvstore.types import KVSpec, Namespace

BLOCK_TOKENS = 16
SLOT_BYTES, REGION_BYTES = 4096, 64 << 20
TIMEOUT_S = 60.0
CALLS = ("match", "lease", "release")
MESSAGE_BYTES, BLOCK_BYTES_IN_REPLY = 64, 16
"""About what a message has besides tokens, and a lease says of each block: its slot and its generation."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """``n`` prompts of ``n_blocks`` blocks, no block of which is in another one."""

    n: int
    n_blocks: int
    block_bytes: int
    seed: int = 0

    @property
    def n_in_region(self) -> int:
        """So many at least lie beside each other in one region of memory, if they were stored in order."""
        return max(1, REGION_BYTES // SLOT_BYTES // self.n_blocks // 2)

    @property
    def namespace(self) -> Namespace:
        """Where they are."""
        return Namespace(f"bench:clients:{self.seed}", KVSpec.opaque(BLOCK_TOKENS, self.block_bytes))

    def tokens(self) -> Callable[[int], NDArray[np.uint32]]:
        """From the number of a prompt to its tokens."""
        common = np.random.default_rng(self.seed).integers(0, 1 << 32, self.n_blocks * BLOCK_TOKENS, dtype=np.uint32)
        return lambda i: common ^ np.uint32(i * 2_654_435_761 & 0xFFFF_FFFF)  # odd: another number for each i


@dataclass(frozen=True, slots=True)
class Phase:
    """What all clients do at the same time: the daemon at ``address``, or else the echo server there."""

    address: str
    is_echo: bool
    seconds: float


@dataclass(frozen=True, slots=True)
class Rounds:
    """What one client did: when each round ended (by ``time.monotonic``), and seconds of each call, [rounds, 3]."""

    ends_s: NDArray[np.float64]
    seconds: NDArray[np.float64]
    n_lost: int
    processor_s: float


def work(phases: list[Phase], prompts: Prompts, number: int, together: Any, start_s: Any, results: Any) -> None:
    """The process: its part of every phase. All begin at ``start_s``, which is set once all are ready."""
    leave_interrupts_to_parent()
    try:
        for phase in phases:
            caller = _Echo(phase.address, prompts) if phase.is_echo else _Caller(phase.address, prompts, number)
            together.wait(TIMEOUT_S)  # all are ready
            together.wait(TIMEOUT_S)  # the beginning is agreed upon
            results.put(_rounds(caller, start_s.value, start_s.value + phase.seconds))
            together.wait(TIMEOUT_S + phase.seconds)
            caller.close()
    except Exception as error:
        together.abort()
        results.put(repr(error))


def _rounds(caller: _Caller | _Echo, start_s: float, end_s: float) -> Rounds:
    ends_s: list[float] = []
    seconds: list[tuple[float, ...]] = []
    clock, monotonic = time.perf_counter, time.monotonic
    time.sleep(max(start_s - monotonic(), 0.0))
    before = os.times()
    while monotonic() < end_s:
        caller.choose()
        marks = [clock()]
        for call in caller.calls:
            call()
            marks.append(clock())
        seconds.append(tuple(end - start for start, end in itertools.pairwise(marks)))
        ends_s.append(monotonic())
    after = os.times()
    processor_s = after.user + after.system - before.user - before.system
    return Rounds(np.array(ends_s), np.array(seconds).reshape(-1, len(CALLS)), caller.n_lost, processor_s)


class _Caller:
    """A client of the daemon."""

    def __init__(self, address: str, prompts: Prompts, number: int) -> None:
        self._client = Client(address, timeout_s=TIMEOUT_S, name=f"bench client {number}")
        self._namespace: NamespaceHandle = self._client.open(prompts.namespace)
        self._prompts, self._tokens_of = prompts, prompts.tokens()
        self._rng = np.random.default_rng([prompts.seed, number])
        self.n_lost = 0
        self.calls = (self._match, self._lease, self._release)
        for i in range(0, prompts.n, prompts.n_in_region):  # memory is mapped with the first lease in a region of it
            self._namespace.lease(self._tokens_of(i)).release()

    def choose(self) -> None:
        self._tokens = self._tokens_of(int(self._rng.integers(self._prompts.n)))

    def _match(self) -> None:
        self.n_lost += self._namespace.match(self._tokens).n_blocks != self._prompts.n_blocks

    def _lease(self) -> None:
        self._held = self._namespace.lease(self._tokens)
        self.n_lost += len(self._held) != self._prompts.n_blocks

    def _release(self) -> None:
        self._held.release()

    def close(self) -> None:
        self._client.close()


class _Echo:
    """A client of the echo server, whose messages are as long as the daemon's."""

    n_lost = 0

    def __init__(self, address: str, prompts: Prompts) -> None:
        self._caller = caller = EchoCaller(address)
        n_request = MESSAGE_BYTES + prompts.n_blocks * BLOCK_TOKENS * 4
        n_leased = MESSAGE_BYTES + prompts.n_blocks * BLOCK_BYTES_IN_REPLY
        self.calls = (
            lambda: caller.call(n_request, MESSAGE_BYTES),
            lambda: caller.call(n_request, n_leased),
            lambda: caller.call(MESSAGE_BYTES, 0),
        )

    def choose(self) -> None:
        """Nothing to choose."""

    def close(self) -> None:
        self._caller.close()


def fill(address: str, prompts: Prompts, step: Callable[[int], None]) -> None:
    """Store all prompts; ``step`` is told how many blocks are there. Raises KVStoreError if there is no room."""
    blocks = np.random.default_rng(prompts.seed).integers(0, 256, (prompts.n_blocks, prompts.block_bytes), np.uint8)
    tokens_of = prompts.tokens()
    with Client(address, timeout_s=TIMEOUT_S, name="bench fill") as client:
        namespace = client.open(prompts.namespace)
        for i in range(prompts.n):
            put = namespace.put(tokens_of(i), blocks)
            if put.n_stored != prompts.n_blocks:
                raise KVStoreError(f"{put.n_skipped} of {prompts.n_blocks} blocks were not stored: {put.reason}")
            step((i + 1) * prompts.n_blocks)
