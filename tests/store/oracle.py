"""What may be found, from tuples of tokens alone: no hashes, no tree, no code of the store.

A block is known by its space (namespace and root) and all tokens from the start of the prompt up to its end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import cache

WIDTH = 2
"""Tokens in a block."""

Tokens = tuple[int, ...]
Key = tuple[int, Tokens]
"""A block or a prompt: its space and all tokens up to its end."""


@cache
def keys_of(prompt: Key) -> tuple[Key, ...]:
    """The blocks of a prompt, a short last one included."""
    space, tokens = prompt
    ends = range(WIDTH, len(tokens) + WIDTH, WIDTH)
    return tuple((space, tokens[:end]) for end in ends)


def parent_of(key: Key) -> Key | None:
    """The block before it, None for a first one."""
    space, tokens = key
    above = tokens[: (len(tokens) - 1) // WIDTH * WIDTH]
    return (space, above) if above else None


def is_whole(key: Key) -> bool:
    """Whether it has all its tokens; a short block can only be a last one."""
    return len(key[1]) % WIDTH == 0


@cache
def common(a: Tokens, b: Tokens) -> int:
    """How many leading tokens are equal."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def depth(prompt: Key, there: Collection[Key]) -> int:
    """Whole blocks of the prompt that are there without a gap from its start."""
    n = 0
    for key in keys_of(prompt):
        if key not in there or not is_whole(key):
            break
        n += 1
    return n


def next_blocks(prompt: Key, there: Collection[Key]) -> list[tuple[int, Key]]:
    """Blocks that may follow the whole ones of the prompt: how many of its next tokens each has, and which."""
    space, tokens = prompt
    at = depth(prompt, there) * WIDTH
    return [
        (common(key[1][at:], tokens[at:]), key)
        for key in there
        if key[0] == space and key[1][:at] == tokens[:at] and at < len(key[1]) <= at + WIDTH
    ]


def partial(prompt: Key, there: Collection[Key]) -> tuple[int, list[Key]]:
    """Tokens that match in one more block, and all blocks that match so far."""
    follow = next_blocks(prompt, there)
    best = max((n for n, _ in follow), default=0)
    return best, [key for n, key in follow if n == best and n]


def orphans(keys: Iterable[Key], there: Collection[Key]) -> set[Key]:
    """Those that lack a parent they need."""
    return {key for key in keys if (parent := parent_of(key)) is not None and parent not in there}


def closed(keys: Collection[Key]) -> set[Key]:
    """Those whose ancestors are all among them."""
    return {key for key in keys if all(above in keys for above in keys_of(key)[:-1])}
