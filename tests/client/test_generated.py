"""Generated tokens: what is stored of a request that says where its prompt ends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.client import Client
from kvstore.errors import BadInputError, ConfigError
from kvstore.types import KVSpec, Namespace, RowKind

BLOCK_BYTES, BLOCK_TOKENS = 4096, 16
SPACE = Namespace("model", KVSpec.opaque(BLOCK_TOKENS, BLOCK_BYTES))


def tokens_of(n_tokens: int, seed: int = 0) -> NDArray[np.uint32]:
    return np.random.default_rng(seed).integers(0, 50_000, n_tokens, dtype=np.uint32)


def blocks_of(n_blocks: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed + 1000).integers(0, 256, (n_blocks, BLOCK_BYTES), dtype=np.uint8)


@pytest.mark.parametrize(
    ("n_tokens", "n_prompt_tokens", "n_kept"),
    [
        (96, 0, 0),
        (96, 15, 0),
        (96, 16, 1),
        (96, 40, 2),  # the third block has 8 tokens of the prompt, and 8 that were generated
        (96, 96, 6),
        (96, 200, 6),
        (100, 96, 6),  # the short last block was generated
        (100, 99, 6),
        (100, 100, 7),  # all of the short last block is prompt
    ],
)
def test_with_store_prompt_no_block_with_a_generated_token_is_stored(
    client: Client, n_tokens: int, n_prompt_tokens: int, n_kept: int
) -> None:
    tokens = tokens_of(n_tokens)
    n_blocks = -(-n_tokens // BLOCK_TOKENS)
    handle = client.open(SPACE, store="prompt")
    result = handle.put(tokens, blocks_of(n_blocks), n_prompt_tokens=n_prompt_tokens)
    assert (result.n_stored, result.n_skipped) == (n_kept, n_blocks - n_kept)
    assert ("hold generated tokens" in result.reason) == (n_kept < n_blocks)
    assert handle.match(tokens).n_tokens == min(n_kept * BLOCK_TOKENS, n_tokens)
    assert client.stats().get("skipped_generated_blocks", 0) == n_blocks - n_kept
    if n_kept:
        n_whole = min(n_kept, n_tokens // BLOCK_TOKENS)
        out = np.zeros((n_whole, BLOCK_BYTES), np.uint8)
        assert handle.get_into(tokens, out).n_blocks == n_whole
        np.testing.assert_array_equal(out, blocks_of(n_blocks)[:n_whole])


def test_the_option_is_the_handles_and_says_nothing_of_puts_without_a_count(client: Client) -> None:
    tokens = tokens_of(64)
    everything, prompts = client.open(SPACE), client.open(SPACE, store="prompt")
    assert prompts.put(tokens, blocks_of(4)).n_stored == 4, "nobody said that anything was generated"
    other = tokens_of(64, seed=1)
    assert everything.put(other, blocks_of(4), n_prompt_tokens=20).n_stored == 4
    assert prompts.match(other).n_blocks == 4, "what others have stored is found"
    again = prompts.put(other, blocks_of(4), n_prompt_tokens=20)
    assert (again.n_present, again.n_skipped, again.reason) == (4, 0, "")


def test_a_continuation_and_a_reservation(client: Client) -> None:
    handle = client.open(SPACE, store="prompt")
    tokens = tokens_of(96)
    assert handle.put(tokens, blocks_of(2), n_prompt_tokens=50).n_stored == 2
    more = handle.put(tokens, blocks_of(4), first_block=2, n_prompt_tokens=50)
    assert (more.n_stored, more.n_skipped) == (1, 3)
    with handle.reserve(tokens, n_blocks=6, n_prompt_tokens=50) as reservation:
        assert (reservation.n_present, len(reservation), reservation.n_skipped) == (3, 0, 3)
        assert "3 blocks hold generated tokens" in reservation.reason


def test_blocks_of_engine_hashes_count_too(client: Client) -> None:
    space = Namespace("hashed", KVSpec.opaque(BLOCK_TOKENS, BLOCK_BYTES), row_kind=RowKind.HASHES, hash_bytes=16)
    hashes = np.random.default_rng(3).integers(0, 256, (5, 16), dtype=np.uint8)
    result = client.open(space, store="prompt").put(hashes, blocks_of(5), n_prompt_tokens=50)
    assert (result.n_stored, result.n_skipped) == (3, 2)


def test_the_daemon_may_overrule(serve: Any) -> None:
    with serve(generated_tokens="skip").connect() as client:
        handle = client.open(SPACE)
        tokens = tokens_of(64)
        result = handle.put(tokens, blocks_of(4), n_prompt_tokens=32)
        assert (result.n_stored, result.n_skipped) == (2, 2)
        assert "the daemon stores none" in result.reason
        assert handle.put(tokens, blocks_of(4)).n_stored == 2, "without a count nothing counts as generated"


def test_wrong_values_are_named(client: Client, config: Any) -> None:
    with pytest.raises(BadInputError, match="store is 'output'"):
        client.open(SPACE, store="output")  # type: ignore[arg-type]
    for wrong in (-1, 1.5, True, "3"):
        with pytest.raises(BadInputError, match="n_prompt_tokens is"):
            client.open(SPACE).put(tokens_of(16), blocks_of(1), n_prompt_tokens=wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="--generated-tokens is 'some'; known are store, skip"):
        type(config)(socket_path=config.socket_path, generated_tokens="some")
