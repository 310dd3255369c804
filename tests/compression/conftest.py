"""Batches of frames with random payloads, and specs of every kind of group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.compression.frame import FrameLayout, FrameRow
from kvstore.types import GroupKind, KVGroup, KVSpec

NAMESPACE = bytes(range(100, 116))


@dataclass
class Frames:
    """``n`` frames: ``payloads`` uint8 [n, payload_bytes], ``headers`` uint8 [n, header_bytes]."""

    layout: FrameLayout
    payloads: NDArray[np.uint8]
    keys: NDArray[np.uint8]
    parents: NDArray[np.uint8]
    rows: list[FrameRow]
    log_seqs: NDArray[np.int64]
    firsts: NDArray[np.bool_]
    headers: NDArray[np.uint8]

    @property
    def addresses(self) -> NDArray[np.uint64]:
        steps = np.arange(len(self.payloads), dtype=np.uint64) * np.uint64(self.layout.payload_bytes)
        return np.uint64(self.payloads.ctypes.data) + steps

    def verify(self) -> list[bool]:
        good: list[bool] = self.layout.verify(self.headers, self.addresses, self.keys, self.parents).tolist()
        return good

    def whole(self, i: int) -> bytes:
        padding_bytes = self.layout.frame_bytes - self.layout.header_bytes - self.layout.payload_bytes
        return b"".join((self.headers[i].tobytes(), self.payloads[i].tobytes(), bytes(padding_bytes)))


def make(spec: KVSpec, n: int, seed: int = 0, row_bytes_max: int = 64) -> Frames:
    rng = np.random.default_rng(seed)
    layout = FrameLayout.of(spec, row_bytes_max, NAMESPACE)
    payloads = rng.integers(0, 256, (n, layout.payload_bytes), dtype=np.uint8)
    keys, parents = rng.integers(0, 256, (2, n, 16), dtype=np.uint8)
    rows = [FrameRow(rng.bytes(int(rng.integers(0, row_bytes_max + 1))), rng.bytes(16 * (i % 2))) for i in range(n)]
    log_seqs = rng.integers(0, 1 << 62, n)
    firsts = rng.integers(0, 2, n).astype(np.bool_)
    frames = Frames(layout, payloads, keys, parents, rows, log_seqs, firsts, np.empty(0, np.uint8))
    frames.headers = layout.encode_headers(keys, parents, rows, log_seqs, frames.addresses, firsts)
    return frames


@pytest.fixture(scope="session")
def make_frames() -> Callable[..., Frames]:
    """``make_frames(spec, n, seed=0, row_bytes_max=64)``."""
    return make


@pytest.fixture(scope="session")
def all_kinds() -> KVSpec:
    """One group of every kind: split planes, page groups of several pages with a rest, ragged sizes."""
    return KVSpec(
        block_tokens=64,
        page_tokens=16,
        groups=(
            KVGroup(layers=2, kv_heads=8, head_dim=128),
            KVGroup(layers=3, kv_heads=3, head_dim=32, kind=GroupKind.SLIDING, layout="HND", window_tokens=128),
            KVGroup(layers=2, head_dim=576, kind=GroupKind.MLA),
            KVGroup(layers=1, dtype="uint8", layout="opaque", page_bytes=777, kind=GroupKind.STATE),
            KVGroup(layers=1, kv_heads=1, head_dim=5, dtype="float32", kind=GroupKind.STATE),
        ),
    )
