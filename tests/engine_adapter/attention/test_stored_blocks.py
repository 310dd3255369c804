"""Attention over blocks that a real daemon holds, where they lie in its memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvstore.client import Client
from kvstore.engine_adapter.attention import KVPages, PageLayout, block_pages, decode_attention
from kvstore.engine_adapter.block_layout import BlockLayout
from kvstore.errors import BadInputError
from kvstore.types import GroupKind, KVGroup, KVSpec, Namespace
from tests.engine_adapter.attention.scenes import attend
from tests.engine_adapter.oracle import as_blocks

BLOCK_TOKENS = 16
DENSE = KVGroup(layers=2, kv_heads=2, head_dim=64, dtype="bfloat16")
LATENT = KVGroup(layers=3, head_dim=576, dtype="float16", kind=GroupKind.MLA)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_tokens", [4, 16])
def test_leased_blocks_are_read_in_place(client: Client, layout: str, page_tokens: int) -> None:
    dense = KVGroup(layers=2, kv_heads=2, head_dim=64, dtype="bfloat16", layout=layout)
    spec = KVSpec(BLOCK_TOKENS, (dense, LATENT), page_tokens)
    rng = np.random.default_rng(page_tokens)
    n_tokens = 3 * BLOCK_TOKENS
    kv = [torch.from_numpy(rng.standard_normal((2, n_tokens, 2, 64))).bfloat16() for _ in range(2)]
    kv += [torch.from_numpy(rng.standard_normal((1, n_tokens, 1, 576))).half() for _ in range(3)]
    handle = client.open(Namespace("m", spec))
    tokens = rng.integers(0, 1000, n_tokens, dtype=np.uint32)
    blocks = as_blocks(spec, [layer.view(torch.uint8).numpy() for layer in kv])
    assert handle.put(tokens, blocks).n_stored == 3
    places = BlockLayout.of(spec)
    with handle.lease(tokens) as lease:
        for layer, heads, value_dim in ((1, 6, 64), (4, 5, 512)):
            pages = KVPages.of(
                PageLayout.of_block(spec, layer, value_dim),
                [block_pages(places, layer, lease.addresses)],
                [n_tokens - 3],
            )
            assert pages.is_aligned
            q = torch.from_numpy(rng.standard_normal((1, heads, pages.layout.key_dim))).to(kv[layer].dtype)
            found = decode_attention(q, pages)
            keys, values = kv[layer].double().numpy()[[0, -1]]
            output, lse = attend(
                q[0].double().numpy(), keys, values[..., :value_dim], np.arange(n_tokens) < n_tokens - 3
            )
            np.testing.assert_allclose(found.output[0].numpy(), output, rtol=1e-3, atol=1e-5)
            np.testing.assert_allclose(found.lse[0].numpy(), lse, rtol=1e-4)


def test_what_attention_can_not_read_is_said() -> None:
    eight_bits = KVGroup(layers=1, kv_heads=2, head_dim=64, dtype="float8_e4m3")
    opaque = KVGroup(layers=1, layout="opaque", page_bytes=4096)
    spec = KVSpec(BLOCK_TOKENS, (DENSE, eight_bits, opaque, LATENT))
    for layer, message in (
        (2, "float8_e4m3"),
        (3, "opaque"),
        (4, "value_dim is missing"),
        (7, "7 layers"),
        (-1, "layer -1"),
    ):
        with pytest.raises(BadInputError, match=message):
            PageLayout.of_block(spec, layer)
    assert PageLayout.of_block(spec, 4, 512).is_latent
    assert not PageLayout.of_block(spec, 1).is_latent
