"""Summaries and scores of pages by a device's kernels, beside numpy: shared memory, shuffles and barriers at work."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.device import Device, PinnedBuffer
from kvstore.device.page_kernels import KeyPages, PageSummaries, score_pages, summarize_pages
from kvstore.errors import IntegrityError

N_PAGES, PAGE_TOKENS, HEADS, GROUP, HEAD_DIM = 6, 16, 2, 4, 64
SCORE_ERROR_MAX = 1e-3


def compare(device: Device) -> dict[str, Any]:
    """How far scores are off. Raises IntegrityError above ``SCORE_ERROR_MAX``, and for summaries that differ."""
    rng = np.random.default_rng(4)
    keys = rng.standard_normal((N_PAGES, PAGE_TOKENS, HEADS, HEAD_DIM), np.float32)
    queries = rng.standard_normal((HEADS * GROUP, HEAD_DIM), np.float32)
    rows = rng.integers(1, PAGE_TOKENS + 1, N_PAGES).astype(np.uint32)
    low, high, scores = _on_device(device, keys, queries, rows)
    kept = [page[:n] for page, n in zip(keys, rows.tolist(), strict=True)]
    expected_low, expected_high = (np.stack([each(page, axis=0) for page in kept]) for each in (np.min, np.max))
    if not (np.array_equal(low, expected_low) and np.array_equal(high, expected_high)):
        raise IntegrityError("summaries of pages differ from numpy's; do not select pages with this device")
    grouped = queries.astype(np.float64).reshape(HEADS, GROUP, 1, HEAD_DIM)
    ends = (end.astype(np.float64).transpose(1, 0, 2)[:, None] for end in (low, high))
    bounds = np.maximum(*(grouped * end for end in ends)).sum(-1).max(1)
    error = float(np.max(np.abs(scores - bounds)) / np.max(np.abs(bounds)))
    if not error <= SCORE_ERROR_MAX:
        raise IntegrityError(
            f"scores of pages are off by {error:.2g} of the largest; do not select pages with this device"
        )
    return {"pages": N_PAGES, "score_error": error}


def _on_device(
    device: Device, keys: NDArray[np.float32], queries: NDArray[np.float32], rows: NDArray[np.uint32]
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]:
    """Lowest and highest keys of each page [pages, heads, dim], and scores [heads, pages]."""
    summary = (N_PAGES, HEADS, HEAD_DIM)
    stream = device.stream()
    with ExitStack() as stack:
        stack.callback(device.free_stream, stream)

        def room(n_bytes: int) -> int:
            address = device.malloc(n_bytes)
            stack.callback(device.free, address)
            return address

        def sent(array: NDArray[Any]) -> int:
            buffer = stack.enter_context(PinnedBuffer(device, array.nbytes))
            buffer.array[:] = array.reshape(-1).view(np.uint8)
            address = room(array.nbytes)
            device.copy(address, buffer.address, array.nbytes, stream)
            return address

        def came(address: int, shape: tuple[int, ...]) -> NDArray[np.float32]:
            n_bytes = 4 * int(np.prod(shape))
            buffer = stack.enter_context(PinnedBuffer(device, n_bytes))
            device.copy(buffer.address, address, n_bytes, stream)
            device.sync_stream(stream)
            return buffer.array.copy().view(np.float32).reshape(shape)

        start = sent(keys)
        addresses = np.uint64(start) + np.arange(N_PAGES, dtype=np.uint64) * np.uint64(keys[0].nbytes)
        pages = KeyPages(
            sent(addresses), sent(rows), N_PAGES, HEADS, HEAD_DIM, "float32", HEADS * HEAD_DIM * 4, HEAD_DIM * 4
        )
        low, high, scores = (room(4 * int(np.prod(shape))) for shape in (summary, summary, (HEADS, N_PAGES)))
        summarize_pages(device, pages, stream, low=low, high=high)
        score_pages(
            device, PageSummaries(low, high, N_PAGES, HEADS, HEAD_DIM, "float32"), sent(queries), GROUP, scores, stream
        )
        return came(low, summary), came(high, summary), came(scores, (HEADS, N_PAGES))
