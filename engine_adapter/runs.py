"""Where runs of bytes come from and go to: the one offset calculation between two layouts of the same tokens.

A **plane** (K, V or a latent) of one layer holds, for every token and head, a *unit*: head_dim values in a row. A
``Strides`` says how units lie in both directions, a ``Pages`` where the pages of tokens begin. A block of the store is
a page like any other. So engine memory to block, block to engine memory and block to block are one calculation,
whatever the layouts are: ``plan_runs``. It gives offsets that hold for every layer with the same strides; ``copy_runs``
adds the layer's addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore import native
from kvstore.errors import BadInputError

Offsets = NDArray[np.int64]


class Strides(NamedTuple):
    """Bytes from one token to the next, and from one head to the next; either may be negative."""

    token_bytes: int
    head_bytes: int


@dataclass(frozen=True, slots=True)
class Pages:
    """Tokens ``first_token ..`` of a row of pages: page i begins ``starts[i]`` bytes (int64) after the layer's address.

    A tensor with all tokens in a row is one page, as long as it is.
    """

    starts: Offsets
    page_tokens: int
    strides: Strides
    first_token: int = 0

    def holds(self, n_tokens: int) -> bool:
        """Whether the pages have room for ``n_tokens`` from ``first_token`` on."""
        return self.first_token >= 0 and self.first_token + n_tokens <= len(self.starts) * self.page_tokens

    def cuts(self, n_tokens: int) -> Offsets:
        """The tokens, counted from ``first_token``, at which another page begins, int64."""
        return np.arange(self.page_tokens - self.first_token % self.page_tokens, n_tokens, self.page_tokens)

    def at(self, tokens: Offsets) -> Offsets:
        """Where tokens lie, counted from ``first_token``: bytes after the layer's address, of their first head."""
        page, inside = np.divmod(tokens + self.first_token, self.page_tokens)
        offsets: Offsets = self.starts[page] + inside * self.strides.token_bytes
        return offsets


@dataclass(frozen=True, slots=True)
class Runs:
    """Copies to make: int64 offsets [n] on both sides and uint64 sizes [n], the same for every layer."""

    to: Offsets
    come_from: Offsets
    sizes: NDArray[np.uint64]

    @property
    def n_bytes(self) -> int:
        return int(self.sizes.sum())


NOTHING = Runs(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.uint64))


def plan_runs(to: Pages, come_from: Pages, n_tokens: int, heads: int, unit_bytes: int) -> Runs:
    """The runs that bring ``n_tokens`` tokens of a plane from one place to the other.

    What lies next to each other on both sides is one run. Raises BadInputError if a side lacks room for the tokens.
    """
    for name, side in (("to", to), ("come_from", come_from)):
        if not side.holds(n_tokens):
            raise BadInputError(
                f"{len(side.starts)} pages of {side.page_tokens} tokens can't hold {n_tokens} tokens from token "
                f"{side.first_token} on (the side {name!r})"
            )
    if n_tokens == 0:
        return NOTHING
    starts = np.unique(np.concatenate(([0], to.cuts(n_tokens), come_from.cuts(n_tokens)))).astype(np.int64)
    lengths = np.diff(starts, append=n_tokens)
    parts = []
    for length in np.unique(lengths).tolist():
        chosen = starts[lengths == length]
        inner_to, inner_from, size = _inside(to.strides, come_from.strides, length, heads, unit_bytes)
        to_offsets = (to.at(chosen)[:, None] + inner_to).ravel()
        parts.append((to_offsets, (come_from.at(chosen)[:, None] + inner_from).ravel(), size))
    return _joined(
        np.concatenate([part[0] for part in parts]),
        np.concatenate([part[1] for part in parts]),
        np.concatenate([np.full(len(part[0]), part[2], np.int64) for part in parts]),
    )


def _joined(to: Offsets, come_from: Offsets, sizes: Offsets) -> Runs:
    """Runs that follow each other on both sides as one, as of pages that happen to lie in a row."""
    apart = (to[1:] != to[:-1] + sizes[:-1]) | (come_from[1:] != come_from[:-1] + sizes[:-1])
    first = np.concatenate(([0], np.flatnonzero(apart) + 1))
    return Runs(to[first], come_from[first], np.add.reduceat(sizes, first).astype(np.uint64))


def _inside(
    to: Strides, come_from: Strides, n_tokens: int, heads: int, unit_bytes: int
) -> tuple[Offsets, Offsets, int]:
    """Runs inside one page of both sides: offsets from the first unit, and the size of each run."""
    size = unit_bytes
    rest = [
        (n_tokens, to.token_bytes, come_from.token_bytes),
        (heads, to.head_bytes, come_from.head_bytes),
    ]
    while adjoining := next((each for each in rest if each[1] == each[2] == size or each[0] == 1), None):
        rest.remove(adjoining)
        size *= adjoining[0]
    to_offsets = from_offsets = np.zeros(1, np.int64)
    for count, to_stride, from_stride in rest:
        steps = np.arange(count)
        to_offsets = (to_offsets[:, None] + steps * to_stride).ravel()
        from_offsets = (from_offsets[:, None] + steps * from_stride).ravel()
    return to_offsets, from_offsets, size


def copy_runs(runs: Runs, to_address: int, from_address: int, threads: int = 1) -> None:
    """Make the copies for a layer whose planes begin at these addresses. Blocks without Python's lock.

    The caller answers for the memory, as with ``native.copy_batch``.
    """
    if len(runs.sizes):
        to, come_from = (runs.to + to_address).view(np.uint64), (runs.come_from + from_address).view(np.uint64)
        native.copy_batch(to, come_from, runs.sizes, threads=threads, streaming=False)


def copy_many(copies: Sequence[tuple[Runs, int, int]], threads: int = 1) -> None:
    """``copy_runs`` for many layers as one batch: where each has few bytes, calls are what costs."""
    if len(copies) == 1:
        copy_runs(*copies[0], threads)
        return
    by_runs: dict[int, tuple[Runs, list[int], list[int]]] = {}
    for runs, to_address, from_address in copies:
        _, to_addresses, from_addresses = by_runs.setdefault(id(runs), (runs, [], []))
        to_addresses.append(to_address)
        from_addresses.append(from_address)
    for runs, to_addresses, from_addresses in by_runs.values():
        to = (np.array(to_addresses)[:, None] + runs.to).ravel().view(np.uint64)
        come_from = (np.array(from_addresses)[:, None] + runs.come_from).ravel().view(np.uint64)
        native.copy_batch(to, come_from, np.tile(runs.sizes, len(to_addresses)), threads=threads, streaming=False)
