"""A trace as runs of blocks: what a request uses, split by who used it before and by who uses it next.

Requests use prefixes, so that of the blocks of one prompt a later request takes the head: those whose last (or next)
use was in the same request stand next to each other. There are far fewer runs than blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore.bench.trace import Trace

NEVER = -1


@dataclass(frozen=True, slots=True)
class Runs:
    """Of all requests, in order, head first: run k of request i is ``k`` in ``firsts[i]..firsts[i + 1]``.

    ``requests`` int64: the request that used the run's blocks before (or uses them next), NEVER if none does;
    ``starts`` and ``ends`` int64: the run's blocks, counted from the prompt's head.
    """

    firsts: NDArray[np.int64]
    requests: NDArray[np.int64]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]


def runs_before(trace: Trace) -> Runs:
    """Who used each block before."""
    return _runs(trace, range(trace.n_requests))


def runs_after(trace: Trace) -> Runs:
    """Who uses each block next."""
    return _runs(trace, range(trace.n_requests - 1, -1, -1))


def _runs(trace: Trace, order: range) -> Runs:
    numbers = np.unique(trace.path_ids, return_inverse=True)[1].reshape(-1)
    user = np.full(int(numbers.max(initial=-1)) + 1, NEVER, np.int64)
    found: list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]] = []
    for request in order:
        at = numbers[trace.offsets[request] : trace.offsets[request + 1]]
        users = user[at]
        user[at] = request
        starts = np.flatnonzero(np.concatenate(([True], users[1:] != users[:-1]))) if len(at) else np.empty(0, np.int64)
        found.append((users[starts], starts, np.append(starts[1:], len(at)) if len(at) else starts))
    if order.step < 0:
        found.reverse()
    firsts = np.zeros(len(found) + 1, np.int64)
    np.cumsum([len(starts) for _, starts, _ in found], out=firsts[1:])
    requests, starts, ends = (np.concatenate([each[i] for each in found]) for i in range(3))
    return Runs(firsts, requests, starts, ends)
