"""Which hits a hybrid model may have, said naively: no masks, no rules of the store, one block after the other.

What is stored is a set of (tokens up to the block's end, group); a group is a number in a spec, here described by
what it needs: every block ("full"), a window in tokens, or a state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

WIDTH = 2
"""Tokens in a block."""

FULL, STATE = -1, 0
Tokens = tuple[int, ...]
Has = Callable[[Tokens, int], bool]
"""Whether a group of the block that ends these tokens is there."""


@dataclass(frozen=True)
class Layout:
    """``needs``: per group FULL, STATE, or how many tokens it looks back at; ``sizes``: bytes of a block of each."""

    name: str
    needs: tuple[int, ...]
    sizes: tuple[int, ...]


def blocks_of(tokens: Tokens) -> list[Tokens]:
    """The blocks of a prompt by all tokens up to their ends, a short last one included."""
    return [tokens[: end + WIDTH] for end in range(0, len(tokens), WIDTH)]


def needed(layout: Layout, tokens: Tokens, n_blocks: int) -> list[tuple[Tokens, int]]:
    """What a hit of the first ``n_blocks`` whole blocks needs."""
    out = []
    blocks = blocks_of(tokens)[:n_blocks]
    end = n_blocks * WIDTH
    for group, need in enumerate(layout.needs):
        for i, block in enumerate(blocks):
            last_token = (i + 1) * WIDTH - 1
            is_needed = need == FULL or (need == STATE and i == n_blocks - 1) or (need > 0 and last_token >= end - need)
            if is_needed:
                out.append((block, group))
    return out


def longest(layout: Layout, tokens: Tokens, has: Has, most: int | None = None) -> int:
    """Whole blocks of the longest hit of at most ``most``, with all it needs."""
    n_whole = len(tokens) // WIDTH
    limit = n_whole if most is None else min(n_whole, most)
    for n in range(limit, 0, -1):
        if all(has(block, group) for block, group in needed(layout, tokens, n)):
            return n
    return 0


def may_end_inside(layout: Layout, block: Tokens, n_blocks: int, n_tokens: int, has: Has) -> bool:
    """Whether a hit may end ``n_tokens`` behind the first ``n_blocks``, inside of ``block``."""
    end = n_blocks * WIDTH + n_tokens
    for group, need in enumerate(layout.needs):
        if need == STATE or not has(block, group):
            return False
        for i, before in enumerate(blocks_of(block)[:n_blocks]):
            if need > 0 and (i + 1) * WIDTH - 1 >= end - need and not has(before, group):
                return False
    return True
