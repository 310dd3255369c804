"""Pages scattered over raw memory, and what attention over them is: in float64, by the definition.

Whatever of the memory holds no token is NaN, so that what reads it and uses it says so.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvstore.engine_adapter.attention import KVPages, PageLayout, Part

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
RELATIVE_ERROR_MAX = 1e-4
"""Of an output against its length, and of an lse (or absolutely, below 1). Asked for are 1e-3."""

BEHIND_BYTES = 4096
"""Behind the last page: what planted bugs read there is NaN, too."""

Floats = NDArray[np.float64]
Bytes = NDArray[np.uint8]
Memory = Callable[[int], tuple[Bytes, int, Any]]
"""Size in bytes to: where to write, the address to read at, and what keeps that readable."""


@dataclass(frozen=True)
class Scene:
    """A question to attention, and the answer: ``keys`` and ``values`` float64 [tokens, kv_heads, dim] a request."""

    q: torch.Tensor
    pages: KVPages
    keys: list[Floats]
    values: list[Floats]
    visible: list[NDArray[np.bool_]]
    memory: Any

    @property
    def expected(self) -> Part[Any]:
        """float64 [requests, q_heads, value_dim] and [requests, q_heads]."""
        answers = [
            attend(*each)
            for each in zip(self.q.cpu().double().numpy(), self.keys, self.values, self.visible, strict=True)
        ]
        return Part(np.stack([output for output, _ in answers]), np.stack([lse for _, lse in answers]))

    def disagreement(self, found: Part[torch.Tensor]) -> str:
        """Empty if an answer is right."""
        expected = self.expected
        output, lse = found.output.cpu().double().numpy(), found.lse.cpu().double().numpy()
        if not np.array_equal(np.isneginf(lse), np.isneginf(expected.lse)) or np.isnan(output).any():
            return f"NaN or another set of empty parts: {lse}, expected {expected.lse}"
        length = np.maximum(np.linalg.norm(expected.output, axis=-1), 1e-6)
        error = np.linalg.norm(output - expected.output, axis=-1) / length
        some = np.isfinite(expected.lse)
        lse_error = np.abs(lse[some] - expected.lse[some]) / np.maximum(np.abs(expected.lse[some]), 1.0)
        worst = max(float(error.max(initial=0)), float(lse_error.max(initial=0)))
        return "" if worst <= RELATIVE_ERROR_MAX else f"relative error {worst:.2g}"


def attend(q: Floats, keys: Floats, values: Floats, visible: NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """One request's query heads over its visible tokens."""
    group = q.shape[0] // keys.shape[1]
    outputs, lses = np.zeros((q.shape[0], values.shape[2])), np.full(q.shape[0], -np.inf)
    for head in range(q.shape[0]) if visible.any() else ():
        logits = keys[visible, head // group] @ q[head] / np.sqrt(q.shape[1])
        top = logits.max()
        if top == -np.inf:
            continue
        weights = np.exp(logits - top)
        outputs[head] = weights @ values[visible, head // group] / weights.sum()
        lses[head] = top + np.log(weights.sum())
    return outputs, lses


def own_memory(n_bytes: int) -> tuple[Bytes, int, Any]:
    """Ordinary memory of this process."""
    memory = np.empty(n_bytes + 64, np.uint8)
    aligned = memory[-memory.ctypes.data % 64 :][:n_bytes]
    return aligned, aligned.ctypes.data, memory


def mapped_elsewhere(n_bytes: int) -> tuple[Bytes, int, Any]:
    """A memfd, mapped for who writes it and once more, read-only, for who reads it, as a zero-copy reader has it."""
    fd = os.memfd_create("pages")
    try:
        os.ftruncate(fd, n_bytes)
        writer = np.frombuffer(mmap.mmap(fd, n_bytes), np.uint8)
        address, mapping = map_for_reading(Path(f"/proc/self/fd/{fd}"), n_bytes)
    finally:
        os.close(fd)
    assert writer.ctypes.data != address
    return writer, address, mapping


def map_for_reading(file: Path, n_bytes: int) -> tuple[int, Any]:
    """Where a file is mapped, read-only, for as long as the second value lives."""
    with file.open("rb") as opened:
        mapping = np.frombuffer(mmap.mmap(opened.fileno(), n_bytes, prot=mmap.PROT_READ), np.uint8)
    return mapping.ctypes.data, mapping


def make_scene(
    seed: int,
    n_tokens: Sequence[int],
    *,
    dtype: str = "float16",
    kv_heads: int = 2,
    group: int = 4,
    key_dim: int = 64,
    latent_value_dim: int = 0,
    page_tokens: int = 16,
    order: str = "NHD",
    first_tokens: Sequence[int] | int = 0,
    alignment: int = 16,
    memory: Memory = own_memory,
    strong: bool = False,
    n_excluded: int = 0,
    device: str = "cpu",
) -> Scene:
    """Random KV in pages in random order with gaps. ``alignment``: of page addresses, in bytes, and of no more.

    ``strong``: logits so far apart that a few tokens have all the weight. ``n_excluded``: the logits of so many tokens
    at the beginning of each request are minus infinity, as their keys are.
    """
    rng = np.random.default_rng(seed)
    value_dim = latent_value_dim or key_dim
    element = DTYPES[dtype].itemsize
    plane_bytes = page_tokens * kv_heads * key_dim * element
    layout = PageLayout(
        DTYPES[dtype],
        page_tokens,
        kv_heads,
        key_dim,
        value_dim,
        *((kv_heads * key_dim, key_dim) if order == "NHD" else (key_dim, page_tokens * key_dim)),
        0 if latent_value_dim else plane_bytes // element,
    )
    page_bytes = plane_bytes if latent_value_dim else 2 * plane_bytes
    counts = [-(-n // page_tokens) for n in n_tokens]
    starts, size = _places(rng, sum(counts), page_bytes, alignment)
    buffer, address, keep = memory(size)
    buffer[:] = 0xFF
    keys: list[Floats] = []
    values: list[Floats] = []
    next_page = 0
    for n, count in zip(n_tokens, counts, strict=True):
        kv = [
            _random(rng, (n, kv_heads, key_dim), dtype, 4.0 if strong else 1.0)
            for _ in range(1 if latent_value_dim else 2)
        ]
        kv[0][:n_excluded] = -torch.inf
        keys.append(kv[0].double().numpy())
        values.append(kv[-1].double().numpy()[..., :value_dim])
        for page in range(count):
            for plane, tensor in enumerate(kv):
                tokens = tensor[page * page_tokens : (page + 1) * page_tokens]
                begin = starts[next_page] + plane * plane_bytes
                _write(buffer[begin : begin + plane_bytes], tokens, page_tokens, order)
            next_page += 1
    ends = np.cumsum(counts)
    addresses = (starts + address).astype(np.uint64)
    rows = [addresses[end - count : end] for end, count in zip(ends.tolist(), counts, strict=True)]
    q = _random(rng, (len(n_tokens), kv_heads * group, key_dim), dtype, 1.0).to(device)
    q = q.abs() + 0.125 if n_excluded else q
    pages = KVPages.of(layout, rows, n_tokens, first_tokens=first_tokens, device=device)
    first = np.broadcast_to(first_tokens, len(n_tokens)).tolist()
    visible = [np.arange(n) >= begin for n, begin in zip(n_tokens, first, strict=True)]
    return Scene(q, pages, keys, values, visible, (buffer, keep))


def _places(rng: np.random.Generator, n_pages: int, page_bytes: int, alignment: int) -> tuple[NDArray[np.int64], int]:
    """Where pages begin, in random order, apart from each other by odd multiples of ``alignment``."""
    gaps = (2 * rng.integers(1, 5, n_pages) - 1) * alignment
    page_bytes += -page_bytes % alignment
    starts = np.cumsum(gaps + page_bytes) - page_bytes
    return rng.permutation(starts), int(starts.max(initial=0)) + page_bytes + BEHIND_BYTES


def _random(rng: np.random.Generator, shape: tuple[int, ...], dtype: str, scale: float) -> torch.Tensor:
    return torch.from_numpy(rng.standard_normal(shape) * scale).to(DTYPES[dtype])


def _write(plane: Bytes, tokens: torch.Tensor, page_tokens: int, order: str) -> None:
    """Tokens [n, heads, dim] into a page's plane; the tokens that it lacks stay what they are."""
    heads = tokens.shape[1]
    raw = tokens.contiguous().view(torch.uint8).numpy().reshape(*tokens.shape[:2], -1)
    if order == "NHD":
        plane.reshape(page_tokens, heads, -1)[: len(raw)] = raw
    else:
        plane.reshape(heads, page_tokens, -1)[:, : len(raw)] = raw.transpose(1, 0, 2)
