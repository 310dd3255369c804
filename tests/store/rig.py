"""A store over a real DRAM tier, a clock that a test moves, and blocks whose bytes say what they are."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.clock import ManualClock
from kvstore.config import PinOptions
from kvstore.lease import Reservation
from kvstore.prefix_index.index import PrefixIndex
from kvstore.prefix_index.policies import make_policy
from kvstore.prefix_index.rows import RowPath
from kvstore.store.hbm import HbmSetup
from kvstore.store.hierarchy import WriteBehind
from kvstore.store.namespaces import OpenNamespace
from kvstore.store.requests import Commit, LeaseLimits, Prompt
from kvstore.store.store import Store
from kvstore.tiers.dram import DramTier
from kvstore.tiers.nvme.tier import NvmeTier
from kvstore.types import ExtraKey, KVSpec, Namespace

KIB = 1 << 10
BLOCK_TOKENS = 2
ANY_BYTES = 1 << 40


class Rig:
    """A store and what a client does with it. ``regions_mapped`` plays the client's side of mapping."""

    def __init__(
        self,
        capacity_bytes: int = 128 * KIB,
        region_bytes: int = 32 * KIB,
        starter_bytes: int = 8 * KIB,
        limits: LeaseLimits | None = None,
        clock: ManualClock | None = None,
        nvme: NvmeTier | None = None,
        write: WriteBehind | None = None,
        hbm: HbmSetup | None = None,
        policy: str = "lru",
    ) -> None:
        self.clock = clock or ManualClock(1000.0)
        self.dram = DramTier(capacity_bytes, region_bytes, starter_bytes, prefault=False)
        index = PrefixIndex(make_policy(policy), reserve_blocks=64, nvme=nvme is not None, hbm=hbm is not None)
        limits = limits or LeaseLimits(10.0, 100.0)
        pins = PinOptions(ANY_BYTES, ANY_BYTES, limits.default_s, limits.max_s)
        self.store = Store(
            index, self.dram, self.clock, limits, region_bytes, nvme, write, history_blocks=256, pins=pins, hbm=hbm
        )

    def close(self) -> None:
        self.store.check()
        self.dram.close()

    def namespace(self, block_bytes: int = 4 * KIB, tenant: str = "default", **more: Any) -> OpenNamespace:
        spec = more.pop("spec", None) or KVSpec.opaque(BLOCK_TOKENS, block_bytes)
        return self.store.namespaces.open(Namespace(model="m", spec=spec, tenant=tenant, **more))

    def prompt(
        self,
        tokens: Sequence[int],
        namespace: OpenNamespace | None = None,
        salt: str = "",
        lora: str = "",
        extras: Sequence[ExtraKey] = (),
    ) -> Prompt:
        namespace = namespace or self.namespace()
        path = RowPath.from_tokens(np.array(tokens, np.uint32), namespace.namespace.spec.block_tokens, extras)
        return Prompt(namespace, namespace.root_key(salt, lora), path, self.clock.now_s(), root=(salt, lora))

    def rows(self, n_rows: int, tag: int, **more: Any) -> Prompt:
        """A prompt of ``n_rows`` whole rows that shares none with a prompt of another ``tag``."""
        namespace = more.get("namespace") or self.namespace()
        n_tokens = n_rows * namespace.namespace.spec.block_tokens
        return self.prompt([tag * 1000 + i for i in range(n_tokens)], **more)

    def reserve(
        self, session: int, prompt: Prompt, first_block: int = 0, n_blocks: int = 0, ttl_s: float = 0.0
    ) -> Reservation:
        """All three steps, moves included, as a server makes them."""
        n_blocks = n_blocks or prompt.path.n_rows - first_block
        reservation = self.store.begin_reserve(session, prompt, first_block, n_blocks, ttl_s)
        for _ in range(8):
            pending = self.store.make_room(reservation)
            if pending is None:
                break
            pending.copy()
            self.store.finish_reclaim(pending)
        return self.store.finish_reserve(reservation)

    def fill(self, reservation: Reservation, prompt: Prompt) -> None:
        first_row = reservation.first_block + reservation.n_present
        for i, slot in enumerate(reservation.slots.tolist()):
            self.dram.view(slot)[: reservation.block_bytes] = self.pattern(prompt, first_row + i)

    def put(self, session: int, prompt: Prompt, first_block: int = 0, n_blocks: int = 0) -> Commit:
        """Store blocks as a client does; (0, 0) when nothing was reserved."""
        reservation = self.reserve(session, prompt, first_block, n_blocks)
        if not len(reservation.slots):
            return Commit(0, 0)
        self.map_regions(session, reservation.slots, writable=True)
        self.fill(reservation, prompt)
        return self.store.commit(session, reservation.id)

    def map_regions(self, session: int, slots: NDArray[np.int64], *, writable: bool) -> None:
        """Get descriptors as a client does that has none of these yet; a writer has them sealed then."""
        for region_id in sorted(set((slots >> 20).tolist())):
            region = self.dram.region(region_id)
            if session not in region.mappers:
                self.store.share_region(session, region.tenant, region_id, writable=writable)
                if writable:
                    self.store.seal_region(session, region_id)

    def unmap_retired(self) -> None:
        """Every client does what the daemon asks it to."""
        for client, region_ids in self.dram.pending_unmaps().items():
            for region_id in region_ids:
                self.dram.remove_mapper(region_id, client)

    def bytes_at(self, slots: NDArray[np.int64], block_bytes: int = 4 * KIB) -> list[bytes]:
        return [self.dram.view(slot)[:block_bytes].tobytes() for slot in slots.tolist()]

    def slots_of(self, claim: Any) -> NDArray[np.int64]:
        return self.store.index.slots(claim.ids)

    def found(self, prompt: Prompt) -> int:
        """Whole blocks that are found; asks nothing of policy or counters of hits."""
        return len(self.store.index.match(prompt.root_key, prompt.path).ids)

    def count(self, name: str) -> int:
        """A counter of the store, 0 as long as it never counted."""
        return int(self.store.counters[name])

    def stat(self, name: str) -> float:
        return self.store.stats()[0][name]

    def dram_bytes(self) -> dict[str, int]:
        """What the DRAM tier counts: ``used``, ``reserved``, ``capacity`` and so on."""
        return {
            name.removesuffix("_bytes"): value
            for name, value in self.dram.stats().items()
            if name.endswith("_bytes") and isinstance(value, int)
        }

    @staticmethod
    def pattern(prompt: Prompt, row: int) -> NDArray[np.uint8]:
        """What a block must hold: bytes that only its root and the tokens up to its end decide."""
        width = prompt.path.row_bytes
        path = bytes(prompt.path.data[: (row + 1) * width])
        seed = hashlib.sha256(prompt.root_key + path).digest()
        size = prompt.namespace.block_bytes
        return np.frombuffer((seed * (size // len(seed) + 1))[:size], np.uint8)

    def expected(self, prompt: Prompt, n_rows: int, first_row: int = 0) -> list[bytes]:
        return [self.pattern(prompt, row).tobytes() for row in range(first_row, n_rows)]
