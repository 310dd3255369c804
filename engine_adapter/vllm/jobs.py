"""One load, or one save, of whole blocks between the store and the engine's pages: on a thread, layer by layer.

What was not complete when a job was cancelled has failed: a load's blocks are computed, a save's are never visible.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.client import Lease
from kvstore.engine_adapter.jobs import Job
from kvstore.engine_adapter.moving import HERE, Moves
from kvstore.engine_adapter.parts import Handle, held_of, reserve_part
from kvstore.engine_adapter.vllm.orders import LoadOrder, SaveOrder
from kvstore.engine_adapter.vllm.paged import PIECE_BYTES, Paged
from kvstore.engine_adapter.vllm.shapes import LayerPages
from kvstore.errors import EndedError, KVStoreError

SAVE_S_MAX = 30.0
"""A save holds the engine's blocks no longer."""

Ids = NDArray[np.int64]
CopyPages = Callable[[int, Ids, Ids, Moves, Callable[[], bool]], bool]


class BlocksJob(Job):
    """What both have in common."""

    def __init__(self, request_id: str, revision: str, layers: list[LayerPages], seconds: float) -> None:
        self.request_id, self.revision = request_id, revision
        self.begun_s = time.monotonic()
        self.deadline_s = self.begun_s + seconds
        self.n_bytes = 0
        self.took_s = 0.0
        self._layers = layers
        super().__init__(len(layers), self.deadline_s)

    def _finish(self, reason: str) -> None:
        # First: who sees that it is over asks how long it took.
        self.took_s = time.monotonic() - self.begun_s
        self.finish(reason)

    @property
    def _parts(self) -> range:
        """Parts of the store's blocks. Their layers follow each other."""
        return range(self._layers[-1].part + 1)

    def _groups_of(self, part: int) -> set[int]:
        """The engine's groups of layers that a part has."""
        return {layer.group for layer in self._layers if layer.part == part}

    def _copy_part(self, part: int, slots: Mapping[int, Ids], ids: Mapping[int, Ids], copy: CopyPages) -> bool:
        """``copy`` (of ``Paged``) for every layer of a part, with what its group has; False if the job has ended before
        the last. What a device was given may be under way still."""
        for number, layer in enumerate(self._layers):
            if layer.part != part:
                continue
            mine = ids[layer.group]
            if not self.step(partial(self._copy_pieces, number, slots[layer.group], mine, copy)):
                return False
            self.n_bytes += len(mine) * layer.page_bytes
            self.complete(ahead=1)
        return not self.ending

    def _copy_pieces(self, number: int, slots: Ids, ids: Ids, copy: CopyPages) -> bool:
        for piece in _pieces(len(ids), self._layers[number].page_bytes):
            # Who cancels waits for no more than one piece.
            if self.ending or not copy(number, slots[piece], ids[piece], self._moves, self._going):
                return False
        return True

    def _going(self) -> bool:
        return not self.ending


class LoadJob(BlocksJob):
    """Blocks of a lease into the engine's blocks."""

    def __init__(
        self, order: LoadOrder, revision: str, layers: list[LayerPages], seconds: float, moves: Moves = HERE
    ) -> None:
        """``moves``: of ``Paged.loading``."""
        super().__init__(order.request_id, revision, layers, seconds)
        self.order = order
        self.use(moves)

    def run(self, attach: Callable[[int], Lease], paged: Paged) -> None:
        """``attach(lease_id)``. Blocks for the copies, one round trip and the mapping of new regions."""
        off_the_engines_cores()
        try:
            with attach(self.order.lease_id) as lease:
                self._finish(self._load(lease, paged))
        except KVStoreError as error:
            # The daemon is down, or the right has ended: what a cache has to live with.
            self.cancel(str(error))

    def _load(self, lease: Lease, paged: Paged) -> str:
        """Why it failed, if it did."""
        ids = [np.array(group, np.int64) for group in self.order.block_ids]
        for part in self._parts:
            held = held_of(lease, part)
            addresses = held.addresses.view(np.int64)
            # The blocks stay until a device has read them, whatever becomes of the lease.
            self._moves.keep([held[i] for i in range(len(held))])
            slots: dict[int, Ids] = {}
            wanted: dict[int, Ids] = {}
            for group in self._groups_of(part):
                # Behind a sliding window the engine has no block.
                blocks = np.flatnonzero(ids[group])
                at = blocks + (self.order.first_block - held.first_block)
                if len(at) and not (at[0] >= 0 and at[-1] < len(held)):
                    return f"the lease has {len(held)} blocks from {held.first_block} on, too few"
                slots[group], wanted[group] = addresses[at], ids[group][blocks]
            if not self._copy_part(part, slots, wanted, paged.load):
                return "it ended before the last layer"
        self._moves.settle()
        return "" if lease.unchanged() else "the lease ended, or a slot changed, while it was read"


class SaveJob(BlocksJob):
    """The engine's blocks into the store."""

    def __init__(self, order: SaveOrder, revision: str, layers: list[LayerPages], moves: Moves = HERE) -> None:
        """``moves``: of ``Paged.saving``, when the engine had computed these blocks or given that to its device."""
        super().__init__(order.request_id, revision, layers, SAVE_S_MAX)
        self.order = order
        self.n_present = self.n_stored = self.n_skipped = 0
        self.use(moves)

    def run(self, open_namespace: Callable[[str], Handle], paged: Paged, lease_s: float) -> None:
        """Blocks for the copies and two round trips for each part."""
        off_the_engines_cores()
        try:
            self._finish(self._save(open_namespace(self.revision), paged, lease_s))
        except KVStoreError as error:
            self.cancel(str(error))

    def _save(self, handle: Handle, paged: Paged, lease_s: float) -> str:
        """Why something was not stored, if it was not."""
        n_blocks = self.order.n_blocks
        saved = self._save_part(0, 0, handle, paged, lease_s)
        self.n_present, self.n_stored = saved.n_present, saved.n_stored
        self.n_skipped = n_blocks - saved.n_there
        reason = saved.reason
        # Windows follow: of blocks behind them the engine has nothing, and no hit needs anything.
        for part in self._parts[1:]:
            first = max(_first_present(self.order.block_ids[group]) for group in self._groups_of(part))
            reason = self._save_part(part, first, handle, paged, lease_s).reason or reason
        return reason

    def _save_part(self, part: int, first: int, handle: Handle, paged: Paged, lease_s: float) -> _Saved:
        """``first``: of the order's blocks."""
        order, n_blocks = self.order, self.order.n_blocks - first
        if not n_blocks:
            return _Saved(0, 0, 0, "")
        with reserve_part(
            handle, part, order.tokens, n_blocks=n_blocks, first_block=order.first_block + first,
            root=order.root, extras=order.extras, ttl_s=lease_s,
        ) as reservation:  # fmt: skip
            n_present, n_slots, n_stored, n_duplicate = reservation.n_present, len(reservation), 0, 0
            if n_slots:
                # Arrays over the slots keep them mapped, whatever becomes of the client meanwhile.
                kept = [reservation[i] for i in range(n_slots)]
                self._moves.keep(kept)
                slots = reservation.addresses.view(np.int64)
                chosen = slice(first + n_present, first + n_present + n_slots)
                groups = self._groups_of(part)
                ids = {group: np.array(order.block_ids[group][chosen], np.int64) for group in groups}
                if not self._copy_part(part, dict.fromkeys(groups, slots), ids, paged.save):
                    raise EndedError("it ended before the last layer")
                self._moves.settle()
                del kept
                n_stored, n_duplicate = reservation.commit()
            n_there = n_present + n_stored + n_duplicate
            return _Saved(n_present, n_stored, n_there, reservation.reason if n_there < n_blocks else "")


class _Saved(NamedTuple):
    """What became of one part of the blocks: there before, stored by us, there now; and why not all are."""

    n_present: int
    n_stored: int
    n_there: int
    reason: str


def _first_present(ids: Sequence[int]) -> int:
    """Where the blocks begin that the engine has without a gap up to the last."""
    gaps = np.flatnonzero(np.asarray(ids) == 0)
    return int(gaps[-1]) + 1 if len(gaps) else 0


def _pieces(n_blocks: int, page_bytes: int) -> Iterator[slice]:
    step = max(1, PIECE_BYTES // page_bytes)
    for start in range(0, n_blocks, step):
        yield slice(start, start + step)


def off_the_engines_cores() -> None:
    """vLLM binds its thread to cores, which those it starts inherit: they would stand in its way there."""
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
