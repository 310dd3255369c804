"""Engines with paged memory of every layout, and what tests of them do over and over."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvstore.client import Client, NamespaceHandle
from kvstore.engine_adapter.engine_layout import EngineKV
from kvstore.engine_adapter.page_table import PageTable
from kvstore.engine_adapter.paged import PagedStore, RowRequest
from kvstore.types import GroupKind, KVGroup, KVSpec, Namespace
from tests.engine_adapter.places import HERE, Place

LAYERS, HEADS, DIM, PAGES = 3, 2, 8, 24
FAR_S = 60.0
DENSE = KVSpec(block_tokens=8, groups=(KVGroup(layers=LAYERS, kv_heads=HEADS, head_dim=DIM, dtype="float32"),))
LATENT = KVSpec(block_tokens=8, groups=(KVGroup(layers=LAYERS, head_dim=DIM, dtype="float32", kind=GroupKind.MLA),))

Values = NDArray[np.float32]
Make = Callable[..., Values]
Made = tuple[Sequence[Any], list[list[Values]]]


def far() -> float:
    return time.monotonic() + FAR_S


class Engine:
    """An engine's memory in some layout. ``logical[l][p]`` is a view [pages, page_tokens, heads, dim] of plane p."""

    def __init__(self, kind: str, page_tokens: int, seed: int, use_torch: bool = False, place: Place = HERE) -> None:
        rng = np.random.default_rng(seed)

        def make(*shape: int) -> Values:
            return rng.standard_normal(shape, dtype=np.float32)

        def given(arrays: Sequence[Any]) -> list[Any]:
            def one(array: Any) -> Any:
                if isinstance(array, tuple):
                    return tuple(map(one, array))
                held = place.hold(array)
                return torch.from_numpy(held) if use_torch and held is array else held

            return [one(array) for array in arrays]

        arrays, self._logical = {
            "2PTHD": self._planes_first, "PTHC": self._merged, "PHTC": self._merged_by_head, "SHD": self._slots,
            "2SLHD": self._page_first, "2PLTHD": self._page_first_direct, "2PHTLD": self._page_head,
            "PTD": self._latent,
        }[kind](make, page_tokens)  # fmt: skip
        self._place = place
        self.page_tokens = page_tokens
        self.kv = EngineKV.of(given(arrays), kind, page_tokens if "S" in kind else None)

    @property
    def logical(self) -> list[list[Values]]:
        """Views of the memory as it is now; on a device, of a copy."""
        self._place.refresh()
        return self._logical

    @staticmethod
    def _planes_first(make: Make, t: int) -> Made:
        arrays = [make(2, PAGES, t, HEADS, DIM) for _ in range(LAYERS)]
        return arrays, [[a[0], a[1]] for a in arrays]

    @staticmethod
    def _merged(make: Make, t: int) -> Made:
        arrays = [make(PAGES, t, HEADS, 2 * DIM) for _ in range(LAYERS)]
        return arrays, [[a[..., :DIM], a[..., DIM:]] for a in arrays]

    @staticmethod
    def _merged_by_head(make: Make, t: int) -> Made:
        arrays = [make(PAGES, HEADS, t, 2 * DIM) for _ in range(LAYERS)]
        return arrays, [[x.transpose(0, 2, 1, 3) for x in (a[..., :DIM], a[..., DIM:])] for a in arrays]

    @staticmethod
    def _slots(make: Make, t: int) -> Made:
        arrays = [(make(PAGES * t, HEADS, DIM), make(PAGES * t, HEADS, DIM)) for _ in range(LAYERS)]
        return arrays, [[a.reshape(PAGES, t, HEADS, DIM) for a in pair] for pair in arrays]

    @staticmethod
    def _page_first(make: Make, t: int) -> Made:
        whole = make(2, PAGES * t, LAYERS, HEADS, DIM)
        paged = whole.reshape(2, PAGES, t, LAYERS, HEADS, DIM)
        return [whole], [[paged[i, :, :, layer] for i in range(2)] for layer in range(LAYERS)]

    @staticmethod
    def _page_first_direct(make: Make, t: int) -> Made:
        whole = make(2, PAGES, LAYERS, t, HEADS, DIM)
        return [whole], [[whole[i, :, layer] for i in range(2)] for layer in range(LAYERS)]

    @staticmethod
    def _page_head(make: Make, t: int) -> Made:
        whole = make(2, PAGES, HEADS, t, LAYERS, DIM)
        planes = whole.transpose(0, 4, 1, 3, 2, 5)
        return [whole], [[planes[i, layer] for i in range(2)] for layer in range(LAYERS)]

    @staticmethod
    def _latent(make: Make, t: int) -> Made:
        arrays = [make(PAGES, t, DIM) for _ in range(LAYERS)]
        return arrays, [[a[:, :, None, :]] for a in arrays]

    def tokens(self, layer: int, plane: int, pages: NDArray[np.int64], n: int) -> Values:
        """A copy of the first n tokens of a row, [n, heads, dim]."""
        view = self.logical[layer][plane][pages]
        return view.reshape(-1, *view.shape[2:])[:n]


DENSE_KINDS = ["2PTHD", "PTHC", "PHTC", "SHD", "2SLHD", "2PLTHD", "2PHTLD"]


def handle_for(client: Client, spec: KVSpec, layout: str = "NHD") -> NamespaceHandle:
    group = spec.groups[0]
    groups = (KVGroup(group.layers, group.kv_heads, group.head_dim, group.dtype, group.kind, layout),)
    return client.open(Namespace(model=f"paged {layout}", spec=KVSpec(spec.block_tokens, groups, 4)))


def table_for(engine: Engine, lengths: Sequence[int], seed: int) -> PageTable:
    """Pages in any order, none twice."""
    counts = [-(-n // engine.page_tokens) for n in lengths]
    pages = np.random.default_rng(seed).permutation(PAGES)[: sum(counts)]
    return PageTable.of(np.concatenate(([0], np.cumsum(counts))), pages, engine.kv.n_pages)


def save_rows(store: PagedStore, rows: list[NDArray[np.int64]], table: PageTable, chunk: int) -> None:
    requests = [RowRequest(row) for row in rows]
    writers = [store.writer(row, prefix) for row, prefix in zip(requests, store.find(requests), strict=True)]
    for start in range(0, max(map(len, rows)), chunk):
        job = store.save(writers, [row[start : start + chunk] for row in rows], table, deadline_s=far())
        for layer in range(LAYERS):
            job.layer_ready(layer)
        assert job.wait_copied(far())
        assert job.wait(far()), job.reason
    for writer in writers:
        writer.finish()


def stored_row(
    client: Client, closing: list[PagedStore], place: Place = HERE
) -> tuple[PagedStore, Engine, NDArray[np.int64], PageTable]:
    engine = Engine("2PTHD", 4, 1, place=place)
    store = place.store(handle_for(client, DENSE), engine.kv)
    closing.append(store)
    row = np.arange(20)
    table = table_for(engine, [20], 1)
    save_rows(store, [row], table, chunk=20)
    return store, engine, row, table
