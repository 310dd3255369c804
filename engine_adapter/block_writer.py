"""Stores the KV of one row of tokens while it is computed: pass by pass, layer by layer, straight into reserved slots.

A pass is one forward of the model over the next tokens of the row (a chunk of the prefill, or one token). Blocks that a
pass completes are reserved when it begins, filled as its layers arrive, and committed when it ends. Tokens of the
block after those wait in memory of our own until the block is complete, or ``finish`` stores it as a short leaf.

Of a hybrid namespace each part of a block is reserved and committed by itself. Windows are stored of all blocks, as the
next prompt may leave this one anywhere; the daemon gives up first those that no prompt has ended with.

Nothing here raises because of the daemon: what can't be stored is not stored, ``reason`` says why, and from then on the
writer does nothing, as blocks without their ancestors are of no use. Windows that can't be stored end nothing: hits
end before them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvstore import native
from kvstore.client import WriteReservation
from kvstore.engine_adapter.block_layout import BlockLayout
from kvstore.engine_adapter.counters import SharedCounters
from kvstore.engine_adapter.moving import HERE, Copy, Moves
from kvstore.engine_adapter.parts import Handle, reserve_part
from kvstore.engine_adapter.runs import NOTHING, Pages, Runs, plan_runs
from kvstore.errors import BadInputError, DeviceError, EndedError
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
class _Target:
    """Where a pass stores one part of some blocks: those from ``first_block`` on go to ``slots`` (addresses)."""

    part: int
    first_block: int
    slots: NDArray[np.int64]
    reservation: WriteReservation | None = None
    kept: Sequence[NDArray[np.uint8]] = ()
    """Arrays over the slots: the memory stays mapped as long as they live, whatever becomes of the client."""
    plans: dict[tuple[object, ...], Runs] = field(default_factory=dict)


@dataclass(slots=True)
class _Pass:
    """What is open between ``begin`` and ``end``, for tokens ``start .. end - 1``. Of the targets those of part 0 come
    first, as they are committed in this order."""

    start: int
    end: int
    targets: list[_Target]
    layers_missing: set[int]
    moves: Moves
    to_copy: list[Copy] = field(default_factory=list)


class BlockWriter:
    """See the module. One per row; calls come from one thread.

    ``layout``: of the namespace's spec, by part. ``known`` are the ids of the tokens before the first pass, ``tails``
    (uint8 [bytes of the part] each) the parts of the block that the last of them lie in, if it is not whole; needed
    unless their number is a multiple of the block's.
    """

    def __init__(
        self,
        handle: Handle,
        layout: BlockLayout,
        known: Tokens,
        *,
        tails: Sequence[NDArray[np.uint8]] | None = None,
        root: Root,
        extras: Sequence[ExtraKey] = (),
        counters: SharedCounters,
    ) -> None:
        if (tails is None) != (len(known) % layout.block_tokens == 0):
            raise BadInputError(f"{len(known)} known tokens: tails go with a block that is not whole, only with it")
        self.n_stored = 0
        """Blocks that this writer made visible."""
        self.reason = ""
        """Why nothing is stored any more."""
        self._handle, self._layout, self._counters = handle, layout, counters
        self._root, self._extras = root, tuple(extras)
        self._ids = np.array(known, np.uint32)
        empty = [np.empty(part.block_bytes, np.uint8) for part in layout.parts]
        self._tails = empty if tails is None else [tail.copy() for tail in tails]
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
        """Store nothing from here on; what is reserved is given back, when no copies to it are under way."""
        if not self.reason:
            self.reason = reason
            self._counters.add("save_stopped")
        open_pass, self._pass = self._pass, None
        for target in open_pass.targets if open_pass is not None else ():
            if target.reservation is not None:
                target.reservation.abort()

    def begin(self, tokens: Tokens, moves: Moves = HERE) -> None:
        """A pass over the next ``tokens`` of the row begins; ``moves`` make its copies, and keep what they write to.

        If it completes blocks it takes a round trip, and one or two more for each part that is a window.
        """
        if self._pass is not None:
            self.stop("the pass before this one did not end")
        if self.reason or not len(tokens):
            return
        start = len(self._ids)
        self._ids = np.concatenate((self._ids, tokens))
        end_block = len(self._ids) // self._layout.block_tokens
        blocks = self._target(0, start, start // self._layout.block_tokens, end_block, has_tail=True)
        targets = [blocks]
        if blocks.reservation is not None:
            self._counters.add("saved_present_blocks", blocks.reservation.n_present)
            end_block -= blocks.reservation.n_skipped  # which can't have windows
        for part in range(1, len(self._layout.parts)):
            targets += self._windows(part, start, end_block)
        moves.keep(self._tails, [target.kept for target in targets])
        self._pass = _Pass(start, len(self._ids), targets, set(range(len(self._layout.layers))), moves)

    def write(self, layer: int, planes: Sequence[Plane], *, stays: bool = False) -> None:
        """A layer's KV of this pass: each plane's pages begin with the first token of the pass. Blocks for the copy, or
        for giving it to the device; the memory must stay as it is until the moves are settled then.

        ``stays`` says that it does until ``end``, which then copies all layers at once.
        """
        current = self._pass
        if current is None:
            return
        place = self._layout.layers[layer]
        if len(planes) != len(place.planes):
            raise BadInputError(f"layer {layer} has {len(place.planes)} planes, {len(planes)} were given")
        copies = [
            Copy(self._runs(current, target, layer, plane.pages), offset, plane.address)
            for plane, offset in zip(planes, place.planes, strict=True)
            for target in current.targets
            if target.part == place.part
        ]
        if stays:
            current.to_copy += copies
        else:
            current.moves.copy(copies)
        current.layers_missing.discard(layer)

    def end(self) -> None:
        """The pass is over: what it completed becomes visible. One round trip for each part if it completed blocks.

        Blocks until the copies are over. Raises DeviceError if the device failed: nothing is stored then.
        """
        current, self._pass = self._pass, None
        if current is None:
            return
        if current.layers_missing:
            self._pass = current
            self.stop(f"layer {min(current.layers_missing)} had no KV for a pass that ended")
            return
        try:
            if current.to_copy:
                current.moves.copy(current.to_copy)
            current.moves.settle()
        except DeviceError as error:
            self._pass = current
            self.stop(str(error))
            raise
        why_stop = ""
        for target in current.targets:
            if target.reservation is not None and self._commit(target.part, target.reservation) and not target.part:
                why_stop = target.reservation.reason or "the right to store ended before the pass did"
        if why_stop:
            self.stop(why_stop)

    def finish(self) -> None:
        """Store the block that is not whole, if there is one, as a short leaf. Two round trips for each part. May be
        called again."""
        if self._pass is not None:
            self.stop("it was finished during a pass")
        if self.reason or not len(self._ids) % self._layout.block_tokens:
            return
        block = len(self._ids) // self._layout.block_tokens
        for part, tail in enumerate(self._tails):
            with self._reserve(part, self._ids, block, block + 1) as reservation:
                try:
                    if len(reservation):
                        reservation.fill(tail[None])
                except EndedError:
                    reservation.abort()
                if self._commit(part, reservation):
                    return

    def _target(self, part: int, start: int, first_block: int, end_block: int, *, has_tail: bool) -> _Target:
        """Slots for one part of blocks that a pass from token ``start`` on completes; behind all of them its tail."""
        tail = self._tails[part]
        if end_block <= first_block:
            return _Target(part, first_block, np.array([tail.ctypes.data] if has_tail else [], np.int64))
        # All whole blocks, whichever are asked for: the windows at the end of a prompt are those that are kept.
        whole = self._ids[: len(self._ids) // self._layout.block_tokens * self._layout.block_tokens]
        reservation = self._reserve(part, whole, first_block, end_block)
        kept, slots = list[NDArray[np.uint8]](), np.empty(0, np.int64)
        try:
            kept = [reservation[i] for i in range(len(reservation))]
            slots = reservation.addresses.view(np.int64)
        except EndedError:
            reservation.abort()  # its commit then counts all as lost
        first_block += reservation.n_present
        if start > first_block * self._layout.block_tokens and len(slots):
            native.copy_batch(
                slots[:1].view(np.uint64), np.array([tail.ctypes.data], np.uint64), self._layout.parts[part].block_bytes
            )
        # Behind a block that found no room nothing can be stored, and so nothing need be kept.
        if has_tail and first_block + len(slots) == end_block:
            slots = np.append(slots, tail.ctypes.data)
        return _Target(part, first_block, slots, reservation, kept)

    def _windows(self, part: int, start: int, end_block: int) -> list[_Target]:
        """Slots for a part that is a window: first for what a hit behind the last block needs, where room is short."""
        block_tokens = self._layout.block_tokens
        window_blocks = -(-self._layout.parts[part].window_tokens // block_tokens)
        first_block = start // block_tokens
        in_window = max(first_block, end_block - window_blocks)
        last = self._target(part, start, in_window, end_block, has_tail=True)
        if last.reservation is not None and last.first_block + len(last.slots) <= end_block:
            last.reservation.abort()
            self._counters.add("save_skipped_windows", end_block - in_window)
            last = self._target(part, start, end_block, end_block, has_tail=True)
        if in_window == first_block:
            return [last]
        return [last, self._target(part, start, first_block, in_window, has_tail=False)]

    def _commit(self, part: int, reservation: WriteReservation) -> int:
        """Make visible what was reserved; returns how many of the blocks asked for are not there."""
        n_stored, n_duplicate = reservation.commit()
        n_asked = reservation.n_present + len(reservation) + reservation.n_skipped
        n_lost = n_asked - reservation.n_present - n_stored - n_duplicate
        if part:
            self._counters.add("save_skipped_windows", n_lost)
            return n_lost
        self.n_stored += n_stored
        self._counters.add("saved_blocks", n_stored)
        self._counters.add("saved_duplicate_blocks", n_duplicate)
        self._counters.add("save_skipped_blocks", n_lost)
        return n_lost

    def _reserve(self, part: int, tokens: Tokens, first_block: int, end_block: int) -> WriteReservation:
        return reserve_part(
            self._handle, part, tokens, first_block=first_block, n_blocks=end_block - first_block,
            root=self._root, extras=self._extras, ttl_s=RESERVED_S_MAX,
        )  # fmt: skip

    def _runs(self, current: _Pass, target: _Target, layer: int, pages: Pages) -> Runs:
        """The runs of a plane, worked out once for all layers that look the same."""
        place = self._layout.layers[layer]
        key = (
            place.alike,
            pages.strides,
            pages.page_tokens,
            pages.first_token,
            pages.starts.tobytes(),
        )
        runs = target.plans.get(key)
        if runs is None:
            runs = target.plans[key] = self._plan(current, target, layer, pages)
        return runs

    def _plan(self, current: _Pass, target: _Target, layer: int, pages: Pages) -> Runs:
        place, block_tokens, units = self._layout.layers[layer], self._layout.block_tokens, self._layout.units
        first_token = max(current.start, target.first_block * block_tokens)
        n_tokens = min(current.end, (target.first_block + len(target.slots)) * block_tokens) - first_token
        if n_tokens <= 0:
            return NOTHING
        to = self._layout.pages(layer, target.slots, first_token - target.first_block * block_tokens)
        skipped = units(layer, first_token - current.start)
        come_from = Pages(pages.starts, pages.page_tokens, pages.strides, pages.first_token + skipped)
        return plan_runs(to, come_from, units(layer, n_tokens), place.heads, place.unit_bytes)
