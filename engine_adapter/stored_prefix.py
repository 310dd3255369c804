"""What the store holds of one row of tokens, kept readable for as long as this object lives.

It holds arrays over the blocks, not the lease: whatever becomes of the right to read, of the client or of the daemon,
the bytes stay as they are until the last array is gone. So an engine that was told how much it need not compute can
be given it later, layer by layer, and that can't fail.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvstore.client import NamespaceHandle, Wait
from kvstore.engine_adapter.block_layout import BlockLayout
from kvstore.engine_adapter.block_writer import Tokens
from kvstore.engine_adapter.counters import SharedCounters
from kvstore.engine_adapter.runs import Pages
from kvstore.errors import EndedError
from kvstore.types import ExtraKey, Root


class StoredPrefix:
    """``n_tokens`` leading tokens of a row, in ``blocks`` (uint8 [block_bytes] each, read-only). Made by ``find``."""

    def __init__(self, layout: BlockLayout, n_tokens: int, blocks: list[NDArray[np.uint8]], starts: NDArray[np.int64]):
        self.n_tokens = n_tokens
        self.reason = ""
        """Why nothing is known, if the daemon could not be asked."""
        self._layout, self._blocks, self._starts = layout, blocks, starts
        self._pid = os.getpid()

    @classmethod
    def find(
        cls,
        handle: NamespaceHandle,
        layout: BlockLayout,
        tokens: Tokens,
        *,
        root: Root,
        extras: Sequence[ExtraKey] = (),
        wait: Wait = "wait",
        counters: SharedCounters,
    ) -> StoredPrefix:
        """The longest stored prefix of ``tokens``, nothing if the daemon is down, slow or has nothing.

        Blocks for one round trip, and as long as ``wait`` allows for what lies on NVMe.
        """
        counters.add("lookup_tokens", len(tokens))
        if not len(tokens):
            return cls.nothing(layout)
        with handle.lease(tokens, root=root, extras=extras, wait=wait) as lease:
            # No more than what is held: the rest may still be on its way from a slower tier.
            n_tokens = min(lease.n_tokens, len(tokens), len(lease) * layout.block_tokens)
            if lease.reason:
                counters.add("lookup_failed")
            try:
                # Addresses first: a remote client fetches all blocks at once then.
                starts = lease.addresses.view(np.int64) if lease else np.empty(0, np.int64)
                blocks = [lease[i] for i in range(len(lease))]
            except EndedError as error:
                return cls.nothing(layout, str(error))
            found = cls(layout, n_tokens, blocks, starts)
            found.reason = lease.reason
        counters.add("hit_tokens", n_tokens)
        return found

    @classmethod
    def nothing(cls, layout: BlockLayout, reason: str = "") -> StoredPrefix:
        """A miss."""
        found = cls(layout, 0, [], np.empty(0, np.int64))
        found.reason = reason
        return found

    def shorten(self, n_tokens: int) -> None:
        """Keep no more than ``n_tokens``; lets go of blocks behind them."""
        self.n_tokens = min(self.n_tokens, n_tokens)
        n_blocks = -(-self.n_tokens // self._layout.block_tokens)
        del self._blocks[n_blocks:]
        self._starts = self._starts[:n_blocks]

    def pages(self, layer: int, first_token: int = 0) -> Pages:
        """Where a layer lies from a token on. Offsets are addresses; add the plane's offset of the layer.

        Raises EndedError in a forked child, which does not have its parent's mappings.
        """
        if os.getpid() != self._pid:
            raise EndedError("a forked child can't read blocks that its parent found; look them up in the child")
        return self._layout.pages(layer, self._starts, first_token)

    def last_block(self) -> NDArray[np.uint8] | None:
        """The bytes of the block that is needed in part only; None if the prefix ends with a whole block."""
        return self._blocks[-1] if self.n_tokens % self._layout.block_tokens else None
