"""Which bytes may come back for which block. Written when a test fills a block; asks no store anything.

No two fills have the same bytes, not even of the same block, and no two places of a fill do. So bytes that
come back say whose they are, and a slot that was mixed up, torn or never committed can't pass for another.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np


@dataclass
class Fill:
    """Bytes that were written for a block once."""

    number: int
    key: Hashable
    published: bool = False


class Recorder:
    """Every fill so far. Blocks are named by anything hashable."""

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._fills: dict[bytes, Fill] = {}
        self._published: defaultdict[Hashable, set[bytes]] = defaultdict(set)

    def fill(self, key: Hashable, n_bytes: int) -> bytes:
        """New bytes for a writer of this block. They must not come back before they are published."""
        number = len(self._fills)
        content = np.random.default_rng([self._seed, number]).bytes(n_bytes)
        self._fills[_digest(content)] = Fill(number, key)
        return content

    def publish(self, content: bytes) -> None:
        """The fill was committed, as the first of its block or in place of a copy that is gone."""
        fill = self._fills[_digest(content)]
        fill.published = True
        self._published[fill.key].add(_digest(content))

    def knows(self, key: Hashable) -> bool:
        """Whether anything was ever published for a block."""
        return key in self._published

    def may_be(self, key: Hashable, content: bytes) -> bool:
        """Whether these bytes may come back for this block."""
        return _digest(content) in self._published[key]

    def verify(self, key: Hashable, content: bytes) -> None:
        """Raises AssertionError that says whose bytes these are unless they may come back for this block."""
        if not self.may_be(key, content):
            raise AssertionError(f"block {key} came back with {self._origin(content)}")

    def _origin(self, content: bytes) -> str:
        fill = self._fills.get(_digest(content))
        if fill is not None:
            return f"fill {fill.number} of block {fill.key}, which was {'' if fill.published else 'never '}committed"
        pieces: defaultdict[str, int] = defaultdict(int)
        for other in self._fills.values():
            known = np.random.default_rng([self._seed, other.number]).bytes(len(content))
            for at in range(0, len(content), 512):
                if content[at : at + 512] == known[at : at + 512]:
                    pieces[f"fill {other.number} of block {other.key}"] += min(512, len(content) - at)
        mixture = ", ".join(f"{n} bytes of {whose}" for whose, n in pieces.items())
        return f"{len(content)} bytes that nobody wrote together: {mixture or 'none of them known'}"


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()
