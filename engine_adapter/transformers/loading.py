"""Stored prefixes of a batch, brought into the tensors of a layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from kvstore.client import Wait
from kvstore.engine_adapter.block_layout import BlockLayout
from kvstore.engine_adapter.counters import SharedCounters
from kvstore.engine_adapter.parts import Handle
from kvstore.engine_adapter.runs import Pages, Runs, Strides, copy_runs, plan_runs
from kvstore.engine_adapter.stored_prefix import StoredPrefix
from kvstore.engine_adapter.transformers.layers import Start
from kvstore.engine_adapter.transformers.rows import Rows
from kvstore.engine_adapter.transformers.shapes import KVLayer
from kvstore.types import ExtraKey, Root


def tensor_pages(tensor: torch.Tensor, first_token: int = 0) -> Pages:
    """The tokens of any row of a tensor [batch, heads, tokens, head_dim] as one page, relative to the row's address."""
    unit = tensor.element_size()
    _, head, token, _ = tensor.stride()
    return Pages(_HERE, tensor.shape[2], Strides(token * unit, head * unit), first_token)


def address_of_row(tensor: torch.Tensor, row: int) -> int:
    """Where a row of a tensor [batch, ...] lies."""
    return tensor.data_ptr() + row * tensor.stride(0) * tensor.element_size()


_HERE = torch.zeros(1, dtype=torch.int64).numpy()


@dataclass(slots=True)
class BatchPrefix:
    """The first ``n_columns`` columns of a batch: row i is padding up to ``pads[i]``, then stored tokens."""

    layout: BlockLayout
    found: Sequence[StoredPrefix]
    pads: Sequence[int]
    n_columns: int
    threads: int = 1
    _plans: dict[tuple[object, ...], Runs] = field(default_factory=dict)

    @classmethod
    def find(
        cls,
        handle: Handle,
        layout: BlockLayout,
        rows: Rows,
        *,
        root: Root,
        extras: Sequence[ExtraKey],
        wait: Wait,
        threads: int,
        counters: SharedCounters,
    ) -> BatchPrefix:
        """What is stored of all rows: the batch begins where the first of them needs to.

        Blocks as ``StoredPrefix.find`` and ``shorten`` do, for each different row.
        """
        by_ids: dict[bytes, StoredPrefix] = {}
        found = []
        for ids in rows.ids:
            same = ids.tobytes()
            if same not in by_ids:
                # One token is left to compute: its logits are what comes next.
                by_ids[same] = StoredPrefix.find(
                    handle, layout, ids[:-1], root=root, extras=extras, wait=wait, counters=counters
                )
            found.append(by_ids[same])
        n_columns = -1
        # A row that is cut to what the others have may have less than that.
        while (least := min(pad + each.n_tokens for pad, each in zip(rows.pads, found, strict=True))) != n_columns:
            n_columns = least
            for pad, each in zip(rows.pads, found, strict=True):
                each.shorten(max(n_columns - pad, 0))
        if n_columns == min(rows.pads) or not any(each.n_tokens for each in found):
            n_columns = 0
        return cls(layout, found, rows.pads, n_columns, threads)

    @property
    def reason(self) -> str:
        """Why nothing is known of a row, if the daemon could not be asked."""
        return next((each.reason for each in self.found if each.reason), "")

    def start(self, layer: KVLayer, dtype: torch.dtype, device: torch.device) -> Start:
        """What a layer begins with: all columns, or the last that its window shows."""
        n = self.n_columns if layer.window_tokens is None else min(self.n_columns, layer.window_tokens - 1)
        return Start((len(self.found), layer.kv_heads, n, layer.head_dim), dtype, device, partial(self._load, layer))

    def _load(self, layer: KVLayer, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Copy a layer's last columns out of the store's memory. Blocks for the copy."""
        place = self.layout.layers[layer.stored_index]
        first_column = self.n_columns - keys.shape[2]
        if keys.device.type != "cpu":
            on_host = [torch.empty(each.shape, dtype=each.dtype) for each in (keys, values)]
            self._load(layer, on_host[0], on_host[1])
            keys.copy_(on_host[0])
            values.copy_(on_host[1])
            return
        for tensor, offset in zip((keys, values), place.planes, strict=True):
            for i in range(len(self.found)):
                n_hidden = min(max(self.pads[i] - first_column, 0), tensor.shape[2])
                if n_hidden:
                    tensor[i, :, :n_hidden] = 0
                runs = self._runs(layer, i, tensor, first_column, n_hidden)
                copy_runs(runs, address_of_row(tensor, i), offset, self.threads)

    def _runs(self, layer: KVLayer, row: int, to: torch.Tensor, first_column: int, n_hidden: int) -> Runs:
        """The runs of a row, worked out once for all layers that look the same."""
        place = self.layout.layers[layer.stored_index]
        key = (place.alike, row, to.shape, to.stride(), first_column)
        runs = self._plans.get(key)
        if runs is None:
            first_token = max(first_column - self.pads[row], 0)
            runs = self._plans[key] = plan_runs(
                tensor_pages(to, n_hidden),
                self.found[row].pages(layer.stored_index, first_token),
                to.shape[2] - n_hidden,
                place.heads,
                place.unit_bytes,
            )
        return runs
