"""Decode attention over K and V in three places: in host memory where they lie, staged first, in the GPU's memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvstore.device import Device, PinnedBuffer
from kvstore.engine_adapter.attention import KVPages, PageLayout, Part, decode_attention
from kvstore.errors import DeviceError, IntegrityError

ERROR_MAX = 1e-3


@dataclass(frozen=True, slots=True)
class Shape:
    """What is attended to. A page has K, then V, of ``PAGE_TOKENS`` tokens."""

    requests: int
    tokens: int
    kv_heads: int
    q_heads: int
    head_dim: int
    repeats: int

    @property
    def layout(self) -> PageLayout:
        """Of each page, in float16."""
        row = self.kv_heads * self.head_dim
        return PageLayout(
            torch.float16,
            PAGE_TOKENS,
            self.kv_heads,
            self.head_dim,
            self.head_dim,
            row,
            self.head_dim,
            PAGE_TOKENS * row,
        )

    @property
    def n_pages(self) -> int:
        """Of all requests."""
        return self.requests * -(-self.tokens // PAGE_TOKENS)

    @property
    def page_bytes(self) -> int:
        """K and V."""
        return 2 * 2 * PAGE_TOKENS * self.kv_heads * self.head_dim


PAGE_TOKENS = 16
LARGE = Shape(requests=8, tokens=8192, kv_heads=8, q_heads=32, head_dim=128, repeats=10)
SMALL = Shape(requests=2, tokens=40, kv_heads=2, q_heads=4, head_dim=64, repeats=1)


def compare(device: Device) -> dict[str, Any]:
    """Seconds and GB/s of K and V for each place, after comparing the results with float64.

    Over a simulated device torch computes on the CPU, and its rates are those of the CPU. Raises IntegrityError where
    results are off by more than ``ERROR_MAX``, DeviceError where this torch has no CUDA.
    """
    on_gpu = device.facts.kind == "cuda"
    if on_gpu and not torch.cuda.is_available():
        raise DeviceError("this torch is built without CUDA: install the build for the driver's CUDA")
    shape = LARGE if on_gpu else SMALL
    place = torch.device("cuda", device.facts.ordinal) if on_gpu else torch.device("cpu")
    n_bytes = shape.n_pages * shape.page_bytes
    with ExitStack() as stack:
        host = stack.enter_context(PinnedBuffer(device, n_bytes))
        values = np.random.default_rng(6).standard_normal(n_bytes // 2, np.float32).astype(np.float16)
        host.array[:] = values.view(np.uint8)
        q = torch.from_numpy(_queries(shape)).to(place)
        stream = device.stream()
        stack.callback(device.free_stream, stream)
        stack.enter_context(_torch_stream(stream) if on_gpu else nullcontext())
        own = torch.frombuffer(bytearray(host.array), dtype=torch.uint8).to(place)
        staged = torch.empty_like(own)
        stack.callback(device.sync_stream, stream)

        def bring() -> None:
            if on_gpu:
                device.copy(staged.data_ptr(), host.address, n_bytes, stream)
            else:
                staged.copy_(own)

        # Of a simulated device kernels can't be torch's; torch reads the host's address of the same bytes.
        in_place = _pages(shape, host.device_address if on_gpu else host.address, place)
        places: dict[str, tuple[KVPages, Callable[[], None]]] = {
            "zero-copy": (in_place, _nothing),
            "staged": (_pages(shape, staged.data_ptr(), place), bring),
            "device memory": (_pages(shape, own.data_ptr(), place), _nothing),
        }
        expected = _reference(shape, values)
        return {
            "kv_bytes": n_bytes,
            "measured_on": str(place),
            "places": {
                name: _timed(device, stream, q, pages, prepare, expected, shape, name)
                for name, (pages, prepare) in places.items()
            },
        }


def _timed(
    device: Device, stream: int, q: torch.Tensor, pages: KVPages, prepare: Callable[[], None],
    expected: NDArray[np.float64], shape: Shape, name: str,
) -> dict[str, float]:  # fmt: skip
    def once() -> Part[torch.Tensor]:
        prepare()
        found = decode_attention(q, pages)
        device.sync_stream(stream)
        return found

    found = once().output.cpu().double().numpy()
    error = float(np.abs(found - expected).max() / np.abs(expected).max())
    if not error <= ERROR_MAX:
        raise IntegrityError(f"attention over {name} is off by {error:.2g} of the largest result")
    seconds = []
    for _ in range(shape.repeats):
        begun_s = time.perf_counter()
        once()
        seconds.append(time.perf_counter() - begun_s)
    took_s = float(np.median(seconds))
    return {"took_s": took_s, "gb_per_s": shape.n_pages * shape.page_bytes / took_s / 1e9, "error": error}


def _torch_stream(stream: int) -> AbstractContextManager[None]:
    """A device's stream as torch's current one."""
    external: Any = torch.cuda.ExternalStream
    given: AbstractContextManager[None] = torch.cuda.stream(external(stream))
    return given


def _nothing() -> None:
    """What needs no preparation."""


def _queries(shape: Shape) -> NDArray[np.float16]:
    drawn = np.random.default_rng(7).standard_normal((shape.requests, shape.q_heads, shape.head_dim), np.float32)
    return drawn.astype(np.float16)


def _pages(shape: Shape, address: int, place: torch.device) -> KVPages:
    """All pages of a request lie in a row, those of the next one behind them."""
    starts = np.uint64(address) + np.arange(shape.n_pages, dtype=np.uint64) * np.uint64(shape.page_bytes)
    return KVPages.of(shape.layout, np.split(starts, shape.requests), [shape.tokens] * shape.requests, device=place)


def _reference(shape: Shape, values: NDArray[np.float16]) -> NDArray[np.float64]:
    """softmax(q k / sqrt(dim)) v in float64, [requests, q_heads, dim]."""
    pages = values.reshape(shape.requests, -1, 2, PAGE_TOKENS, shape.kv_heads, shape.head_dim)
    out = np.empty((shape.requests, shape.q_heads, shape.head_dim))
    group = shape.q_heads // shape.kv_heads
    for request, q in enumerate(_queries(shape).astype(np.float64)):
        k, v = (
            pages[request, :, plane].reshape(-1, shape.kv_heads, shape.head_dim)[: shape.tokens].astype(np.float64)
            for plane in (0, 1)
        )
        for head in range(shape.q_heads):
            logits = k[:, head // group] @ q[head] / np.sqrt(shape.head_dim)
            weights = np.exp(logits - logits.max())
            out[request, head] = weights @ v[:, head // group] / weights.sum()
    return out
