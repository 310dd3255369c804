"""Random prompts for the models: as a RowPath for the index, and as plain symbols that share no code with it."""

from __future__ import annotations

import random

import numpy as np

from kvstore.prefix_index.rows import RowPath
from kvstore.types import ExtraKey

BLOCK_TOKENS = 3
# Ids that share low bytes, high bytes or none, so that an order by bytes is put to the test.
TOKENS = [0, 1, 256, 257, 1 << 24, (1 << 32) - 1]
ROOTS = [b"a" * 16, b"b" * 16]

Symbol = tuple[object, ...]
Path = tuple[tuple[Symbol, ...], ...]


class Prompt:
    """Tokens with extras, once as a RowPath and once as plain symbols, one per token."""

    def __init__(self, tokens: list[int], extras: list[ExtraKey]) -> None:
        self.tokens = tokens
        self.extras = extras
        self.path = RowPath.from_tokens(np.array(tokens, np.uint32), BLOCK_TOKENS, extras)
        symbols: list[Symbol] = [("plain", t) for t in tokens]
        for extra in extras:
            for i in range(extra.n_tokens):
                at = extra.start_token + i
                if at < len(tokens):
                    symbols[at] = ("covered", tokens[at], extra.digest, i)
        self.rows: Path = tuple(tuple(symbols[i : i + BLOCK_TOKENS]) for i in range(0, len(symbols), BLOCK_TOKENS))

    def __repr__(self) -> str:
        return f"Prompt({self.rows})"


def draw_extras(dice: random.Random) -> list[ExtraKey]:
    extras = []
    at = dice.randrange(10)
    for _ in range(dice.randrange(1, 3)):
        size = dice.randrange(1, 5)
        extras.append(ExtraKey(at, size, dice.choice([b"img", b"pic"])))
        at += size + dice.randrange(4)
    return extras


def draw_prompt(dice: random.Random) -> Prompt:
    some = dice.sample(TOKENS, dice.randrange(1, len(TOKENS) + 1))
    tokens = [dice.choice(some) for _ in range(dice.randrange(15))]
    return Prompt(tokens, draw_extras(dice) if dice.random() < 0.3 else [])


def draw_relative(dice: random.Random, prompt: Prompt) -> Prompt:
    """A prompt cut, continued, with one token changed, or with other content behind some tokens."""
    tokens = prompt.tokens[: dice.randrange(len(prompt.tokens) + 1)] if dice.random() < 0.5 else prompt.tokens[:]
    if dice.random() < 0.4:
        tokens += [dice.choice(TOKENS) for _ in range(dice.randrange(6))]
    if tokens and dice.random() < 0.3:
        tokens[dice.randrange(len(tokens))] = dice.choice(TOKENS)
    extras = prompt.extras
    if dice.random() < 0.3:
        extras = draw_extras(dice) if dice.random() < 0.7 else []
    return Prompt(tokens, extras)


def shared_plain(row: tuple[Symbol, ...], other: tuple[Symbol, ...]) -> int:
    n = 0
    for mine, theirs in zip(row, other, strict=False):
        if mine != theirs or mine[0] != "plain":
            break
        n += 1
    return n
