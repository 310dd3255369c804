"""Attention over all tokens from attention over parts of them: by the log-sum-exp of each part.

A part is what softmax gave over its own tokens and the logarithm of the sum of exponentials that it was divided by. As
long as parts have no token in common their union follows exactly, in whatever memory and by whatever processor each
was computed (FlashAttention; tree attention).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import BadInputError

if TYPE_CHECKING:
    import torch

Array = TypeVar("Array", "torch.Tensor", NDArray[Any])


class Part(NamedTuple, Generic[Array]):
    """Attention over some tokens: ``output`` [..., value_dim], ``lse`` [...], natural logarithms.

    Of no tokens at all: zeros, and minus infinity.
    """

    output: Array
    lse: Array


def merge(outputs: Sequence[Array], lses: Sequence[Array]) -> Part[Array]:
    """The parts as one: outputs [..., value_dim] and lses [...] of equal shapes, torch tensors or numpy arrays.

    Computed in the type that they have, on the device where they are, without waiting for it; parts that weigh nothing,
    as those without tokens do, leave nothing of their output, not even NaN.
    A learned sink (a logit for each head that takes weight and gives no value) is a part with zeros for
    output and that logit for lse. Raises BadInputError for no parts, and for shapes that don't fit.
    """
    _check(outputs, lses)
    xp = _namespace(outputs[0])
    lse, output = xp.stack(tuple(lses)), xp.stack(tuple(outputs))
    most = xp.amax(lse, 0)
    base = xp.where(xp.isfinite(most), most, xp.zeros_like(most))
    weights = xp.exp(lse - base)
    total = xp.sum(weights, 0)
    some = total > 0
    divisor = xp.where(some, total, xp.ones_like(total))
    weights = weights[..., None]
    merged = xp.sum(weights * xp.where(weights == 0, xp.zeros_like(output), output), 0) / divisor[..., None]
    return Part(merged, xp.where(some, base + xp.log(divisor), most))


def _namespace(array: Any) -> Any:
    if isinstance(array, np.ndarray):
        return np
    import torch

    return torch


def _check(outputs: Sequence[Any], lses: Sequence[Any]) -> None:
    if not len(outputs) or len(outputs) != len(lses):
        raise BadInputError(f"{len(outputs)} outputs and {len(lses)} lses can't be merged; give one of each a part")
    for i, (output, lse) in enumerate(zip(outputs, lses, strict=True)):
        if tuple(output.shape) != tuple(outputs[0].shape) or tuple(lse.shape) != tuple(output.shape)[:-1]:
            raise BadInputError(
                f"part {i} has an output of shape {tuple(output.shape)} and an lse of shape {tuple(lse.shape)}; the "
                f"first has an output of shape {tuple(outputs[0].shape)}, and an lse has no last dimension"
            )
