"""One load, or one save, of whole blocks between the store and the engine's pages: on a thread, layer by layer.

What was not complete when a job was cancelled has failed: a load's blocks are computed, a save's are never visible.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.client import Lease, NamespaceHandle
from kvstore.engine_adapter.jobs import Job
from kvstore.engine_adapter.vllm.orders import LoadOrder, SaveOrder
from kvstore.engine_adapter.vllm.paged import PIECE_BYTES, Paged
from kvstore.engine_adapter.vllm.shapes import LayerPages
from kvstore.errors import EndedError, KVStoreError

SAVE_S_MAX = 30.0
"""A save holds the engine's blocks no longer."""

Ids = NDArray[np.int64]


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

    def _copy_layers(self, slots: Ids, ids_of: Callable[[int], Ids], copy: Callable[[int, Ids, Ids], None]) -> bool:
        """``copy(layer, slots, ids)`` for every layer; False if the job has ended before the last."""
        for number, layer in enumerate(self._layers):
            ids = ids_of(layer.group)
            wanted = ids != 0  # behind a sliding window the engine has no block
            if not self.step(partial(self._copy_pieces, number, slots[wanted], ids[wanted], copy)):
                return False
            self.n_bytes += int(wanted.sum()) * layer.page_bytes
        return not self.ending

    def _copy_pieces(self, number: int, slots: Ids, ids: Ids, copy: Callable[[int, Ids, Ids], None]) -> None:
        for piece in _pieces(len(ids), self._layers[number].page_bytes):
            if self.ending:
                return  # who cancels waits for no more than one piece
            copy(number, slots[piece], ids[piece])


class LoadJob(BlocksJob):
    """Blocks of a lease into the engine's blocks."""

    def __init__(self, order: LoadOrder, revision: str, layers: list[LayerPages], seconds: float) -> None:
        super().__init__(order.request_id, revision, layers, seconds)
        self.order = order

    def run(self, attach: Callable[[int], Lease], paged: Paged) -> None:
        """``attach(lease_id)``. Blocks for the copies, one round trip and the mapping of new regions."""
        off_the_engines_cores()
        try:
            with attach(self.order.lease_id) as lease:
                self.finish(self._load(lease, paged))
        except KVStoreError as error:
            # The daemon is down, or the right has ended: what a cache has to live with.
            self.cancel(str(error))
        self.took_s = time.monotonic() - self.begun_s

    def _load(self, lease: Lease, paged: Paged) -> str:
        """Why it failed, if it did."""
        start, n = self.order.first_block - lease.first_block, self.order.n_blocks
        if start < 0 or len(lease) < start + n:
            return f"the lease has {len(lease)} blocks from {lease.first_block} on, too few"
        slots = lease.addresses[start : start + n].view(np.int64)
        ids = [np.array(group, np.int64) for group in self.order.block_ids]
        if not self._copy_layers(slots, ids.__getitem__, paged.load):
            return "it ended before the last layer"
        # What was copied counts only if the right held, and the slots kept their contents, until now.
        good = lease.valid and lease.slots.unchanged()
        return "" if good else "the lease ended, or a slot changed, while it was read"


class SaveJob(BlocksJob):
    """The engine's blocks into the store."""

    def __init__(self, order: SaveOrder, revision: str, layers: list[LayerPages], mark: Any) -> None:
        """``mark``: of ``Paged.mark``, made when the engine had computed these blocks."""
        super().__init__(order.request_id, revision, layers, SAVE_S_MAX)
        self.order = order
        self.n_present = self.n_stored = self.n_skipped = 0
        self._mark = mark

    def wait_copied(self, deadline_s: float) -> bool:
        """Block until the engine's blocks are no longer read; False if that is not so by the deadline."""
        return self.wait_layer(self._n_layers - 1, deadline_s) or self.over

    def run(self, open_namespace: Callable[[str], NamespaceHandle], paged: Paged, lease_s: float) -> None:
        """Blocks for the copies and two round trips."""
        off_the_engines_cores()
        try:
            self.finish(self._save(open_namespace(self.revision), paged, lease_s))
        except KVStoreError as error:
            self.cancel(str(error))
        self.took_s = time.monotonic() - self.begun_s

    def _save(self, handle: NamespaceHandle, paged: Paged, lease_s: float) -> str:
        """Why something was not stored, if it was not."""
        order = self.order
        with handle.reserve(
            order.tokens, n_blocks=order.n_blocks, first_block=order.first_block,
            root=order.root, extras=order.extras, ttl_s=lease_s,
        ) as reservation:  # fmt: skip
            self.n_present, n_slots = reservation.n_present, len(reservation)
            self.n_skipped = order.n_blocks - self.n_present
            if n_slots:
                # Arrays over the slots keep them mapped, whatever becomes of the client meanwhile.
                kept = [reservation[i] for i in range(n_slots)]
                slots = reservation.addresses.view(np.int64)
                part = slice(self.n_present, self.n_present + n_slots)
                ids = [np.array(group[part], np.int64) for group in order.block_ids]
                paged.wait(self._mark)
                if not self._copy_layers(slots, ids.__getitem__, paged.save):
                    raise EndedError("it ended before the last layer")
                del kept
                n_stored, n_duplicate = reservation.commit()
                self.n_stored = n_stored
                self.n_skipped -= n_stored + n_duplicate
            return reservation.reason if self.n_skipped else ""


def _pieces(n_blocks: int, page_bytes: int) -> Iterator[slice]:
    step = max(1, PIECE_BYTES // page_bytes)
    for start in range(0, n_blocks, step):
        yield slice(start, start + step)


def off_the_engines_cores() -> None:
    """vLLM binds its thread to cores, which those it starts inherit: they would stand in its way there."""
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
