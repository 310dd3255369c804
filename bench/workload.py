"""What replay and simulation share: a trace of engine hashes, or one of prompts with token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.bench.generate import TokenTrace
from kvstore.bench.payload import Payload, prefix_keys
from kvstore.bench.trace import Trace
from kvstore.errors import BadInputError
from kvstore.hints import REQUEST_TYPE_CHARS_MAX, TURN_MAX, Hints
from kvstore.prefix_index.rows import RowPath
from kvstore.types import KVSpec, Namespace, RowKind

Workload = Trace | TokenTrace

HASH_BYTES = 8
"""Width of a trace's block id as an engine hash: unsigned 64 bits, little-endian."""

_PAGE_BYTES = 4096


def prompt(workload: Workload, index: int) -> NDArray[Any]:
    """What the client is asked with: uint32 tokens [n], or uint8 hashes [n, 8]."""
    if isinstance(workload, TokenTrace):
        return workload.requests[index].tokens
    return workload.ids(index).astype("<u8", copy=False).view(np.uint8).reshape(-1, HASH_BYTES)


def prompt_tokens(workload: Workload, index: int) -> int:
    """How many tokens the prompt has: of hashes the last one may stand for less than a whole block."""
    return workload.requests[index].input_length


def hints(workload: Workload, index: int, *, is_done: bool) -> Hints | None:
    """What a client says about the request: kind and turn where the trace has them; once it ``is_done`` its output."""
    request = workload.requests[index]
    request_type = getattr(request, "type", None) or ""
    said = Hints(
        request_type=request_type[:REQUEST_TYPE_CHARS_MAX],
        turn=min(request.turn or 0, TURN_MAX),
        output_tokens=request.output_length if is_done else 0,
    )
    return said if said.to_dict() else None


def row_path(workload: Workload, index: int) -> RowPath:
    """The prompt as the index takes it."""
    if isinstance(workload, TokenTrace):
        return RowPath.from_tokens(workload.requests[index].tokens, workload.block_tokens)
    return RowPath.from_hashes(prompt(workload, index), HASH_BYTES)


def n_blocks(workload: Workload, index: int) -> int:
    """Blocks of the prompt, a short last one included."""
    if isinstance(workload, TokenTrace):
        return -(-workload.requests[index].input_length // workload.block_tokens)
    return int(workload.offsets[index + 1] - workload.offsets[index])


def path_ids(workload: Workload, index: int) -> list[int]:
    """A number per block of the prompt that stands for the whole prefix up to it."""
    trace = workload.block_view if isinstance(workload, TokenTrace) else workload
    ids: list[int] = trace.path_ids[trace.offsets[index] : trace.offsets[index + 1]].tolist()
    return ids


def hit_tokens(workload: Workload, index: int, hit_blocks: int) -> int:
    """Tokens that the leading ``hit_blocks`` blocks cover; the last block covers what is left."""
    return min(hit_blocks * workload.block_tokens, workload.requests[index].input_length)


def whole_blocks(workload: Workload, index: int, tokens: int) -> int:
    """Leading blocks of the prompt of which every token is among the first ``tokens``."""
    if tokens >= workload.requests[index].input_length:
        return n_blocks(workload, index)
    return tokens // workload.block_tokens


def namespace(workload: Workload, block_bytes: int, model: str, tenant: str = "default") -> Namespace:
    """The namespace a replay uses."""
    spec = KVSpec.opaque(workload.block_tokens, block_bytes)
    if isinstance(workload, TokenTrace):
        return Namespace(model=model, spec=spec, tenant=tenant)
    return Namespace(model=model, spec=spec, tenant=tenant, row_kind=RowKind.HASHES, hash_bytes=HASH_BYTES)


def payload(workload: Workload, block_bytes: int, seed: int) -> Payload:
    """The maker of block bytes: a segment per token where there are tokens, else one per block."""
    segments = workload.block_tokens if isinstance(workload, TokenTrace) else 1
    return Payload(block_bytes, seed, segments)


def payload_keys(workload: Workload, index: int) -> NDArray[np.uint64]:
    """Keys for ``payload``: uint64 [n_blocks, segments]. Tokens that a short last block lacks have key 0."""
    if not isinstance(workload, TokenTrace):
        ids: NDArray[np.uint64] = workload.path_ids[workload.offsets[index] : workload.offsets[index + 1]]
        return ids.reshape(-1, 1)
    out = np.zeros((n_blocks(workload, index), workload.block_tokens), dtype=np.uint64)
    tokens = workload.requests[index].tokens
    out.reshape(-1)[: len(tokens)] = prefix_keys(tokens)
    return out


def capacity_blocks(unique_blocks: int, percent: float, name: str = "it") -> int:
    """That percentage of the unique blocks, rounded down, at least one. ``name``: what the percentage was given as."""
    if not 0 < percent <= 100:
        raise BadInputError(f"capacity percent is {percent!r}; {name} must be above 0 and at most 100")
    return max(1, int(unique_blocks * percent / 100))


def dram_capacity_bytes(blocks: int, block_bytes: int) -> int:
    """DRAM that holds ``blocks`` blocks: a slot is a block rounded up to whole pages of 4096 bytes."""
    if blocks < 1 or block_bytes < 1:
        raise BadInputError(f"{blocks} blocks of {block_bytes} bytes; both must be at least 1")
    return blocks * -(-block_bytes // _PAGE_BYTES) * _PAGE_BYTES


def take(workload: Workload, indices: Sequence[int]) -> Workload:
    """The chosen requests as a workload of its own, ids unchanged."""
    if isinstance(workload, TokenTrace):
        return TokenTrace(workload.name, tuple(workload.requests[i] for i in indices), workload.block_tokens)
    spans = [np.arange(workload.offsets[i], workload.offsets[i + 1]) for i in indices]
    where = np.concatenate(spans) if spans else np.empty(0, dtype=np.int64)
    offsets = np.zeros(len(spans) + 1, dtype=np.int64)
    np.cumsum([len(span) for span in spans], out=offsets[1:])
    return Trace(
        workload.name,
        tuple(workload.requests[i] for i in indices),
        offsets,
        workload.hash_ids[where],
        workload.block_tokens,
        workload.path_ids[where],
    )
