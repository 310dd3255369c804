"""Stores the KV of one row of tokens while it is computed: pass by pass, layer by layer, straight into reserved slots.

A pass is one forward of the model over the next tokens of the row (a chunk of the prefill, or one token). Blocks that a
pass completes are reserved when it begins, filled as its layers arrive, and committed when it ends. Tokens of the
block after those wait in memory of our own until the block is complete, or ``finish`` stores it as a short leaf.

Nothing here raises because of the daemon: what can't be stored is not stored, ``reason`` says why, and from then on the
writer does nothing, as blocks without their ancestors are of no use.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvstore import native
from kvstore.client import NamespaceHandle, WriteReservation
from kvstore.engine_adapter.block_layout import BlockLayout
from kvstore.engine_adapter.counters import SharedCounters
from kvstore.engine_adapter.runs import NOTHING, Pages, Runs, copy_many, copy_runs, plan_runs
from kvstore.errors import BadInputError, EndedError
from kvstore.types import ExtraKey, Root

RESERVED_S_MAX = 600.0
"""A pass may compute for minutes; the daemon's --lease-max, which is less, counts."""

Tokens = NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Plane:
    """Where one plane of one layer lies in the engine: its address, and the pages after it."""

    address: int
    pages: Pages


@dataclass(slots=True)
class _Pass:
    """What is open between ``begin`` and ``end``: tokens ``first_token .. end_token`` go to ``targets``."""

    end_token: int
    first_token: int
    """The first token that has somewhere to go; those before it are in blocks that are stored already."""
    skip_tokens: int
    """Tokens of this pass before that one."""
    targets: NDArray[np.int64]
    reservation: WriteReservation | None
    kept: list[NDArray[np.uint8]]
    """Arrays over the slots: the memory stays mapped as long as they live, whatever becomes of the client."""
    layers_missing: set[int]
    plans: dict[tuple[object, ...], Runs] = field(default_factory=dict)
    to_copy: list[tuple[Runs, int, int]] = field(default_factory=list)


class BlockWriter:
    """See the module. One per row; calls come from one thread.

    ``known`` are the ids of the tokens before the first pass, ``tail`` (uint8 [block_bytes]) the bytes of the block
    that the last of them lie in, if it is not whole; needed unless their number is a multiple of the block's.
    """

    def __init__(
        self,
        handle: NamespaceHandle,
        layout: BlockLayout,
        known: Tokens,
        *,
        tail: NDArray[np.uint8] | None = None,
        root: Root,
        extras: Sequence[ExtraKey] = (),
        counters: SharedCounters,
    ) -> None:
        if (tail is None) != (len(known) % layout.block_tokens == 0):
            raise BadInputError(f"{len(known)} known tokens: a tail goes with a block that is not whole, only with it")
        self.n_stored = 0
        """Blocks that this writer made visible."""
        self.reason = ""
        """Why nothing is stored any more."""
        self._handle, self._layout, self._counters = handle, layout, counters
        self._root, self._extras = root, tuple(extras)
        self._ids = np.array(known, np.uint32)
        self._tail = np.empty(layout.block_bytes, np.uint8) if tail is None else tail.copy()
        self._pass: _Pass | None = None

    @property
    def n_tokens(self) -> int:
        """Tokens of the passes so far, with those before them."""
        return len(self._ids)

    @property
    def in_pass(self) -> bool:
        """Whether a pass has begun that did not end."""
        return self._pass is not None

    def stop(self, reason: str) -> None:
        """Store nothing from here on; what is reserved is given back."""
        if not self.reason:
            self.reason = reason
            self._counters.add("save_stopped")
        open_pass, self._pass = self._pass, None
        if open_pass is not None and open_pass.reservation is not None:
            open_pass.reservation.abort()

    def begin(self, tokens: Tokens) -> None:
        """A pass over the next ``tokens`` of the row begins. One round trip if it completes blocks."""
        if self._pass is not None:
            self.stop("the pass before this one did not end")
        if self.reason or not len(tokens):
            return
        block_tokens = self._layout.block_tokens
        start = len(self._ids)
        self._ids = np.concatenate((self._ids, tokens))
        end = len(self._ids)
        first_block, end_block = start // block_tokens, end // block_tokens
        reservation, n_present = None, 0
        slots, kept = np.empty(0, np.int64), list[NDArray[np.uint8]]()
        if end_block > first_block:
            reservation = self._reserve(first_block, end_block)
            n_present = reservation.n_present
            with contextlib.suppress(EndedError):
                kept = [reservation[i] for i in range(len(reservation))]
                slots = reservation.addresses.view(np.int64)
            if start % block_tokens and n_present == 0 and len(slots):
                native.copy_batch(
                    slots[:1].view(np.uint64), np.array([self._tail.ctypes.data], np.uint64), self._layout.block_bytes
                )
        first_target = first_block + n_present
        n_missing = end_block - first_target - len(slots)
        # Behind a block that found no room nothing can be stored, and so nothing need be kept.
        targets = slots if n_missing else np.append(slots, self._tail.ctypes.data)
        first_token = max(start, first_target * block_tokens)
        self._pass = _Pass(
            end_token=min(end, (first_target + len(targets)) * block_tokens),
            first_token=first_token,
            skip_tokens=first_token - start,
            targets=targets.astype(np.int64),
            reservation=reservation,
            kept=kept,
            layers_missing=set(range(len(self._layout.layers))),
        )
        self._counters.add("saved_present_blocks", n_present)

    def write(self, layer: int, planes: Sequence[Plane], *, stays: bool = False) -> None:
        """A layer's KV of this pass: each plane's pages begin with the first token of the pass. Blocks for the copy.

        ``stays`` says that the memory stays as it is until ``end``, which then copies all layers at once.
        """
        current = self._pass
        if current is None:
            return
        place = self._layout.layers[layer]
        if len(planes) != len(place.planes):
            raise BadInputError(f"layer {layer} has {len(place.planes)} planes, {len(planes)} were given")
        for plane, offset in zip(planes, place.planes, strict=True):
            runs = self._runs(current, layer, plane.pages)
            if stays:
                current.to_copy.append((runs, offset, plane.address))
            else:
                copy_runs(runs, offset, plane.address)
        current.layers_missing.discard(layer)

    def end(self) -> None:
        """The pass is over: what it completed becomes visible. One round trip if it completed blocks."""
        current, self._pass = self._pass, None
        if current is None:
            return
        if current.layers_missing:
            self._pass = current
            self.stop(f"layer {min(current.layers_missing)} had no KV for a pass that ended")
            return
        copy_many(current.to_copy)
        reservation = current.reservation
        if reservation is None:
            return
        n_stored, n_duplicate = reservation.commit()
        self.n_stored += n_stored
        self._counters.add("saved_blocks", n_stored)
        self._counters.add("saved_duplicate_blocks", n_duplicate)
        n_asked = reservation.n_present + len(reservation) + reservation.n_skipped
        n_lost = n_asked - reservation.n_present - n_stored - n_duplicate
        if n_lost:
            self._counters.add("save_skipped_blocks", n_lost)
            self.stop(reservation.reason or "the right to store ended before the pass did")

    def finish(self) -> None:
        """Store the block that is not whole, if there is one, as a short leaf. Two round trips. May be called again."""
        n_rest = len(self._ids) % self._layout.block_tokens
        if self._pass is not None:
            self.stop("it was finished during a pass")
        if self.reason or not n_rest:
            return
        first_block = len(self._ids) // self._layout.block_tokens
        result = self._handle.put(
            self._ids, self._tail[None], first_block=first_block, root=self._root, extras=self._extras
        )
        self.n_stored += result.n_stored
        self._counters.add("saved_blocks", result.n_stored)
        self._counters.add("save_skipped_blocks", result.n_skipped)

    def _reserve(self, first_block: int, end_block: int) -> WriteReservation:
        return self._handle.reserve(
            self._ids[: end_block * self._layout.block_tokens],
            first_block=first_block,
            n_blocks=end_block - first_block,
            root=self._root,
            extras=self._extras,
            ttl_s=RESERVED_S_MAX,
        )

    def _runs(self, current: _Pass, layer: int, pages: Pages) -> Runs:
        """The runs of a plane, worked out once for all layers that look the same."""
        place = self._layout.layers[layer]
        key = (place.alike, pages.strides, pages.page_tokens, pages.first_token, pages.starts.tobytes())
        runs = current.plans.get(key)
        if runs is None:
            runs = current.plans[key] = self._plan(current, layer, pages)
        return runs

    def _plan(self, current: _Pass, layer: int, pages: Pages) -> Runs:
        place = self._layout.layers[layer]
        n_tokens = current.end_token - current.first_token
        if n_tokens <= 0:
            return NOTHING
        inside = current.first_token % self._layout.block_tokens
        to = self._layout.pages(layer, current.targets, inside)
        units = self._layout.units
        come_from = Pages(
            pages.starts, pages.page_tokens, pages.strides, pages.first_token + units(layer, current.skip_tokens)
        )
        return plan_runs(to, come_from, units(layer, n_tokens), place.heads, place.unit_bytes)
