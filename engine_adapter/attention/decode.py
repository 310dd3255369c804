"""Attention of one new token a request over pages that are read where they lie."""

from __future__ import annotations

import importlib.util
import math

import torch

from kvstore.engine_adapter.attention import in_torch
from kvstore.engine_adapter.attention.merge import Part
from kvstore.engine_adapter.attention.pages import KVPages
from kvstore.errors import BadInputError, DeviceError

BACKENDS = ("triton", "torch")


def decode_attention(
    q: torch.Tensor,
    pages: KVPages,
    *,
    scale: float | None = None,
    out: Part[torch.Tensor] | None = None,
    n_splits: int | None = None,
    backend: str | None = None,
) -> Part[torch.Tensor]:
    """softmax(q k * scale) v over each request's pages, and its log-sum-exp, for ``merge`` with other parts.

    ``q`` [requests, q_heads, key_dim] of the pages' dtype, on their device; ``q_heads`` is a multiple of the pages'
    ``kv_heads``, and consecutive ones share a kv head. ``scale`` is key_dim ** -0.5 unless given (a latent's is its
    model's). Gives float32 [requests, q_heads, value_dim] and [requests, q_heads], in ``out`` where that is given
    (contiguous). A request without tokens here gets zeros and minus infinity.

    On a GPU the work is given to torch's current stream, without waiting for it: the pages must stay until it is over.
    Each page is read once for all its query heads up to 32 a kv head, once more for every 32 beyond. ``n_splits`` is
    how many programs share a request's tokens; chosen unless given. On the CPU it is done when this returns.

    ``backend``: "triton", "torch" (the CPU), or what the device needs. Raises BadInputError for arguments that don't
    fit each other, DeviceError where the device has no backend here.
    """
    layout = pages.layout
    if q.dim() != 3 or q.shape[0] != len(pages) or q.shape[2] != layout.key_dim or q.stride(2) != 1:
        raise BadInputError(
            f"q is {tuple(q.shape)} with strides {q.stride()}; give [{len(pages)} requests, q_heads, "
            f"{layout.key_dim}], the last dimension contiguous"
        )
    if not q.shape[1] or q.shape[1] % layout.kv_heads:
        raise BadInputError(f"{q.shape[1]} query heads can't share {layout.kv_heads} kv heads evenly")
    if q.dtype != layout.dtype or q.device != pages.device:
        raise BadInputError(f"q is {q.dtype} on {q.device}, the pages are {layout.dtype} on {pages.device}")
    if n_splits is not None and n_splits < 1:
        raise BadInputError(f"n_splits is {n_splits}; it must be at least 1")
    if out is None:
        shape = q.shape[0], q.shape[1], layout.value_dim
        out = Part(
            torch.empty(shape, dtype=torch.float32, device=q.device),
            torch.empty(shape[:2], dtype=torch.float32, device=q.device),
        )
    _check_out(out, q, layout.value_dim)
    scale = scale if scale is not None else 1.0 / math.sqrt(layout.key_dim)
    if _backend(q.device, backend) == "torch":
        in_torch.decode(q, pages, scale, out)
    elif len(pages):
        from kvstore.engine_adapter.attention import launch

        launch.decode(q, pages, scale, out, n_splits)
    return out


def _check_out(out: Part[torch.Tensor], q: torch.Tensor, value_dim: int) -> None:
    for name, array, shape in (("output", out.output, (*q.shape[:2], value_dim)), ("lse", out.lse, q.shape[:2])):
        if (
            array.shape != shape
            or array.dtype != torch.float32
            or not array.is_contiguous()
            or array.device != q.device
        ):
            raise BadInputError(
                f"out.{name} is {array.dtype} {tuple(array.shape)} on {array.device}; it must be contiguous float32 "
                f"{tuple(shape)} on {q.device}"
            )


def _backend(device: torch.device, asked: str | None) -> str:
    if asked not in (None, *BACKENDS):
        raise BadInputError(f"backend is {asked!r}; known are {', '.join(BACKENDS)}")
    backend = asked or ("torch" if device.type == "cpu" else "triton")
    if backend == "torch" and device.type != "cpu":
        raise BadInputError(f"the backend torch reads pages in the memory of this process, not on {device}")
    if backend == "triton" and importlib.util.find_spec("triton") is None:
        raise DeviceError(
            f"attention on {device} needs triton: pip install triton, or kvstored's extra cuda12 or cuda13"
        )
    return backend
