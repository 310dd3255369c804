"""Reader for request traces in the Mooncake format, one JSON object a line.

Fields: ``timestamp``, ``input_length`` and ``output_length`` (tokens), ``hash_ids`` (one per block of the
prompt). Alibaba's traces add ``chat_id``, ``parent_chat_id``, ``type`` and ``turn``; they are kept. What
``kvstore record`` writes is as Alibaba's, and says in ``block_tokens`` how many a block has; its ids are chained. Other
fields are ignored. Two things differ between the two sources and are found out here: Mooncake counts
milliseconds in blocks of 512 tokens, with ids that stand for a whole prefix ("chained"); Alibaba counts
seconds in blocks of 16 tokens, with an id for the content of one block alone.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any

import aiofiles
import numpy as np
from numpy.typing import NDArray

from kvstore.errors import TraceError
from kvstore.types import MAX_BLOCK_TOKENS

MAX_LINE_BYTES = 64 << 20
_CHUNK_BYTES = 1 << 20
_MAX_TOKENS = 1 << 31
_MAX_ID = (1 << 63) - 1
_COMMON_BLOCK_TOKENS = (512, 16, *(1 << k for k in range(17)))


class TimeUnit(StrEnum):
    """What ``timestamp`` counts. AUTO: seconds if the first request has a ``chat_id``, else milliseconds."""

    AUTO = "auto"
    SECONDS = "s"
    MILLISECONDS = "ms"


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request, without its ids (those lie packed in the trace). ``timestamp_s`` is in seconds."""

    timestamp_s: float
    input_length: int
    output_length: int
    chat_id: int | str | None = None
    parent_chat_id: int | str | None = None
    type: str | None = None
    turn: int | None = None


@dataclass(frozen=True, eq=False)
class Trace:
    """A whole trace: requests in file order and their ids packed.

    ``offsets`` int64 [n + 1] and ``hash_ids`` uint64 [block_accesses]: the ids of request i are
    ``hash_ids[offsets[i]:offsets[i + 1]]``. ``given_path_ids`` are the ``path_ids`` of the whole trace, for a
    part of it.
    """

    name: str
    requests: tuple[TraceRequest, ...]
    offsets: NDArray[np.int64]
    hash_ids: NDArray[np.uint64]
    block_tokens: int
    given_path_ids: NDArray[np.uint64] | None = None

    @property
    def n_requests(self) -> int:
        """How many requests there are."""
        return len(self.requests)

    @property
    def block_accesses(self) -> int:
        """How many ids all requests have together."""
        return len(self.hash_ids)

    @cached_property
    def input_lengths(self) -> NDArray[np.int64]:
        """Prompt lengths in tokens, int64 [n]."""
        return np.array([r.input_length for r in self.requests], dtype=np.int64)

    def ids(self, index: int) -> NDArray[np.uint64]:
        """The ids of one request: a view."""
        return self.hash_ids[self.offsets[index] : self.offsets[index + 1]]

    @cached_property
    def chained(self) -> bool:
        """Whether every id is always found behind the same id, so that it names a whole prefix."""
        if not self.block_accesses:
            return True
        parents = self._parents()
        order = np.lexsort((parents, self.hash_ids))
        same_id = self.hash_ids[order][1:] == self.hash_ids[order][:-1]
        return not bool(np.any(same_id & (parents[order][1:] != parents[order][:-1])))

    @cached_property
    def path_ids(self) -> NDArray[np.uint64]:
        """An id per block that stands for the whole prefix: ``hash_ids`` themselves if they are chained."""
        if self.given_path_ids is not None:
            return self.given_path_ids
        if self.chained:
            return self.hash_ids
        known: dict[tuple[int, int], int] = {}
        out = np.empty(self.block_accesses, dtype=np.uint64)
        for index in range(self.n_requests):
            start, parent = int(self.offsets[index]), -1
            for at, row in enumerate(self.ids(index).tolist(), start):
                parent = known.setdefault((parent, row), len(known))
                out[at] = parent
        return out

    @cached_property
    def unique_blocks(self) -> int:
        """How many different blocks (prefixes) the trace names: the room an unlimited cache would take."""
        return len(np.unique(self.path_ids))

    @cached_property
    def ideal_block_hit_ratio(self) -> float:
        """Block hits over block accesses with unlimited room."""
        return (self.block_accesses - self.unique_blocks) / self.block_accesses if self.block_accesses else 0.0

    @cached_property
    def ideal_token_hit_ratio(self) -> float:
        """Hit tokens over prompt tokens with unlimited room; a prompt's last id covers what is left of it."""
        total = int(self.input_lengths.sum())
        return self._ideal_hit_tokens() / total if total else 0.0

    def _ideal_hit_tokens(self) -> int:
        first = np.zeros(self.block_accesses, dtype=bool)
        first[np.unique(self.path_ids, return_index=True)[1]] = True
        owners = np.repeat(np.arange(self.n_requests), np.diff(self.offsets))
        hits = np.bincount(owners[~first], minlength=self.n_requests)
        return int(np.minimum(hits * self.block_tokens, self.input_lengths).sum())

    def _parents(self) -> NDArray[np.int64]:
        """The id before each id within its request; -1 at a start."""
        parents = np.empty(self.block_accesses, dtype=np.int64)
        parents[1:] = self.hash_ids[:-1].astype(np.int64)
        starts = self.offsets[:-1]
        parents[starts[starts < self.block_accesses]] = -1
        return parents


def load_trace(
    path: str | Path,
    limit: int | None = None,
    block_tokens: int | None = None,
    time_unit: TimeUnit = TimeUnit.AUTO,
) -> Trace:
    """``read_trace`` for callers without an event loop; blocks until the file is read."""
    return asyncio.run(read_trace(path, limit, block_tokens, time_unit))


async def read_trace(
    path: str | Path,
    limit: int | None = None,
    block_tokens: int | None = None,
    time_unit: TimeUnit = TimeUnit.AUTO,
) -> Trace:
    """Read the first ``limit`` requests (all by default); ``block_tokens`` is inferred when not given.

    Raises TraceError that names file, line, field and value.
    """
    if limit is not None and limit < 1:
        raise TraceError(f"limit is {limit}; it must be at least 1, or left out for the whole trace")
    if block_tokens is not None and not 1 <= block_tokens <= MAX_BLOCK_TOKENS:
        raise TraceError(f"block_tokens is {block_tokens}; it must be in 1..{MAX_BLOCK_TOKENS}")
    reader = _Reader(str(path), time_unit)
    try:
        await reader.read(limit)
    except OSError as error:
        raise TraceError(f"{path}: can't be read: {error.strerror or error}; check the path") from error
    return reader.finish(block_tokens)


class _Reader:
    """Collects checked requests of one file."""

    def __init__(self, path: str, time_unit: TimeUnit) -> None:
        self._path = path
        self._time_unit = time_unit
        self._requests: list[TraceRequest] = []
        self._ids: list[NDArray[np.uint64]] = []
        self._lines: list[int] = []
        self._block_tokens: int | None = None

    async def read(self, limit: int | None) -> None:
        number = 0
        async for raw in self._raw_lines():
            number += 1
            if not raw.strip():
                continue
            self._add(number, raw)
            if limit is not None and len(self._requests) >= limit:
                return

    async def _raw_lines(self) -> AsyncIterator[bytes]:
        """Lines cut from large chunks: a thread hop per chunk instead of one per line."""
        rest, number = b"", 0
        async with aiofiles.open(self._path, "rb") as file:
            while chunk := await file.read(_CHUNK_BYTES):
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    number += 1
                    yield line
                if len(rest) > MAX_LINE_BYTES:
                    raise self._error(number + 1, "line", f"longer than {MAX_LINE_BYTES} bytes")
        yield rest

    def _add(self, line: int, raw: bytes) -> None:
        record = self._parse(line, raw)
        seconds = self._number(line, record, "timestamp")
        if self._time_unit is TimeUnit.AUTO:
            self._time_unit = TimeUnit.SECONDS if "chat_id" in record else TimeUnit.MILLISECONDS
        if self._time_unit is TimeUnit.MILLISECONDS:
            seconds /= 1000
        if not self._requests and record.get("block_tokens") is not None:
            self._block_tokens = self._size(line, record)
        ids = self._id_array(line, record)
        input_length = self._count(line, record, "input_length")
        if (input_length > 0) != (len(ids) > 0):
            raise self._error(line, "hash_ids", f"{len(ids)} ids for an input_length of {input_length}")
        request = TraceRequest(
            timestamp_s=seconds,
            input_length=input_length,
            output_length=self._count(line, record, "output_length"),
            chat_id=self._label(line, record, "chat_id"),
            parent_chat_id=self._label(line, record, "parent_chat_id"),
            type=self._text(line, record, "type"),
            turn=None if record.get("turn") is None else self._count(line, record, "turn"),
        )
        self._requests.append(request)
        self._ids.append(ids)
        self._lines.append(line)

    def finish(self, block_tokens: int | None) -> Trace:
        """The packed trace; raises TraceError if there is none or block size and lengths don't fit."""
        if not self._requests:
            raise TraceError(f"{self._path}: no requests in it; a trace has one JSON object a line")
        counts = np.array([len(ids) for ids in self._ids], dtype=np.int64)
        lengths = np.array([r.input_length for r in self._requests], dtype=np.int64)
        block_tokens = block_tokens or self._block_tokens or self._infer_block_tokens(lengths, counts)
        self._check_counts(lengths, counts, block_tokens)
        offsets = np.zeros(len(counts) + 1, dtype=np.int64)
        np.cumsum(counts, out=offsets[1:])
        name = Path(self._path).name
        return Trace(name, tuple(self._requests), offsets, np.concatenate(self._ids), block_tokens)

    def _infer_block_tokens(self, lengths: NDArray[np.int64], counts: NDArray[np.int64]) -> int:
        """The size that explains most requests; common sizes first, since short traces fit many."""
        some = counts > 0
        lengths, counts = lengths[some], counts[some]
        smallest = -(-lengths // np.maximum(counts, 1))
        common = _COMMON_BLOCK_TOKENS
        if self._requests[0].chat_id is not None:
            common = (16, *common)
        sizes = [*common, int(smallest.max(initial=1))]
        fits = [int(np.count_nonzero(-(-lengths // size) == counts)) for size in sizes]
        best = int(np.argmax(fits))
        if fits[best] * 2 < len(counts) or sizes[best] > MAX_BLOCK_TOKENS:
            raise TraceError(f"{self._path}: input_length and hash_ids fit no block size; give block_tokens")
        return sizes[best]

    def _check_counts(self, lengths: NDArray[np.int64], counts: NDArray[np.int64], block_tokens: int) -> None:
        """A prompt has an id for each whole block, and possibly one for what is left."""
        wrong = np.flatnonzero((counts < lengths // block_tokens) | (counts > -(-lengths // block_tokens)))
        if len(wrong):
            at = int(wrong[0])
            what = f"{counts[at]} ids for an input_length of {lengths[at]} in blocks of {block_tokens} tokens"
            raise self._error(self._lines[at], "hash_ids", what)

    def _parse(self, line: int, raw: bytes) -> Mapping[str, Any]:
        try:
            record = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise self._error(line, "line", f"{raw[:60]!r}, not JSON ({error})") from error
        if not isinstance(record, dict):
            raise self._error(line, "line", f"{record!r:.60}, not an object with fields")
        return record

    def _field(self, line: int, record: Mapping[str, Any], name: str) -> Any:
        if name not in record:
            raise self._error(line, name, "missing")
        return record[name]

    def _number(self, line: int, record: Mapping[str, Any], name: str) -> float:
        value = self._field(line, record, name)
        # The upper bound also keeps an integer too large for a float out.
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1 << 53:
            raise self._error(line, name, f"{value!r:.60}, not a number from 0 on")
        return float(value)

    def _count(self, line: int, record: Mapping[str, Any], name: str) -> int:
        value = self._field(line, record, name)
        if isinstance(value, float) and math.isfinite(value) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _MAX_TOKENS:
            raise self._error(line, name, f"{value!r:.60}, not a whole number in 0..{_MAX_TOKENS - 1}")
        return value

    def _size(self, line: int, record: Mapping[str, Any]) -> int:
        value = self._count(line, record, "block_tokens")
        if not 1 <= value <= MAX_BLOCK_TOKENS:
            raise self._error(line, "block_tokens", f"{value}, not in 1..{MAX_BLOCK_TOKENS}")
        return value

    def _id_array(self, line: int, record: Mapping[str, Any]) -> NDArray[np.uint64]:
        values = self._field(line, record, "hash_ids")
        if not isinstance(values, list):
            raise self._error(line, "hash_ids", f"{values!r:.60}, not a list")
        for value in values:
            if type(value) is not int or not 0 <= value <= _MAX_ID:
                raise self._error(line, "hash_ids", f"{value!r:.60} in it, not a whole number in 0..2^63-1")
        return np.array(values, dtype=np.uint64)

    def _label(self, line: int, record: Mapping[str, Any], name: str) -> int | str | None:
        value = record.get(name)
        if value is None or (isinstance(value, int | str) and not isinstance(value, bool)):
            return value
        raise self._error(line, name, f"{value!r:.60}, not a number or a text")

    def _text(self, line: int, record: Mapping[str, Any], name: str) -> str | None:
        value = record.get(name)
        if value is None or isinstance(value, str):
            return value
        raise self._error(line, name, f"{value!r:.60}, not a text")

    def _error(self, line: int, field: str, what: str) -> TraceError:
        return TraceError(f"{self._path}, line {line}: {field} is {what}")
