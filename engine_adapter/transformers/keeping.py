"""Storing what a batch computes: one writer for each row that differs, fed by the cache's updates."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from kvstore.engine_adapter.block_writer import BlockWriter, Plane
from kvstore.engine_adapter.counters import SharedCounters
from kvstore.engine_adapter.transformers.loading import address_of_row, tensor_pages
from kvstore.engine_adapter.transformers.shapes import KVLayer

FEW_TOKENS = 8


class RowKeeper:
    """One row: which of the batch it is, how it is padded, and its writer."""

    def __init__(self, row: int, pad: int, writer: BlockWriter) -> None:
        self.row, self.pad, self.writer = row, pad, writer
        self.n_skip = 0
        """Columns of the pass that are padding."""


class BatchKeeper:
    """The rows of a batch that are stored. ``repeats``: each row stands so often in the batch that is computed."""

    def __init__(self, rows: Sequence[RowKeeper], counters: SharedCounters) -> None:
        self._rows = list(rows)
        self._counters = counters
        self.repeats = 1
        self._kept: list[torch.Tensor] = []
        """What a pass of few tokens gave: copied when it ends."""

    @property
    def active(self) -> bool:
        """Whether anything is still stored."""
        return any(not keeper.writer.reason for keeper in self._rows)

    @property
    def n_stored(self) -> int:
        """Blocks made visible."""
        return sum(keeper.writer.n_stored for keeper in self._rows)

    @property
    def reason(self) -> str:
        """Why a row is not stored any more, of the first for which that is so."""
        return next((keeper.writer.reason for keeper in self._rows if keeper.writer.reason), "")

    def begin(self, first_column: int, ids: NDArray[np.uint32]) -> None:
        """A pass over columns ``first_column ..`` begins; ``ids``: uint32 [batch, columns]."""
        for keeper in self._rows:
            keeper.n_skip = min(max(keeper.pad - first_column, 0), ids.shape[1])
            keeper.writer.begin(ids[keeper.row * self.repeats, keeper.n_skip :])

    def write(self, layer: KVLayer, keys: torch.Tensor, values: torch.Tensor) -> None:
        """A layer's KV of the pass, both [batch, heads, tokens, head_dim] in any memory order."""
        if keys.device.type != "cpu":
            keys, values = keys.cpu(), values.cpu()
        stays = keys.shape[2] <= FEW_TOKENS
        if stays:
            self._kept += keys, values
        for keeper in self._rows:
            if keeper.writer.reason:
                continue
            row = keeper.row * self.repeats
            planes = [Plane(address_of_row(each, row), tensor_pages(each, keeper.n_skip)) for each in (keys, values)]
            keeper.writer.write(layer.stored_index, planes, stays=stays)

    def end(self) -> None:
        """The pass is over."""
        for keeper in self._rows:
            keeper.writer.end()
        self._kept.clear()

    def finish(self) -> None:
        """Store what is left: blocks that are not whole."""
        for keeper in self._rows:
            keeper.writer.finish()

    def stop(self, reason: str) -> None:
        """Store nothing more."""
        for keeper in self._rows:
            keeper.writer.stop(reason)
        self._kept.clear()
