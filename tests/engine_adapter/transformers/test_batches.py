"""Batches: the same prefix, different ones, padding, several answers, beams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import BatchEncoding

from kvstore.engine_adapter.transformers import KVStoreCache
from kvstore.errors import BadInputError
from tests.engine_adapter.transformers.models import greedy, tiny_llama, tokens

MakeCache = Callable[..., KVStoreCache]


def padded(*rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows as a batch padded on the left, and its mask."""
    n = max(map(len, rows))
    ids = torch.stack([torch.cat([torch.zeros(n - len(row), dtype=torch.long), row]) for row in rows])
    mask = torch.stack([(torch.arange(n) >= n - len(row)).long() for row in rows])
    return ids, mask


def store(model: Any, make_cache: MakeCache, prompt: torch.Tensor) -> None:
    cache = make_cache(model, prompt[None])
    greedy(model, prompt[None], n_new=1, past_key_values=cache)
    cache.save()


def test_rows_that_share_a_prefix(model: Any, make_cache: MakeCache) -> None:
    shared = tokens(0, 50)
    store(model, make_cache, shared)
    ids, mask = padded(*(torch.cat([shared, tokens(10 + i, 7)]) for i in range(3)))
    cache = make_cache(model, ids, mask)
    assert cache.n_hit_tokens == 50
    assert greedy(model, ids, attention_mask=mask, past_key_values=cache) == greedy(model, ids, attention_mask=mask)


def test_rows_of_different_length_with_different_hits(model: Any, make_cache: MakeCache) -> None:
    first, second, third = tokens(1, 60), tokens(2, 41), tokens(3, 52)
    for row in (first, second, third[:30]):
        store(model, make_cache, row)
    ids, mask = padded(
        torch.cat([first, tokens(11, 5)]), torch.cat([second, tokens(12, 3)]), torch.cat([third, tokens(13, 4)])
    )
    expected = greedy(model, ids, attention_mask=mask)
    cache = make_cache(model, ids, mask)
    # 65 columns; the third row begins in column 9 and has 30 tokens stored: it needs computing first.
    assert cache.n_hit_tokens == 9 + 30
    assert greedy(model, ids, attention_mask=mask, past_key_values=cache) == expected
    cache.save()
    # All rows were stored, each as if it had been alone, whatever its padding.
    for row, pad in zip(ids, (0, 21, 9), strict=True):
        alone = make_cache(model, row[None, pad:])
        assert alone.n_hit_tokens == len(row) - pad - 1
        assert greedy(model, row[None, pad:], past_key_values=alone) == greedy(model, row[None, pad:])


def test_padded_rows_are_stored_from_their_own_first_token_on(model: Any, make_cache: MakeCache) -> None:
    rows = [tokens(20, 50), tokens(21, 33), tokens(22, 7)]
    ids, mask = padded(*rows)
    cache = make_cache(model, ids, mask)
    assert greedy(model, ids, attention_mask=mask, past_key_values=cache) == greedy(model, ids, attention_mask=mask)
    cache.save()
    for row in rows:
        alone = make_cache(model, row[None])
        assert alone.n_hit_tokens == len(row) - 1
        assert greedy(model, row[None], past_key_values=alone) == greedy(model, row[None])


def test_one_row_without_a_hit_is_a_batch_without(model: Any, make_cache: MakeCache) -> None:
    store(model, make_cache, tokens(4, 60))
    ids, mask = padded(torch.cat([tokens(4, 60), tokens(14, 5)]), tokens(5, 30))
    cache = make_cache(model, ids, mask)
    # The second row begins in column 35: up to there only the first is needed.
    assert cache.n_hit_tokens == 35
    expected = greedy(model, ids, attention_mask=mask)
    assert greedy(model, ids, attention_mask=mask, past_key_values=cache) == expected
    ids, mask = padded(torch.cat([tokens(4, 60), tokens(14, 5)]), tokens(6, 65))
    assert make_cache(model, ids, mask).n_hit_tokens == 0


def test_equal_rows_are_looked_up_and_stored_once(make_cache: MakeCache) -> None:
    model = tiny_llama()
    ids = tokens(7, 40)[None].repeat(4, 1)
    cache = make_cache(model, ids)
    expected = greedy(model, ids)
    assert greedy(model, ids, past_key_values=cache) == expected
    assert cache.save() == 4  # 40 tokens and 11 of what was said: three whole blocks and a short one
    again = make_cache(model, ids)
    assert again.n_hit_tokens == 39
    assert greedy(model, ids, past_key_values=again) == expected


def test_beams_and_several_answers(model: Any, make_cache: MakeCache) -> None:
    prompt = torch.cat([tokens(8, 50), tokens(18, 6)])[None]
    store(model, make_cache, prompt[0, :50])
    beams = {"num_beams": 3, "num_return_sequences": 2}
    expected = greedy(model, prompt, **beams)
    cache = make_cache(model, prompt)
    assert cache.n_hit_tokens == 50
    assert greedy(model, prompt, **beams, past_key_values=cache) == expected
    assert "go their own ways" in cache.save_reason
    # The prompt was stored to its end, and nothing of what the beams said.
    following = make_cache(model, torch.cat([prompt[0], torch.tensor(expected[0])])[None])
    assert following.n_hit_tokens == 56


def test_assisted_decoding_takes_tokens_back(model: Any, make_cache: MakeCache) -> None:
    prompt = tokens(9, 10).repeat(6)[None]
    store(model, make_cache, prompt[0, :40])
    expected = greedy(model, prompt)
    cache = make_cache(model, prompt)
    assert cache.n_hit_tokens == 40
    assert greedy(model, prompt, prompt_lookup_num_tokens=4, past_key_values=cache) == expected
    assert make_cache(model, prompt).n_hit_tokens >= 48


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        ([[1, 1, 0]], "pad on the left"),
        ([[0, 1, 0]], "pad on the left"),
        ([[1, 1]], "shape"),
        ([[0, 0, 0]], "whole row"),
    ],
)
def test_masks_that_can_not_be(make_cache: MakeCache, mask: list[list[int]], said: str) -> None:
    with pytest.raises(BadInputError, match=said):
        make_cache(tiny_llama(), tokens(1, 3)[None], torch.tensor(mask))


def test_padding_without_a_mask(make_cache: MakeCache) -> None:
    ids, _ = padded(tokens(1, 8), tokens(2, 5))
    with pytest.raises(BadInputError, match="give attention_mask"):
        make_cache(tiny_llama(), ids)


@pytest.mark.parametrize("ids", [torch.zeros(1, 0, dtype=torch.long), torch.zeros(2, 2), torch.zeros(1, 1, 1).long()])
def test_ids_that_can_not_be(make_cache: MakeCache, ids: torch.Tensor) -> None:
    with pytest.raises(BadInputError, match="give integers"):
        make_cache(tiny_llama(), ids)


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ("hello", "input_ids are 'hello', no table of integers .*tokenizer"),
        (["a", "b"], "no table of integers"),
        ([[1, 2], [3]], "no table of integers"),
        ([None], "no table of integers"),
        ({"input_ids": tokens(1, 3)[None]}, r"input_ids are a dict; give .* input_ids=inputs\['input_ids'\]"),
        (BatchEncoding({"input_ids": tokens(1, 3)[None]}), "input_ids are a BatchEncoding"),
    ],
)
def test_no_ids_at_all(make_cache: MakeCache, ids: Any, said: str) -> None:
    with pytest.raises(BadInputError, match=said):
        make_cache(tiny_llama(), ids)
    with pytest.raises(BadInputError, match=said.replace("input_ids are", "attention_mask are")):
        make_cache(tiny_llama(), tokens(1, 3)[None], ids)
