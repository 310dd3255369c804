"""Requests as they are looked up, for whoever records traffic: when, how long, and the keys of their blocks.

Nothing is kept of a namespace whose requests nobody has asked for lately. Else each lookup adds one entry to a ring of
a bounded number of blocks; who falls behind is told how many requests were lost. A request that is looked up again
because blocks were on their way counts once.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from secrets import token_bytes
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import BadInputError
from kvstore.prefix_index.block_table import At
from kvstore.prefix_index.index import PrefixIndex
from kvstore.store.requests import Prompt

BLOCKS_MAX = 1 << 18
"""Blocks of requests that are kept for each namespace: some 2 MiB of keys."""
REQUESTS_MAX = 1 << 14
NAMESPACES_MAX = 16
"""Namespaces whose requests are kept at the same time."""
AGAIN_MAX = 1024
"""Requests of which it is known that they will be asked again."""
IDLE_S = 60.0
"""So long after the last question requests are kept."""


class Looked(NamedTuple):
    """One request. ``keys``: uint64 [rows], the first half of each block's key. ``session``: stands for the caller's
    session id as long as the recording goes on; 0 without one."""

    time_s: float
    n_tokens: int
    n_output: int
    request_type: str
    turn: int
    session: int
    keys: NDArray[np.uint64]


class Requests(NamedTuple):
    """What follows a number. ``n_lost`` more came and were not kept; with ``gap`` others were not recorded at all."""

    requests: list[Looked]
    next_seq: int
    n_lost: int
    gap: bool


@dataclass(slots=True)
class _Recording:
    """The ring of one namespace; the last entry has number ``last_seq``."""

    first_seq: int
    asked_at_s: float
    last_seq: int = 0
    n_blocks: int = 0
    ring: deque[Looked] = field(default_factory=deque)
    secret: bytes = field(default_factory=lambda: token_bytes(16))
    again: OrderedDict[tuple[int, int], None] = field(default_factory=OrderedDict)

    def add(self, looked: Looked) -> None:
        self.ring.append(looked)
        self.last_seq += 1
        self.n_blocks += len(looked.keys)
        while len(self.ring) > REQUESTS_MAX or (self.n_blocks > BLOCKS_MAX and len(self.ring) > 1):
            self.n_blocks -= len(self.ring.popleft().keys)


class RequestLog:
    """Of one store. Called on its thread only."""

    def __init__(self, index: PrefixIndex, unix_s: Callable[[], float] = time.time) -> None:
        self._index = index
        self._unix_s = unix_s
        self._of: dict[int, _Recording] = {}
        """By number of the namespace."""
        self._next_first_seq = 1

    def watched(self, namespace: int, now_s: float) -> None:
        """Somebody asks for the requests of a namespace: keep them from now on, for a while.

        Raises BadInputError if too many namespaces are recorded already.
        """
        recording = self._of.get(namespace)
        if recording is not None:
            recording.asked_at_s = now_s
            return
        if len(self._of) >= NAMESPACES_MAX:
            raise BadInputError(
                f"requests of {NAMESPACES_MAX} namespaces are recorded already: end one, and wait {IDLE_S:.0f} s"
            )
        first = self._next_first_seq
        self._of[namespace] = _Recording(first, now_s, first - 1)

    def last_seq(self, namespace: int) -> int:
        """The number of the last request so far."""
        return self._of[namespace].last_seq

    def tick(self, now_s: float) -> None:
        """Forget recordings that nobody has asked for long enough."""
        for namespace, each in list(self._of.items()):
            if now_s - each.asked_at_s > IDLE_S:
                del self._of[namespace]
                # Numbers go on, so that whoever comes back is told that requests are missing.
                self._next_first_seq = max(self._next_first_seq, each.last_seq + 2)

    def note(self, session_id: int, prompt: Prompt, ids: At, *, asks_again: bool) -> None:
        """A prompt was looked up, whose leading blocks ``ids`` are stored; keys of the others are computed.

        ``asks_again``: blocks are on their way, so that the caller may ask for the same once more.
        """
        recording = self._of.get(prompt.namespace.ordinal)
        if recording is None or not prompt.path.n_rows:
            return
        keys = self._keys(prompt, ids)
        this = (session_id, int(keys[-1]))
        is_known = this in recording.again
        recording.again.pop(this, None)
        if asks_again:
            recording.again[this] = None
            if len(recording.again) > AGAIN_MAX:
                recording.again.popitem(last=False)
        if is_known:
            return
        use, hints = prompt.use(), prompt.hints
        session = hints.session_id if hints is not None else ""
        looked = Looked(
            self._unix_s(), prompt.n_tokens, use.output_tokens,
            hints.request_type if hints is not None else "", hints.turn if hints is not None else 0,
            _digest(session, recording.secret) if session else 0, keys,
        )  # fmt: skip
        recording.add(looked)

    def after(self, namespace: int, seq: int, most_blocks: int) -> Requests:
        """The requests that follow number ``seq``, of about so many blocks at most, at least one. See ``watched``."""
        recording = self._of[namespace]
        gap = not recording.first_seq - 1 <= seq <= recording.last_seq
        if gap:
            seq = recording.first_seq - 1
        oldest = recording.last_seq + 1 - len(recording.ring)
        n_lost = max(oldest - seq - 1, 0)
        seq += n_lost
        found: list[Looked] = []
        n_blocks = 0
        for i in range(seq + 1 - oldest, len(recording.ring)):
            looked = recording.ring[i]
            n_blocks += len(looked.keys)
            if found and n_blocks > most_blocks:
                break
            found.append(looked)
        return Requests(found, seq + len(found), n_lost, gap)

    def _keys(self, prompt: Prompt, ids: At) -> NDArray[np.uint64]:
        table, path = self._index.table, prompt.path
        n = min(len(ids), path.n_full_rows)
        known = table.key[ids[:n]]
        rest = path.chain(known[-1].tobytes() if n else prompt.root_key, n, path.n_rows)
        both = np.ascontiguousarray(np.concatenate((known, rest)))
        keys: NDArray[np.uint64] = both.view(np.uint64)[:, 0]
        return keys


def _digest(text: str, secret: bytes) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8, key=secret).digest(), "little") | 1
