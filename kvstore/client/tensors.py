"""Blocks as torch tensors, without a copy. Needs torch, which the package itself does not."""

from __future__ import annotations

import warnings

import numpy as np
import torch
from numpy.typing import NDArray

from kvstore.errors import BadInputError
from kvstore.types import DTYPE_BYTES

_TORCH = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
    "uint8": torch.uint8,
}


def as_tensor(
    block: NDArray[np.uint8], dtype: str | torch.dtype = "uint8", shape: tuple[int, ...] | None = None
) -> torch.Tensor:
    """A tensor over ``block`` (uint8, one-dimensional) that keeps its memory alive; never write to it.

    Raises BadInputError for an unknown dtype or a shape that doesn't take exactly the block's bytes.
    """
    with warnings.catch_warnings():
        # torch warns that it can't keep a tensor read-only; the kernel does, see Lease.tensor.
        warnings.simplefilter("ignore", UserWarning)
        return typed(torch.from_numpy(block), dtype, shape)


def typed(block: torch.Tensor, dtype: str | torch.dtype, shape: tuple[int, ...] | None = None) -> torch.Tensor:
    """The bytes of a block (uint8, one-dimensional, anywhere) as other values, no copy; raises as ``as_tensor``."""
    if isinstance(dtype, torch.dtype):
        dtype = next((name for name, known in _TORCH.items() if known == dtype), str(dtype))
    if dtype not in _TORCH:
        raise BadInputError(f"dtype is {dtype!r}; known are {', '.join(sorted(DTYPE_BYTES))}")
    if block.nbytes % DTYPE_BYTES[dtype]:
        raise BadInputError(f"a block of {block.nbytes} bytes is no whole number of {dtype} values")
    tensor = block.view(_TORCH[dtype])
    if shape is None:
        return tensor
    try:
        return tensor.view(shape)
    except RuntimeError:
        raise BadInputError(f"shape {shape} does not take the {tensor.numel()} {dtype} values of a block") from None
