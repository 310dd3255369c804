"""Whether a forward computes what a cache was made for: each function says what is wrong, or nothing.

KV of a prefix may stand for it only if the tokens, their positions and what they may see are the same.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvstore.engine_adapter.transformers.rows import Rows, left_pads
from kvstore.errors import BadInputError

_NOT_TEXT = ("inputs_embeds", "pixel_values", "pixel_values_videos", "input_features")

Ids = NDArray[np.uint32]


def wrong_dtype(device_type: str) -> str:
    """KV is that of another dtype."""
    return "torch.autocast is on, but the cache was made without" if torch.is_autocast_enabled(device_type) else ""


def wrong_kind(inputs: dict[str, Any]) -> str:
    """Inputs that token ids don't stand for."""
    if any(inputs.get(name) is not None for name in _NOT_TEXT):
        return "images, sounds or embeddings were given, but the cache was made for text: say extras=..."
    kinds = inputs.get("token_type_ids")
    if isinstance(kinds, torch.Tensor) and bool(kinds.any()):
        return "token_type_ids mark some tokens, but the cache was made for text: say extras=..."
    return ""


def wrong_tokens(rows: Rows, ids: Ids, first: int, repeats: int) -> str:
    """``ids`` uint32 [batch * repeats, columns] from column ``first`` on; those of the prompt must be the prompt's."""
    end = first + ids.shape[1]
    for i, (expected, pad) in enumerate(zip(rows.ids, rows.pads, strict=True)):
        start, stop = max(first, pad), min(end, rows.n_columns)
        if start >= stop:
            continue
        given = ids[i * repeats : (i + 1) * repeats, start - first : stop - first]
        if not (given == expected[start - pad : stop - pad]).all():
            return f"row {i} has other tokens than the prompt that the cache was made for"
    return ""


def wrong_mask(rows: Rows, mask: Any, first: int, end: int, repeats: int) -> str:
    """What tokens may see: all before them, but the padding that the cache knows of."""
    if first >= rows.n_columns and (mask is None or (isinstance(mask, torch.Tensor) and mask.ndim == 2)):
        return ""  # it only grows
    if mask is None:
        pads: tuple[int, ...] = (0,) * len(rows.pads)
    elif isinstance(mask, torch.Tensor) and mask.ndim == 2:
        try:
            pads = left_pads(mask[::repeats], (len(rows.ids), end))
        except BadInputError as error:
            return f"the attention mask is not one that KV can be reused with ({error})"
    else:
        return "the attention mask is no table of tokens, as KV of a prefix needs it"
    return "" if pads == rows.pads else f"rows are padded by {pads}, but the cache was made for {rows.pads}"


def wrong_positions(rows: Rows, positions: Any, end: int, repeats: int) -> str:
    """Positions count a row's tokens from 0 on."""
    if not isinstance(positions, torch.Tensor) or positions.ndim != 2:
        return ""
    last = positions[:, -1].tolist()
    for i, pad in enumerate(rows.pads):
        if last[i * repeats % len(last)] != end - 1 - pad:
            return f"row {i} has its tokens at other positions than from 0 on"
    return ""


def is_whole_prompt(rows: Rows, ids: Ids, repeats: int) -> bool:
    """Whether ``ids`` begin with the prompt, from its first column on."""
    return ids.shape[1] >= rows.n_columns and all(
        (ids[i * repeats : (i + 1) * repeats, pad : rows.n_columns] == row).all()
        for i, (row, pad) in enumerate(zip(rows.ids, rows.pads, strict=True))
    )
