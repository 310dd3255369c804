"""Storing what a batch computes: one writer for each row that differs, fed by the cache's updates.

A pass of many tokens (the prefill, or a chunk of it) is stored layer by layer while it is computed. Passes of few
tokens are only noted: layers hold their KV anyway, so it is taken from there, all layers at once, when a block is
complete. So for the store a decoding step has nothing to do for each layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvstore.engine_adapter.block_writer import BlockWriter, Plane, Tokens
from kvstore.engine_adapter.transformers.loading import address_of_row, tensor_pages
from kvstore.engine_adapter.transformers.shapes import KVLayer

FEW_TOKENS = 8


class RowKeeper:
    """One row: which of the batch it is, how it is padded, its writer, and the tokens that only layers hold so far."""

    def __init__(self, row: int, pad: int, writer: BlockWriter) -> None:
        self.row, self.pad, self.writer = row, pad, writer
        self.n_skip = 0
        """Columns of the pass that are padding."""
        self.waiting: list[Tokens] = []

    @property
    def n_waiting(self) -> int:
        """Tokens that were computed, but not given to the writer."""
        return sum(map(len, self.waiting))


class BatchKeeper:
    """The rows of a batch that are stored. ``repeats``: each row stands so often in the batch that is computed.

    ``held``: the cache's own layers by their index; what they hold ends with the tokens that were computed last.
    """

    def __init__(
        self, rows: Sequence[RowKeeper], layers: Sequence[KVLayer], block_tokens: int, held: Sequence[Any]
    ) -> None:
        self.repeats = 1
        self.layer_by_layer = False
        """Whether the pass under way wants ``write`` for each layer."""
        self._rows, self._layers, self._block_tokens, self._held = list(rows), list(layers), block_tokens, held
        windows = [layer.window_tokens - 1 for layer in layers if layer.window_tokens is not None]
        self._reach_tokens = min([block_tokens, *windows])
        """So many of the last tokens all layers hold."""
        self._passing: NDArray[np.uint32] | None = None
        """The tokens of the pass under way, uint32 [batch, columns]."""
        self._end_column = 0

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
        """A pass over columns ``first_column ..`` begins; ``ids``: uint32 [batch, columns].

        Must be called before any layer has the new tokens.
        """
        n_columns = ids.shape[1]
        if self._passing is not None:
            self.stop("the pass before this one did not end")
            return
        most_waiting = max((keeper.n_waiting for keeper in self._rows), default=0)
        self.layer_by_layer = n_columns > min(FEW_TOKENS, self._reach_tokens)
        if most_waiting and (self.layer_by_layer or most_waiting + n_columns > self._reach_tokens):
            self._flush(self._rows)
        for keeper in self._rows:
            keeper.n_skip = min(max(keeper.pad - first_column, 0), n_columns)
            expected = keeper.pad + keeper.writer.n_tokens + keeper.n_waiting
            if not keeper.writer.reason and keeper.n_skip < n_columns and first_column + keeper.n_skip != expected:
                keeper.writer.stop(f"column {first_column} was computed where {expected} comes next")
            if self.layer_by_layer:
                keeper.writer.begin(ids[keeper.row * self.repeats, keeper.n_skip :])
        self._passing, self._end_column = ids, first_column + n_columns

    def write(self, layer: KVLayer, keys: torch.Tensor, values: torch.Tensor) -> None:
        """A layer's KV of the pass, both [batch, heads, tokens, head_dim] in any memory order. Blocks for the copy."""
        if keys.device.type != "cpu":
            keys, values = keys.cpu(), values.cpu()
        for keeper in self._rows:
            if not keeper.writer.reason:
                keeper.writer.write(layer.stored_index, self._planes(keeper, keys, values, keeper.n_skip))

    def end(self) -> None:
        """The pass is over: all layers have its tokens."""
        ids, self._passing = self._passing, None
        if ids is None:
            return
        for keeper in self._rows:
            if self.layer_by_layer:
                keeper.writer.end()
            elif not keeper.writer.reason and keeper.n_skip < ids.shape[1]:
                keeper.waiting.append(ids[keeper.row * self.repeats, keeper.n_skip :])
        self._flush([keeper for keeper in self._rows if self._completes_a_block(keeper)])

    def finish(self) -> None:
        """Store what is left: blocks that are not whole."""
        if self._passing is not None:
            self.stop("it was finished during a pass")
        self._flush(self._rows)
        for keeper in self._rows:
            keeper.writer.finish()

    def stop(self, reason: str) -> None:
        """Store nothing more."""
        self._passing = None
        for keeper in self._rows:
            keeper.writer.stop(reason)
            keeper.waiting.clear()

    def _completes_a_block(self, keeper: RowKeeper) -> bool:
        return keeper.writer.n_tokens % self._block_tokens + keeper.n_waiting >= self._block_tokens

    def _flush(self, rows: Sequence[RowKeeper]) -> None:
        """Give the writers what waits, out of the layers' memory."""
        rows = [keeper for keeper in rows if keeper.waiting and not keeper.writer.reason]
        if not rows:
            return
        n_waiting = {id(keeper): keeper.n_waiting for keeper in rows}
        most = max(n_waiting.values())
        for keeper in rows:
            keeper.writer.begin(np.concatenate(keeper.waiting))
            keeper.waiting.clear()
        on_host = []  # keeps copies from a device until the writers have taken them
        for layer in self._layers:
            keys, values = self._held[layer.index].keys, self._held[layer.index].values
            if keys is None or not self._is_whole(layer, keys, most):
                self.stop(f"layer {layer.index} does not hold what was computed: the cache was changed meanwhile")
                return
            if keys.device.type != "cpu":
                keys, values = keys[:, :, -most:].cpu(), values[:, :, -most:].cpu()
                on_host.append((keys, values))
            for keeper in rows:
                planes = self._planes(keeper, keys, values, keys.shape[2] - n_waiting[id(keeper)])
                keeper.writer.write(layer.stored_index, planes, stays=True)
        for keeper in rows:
            keeper.writer.end()

    def _is_whole(self, layer: KVLayer, keys: torch.Tensor, n_tokens: int) -> bool:
        """Whether a layer holds all rows, and as many tokens as were computed."""
        last_row = max(keeper.row for keeper in self._rows) * self.repeats
        if layer.window_tokens is None:
            return keys.shape[2] == self._end_column and keys.shape[0] > last_row
        return keys.shape[2] >= n_tokens and keys.shape[0] > last_row

    def _planes(
        self, keeper: RowKeeper, keys: torch.Tensor, values: torch.Tensor, first_token: int
    ) -> tuple[Plane, Plane]:
        row = keeper.row * self.repeats
        return (
            Plane(address_of_row(keys, row), tensor_pages(keys, first_token)),
            Plane(address_of_row(values, row), tensor_pages(values, first_token)),
        )
