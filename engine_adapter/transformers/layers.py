"""Layers of a transformers cache that begin with stored KV and take it from the store's memory when it is first needed.

Until then a layer only says how long it is. The copy out of the store goes straight to where the layer keeps its KV,
next to the new tokens: transformers would copy the old ones there anyway. Full layers leave room for tokens to come,
so that a decoding step writes one token and does not copy all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

ROOM_TOKENS = 256

Load = Callable[[torch.Tensor, torch.Tensor], None]
"""Fills keys and values [batch, heads, tokens, head_dim] with the last of the stored tokens."""


Room = tuple[torch.Tensor, torch.Tensor]


class Start:
    """What a layer begins with: ``shape`` of its stored keys (those it still needs), and how to get them."""

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device, load: Load) -> None:
        self.shape, self.dtype, self.device, self.load = shape, dtype, device, load


class _Settling(DynamicLayer):
    """Keys and values as attributes that are loaded when somebody looks."""

    _keys: torch.Tensor | None
    _values: torch.Tensor | None
    _start: Start | None = None

    def begin_with(self, start: Start) -> None:
        """Have the layer begin with stored KV."""
        self._start = start
        self.dtype, self.device = start.dtype, start.device
        self.is_initialized = True

    @property
    def loaded(self) -> bool:
        """Whether nothing in the store's memory is needed any more."""
        return self._start is None

    @property
    def keys(self) -> torch.Tensor | None:
        self._settle()
        return self._keys

    @keys.setter
    def keys(self, keys: torch.Tensor | None) -> None:
        self._settle()
        self._keys = keys

    @property
    def values(self) -> torch.Tensor | None:
        self._settle()
        return self._values

    @values.setter
    def values(self, values: torch.Tensor | None) -> None:
        self._settle()
        self._values = values

    def _settle(self, room_tokens: int = 0) -> None:
        """Load what the layer begins with, if that has not been done."""
        start, self._start = self._start, None
        if start is None:
            return
        batch, heads, n_tokens, head_dim = start.shape
        shape = (batch, heads, n_tokens + room_tokens, head_dim)
        keys = torch.empty(shape, dtype=start.dtype, device=start.device)
        values = torch.empty_like(keys)
        start.load(keys[:, :, :n_tokens], values[:, :, :n_tokens])
        self._took(keys, values, n_tokens)

    def _begin_like(self, key_states: torch.Tensor) -> None:
        """Have what the layer begins with loaded where it computes: layers of a model may be on several devices."""
        if self._start is not None:
            self._start.device = self.device = key_states.device

    def _took(self, keys: torch.Tensor, values: torch.Tensor, n_tokens: int) -> None:
        self._keys, self._values = keys[:, :, :n_tokens], values[:, :, :n_tokens]


class StoredLayer(_Settling):
    """Full attention."""

    _room: Room | None = None
    """Memory that ``_keys`` and ``_values`` are the first tokens of."""

    def get_seq_length(self) -> int:
        return self._start.shape[2] if self._start is not None else super().get_seq_length()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._begin_like(key_states)
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            return super().update(key_states, value_states, *args, **kwargs)
        n_before = self.get_seq_length()
        n_new = key_states.shape[-2]
        self._settle(n_new + ROOM_TOKENS)
        room = self._room_for(n_before, key_states, value_states)
        for memory, new in zip(room, (key_states, value_states), strict=True):
            memory[:, :, n_before : n_before + n_new] = new
        self._took(room[0], room[1], n_before + n_new)
        assert self._keys is not None  # noqa: S101 - just set
        assert self._values is not None  # noqa: S101
        return self._keys, self._values

    def _took(self, keys: torch.Tensor, values: torch.Tensor, n_tokens: int) -> None:
        super()._took(keys, values, n_tokens)
        self._room = keys, values

    def _room_for(self, n_before: int, key_states: torch.Tensor, value_states: torch.Tensor) -> Room:
        """Memory that holds the tokens there are, with room for those to come."""
        n_needed = n_before + key_states.shape[-2]
        if self._room is not None and self._is_in_room() and self._room[0].shape[2] >= n_needed:
            return self._room
        room = []
        for old, new in ((self._keys, key_states), (self._values, value_states)):
            memory = new.new_empty((new.shape[0], new.shape[1], n_needed + ROOM_TOKENS, new.shape[3]))
            if n_before and old is not None:
                memory[:, :, :n_before] = old
            room.append(memory)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return room[0], room[1]

    def _is_in_room(self) -> bool:
        """Whether keys and values still are what lies there: not reordered, repeated or replaced meanwhile."""
        assert self._room is not None  # noqa: S101 - the caller has looked
        return all(
            now is not None and now.data_ptr() == memory.data_ptr() and now.stride() == memory.stride()
            and now.shape[:2] == memory.shape[:2]
            for now, memory in zip((self._keys, self._values), self._room, strict=True)
        )  # fmt: skip

    def reset(self) -> None:
        self._start = self._room = None
        super().reset()


class StoredSlidingLayer(_Settling, DynamicSlidingWindowLayer):
    """A sliding window: keeps the last ``sliding_window - 1`` tokens, and counts all of them."""

    def begin_with(self, start: Start, n_tokens: int = 0) -> None:
        """``n_tokens``: of the whole prefix, of which ``start`` is the end."""
        super().begin_with(start)
        self.cumulative_length = n_tokens

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._begin_like(key_states)
        return super().update(key_states, value_states, *args, **kwargs)

    def reset(self) -> None:
        self._start = None
        super().reset()
