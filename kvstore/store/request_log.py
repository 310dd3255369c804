"""Requests as they are looked up, for whoever records traffic: when, how long, and the keys of their blocks.

Nothing is kept of a namespace whose requests nobody has asked for lately. Else each lookup adds one entry to a ring of
a bounded number of blocks; who falls behind is told how many requests were lost, and so are those too long to be kept.
A request that is looked up again because blocks were on their way counts once.

Keys of blocks that are not stored are computed a slice at a time, so that a long prompt keeps nobody waiting: see
``RequestLog.work``.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from secrets import token_bytes
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import BadInputError
from kvstore.prefix_index.block_table import At
from kvstore.prefix_index.index import PrefixIndex
from kvstore.prefix_index.rows import RowPath
from kvstore.store.namespaces import OpenNamespace
from kvstore.store.requests import Prompt

BLOCKS_MAX = 1 << 18
"""Blocks of requests that are kept for each namespace: 2 MiB of keys."""
REQUESTS_MAX = 1 << 14
REQUEST_BLOCKS_MAX = 1 << 14
"""Longer requests are lost. 2^30 tokens at most, as a block has 2^16 at most: fewer than traces can name."""
NAMESPACES_MAX = 16
"""Namespaces whose requests are kept at the same time, of which each tenant may have so many:"""
TENANT_NAMESPACES_MAX = 4
UNFINISHED_BYTES_MAX = 16 << 20
"""Memory of a namespace's requests whose keys are not computed yet; further ones are lost."""
SLICE_BLOCKS = 512
SLICE_BYTES = 256 << 10
"""Keys are computed for so many blocks, or of so many bytes of prompt, at a time: half a millisecond, or somewhat more
than one where extra keys cover every block."""
AGAIN_MAX = 1024
"""Requests of which it is known that they will be asked again."""
AGAIN_S = 10.0
"""So long that is expected."""
IDLE_S = 60.0
"""So long after the last question requests are kept."""

_REQUEST_BYTES = 4096
_BLOCK_BYTES = 512
"""About what an unfinished request takes by itself, and for each block, beside its prompt."""


class Looked(NamedTuple):
    """One request. ``keys``: uint64 [rows], the first half of each block's key. ``time_s``: Unix time as it was when
    the recording began, and monotonic from then on. ``session``: stands for the caller's session id, below one root, as
    long as the recording goes on; 0 without one."""

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
    """The ring of one namespace: numbers and requests. The last request that came, kept or lost, has ``last_seq``."""

    tenant: str
    first_seq: int
    asked_at_s: float
    unix_offset_s: float
    """Unix time at its beginning, less the clock's."""
    last_seq: int
    n_blocks: int = 0
    unfinished_bytes: int = 0
    ring: deque[tuple[int, Looked]] = field(default_factory=deque)
    secret: bytes = field(default_factory=lambda: token_bytes(16))
    again: OrderedDict[tuple[int, int], float] = field(default_factory=OrderedDict)
    """When a request was looked up that will be asked again, by session and last key."""

    def lose(self) -> None:
        """A request came that is not kept."""
        self.last_seq += 1

    def add(self, looked: Looked) -> None:
        self.last_seq += 1
        self.ring.append((self.last_seq, looked))
        self.n_blocks += len(looked.keys)
        while len(self.ring) > REQUESTS_MAX or self.n_blocks > BLOCKS_MAX:
            self.n_blocks -= len(self.ring.popleft()[1].keys)

    def is_known(self, this: tuple[int, int], now_s: float, *, asks_again: bool) -> bool:
        """Whether it is asked again what was noted already."""
        noted_s = self.again.pop(this, None)
        if asks_again:
            self.again[this] = now_s
            if len(self.again) > AGAIN_MAX:
                self.again.popitem(last=False)
        return noted_s is not None and now_s - noted_s <= AGAIN_S


@dataclass(slots=True)
class _Unfinished:
    """A request of which the keys of ``n_done`` blocks are there, the last of them ``parent``."""

    recording: _Recording
    looked: Looked
    session_id: int
    now_s: float
    asks_again: bool
    path: RowPath
    parent: bytes
    n_done: int
    n_bytes: int


class RequestLog:
    """Of one store. Called on its thread only."""

    def __init__(self, index: PrefixIndex, unix_s: Callable[[], float] = time.time) -> None:
        self._index = index
        self._unix_s = unix_s
        self._of: dict[int, _Recording] = {}
        """By number of the namespace."""
        self._next_first_seq = 1
        self._unfinished: deque[_Unfinished] = deque()

    @property
    def has_work(self) -> bool:
        """Whether ``work`` would do some."""
        return bool(self._unfinished)

    def watched(self, opened: OpenNamespace, now_s: float) -> None:
        """Somebody asks for the requests of a namespace: keep them from now on, for a while.

        Raises BadInputError if too many namespaces are recorded already, of the tenant or in all.
        """
        recording = self._of.get(opened.ordinal)
        if recording is not None:
            recording.asked_at_s = now_s
            return
        tenant = opened.namespace.tenant
        if Counter(each.tenant for each in self._of.values())[tenant] >= TENANT_NAMESPACES_MAX:
            raise BadInputError(
                f"requests of {TENANT_NAMESPACES_MAX} namespaces of tenant {tenant!r:.80} are recorded already: end "
                f"one, and wait {IDLE_S:.0f} s"
            )
        if len(self._of) >= NAMESPACES_MAX:
            raise BadInputError(
                f"requests of {NAMESPACES_MAX} namespaces are recorded already: end one, and wait {IDLE_S:.0f} s"
            )
        first = self._next_first_seq
        self._of[opened.ordinal] = _Recording(tenant, first, now_s, self._unix_s() - now_s, first - 1)

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

    def note(self, session_id: int, prompt: Prompt, ids: At, now_s: float, *, asks_again: bool) -> None:
        """A prompt was looked up, whose leading blocks ``ids`` are stored.

        ``asks_again``: blocks are on their way, so that the caller may ask for the same once more. Computes one slice
        of keys at most; of a long prompt the rest follows with ``work``.
        """
        recording = self._of.get(prompt.namespace.ordinal)
        path = prompt.path
        if recording is None or not path.n_rows:
            return
        n_bytes = path.data.nbytes + _REQUEST_BYTES + _BLOCK_BYTES * path.n_rows
        if path.n_rows > REQUEST_BLOCKS_MAX or recording.unfinished_bytes + n_bytes > UNFINISHED_BYTES_MAX:
            recording.lose()
            return
        recording.unfinished_bytes += n_bytes
        n = min(len(ids), path.n_full_rows)
        known = self._index.table.key[ids[:n]]
        keys = np.empty(path.n_rows, np.uint64)
        keys[:n] = _first_halves(known)
        use, hints = prompt.use(), prompt.hints
        session = hints.session_id if hints is not None else ""
        looked = Looked(
            recording.unix_offset_s + now_s, prompt.n_tokens, use.output_tokens,
            hints.request_type if hints is not None else "", hints.turn if hints is not None else 0,
            _digest(prompt.root_key + session.encode(), recording.secret) if session else 0, keys,
        )  # fmt: skip
        parent = known[-1].tobytes() if n else prompt.root_key
        self._unfinished.append(_Unfinished(recording, looked, session_id, now_s, asks_again, path, parent, n, n_bytes))
        if len(self._unfinished) == 1:
            self.work()

    def work(self) -> None:
        """Compute one slice of the keys that requests lack, oldest first."""
        left = SLICE_BLOCKS
        while self._unfinished and left > 0:
            first = self._unfinished[0]
            left -= max(self._go_on(first, left), 1)
            if first.n_done == first.path.n_rows:
                self._unfinished.popleft()
                self._finish(first)

    def after(self, namespace: int, seq: int, most_blocks: int, most: int = REQUESTS_MAX) -> Requests:
        """The ``most`` requests that follow number ``seq``, of about so many blocks at most, at least one.

        See ``watched``.
        """
        recording = self._of[namespace]
        gap = not recording.first_seq - 1 <= seq <= recording.last_seq
        if gap:
            seq = recording.first_seq - 1
        start = bisect_right(recording.ring, seq, key=lambda entry: entry[0])
        found: list[Looked] = []
        n_blocks, next_seq = 0, seq
        for number, looked in islice(recording.ring, start, start + most):
            n_blocks += len(looked.keys)
            if found and n_blocks > most_blocks:
                break
            found.append(looked)
            next_seq = number
        if start + len(found) == len(recording.ring):
            next_seq = recording.last_seq
        return Requests(found, next_seq, next_seq - seq - len(found), gap)

    def _go_on(self, request: _Unfinished, most: int) -> int:
        """Compute the next keys of a request, ``most`` of them at most; says what they count as."""
        path, first = request.path, request.n_done
        most_here = min(most, max(SLICE_BYTES // path.row_bytes * most // SLICE_BLOCKS, 1))
        end = min(first + most_here, path.n_rows)
        if end > first:
            keys = path.chain(request.parent, first, end)
            request.looked.keys[first:end] = _first_halves(keys)
            request.parent, request.n_done = keys[-1].tobytes(), end
        return max(end - first, (end - first) * path.row_bytes * SLICE_BLOCKS // SLICE_BYTES)

    @staticmethod
    def _finish(request: _Unfinished) -> None:
        recording = request.recording
        recording.unfinished_bytes -= request.n_bytes
        this = (request.session_id, int(request.looked.keys[-1]))
        if not recording.is_known(this, request.now_s, asks_again=request.asks_again):
            recording.add(request.looked)


def _first_halves(keys: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """uint64 [n] of uint8 [n, 16]."""
    halves: NDArray[np.uint64] = np.ascontiguousarray(keys).view(np.uint64)[:, 0]
    return halves


def _digest(data: bytes, secret: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8, key=secret).digest(), "little") | 1
