"""Synthetic multi-turn conversations with token ids: for runs without a trace file and for partial matches.

Every conversation starts with the same system prompt. Each turn's prompt is the whole conversation so far
(system prompt, questions and answers) and a new question. Conversations arrive as a Poisson process; the
pause between two turns of one is exponential. Everything follows from the seed.
"""

from __future__ import annotations

import hashlib
import heapq
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from kvstore.bench.trace import Trace, TraceRequest
from kvstore.errors import BadInputError
from kvstore.types import MAX_BLOCK_TOKENS

_SYSTEM_STREAM = 0
_ARRIVAL_STREAM = 1
_SESSION_STREAM = 2


@dataclass(frozen=True, slots=True)
class ConversationOptions:
    """What to generate. Lengths in tokens; ``mean_*`` are means of geometric or exponential draws."""

    sessions: int = 100
    mean_turns: float = 4.0
    system_tokens: int = 880
    mean_question_tokens: float = 300.0
    mean_answer_tokens: float = 250.0
    block_tokens: int = 512
    sessions_per_s: float = 1.0
    mean_pause_s: float = 30.0
    vocabulary: int = 128_000
    seed: int = 0

    def __post_init__(self) -> None:
        limits: dict[str, tuple[float, float]] = {
            "sessions": (1, 10_000_000),
            "mean_turns": (1, 1000),
            "system_tokens": (0, 1 << 20),
            "mean_question_tokens": (1, 1 << 20),
            "mean_answer_tokens": (1, 1 << 20),
            "block_tokens": (1, MAX_BLOCK_TOKENS),
            "sessions_per_s": (1e-9, 1e9),
            "mean_pause_s": (0, 1e9),
            "vocabulary": (2, 1 << 32),
            "seed": (0, (1 << 63) - 1),
        }
        for option in fields(self):
            value, (least, most) = getattr(self, option.name), limits[option.name]
            if not least <= value <= most:
                raise BadInputError(f"{option.name} is {value!r}; it must be from {least:g} to {most:g}")


@dataclass(frozen=True, slots=True, eq=False)
class TokenRequest:
    """One request with its prompt: ``tokens`` is uint32 [input_length], read-only."""

    timestamp_s: float
    tokens: NDArray[np.uint32]
    output_length: int
    chat_id: int
    turn: int

    @property
    def input_length(self) -> int:
        """Length of the prompt in tokens."""
        return len(self.tokens)


@dataclass(frozen=True, eq=False)
class TokenTrace:
    """Requests with token ids, in order of time."""

    name: str
    requests: tuple[TokenRequest, ...]
    block_tokens: int

    @property
    def n_requests(self) -> int:
        """How many requests there are."""
        return len(self.requests)

    @cached_property
    def input_lengths(self) -> NDArray[np.int64]:
        """Prompt lengths in tokens, int64 [n]."""
        return np.array([r.input_length for r in self.requests], dtype=np.int64)

    @cached_property
    def block_view(self) -> Trace:
        """The same requests as chained block ids; a last, short block has an id of its own."""
        return to_trace(self.requests, self.block_tokens, self.name)

    @property
    def block_accesses(self) -> int:
        """How many blocks all prompts have together, short ones included."""
        return self.block_view.block_accesses

    @property
    def unique_blocks(self) -> int:
        """How many different blocks there are, short ones included."""
        return self.block_view.unique_blocks


def generate_trace(options: ConversationOptions, limit: int | None = None) -> TokenTrace:
    """The first ``limit`` requests of ``generate`` (all by default)."""
    requests = []
    for request in generate(options):
        requests.append(request)
        if limit is not None and len(requests) >= limit:
            break
    return TokenTrace(f"generated, seed {options.seed}", tuple(requests), options.block_tokens)


def generate(options: ConversationOptions) -> Iterator[TokenRequest]:
    """Requests in order of time. Keeps only the conversations that are under way."""
    system = _rng(options, _SYSTEM_STREAM).integers(options.vocabulary, size=options.system_tokens, dtype=np.uint32)
    arrivals = _rng(options, _ARRIVAL_STREAM)
    waiting: list[_Conversation] = []
    start_s = 0.0
    for chat_id in range(options.sessions):
        start_s += arrivals.exponential(1 / options.sessions_per_s)
        # Turns due before the next conversation starts can't be overtaken by anything any more.
        yield from _due(waiting, start_s)
        heapq.heappush(waiting, _Conversation(start_s, chat_id, options, system))
    yield from _due(waiting, float("inf"))


def to_trace(requests: Iterable[TokenRequest], block_tokens: int, name: str = "generated") -> Trace:
    """Chained ids in order of first appearance: equal ids mean the same tokens from the start on."""
    known: dict[bytes, int] = {}
    plain: list[TraceRequest] = []
    ids: list[int] = []
    offsets = [0]
    for request in requests:
        ids.extend(known.setdefault(key, len(known)) for key in _prefix_digests(request.tokens, block_tokens))
        offsets.append(len(ids))
        plain.append(
            TraceRequest(
                request.timestamp_s,
                request.input_length,
                request.output_length,
                chat_id=request.chat_id,
                turn=request.turn,
            )
        )
    return Trace(name, tuple(plain), np.array(offsets, dtype=np.int64), np.array(ids, dtype=np.uint64), block_tokens)


def to_json_lines(trace: Trace) -> Iterator[str]:
    """Lines of a trace file with Alibaba's fields (so timestamps in seconds), line ends included."""
    for index, request in enumerate(trace.requests):
        record = {
            "timestamp": request.timestamp_s,
            "input_length": request.input_length,
            "output_length": request.output_length,
            "hash_ids": trace.ids(index).tolist(),
            "chat_id": request.chat_id if request.chat_id is not None else index,
            "turn": request.turn or 0,
        }
        yield json.dumps(record) + "\n"


@dataclass(slots=True, order=True)
class _Conversation:
    """A conversation under way, ordered by when its next turn is due."""

    due_s: float
    chat_id: int
    options: ConversationOptions = field(compare=False)
    history: NDArray[np.uint32] = field(compare=False)
    turn: int = field(default=0, compare=False)
    turns: int = field(init=False, compare=False)
    rng: np.random.Generator = field(init=False, compare=False)

    def __post_init__(self) -> None:
        self.rng = _rng(self.options, _SESSION_STREAM, self.chat_id)
        self.turns = int(self.rng.geometric(1 / self.options.mean_turns))

    def take_turn(self) -> TokenRequest:
        """The request that is due; afterwards the next one is set up."""
        prompt = np.concatenate([self.history, self._draw(self.options.mean_question_tokens)])
        answer = self._draw(self.options.mean_answer_tokens)
        prompt.flags.writeable = False
        self.turn += 1
        request = TokenRequest(self.due_s, prompt, len(answer), self.chat_id, self.turn)
        self.history = np.concatenate([prompt, answer])
        self.due_s += float(self.rng.exponential(self.options.mean_pause_s))
        return request

    def _draw(self, mean_tokens: float) -> NDArray[np.uint32]:
        length = int(self.rng.geometric(1 / mean_tokens))
        return self.rng.integers(self.options.vocabulary, size=length, dtype=np.uint32)


def _due(waiting: list[_Conversation], until_s: float) -> Iterator[TokenRequest]:
    while waiting and waiting[0].due_s <= until_s:
        conversation = waiting[0]
        yield conversation.take_turn()
        if conversation.turn < conversation.turns:
            heapq.heapreplace(waiting, conversation)
        else:
            heapq.heappop(waiting)


def _prefix_digests(tokens: NDArray[np.uint32], block_tokens: int) -> Iterator[bytes]:
    """One digest per block, over all tokens up to its end."""
    running = hashlib.blake2b(digest_size=16)
    for start in range(0, len(tokens), block_tokens):
        running.update(np.ascontiguousarray(tokens[start : start + block_tokens], dtype="<u4").data)
        yield running.copy().digest()


def _rng(options: ConversationOptions, *stream: int) -> np.random.Generator:
    return np.random.default_rng([options.seed, *stream])
