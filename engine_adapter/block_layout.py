"""Where each layer, plane, page, token and head lies inside a block of the store, worked out from its KVSpec.

A block is stored group by group, layer by layer, page by page; inside a page K, then V (see docs/FORMAT.md).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.engine_adapter.runs import Pages, Strides
from kvstore.errors import BadInputError
from kvstore.hybrid import Part, parts_of, place_of
from kvstore.types import DTYPE_BYTES, GroupKind, KVGroup, KVSpec

OPAQUE = "opaque"


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """One layer inside a part of a block. ``planes`` has the offset of each plane's first page: K and V, or one.

    ``token_step`` tokens are one unit: 1, but a whole page where only the engine knows what is inside it.
    """

    planes: tuple[int, ...]
    page_bytes: int
    heads: int
    unit_bytes: int
    token_step: int
    strides: Strides
    opaque: bool = False
    part: int = 0

    @property
    def alike(self) -> tuple[int | Strides, ...]:
        """Equal for layers of a block for which the same runs hold."""
        return self.part, self.page_bytes, self.heads, self.unit_bytes, self.token_step, self.strides


class PartSize(NamedTuple):
    """One part of every block."""

    block_bytes: int
    window_tokens: int


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """The inside of every block of one spec; see ``of``. ``parts`` has the bytes of each part, and of how many tokens
    before its end a hit needs it: 0 for all."""

    block_tokens: int
    page_tokens: int
    layers: tuple[LayerPlace, ...]
    parts: tuple[PartSize, ...]

    @classmethod
    def of(cls, spec: KVSpec) -> BlockLayout:
        """The layout of a spec's blocks; layers are counted through all groups.

        Raises BadInputError for a group of states that is not opaque: it has no tokens to tell apart.
        """
        return cls._of(spec, by_part=False)

    @classmethod
    def by_part(cls, spec: KVSpec) -> BlockLayout:
        """As ``of``, for blocks whose parts are stored each by itself: places are in the part that has the layer.

        The same as ``of`` for a spec that is not hybrid.
        """
        return cls._of(spec, by_part=bool(parts_of(spec)))

    @classmethod
    def _of(cls, spec: KVSpec, *, by_part: bool) -> BlockLayout:
        layers: list[LayerPlace] = []
        start, part = 0, 0
        pages = spec.block_tokens // spec.tokens_per_page
        for number, group in enumerate(spec.groups):
            page_bytes = group.bytes_per_page(spec.tokens_per_page)
            if by_part:
                whose, start, _ = place_of(spec, number)
                part = whose.number
            for _ in range(group.layers):
                layers.append(replace(_layer(group, start, page_bytes, spec.tokens_per_page), part=part))
                start += pages * page_bytes
        sizes = [PartSize(spec.block_bytes, 0)]
        if by_part:
            sizes = [PartSize(each.block_bytes, _window_tokens(each)) for each in parts_of(spec)]
        return cls(spec.block_tokens, spec.tokens_per_page, tuple(layers), tuple(sizes))

    def pages(self, layer: int, block_starts: NDArray[np.int64], first_token: int) -> Pages:
        """The pages of a layer in several blocks, from a token of the first of them on.

        ``block_starts``, int64 [n], may be addresses or relative to any; add a plane's offset to what comes out.
        Tokens of the result count units (see ``LayerPlace``). Raises BadInputError for a token inside a unit.
        """
        place = self.layers[layer]
        pages = np.arange(self.block_tokens // self.page_tokens) * place.page_bytes
        starts = (block_starts[:, None] + pages).ravel()
        return Pages(starts, self.page_tokens // place.token_step, place.strides, self.units(layer, first_token))

    def units(self, layer: int, n_tokens: int) -> int:
        """Tokens as units of a layer; raises BadInputError for a part of one."""
        step = self.layers[layer].token_step
        if n_tokens % step:
            raise BadInputError(f"{n_tokens} tokens are no whole number of opaque pages of {step} tokens")
        return n_tokens // step


def _window_tokens(part: Part) -> int:
    return 0 if part.number == 0 else part.spec.groups[0].window_tokens or part.spec.block_tokens


def _layer(group: KVGroup, start: int, page_bytes: int, page_tokens: int) -> LayerPlace:
    if group.layout == OPAQUE:
        return LayerPlace((start,), page_bytes, 1, page_bytes, page_tokens, Strides(page_bytes, page_bytes), True)
    if group.kind is GroupKind.STATE:
        raise BadInputError("a state has no tokens to tell apart; describe it with layout='opaque'")
    unit_bytes = group.head_dim * DTYPE_BYTES[group.dtype]
    if group.layout == "NHD":
        strides = Strides(group.kv_heads * unit_bytes, unit_bytes)
    else:
        strides = Strides(unit_bytes, page_tokens * unit_bytes)
    plane_bytes = page_tokens * group.kv_heads * unit_bytes
    planes = tuple(range(start, start + page_bytes, plane_bytes))
    return LayerPlace(planes, page_bytes, group.kv_heads, unit_bytes, 1, strides)
