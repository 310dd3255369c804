"""What replay and simulation share: keys for payloads, capacities, parts of a workload."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.bench import workload as work
from kvstore.bench.generate import ConversationOptions, TokenTrace, generate_trace
from kvstore.bench.trace import Trace, TraceRequest
from kvstore.errors import BadInputError
from kvstore.types import RowKind


def content_trace() -> Trace:
    """Ids of contents: 2 stands for two different prefixes."""
    ids = np.array([1, 2, 3, 2, 1, 2], dtype=np.uint64)
    requests = tuple(TraceRequest(float(i), n, 1) for i, n in enumerate((33, 16, 32)))
    return Trace("content", requests, np.array([0, 3, 4, 6]), ids, 16)


@pytest.fixture(scope="module")
def tokens() -> TokenTrace:
    options = ConversationOptions(sessions=6, block_tokens=16, system_tokens=40, mean_question_tokens=30)
    return generate_trace(options)


def test_a_part_keeps_the_ids_that_the_whole_has() -> None:
    whole = content_trace()
    part = work.take(whole, [1, 2])
    assert isinstance(part, Trace)
    assert part.offsets.tolist() == [0, 1, 3]
    assert part.hash_ids.tolist() == [2, 1, 2]
    assert part.requests == whole.requests[1:]
    assert work.payload_keys(part, 1).tolist() == work.payload_keys(whole, 2).tolist()
    # The same content behind nothing and behind 1 is not the same block.
    assert work.payload_keys(part, 0)[0, 0] != work.payload_keys(part, 1)[1, 0]


def test_an_empty_part_has_no_requests(tokens: TokenTrace) -> None:
    for whole in (content_trace(), tokens):
        assert work.take(whole, []).n_requests == 0


def test_parts_of_all_clients_are_the_whole(tokens: TokenTrace) -> None:
    parts = [work.take(tokens, range(i, tokens.n_requests, 3)) for i in range(3)]
    dealt = [parts[i % 3].requests[i // 3] for i in range(tokens.n_requests)]
    assert dealt == list(tokens.requests)


def test_payload_keys_of_tokens_follow_the_prefix(tokens: TokenTrace) -> None:
    seen: dict[bytes, int] = {}
    for index, request in enumerate(tokens.requests):
        keys = work.payload_keys(tokens, index)
        assert keys.shape == (work.n_blocks(tokens, index), 16)
        flat = keys.reshape(-1)
        assert not flat[request.input_length :].any()
        for end in (1, 40, request.input_length):
            prefix = request.tokens[:end].tobytes()
            assert seen.setdefault(prefix, int(flat[end - 1])) == flat[end - 1]
    assert len(set(seen.values())) == len(seen)


def test_the_last_block_covers_what_is_left() -> None:
    trace = content_trace()
    assert [work.hit_tokens(trace, 0, n) for n in range(4)] == [0, 16, 32, 33]
    assert [work.whole_blocks(trace, 0, n) for n in (0, 15, 16, 32, 33)] == [0, 0, 1, 2, 3]


def test_namespaces_say_what_rows_are(tokens: TokenTrace) -> None:
    hashes = work.namespace(content_trace(), 64, "m")
    assert (hashes.row_kind, hashes.hash_bytes, hashes.spec.block_tokens) == (RowKind.HASHES, 8, 16)
    assert work.namespace(tokens, 64, "m").row_kind is RowKind.TOKENS
    assert work.prompt(content_trace(), 0).tolist()[1] == [2, 0, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("unique", "percent", "blocks"), [(182_790, 5, 9139), (182_790, 100, 182_790), (10, 1, 1), (7, 50, 3)]
)
def test_percent_of_unique_blocks_is_rounded_down(unique: int, percent: float, blocks: int) -> None:
    assert work.capacity_blocks(unique, percent) == blocks


def test_dram_is_counted_in_whole_pages() -> None:
    assert work.dram_capacity_bytes(10, 4096) == 40_960
    assert work.dram_capacity_bytes(10, 4097) == 81_920
    assert work.dram_capacity_bytes(3, 1) == 12_288
    with pytest.raises(BadInputError, match="0 blocks"):
        work.dram_capacity_bytes(0, 1)
