"""An engine's paged KV memory, described by its tensors and the order of their dimensions.

``dims`` names the dimensions of each tensor, one letter each:

    P page      T token in its page      S token of all pages      H head       D values of a head
    L layer     2 K and V                C values of K, then of V  X all bytes of a page, known to the engine only

So vLLM's flash attention is ``2PTHD`` or ``PTHC``, SGLang's layer-first ``SHD`` for K and V each, its page-first
``2SLHD``, ``2PLTHD``, ``2PHTLD``, an MLA latent ``PTD``, opaque blocks ``PX``. Memory order does not matter: strides
are read from the tensors, which may be numpy's, torch's, or whatever says by ``__cuda_array_interface__`` where it
lies on a device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.engine_adapter.block_layout import BlockLayout
from kvstore.engine_adapter.runs import Pages, Strides
from kvstore.errors import BadInputError

_LETTERS = frozenset("PTSHDL2CX")


@dataclass(frozen=True, slots=True)
class EnginePlane:
    """K, V, a latent or all of one layer: where page 0 begins, and how far on the next page, token and head are."""

    address: int
    page_bytes: int
    strides: Strides


@dataclass(frozen=True, slots=True)
class EngineLayer:
    """One layer of the engine; each plane holds ``heads`` units of ``unit_bytes`` for a token."""

    planes: tuple[EnginePlane, ...]
    heads: int
    unit_bytes: int
    opaque: bool = False


@dataclass(frozen=True, slots=True)
class EngineKV:
    """All layers of an engine, in the order of the store's. Keeps the tensors alive; see ``of``."""

    layers: tuple[EngineLayer, ...]
    page_tokens: int
    n_pages: int
    on_device: bool = False
    """Whether addresses are of a device's memory."""
    _tensors: tuple[Any, ...] = field(default=(), repr=False, compare=False)

    @classmethod
    def of(cls, tensors: Sequence[Any], dims: str, page_tokens: int | None = None) -> EngineKV:
        """From one tensor a layer (or a pair of K and V), or a single one with a dimension ``L``.

        ``page_tokens`` is needed where no dimension says it: with ``S`` and ``X``. Raises BadInputError for dimensions
        that don't fit, values of a head that are not contiguous, tensors that differ or are on other than CUDA devices.
        """
        if not tensors:
            raise BadInputError("no tensors were given; give one for each layer")
        if len(set(dims)) != len(dims) or not set(dims) <= _LETTERS or ("P" in dims) == ("S" in dims):
            raise BadInputError(f"dims is {dims!r}; use each letter of PTSHDL2CX once at most, and one of P and S")
        if sum(letter in dims for letter in "DCX") != 1:
            raise BadInputError(f"dims is {dims!r}; it needs one of D, C and X for the values")
        layers: list[EngineLayer] = []
        counts: set[tuple[int, int]] = set()
        places: set[bool] = set()
        for given in tensors:
            parts = [_Described(part, dims) for part in (given if isinstance(given, tuple) else (given,))]
            for index in range(parts[0].size("L")):
                planes = [plane for part in parts for plane in part.planes(index, page_tokens)]
                layers.append(EngineLayer(tuple(planes), parts[0].size("H"), parts[0].unit_bytes, "X" in dims))
            counts |= {part.counts(page_tokens) for part in parts}
            places |= {part.on_device for part in parts}
        if len(counts) != 1:
            raise BadInputError(f"the tensors differ in (page_tokens, pages): {sorted(counts)}")
        if len(places) != 1:
            raise BadInputError("some tensors lie in host memory, some on a device; give all in one place")
        ((tokens, n_pages),) = counts
        return cls(tuple(layers), tokens, n_pages, places.pop(), tuple(tensors))

    def check(self, layout: BlockLayout) -> None:
        """Raises BadInputError, naming the layer, unless blocks of ``layout`` hold just this KV."""
        if len(self.layers) != len(layout.layers):
            raise BadInputError(f"the engine has {len(self.layers)} layers, a block {len(layout.layers)}")
        for index, (mine, place) in enumerate(zip(self.layers, layout.layers, strict=True)):
            here = len(mine.planes), mine.heads, mine.unit_bytes
            there = len(place.planes), place.heads, place.unit_bytes
            if here != there:
                raise BadInputError(
                    f"layer {index} has (planes, heads, bytes) {here} in the engine, {there} in a block"
                )
            if mine.opaque != place.opaque:
                raise BadInputError(f"layer {index} is opaque on one side only")
            if mine.opaque and self.page_tokens != layout.page_tokens:
                raise BadInputError(
                    f"opaque pages have {self.page_tokens} tokens here, {layout.page_tokens} in a block"
                )

    def pages(self, layer: int, plane: int, table: NDArray[np.int64], first_token: int, token_step: int = 1) -> Pages:
        """The pages of a row, int64 [n], as one plane has them; add the plane's address. Tokens count units."""
        place = self.layers[layer].planes[plane]
        return Pages(
            table * place.page_bytes, max(self.page_tokens // token_step, 1), place.strides, first_token // token_step
        )


class _Described:
    """A tensor with named dimensions: sizes, and strides in bytes; absent ones have size 1."""

    def __init__(self, tensor: Any, dims: str) -> None:
        shape = tuple(tensor.shape)
        if len(shape) != len(dims):
            raise BadInputError(f"a tensor of shape {shape} does not have the dimensions {dims!r}")
        self.on_device = False
        if hasattr(tensor, "data_ptr"):
            if tensor.device.type not in ("cpu", "cuda"):
                raise BadInputError(
                    f"a tensor is on {tensor.device}; only host memory and CUDA devices can be read here"
                )
            self.on_device = tensor.device.type == "cuda"
            self.value_bytes, self.address = tensor.element_size(), tensor.data_ptr()
            strides = [stride * self.value_bytes for stride in tensor.stride()]
        elif hasattr(tensor, "__cuda_array_interface__"):
            interface = tensor.__cuda_array_interface__
            self.on_device = True
            self.value_bytes, self.address = np.dtype(interface["typestr"]).itemsize, int(interface["data"][0])
            strides = list(interface.get("strides") or _packed_strides(shape, self.value_bytes))
        else:
            self.value_bytes, self.address = tensor.itemsize, tensor.ctypes.data
            strides = list(tensor.strides)
        self._sizes = dict(zip(dims, shape, strict=True))
        self._strides = dict(zip(dims, strides, strict=True))
        values = next(letter for letter in "DCX" if letter in dims)
        if self._sizes[values] > 1 and self._strides[values] != self.value_bytes:
            raise BadInputError(f"the values of a head ({values} of {dims!r}) do not lie next to each other")
        if self.size("2") > 2 or ("C" in dims and self._sizes["C"] % 2):
            raise BadInputError(f"a tensor of shape {shape} has no K and V where {dims!r} says")
        self.unit_bytes = self._sizes[values] * self.value_bytes // (2 if values == "C" else 1)

    def size(self, letter: str) -> int:
        return int(self._sizes.get(letter, 1))

    def counts(self, page_tokens: int | None) -> tuple[int, int]:
        """Tokens of a page, and pages."""
        tokens = self._sizes.get("T", page_tokens)
        if tokens is None:
            raise BadInputError("page_tokens is missing; no dimension says it")
        if "S" in self._sizes:
            return int(tokens), self.size("S") // int(tokens)
        return int(tokens), self.size("P")

    def planes(self, layer: int, page_tokens: int | None) -> list[EnginePlane]:
        """The planes of one layer that lie in this tensor."""
        tokens, _ = self.counts(page_tokens)
        strides = self._strides
        token_bytes = strides.get("S", strides.get("T", self.unit_bytes))
        page_bytes = strides["P"] if "P" in strides else tokens * token_bytes
        start = self.address + layer * strides.get("L", 0)
        if "2" in self._sizes:
            starts = [start + i * strides["2"] for i in range(self.size("2"))]
        elif "C" in self._sizes:
            starts = [start, start + self.unit_bytes]
        else:
            starts = [start]
        inside = Strides(token_bytes, strides.get("H", self.unit_bytes))
        return [EnginePlane(each, page_bytes, inside) for each in starts]


def _packed_strides(shape: tuple[int, ...], value_bytes: int) -> list[int]:
    """Bytes from one to the next in each dimension of a C-contiguous array."""
    return [value_bytes * math.prod(shape[i + 1 :]) for i in range(len(shape))]
