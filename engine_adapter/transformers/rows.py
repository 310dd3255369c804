"""A batch as rows of tokens: ids as numpy arrays, and how many columns of padding stand before each row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvstore.errors import BadInputError
from kvstore.tokens import token_array


@dataclass(frozen=True, slots=True)
class Rows:
    """``ids[i]`` (uint32) are the tokens of row i, which begin in column ``pads[i]`` of ``n_columns``."""

    ids: tuple[NDArray[np.uint32], ...]
    pads: tuple[int, ...]
    n_columns: int

    @classmethod
    def of(cls, input_ids: Any, attention_mask: Any = None, pad_token_id: int | None = None) -> Rows:
        """From ``input_ids`` [batch, columns] or [columns], and a mask of the same shape where rows are padded.

        Raises BadInputError for another shape or type (text, a tokenizer's whole output), for padding that is not on
        the left, and for padding without a mask.
        """
        columns = _tensor("input_ids", input_ids)
        if columns.ndim == 1:
            columns = columns[None]
        if columns.ndim != 2 or columns.dtype not in (torch.int64, torch.int32) or 0 in columns.shape:
            raise BadInputError(
                f"input_ids are {columns.dtype} of shape {tuple(columns.shape)}; give integers [batch, tokens]"
            )
        pads = left_pads(attention_mask, tuple(columns.shape))
        if attention_mask is None and pad_token_id is not None and len(columns) > 1:
            padded = (columns[:, 0] == pad_token_id) & (columns != pad_token_id).any(dim=1)
            if bool(padded.any()):
                raise BadInputError("input_ids begin with padding; give attention_mask, too, which says how much of it")
        table = columns.cpu().numpy()
        ids = tuple(token_array(row[pad:]) for row, pad in zip(table, pads, strict=True))
        return cls(ids, pads, columns.shape[1])


def left_pads(attention_mask: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    """How many columns of each row are padding, all of them on the left. Raises BadInputError if they are not."""
    if attention_mask is None:
        return (0,) * shape[0]
    mask = _tensor("attention_mask", attention_mask)
    if mask.ndim == 1:
        mask = mask[None]
    if tuple(mask.shape) != shape:
        raise BadInputError(f"attention_mask has shape {tuple(mask.shape)}; it must be that of the tokens, {shape}")
    seen = mask.to(torch.bool)
    pads = (~seen).sum(dim=1)
    if not bool((seen == (torch.arange(shape[1], device=mask.device) >= pads[:, None])).all()):
        raise BadInputError("attention_mask hides tokens in the middle or on the right; pad on the left only")
    if bool((pads == shape[1]).any()):
        raise BadInputError("attention_mask hides a whole row; leave it out")
    return tuple(pads.tolist())


def _tensor(name: str, given: Any) -> torch.Tensor:
    """As a tensor. Raises BadInputError for what can't be one, saying what to give."""
    if isinstance(given, Mapping):
        raise BadInputError(
            f"{name} are a {type(given).__name__}; give for_prompt the tensors in it: "
            "input_ids=inputs['input_ids'], attention_mask=inputs['attention_mask']"
        )
    try:
        return torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise BadInputError(
            f"{name} are {given!r:.40}, no table of integers ({error!s:.80}); give [batch, tokens] as a tokenizer "
            "makes it: tokenizer(text, return_tensors='pt')['input_ids']"
        ) from None
