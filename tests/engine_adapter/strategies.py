"""Specs and engine memory for property tests."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvstore.engine_adapter.runs import Pages, Strides
from kvstore.types import GroupKind, KVGroup, KVSpec


@st.composite
def specs(draw: st.DrawFn) -> KVSpec:
    """Small specs with one or two groups: NHD, HND and latent, pages that divide a block."""
    page_tokens = draw(st.integers(1, 5))
    groups = []
    for _ in range(draw(st.integers(1, 2))):
        latent = draw(st.booleans())
        groups.append(
            KVGroup(
                layers=draw(st.integers(1, 3)),
                kv_heads=1 if latent else draw(st.integers(1, 3)),
                head_dim=draw(st.integers(1, 5)),
                dtype=draw(st.sampled_from(("float32", "bfloat16", "int8"))),
                kind=GroupKind.MLA if latent else GroupKind.FULL,
                layout=draw(st.sampled_from(("NHD", "HND"))),
            )
        )
    return KVSpec(block_tokens=page_tokens * draw(st.integers(1, 3)), groups=tuple(groups), page_tokens=page_tokens)


class EnginePlane:
    """One plane in an engine's memory: an array [pages, page_tokens, heads, unit_bytes] in some memory order.

    Page 0 is never used, as with engines that keep it for nothing.
    """

    def __init__(self, rng: np.random.Generator, order: tuple[int, ...], n_pages: int, page_tokens: int, heads: int,
                 unit_bytes: int, padding: int) -> None:  # fmt: skip
        shape = (n_pages + 1, page_tokens, heads)
        # Memory order of the three outer dimensions; units may have unused bytes behind them.
        memory = rng.integers(0, 256, (*(shape[i] for i in order), unit_bytes + padding), dtype=np.uint8)
        back = np.argsort(order)
        self.memory = memory
        self.array: NDArray[np.uint8] = memory[..., :unit_bytes].transpose(*back, 3)
        self.page_tokens = page_tokens
        self.address = int(self.array.ctypes.data)
        page, token, head, _ = self.array.strides
        self.page_bytes, self.strides = page, Strides(token, head)

    def pages(self, table: NDArray[np.int64], first_token: int) -> Pages:
        return Pages(table * self.page_bytes, self.page_tokens, self.strides, first_token)

    def tokens(self, table: NDArray[np.int64]) -> NDArray[np.uint8]:
        """A copy of what the pages of a table hold, [tokens, heads, unit_bytes]."""
        chosen = self.array[table]
        return chosen.reshape(-1, *chosen.shape[2:])
