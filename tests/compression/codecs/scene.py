"""Page groups of K and V in memory with a margin around them, and values of every kind."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvstore.compression.codec import Codec
from kvstore.compression.frame_format import PlaneKind
from kvstore.compression.payload import Kept
from kvstore.compression.plane import PlaneShape
from kvstore.types import DTYPE_BYTES, KVGroup

MARGIN = 64
FILL = 0xA5

KINDS = ("normal", "bits", "tiny", "constant", "zeros", "huge")


def shape(
    dim: int = 64,
    heads: int = 3,
    dtype: str = "bfloat16",
    layout: str = "NHD",
    kind: PlaneKind = PlaneKind.K,
    page_tokens: int = 16,
    pages: int = 4,
) -> PlaneShape:
    group = KVGroup(layers=1, kv_heads=heads, head_dim=dim, dtype=dtype, layout=layout)
    return PlaneShape.of(group, kind, page_tokens, pages)


def values(kind: str, shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[np.float32]:
    """Like K and V: channels differ in scale, and some are far from 0."""
    scales = np.exp(rng.standard_normal(shape[-1]))
    x = (rng.standard_normal(shape) * scales + (rng.random(shape[-1]) < 0.1) * 8).astype(np.float32)
    match kind:
        case "tiny":
            x *= np.float32(1e-7)
        case "constant":
            x[:] = 3.7
        case "zeros":
            x = np.where(rng.random(shape) < 0.5, np.float32(0), -np.float32(0))
        case "huge":
            x *= np.float32(3e4)
    return x


def elements(x: NDArray[np.float32], dtype: str) -> NDArray[np.uint8]:
    if dtype == "bfloat16":
        return (x.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    with np.errstate(over="ignore"):
        return x.astype(dtype).view(np.uint8)


def floats(raw: NDArray[np.uint8], dtype: str) -> NDArray[np.float32]:
    raw = np.ascontiguousarray(raw)
    if dtype == "bfloat16":
        return (raw.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    return raw.view(dtype).astype(np.float32)


@dataclass
class Groups:
    """``n`` page groups of a shape, each with a margin that nobody may touch."""

    plane: PlaneShape
    n: int
    memory: NDArray[np.uint8] = field(init=False)

    def __post_init__(self) -> None:
        self.memory = np.full((self.n, self.row + 2 * MARGIN), FILL, np.uint8)

    @property
    def row(self) -> int:
        return self.plane.page_stride * self.plane.pages

    @property
    def body(self) -> NDArray[np.uint8]:
        return self.memory[:, MARGIN:-MARGIN]

    @property
    def addresses(self) -> NDArray[np.uint64]:
        return addresses(self.memory, MARGIN)

    def fill(self, kind: str, seed: int) -> Groups:
        rng = np.random.default_rng(seed)
        if kind == "bits":
            self.body[:] = rng.integers(0, 256, self.body.shape, np.uint8)
        else:
            count = self.row // DTYPE_BYTES[self.plane.dtype] // self.plane.dim
            x = values(kind, (self.n, count, self.plane.dim), rng)
            self.body[:] = elements(x, self.plane.dtype).reshape(self.n, -1)
        return self

    def rows(self) -> NDArray[np.uint8]:
        """The plane, uint8 [n, heads, tokens, row_bytes]; a copy, found without the code under test."""
        plane = self.plane
        pages = self.body.reshape(self.n, plane.pages, plane.page_stride)
        part = pages[:, :, plane.offset : plane.offset + plane.part_bytes]
        if plane.head_stride < plane.token_stride:
            by_token = part.reshape(self.n, plane.tokens, plane.heads, plane.row_bytes)
            return np.ascontiguousarray(by_token.transpose(0, 2, 1, 3))
        by_head = part.reshape(self.n, plane.pages, plane.heads, plane.page_tokens, plane.row_bytes)
        return np.ascontiguousarray(by_head.transpose(0, 2, 1, 3, 4)).reshape(
            self.n, plane.heads, plane.tokens, plane.row_bytes
        )

    def floats(self) -> NDArray[np.float32]:
        """[n, heads, tokens, dim]."""
        return floats(self.rows(), self.plane.dtype)

    def is_untouched_outside(self) -> bool:
        """Margins and the other plane of each page are as they were made."""
        pages = self.body.reshape(self.n, self.plane.pages, self.plane.page_stride).copy()
        pages[:, :, self.plane.offset : self.plane.offset + self.plane.part_bytes] = FILL
        margins = (self.memory[:, :MARGIN] == FILL).all() and (self.memory[:, -MARGIN:] == FILL).all()
        return bool(margins and (pages == FILL).all())


def addresses(memory: NDArray[np.uint8], offset: int = 0) -> NDArray[np.uint64]:
    n, row = memory.shape
    return np.uint64(memory.ctypes.data + offset) + np.arange(n, dtype=np.uint64) * np.uint64(row)


@dataclass
class Stored:
    """Encoded page groups: ``memory`` uint8 [n, room], of which ``sizes`` count."""

    memory: NDArray[np.uint8]
    sizes: NDArray[np.uint64]
    lost: NDArray[np.bool_]

    @property
    def addresses(self) -> NDArray[np.uint64]:
        return addresses(self.memory)


def encode(codec: Codec, groups: Groups, kept: Kept, threads: int = 1) -> Stored:
    memory = np.full((groups.n, codec.stored_bytes(groups.plane, kept) + MARGIN), FILL, np.uint8)
    done = codec.encode(groups.plane, kept, groups.addresses, addresses(memory), threads)
    assert (memory[:, -MARGIN:] == FILL).all()
    return Stored(memory, done.sizes, done.lost)


def decode(codec: Codec, plane: PlaneShape, stored: Stored, threads: int = 1) -> tuple[Groups, NDArray[np.bool_]]:
    back = Groups(plane, len(stored.sizes))
    good = codec.decode(plane, stored.addresses, stored.sizes, back.addresses, threads)
    assert back.is_untouched_outside()
    return back, good
