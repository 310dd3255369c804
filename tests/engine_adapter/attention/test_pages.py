"""Tables of pages: what is checked, and what is known of addresses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvstore.engine_adapter.attention import KVPages, PageLayout
from kvstore.engine_adapter.page_table import PageTable
from kvstore.errors import BadInputError

LAYOUT = PageLayout(
    torch.float16,
    page_tokens=4,
    kv_heads=2,
    key_dim=64,
    value_dim=64,
    token_stride=128,
    head_stride=64,
    value_offset=512,
)


def row(*addresses: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    return np.array(addresses, np.uint64)


def test_rows_of_addresses_become_a_table() -> None:
    high = (1 << 63) + 4096
    pages = KVPages.of(LAYOUT, [row(4096, high), row(), row(8192)], [7, 0, 4], first_tokens=[1, 0, 0])
    assert pages.addresses.dtype == torch.uint64
    assert pages.addresses.tolist() == [4096, high, 8192]
    assert pages.indptr.tolist() == [0, 2, 2, 3]
    assert pages.n_tokens.tolist() == [7, 0, 4]
    assert pages.first_tokens.tolist() == [1, 0, 0]
    assert pages.max_tokens == 7
    assert len(pages) == 3


@pytest.mark.parametrize(
    ("layout", "address", "is_aligned"),
    [
        ({}, 4096, True),
        ({}, 4096 + 16, True),
        ({}, 4096 + 8, False),
        ({"token_stride": 132}, 4096, False),
        ({"head_stride": 68}, 4096, False),
        ({"value_offset": -516}, 4096, False),
        ({"value_offset": -520}, 4096, True),
    ],
)
def test_alignment_is_found_out(layout: dict[str, int], address: int, is_aligned: bool) -> None:
    shape = {name: getattr(LAYOUT, name) for name in LAYOUT.__slots__} | layout
    assert KVPages.of(PageLayout(**shape), [row(4096, address)], [8]).is_aligned == is_aligned


@pytest.mark.parametrize(
    ("rows", "n_tokens", "first_tokens", "message"),
    [
        ([row(4096)], [5], 0, "5 tokens, but 1 pages of 4"),
        ([row(4096)], [4, 4], 0, "n_tokens"),
        ([row(4096)], [-1], 0, "n_tokens"),
        ([row(4096)], [1.5], 0, "n_tokens"),
        ([row(4096)], [4], [-1], "first_tokens"),
        ([row(4097)], [4], 0, "odd address 0x1001"),
    ],
)
def test_tables_that_can_not_be(rows: Any, n_tokens: Any, first_tokens: Any, message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        KVPages.of(LAYOUT, rows, n_tokens, first_tokens=first_tokens)


def test_a_window_ends_at_the_query() -> None:
    pages = KVPages.of(LAYOUT, [row(4096, 8192), row(4096, 8192)], [8, 6], first_tokens=[0, 2])
    seen = pages.windowed(torch.tensor([7, 5]), 5, sink_tokens=2)
    assert seen.first_tokens.tolist() == [3, 2]
    assert seen.sink_tokens is not None
    assert seen.sink_tokens.tolist() == [2, 0]
    later = pages.windowed(torch.tensor([27, 25]), 5, sink_tokens=21, first_positions=20)
    assert later.first_tokens.tolist() == [3, 2]
    assert later.sink_tokens is not None
    assert later.sink_tokens.tolist() == [1, 0]
    for window, sinks in ((0, 0), (1, -1)):
        with pytest.raises(BadInputError, match="is none"):
            pages.windowed(torch.tensor([7, 5]), window, sink_tokens=sinks)


def test_tensors_that_do_not_go_together() -> None:
    table = PageTable.of([0, 1], [0], n_pages=2)
    keys = torch.zeros(2, 4, 2, 64, dtype=torch.float16)
    for values in (keys[:, :, :1], keys.transpose(1, 2).contiguous().transpose(1, 2), keys.float()):
        with pytest.raises(BadInputError, match="K "):
            KVPages.of_tensors(keys, values, table, [4])
