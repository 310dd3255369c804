"""What the scheduler's side tells the workers' side with every step, and what it hears back.

The engine carries these values, pickled, between processes of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvstore.types import ExtraKey, Root

BlockIds = tuple[tuple[int, ...], ...]
"""Ids of the engine's blocks: for each group of layers one for each block of the prompt; 0 where it has none."""


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Bring blocks ``first_block ..`` of a prompt, held by a lease, into blocks of the engine.

    ``lease_id`` 0: nothing holds them although the engine was promised them; the load has to fail.
    """

    request_id: str
    lease_id: int
    first_block: int
    block_ids: BlockIds

    @property
    def n_blocks(self) -> int:
        return len(self.block_ids[0])


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """Store blocks ``first_block ..`` of a prompt, which are complete when the step is done.

    ``tokens`` uint32 [n]: those of all blocks from the prompt's begin to the last one here. ``context``: ids of the
    blocks that these were computed from, as far as they may be found bad later.
    """

    request_id: str
    tokens: NDArray[np.uint32]
    root: Root
    extras: tuple[ExtraKey, ...]
    first_block: int
    block_ids: BlockIds
    context: frozenset[int] = frozenset()

    @property
    def n_blocks(self) -> int:
        return len(self.block_ids[0])


@dataclass
class StepOrders(KVConnectorMetadata):  # type: ignore[misc]
    """All of one step. Steps are numbered from 1 on; ``processed_step`` is the last whose outcome was known."""

    step: int
    processed_step: int
    revision: str
    """Completes the namespaces: names the weights."""
    load_async: bool
    loads: list[LoadOrder] = field(default_factory=list)
    saves: list[SaveOrder] = field(default_factory=list)
    preempted: frozenset[str] = frozenset()
    ended: frozenset[str] = frozenset()
    """Finished requests whose blocks stay until their saves are done."""


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What became of orders; of several workers the sum."""

    step: int
    saves_done: dict[str, int] = field(default_factory=dict)
    """Save orders that no longer need the engine's blocks, by request."""
    saved_until: dict[str, int] = field(default_factory=dict)
    """Tokens of a request's prompt that are stored, where a save was done in full."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """Both together."""
        if not isinstance(other, WorkerReport):
            return self
        done = dict(self.saves_done)
        for request_id, n in other.saves_done.items():
            done[request_id] = done.get(request_id, 0) + n
        both = self.saved_until.keys() & other.saved_until.keys()
        until = {request_id: min(self.saved_until[request_id], other.saved_until[request_id]) for request_id in both}
        return WorkerReport(max(self.step, other.step), done, until)


@dataclass
class Handshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """Which namespace a worker reads and writes, but for the revision: ``Namespace.to_dict``."""

    namespace: dict[str, Any]
