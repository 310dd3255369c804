"""What the store holds of one row of tokens, kept readable for as long as this object lives.

It holds arrays over the blocks, not the lease: whatever becomes of the right to read, of the client or of the daemon,
the bytes stay as they are until the last array is gone. So an engine that was told how much it need not compute can
be given it later, layer by layer, and that can't fail.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.client import Lease, NamespaceHandle, Wait
from kvstore.client.hbm import HbmHeld
from kvstore.engine_adapter.block_layout import BlockLayout
from kvstore.engine_adapter.block_writer import Tokens
from kvstore.engine_adapter.counters import SharedCounters
from kvstore.engine_adapter.parts import Handle, held_of
from kvstore.engine_adapter.runs import Pages
from kvstore.errors import BadInputError, EndedError
from kvstore.types import ExtraKey, Root


@dataclass(slots=True)
class HeldPart:
    """What is held of one part: ``blocks`` (uint8 [bytes of the part] each, read-only; None of one in HBM only) from
    ``first_block`` on, and their addresses, int64 [n]: of those in ``hbm`` on its device."""

    first_block: int
    blocks: list[NDArray[np.uint8] | None]
    starts: NDArray[np.int64]
    hbm: HbmHeld | None = None

    @classmethod
    def of(cls, lease: Lease, part: int) -> HeldPart:
        """Raises EndedError if the lease has ended."""
        held = held_of(lease, part)
        # Addresses first: a remote client fetches all blocks at once then.
        starts = held.addresses.view(np.int64)
        if not len(lease.hbm):
            return cls(held.first_block, [held[i] for i in range(len(held))], starts)
        in_hbm = lease.hold_hbm()
        blocks = [held[i] if start else None for i, start in enumerate(starts.tolist())]
        starts = starts.copy()
        starts[in_hbm.at] = in_hbm.addresses.view(np.int64)
        return cls(held.first_block, blocks, starts, in_hbm)

    def cut(self, end_block: int) -> None:
        """Let go of the blocks from ``end_block`` on."""
        n = max(end_block - self.first_block, 0)
        del self.blocks[n:]
        self.starts = self.starts[:n]


class Found(NamedTuple):
    """So many tokens, what is held of each part of their blocks, and why nothing is known of them if that is so."""

    n_tokens: int = 0
    parts: Sequence[HeldPart] = ()
    reason: str = ""


def _held(lease: Lease, layout: BlockLayout, n_tokens: int) -> Found:
    if not lease:
        return Found(reason=lease.reason)
    try:
        parts = [HeldPart.of(lease, part) for part in range(len(layout.parts))]
    except EndedError as error:
        return Found(reason=lease.reason or str(error))
    # No more than what is held: the rest may still be on its way from a slower tier.
    return Found(min(lease.n_tokens, n_tokens, len(lease) * layout.block_tokens), parts, lease.reason)


class StoredPrefix:
    """``n_tokens`` leading tokens of a row, and of each part of its blocks what a hit that ends there needs.

    Made by ``find``.
    """

    def __init__(
        self,
        layout: BlockLayout,
        found: Found,
        again: Callable[[int], Found],
        tail: Callable[[int, int], NDArray[np.uint8] | None],
    ) -> None:
        """``again(n_tokens)`` finds a prefix of no more than so many tokens; ``tail(n_tokens, block)`` the bytes of one
        that is in HBM only, in host memory."""
        self.n_tokens, self._parts, self.reason = found
        self._layout, self._again, self._tail = layout, again, tail
        self._pid = os.getpid()
        self._have_tail()

    @classmethod
    def find(
        cls,
        handle: Handle,
        layout: BlockLayout,
        tokens: Tokens,
        *,
        root: Root,
        extras: Sequence[ExtraKey] = (),
        wait: Wait = "wait",
        hbm: bool = False,
        counters: SharedCounters,
    ) -> StoredPrefix:
        """The longest stored prefix of ``tokens``, nothing if the daemon is down, slow or has nothing.

        ``layout``: of the namespace's spec by part. Blocks for one round trip, and as long as ``wait`` allows for what
        lies on NVMe. With ``hbm`` blocks in HBM are held there, for copies by the device that the client reads it with;
        not of a hybrid namespace.
        """
        more: dict[str, Any] = {"root": root, "extras": extras, "wait": wait}
        above: dict[str, Any] = {"hbm": True} if hbm and isinstance(handle, NamespaceHandle) else {}

        def ask(n_tokens: int) -> Found:
            with handle.lease(tokens[:n_tokens], **more, **above) as lease:
                return _held(lease, layout, n_tokens)

        def tail(n_tokens: int, block: int) -> NDArray[np.uint8] | None:
            with handle.lease(tokens[:n_tokens], first_block=block, **more) as lease:
                parts = _held(lease, layout, n_tokens).parts
                return parts[0].blocks[0] if parts else None

        counters.add("lookup_tokens", len(tokens))
        found = ask(len(tokens)) if len(tokens) else Found()
        if found.reason:
            counters.add("lookup_failed")
        counters.add("hit_tokens", found.n_tokens)
        return cls(layout, found, ask, tail)

    @property
    def hbm(self) -> list[HbmHeld]:
        """What of it is held in HBM."""
        return [part.hbm for part in self._parts if part.hbm is not None]

    def vouched(self) -> bool:
        """Whether what a device has read of it in HBM until now counts; True if none of it is there. Else blocks for a
        round trip."""
        return all(held.vouched() for held in self.hbm)

    def shorten(self, n_tokens: int) -> None:
        """Keep no more than ``n_tokens``; lets go of blocks behind them.

        A hit that ends earlier needs other blocks of a window. If those are not held this blocks for another round
        trip, and what is left may be shorter than ``n_tokens``.
        """
        if n_tokens >= self.n_tokens:
            return
        if n_tokens > 0 and not self._reaches(n_tokens):
            self.n_tokens, self._parts, self.reason = self._again(n_tokens)
        else:
            self._cut(max(n_tokens, 0))
        self._have_tail()

    def first_token(self, layer: int) -> int:
        """The first token of which a layer's KV is held: 0, but of a window the beginning of its first block."""
        part = self._layout.layers[layer].part
        return self._parts[part].first_block * self._layout.block_tokens if self._parts else 0

    def pages(self, layer: int, first_token: int = 0) -> Pages:
        """Where a layer lies from a token on. Offsets are addresses; add the plane's offset of the layer.

        Raises EndedError in a forked child, which does not have its parent's mappings, and BadInputError for a token
        before ``first_token`` of the layer.
        """
        if os.getpid() != self._pid:
            raise EndedError("a forked child can't read blocks that its parent found; look them up in the child")
        held_from = self.first_token(layer)
        if first_token < held_from:
            raise BadInputError(f"layer {layer} was asked for from token {first_token} on; held is from {held_from} on")
        part = self._layout.layers[layer].part
        starts = self._parts[part].starts if self._parts else np.empty(0, np.int64)
        return self._layout.pages(layer, starts, first_token - held_from)

    def last_blocks(self) -> list[NDArray[np.uint8]] | None:
        """The bytes of each part of the block that is needed in part only; None if the prefix ends with a whole one."""
        if not self.n_tokens % self._layout.block_tokens:
            return None
        return [block for part in self._parts if (block := part.blocks[-1]) is not None]

    def _cut(self, n_tokens: int) -> None:
        self.n_tokens = n_tokens
        for part in self._parts:
            part.cut(-(-n_tokens // self._layout.block_tokens))

    def _have_tail(self) -> None:
        """Have the bytes of a last block that is needed in part only, or end before it.

        It may be in HBM only: then this blocks for another round trip, and for what lies on NVMe.
        """
        whole, inside = divmod(self.n_tokens, self._layout.block_tokens)
        if not inside or self._parts[0].blocks[whole] is not None:
            return
        block = self._tail(self.n_tokens, whole)
        if block is None:
            self._cut(whole * self._layout.block_tokens)
        else:
            self._parts[0].blocks[whole] = block

    def _reaches(self, n_tokens: int) -> bool:
        """Whether what is held is all that a hit of so many tokens needs."""
        return all(
            held.first_block * self._layout.block_tokens <= max(n_tokens - size.window_tokens, 0)
            for held, size in zip(self._parts, self._layout.parts, strict=True)
            if size.window_tokens
        )
