"""Descriptions of engines and page tables that can't be: refused with what is wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvstore.client import Client
from kvstore.engine_adapter.engine_layout import EngineKV
from kvstore.engine_adapter.page_table import PageTable
from kvstore.engine_adapter.paged import PagedStore
from kvstore.errors import BadInputError
from kvstore.types import KVGroup, KVSpec, Namespace
from tests.engine_adapter.paged_engines import DENSE, Engine


@pytest.mark.parametrize(
    ("tensors", "dims", "page_tokens", "said"),
    [
        ([], "PTHD", None, "no tensors"),
        ([np.zeros((2, 2))], "PT", None, "one of D, C and X"),
        ([np.zeros((2, 2))], "DD", None, "once at most"),
        ([np.zeros((2, 2, 2))], "PTHD", None, "does not have the dimensions"),
        ([np.zeros((4, 2))], "SD", None, "page_tokens is missing"),
        ([np.zeros((2, 2, 4))[:, :, ::2]], "PTD", None, "do not lie next to each other"),
        ([np.zeros((2, 2, 3))], "PTC", None, "no K and V"),
        ([np.zeros((2, 2, 3)), np.zeros((2, 4, 3))], "PTD", None, "differ"),
        ([torch.zeros(2, 2, 3, device="meta")], "PTD", None, "only host memory"),
    ],
)
def test_descriptions_that_can_not_be(tensors: list[Any], dims: str, page_tokens: int | None, said: str) -> None:
    with pytest.raises(BadInputError, match=said):
        EngineKV.of(tensors, dims, page_tokens)


@pytest.mark.parametrize(
    ("kind", "page_tokens", "spec", "said"),
    [
        ("PTD", 4, DENSE, r"layer 0 has \(planes, heads, bytes\) \(1, 1, 32\) in the engine, \(2, 2, 32\) in a block"),
        ("2PTHD", 4, KVSpec(8, (KVGroup(layers=2, kv_heads=2, head_dim=8),)), "3 layers, a block 2"),
    ],
)
def test_an_engine_must_be_what_the_namespace_says(
    client: Client, kind: str, page_tokens: int, spec: KVSpec, said: str
) -> None:
    handle = client.open(Namespace(model="other", spec=spec))
    with pytest.raises(BadInputError, match=said):
        PagedStore(handle, Engine(kind, page_tokens, 1).kv)


@pytest.mark.parametrize(
    ("indptr", "indices", "said"),
    [
        ([0, 2], [1], "must rise from 0"),
        ([], [], "must rise from 0"),
        ([0, 2, 1, 3], [1, 2, 3], "must rise from 0"),
        ([0, 1], [9], "page 9 is not one of the engine's 4"),
        ([0, 1], [-1], "page -1"),
        ([0, 1], [1.5], "give integers"),
    ],
)
def test_page_tables_that_can_not_be(indptr: list[int], indices: list[Any], said: str) -> None:
    with pytest.raises(BadInputError, match=said):
        PageTable.of(indptr, indices, 4)
