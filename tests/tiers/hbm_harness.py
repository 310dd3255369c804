"""The HBM tier for the conformance suite, over the simulated device, whose memory is looked at by its files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from kvstore.device import PinnedBuffer, open_device
from kvstore.device.simulated_ipc import Handle
from kvstore.tiers.any_region import DAEMON_WRITER
from kvstore.tiers.hbm import HbmTier
from tests.tiers.dram_scene import region_file_bytes
from tests.tiers.harness import BLOCK_BYTES, Harness, Int64s

DEVICE_FILES = "kvstore-device"
N_BLOCKS = 64


class HbmHarness(Harness):
    """Blocks come and go by way of the device, as the daemon and clients do it."""

    contradictions: ClassVar = {
        "counts": lambda self: self.tier._table.states.__setitem__(slice(0, 1), 3),
        "not live": lambda self: self.tier._table.tags.__setitem__(self.tier._table.states == 1, 5),
        "are counted": lambda self: self.tier._source.give_back(BLOCK_BYTES),
    }

    def __init__(self, _directory: Path) -> None:
        super().__init__()
        self._others_bytes = region_file_bytes(DEVICE_FILES)
        self._device = open_device("simulated", total_bytes=self.capacity_bytes)
        self._stream = self._device.stream()
        self._host = PinnedBuffer(self._device, N_BLOCKS * BLOCK_BYTES)
        self._rows = self._host.array.reshape(N_BLOCKS, BLOCK_BYTES)
        self.tier = HbmTier(self._device, self.capacity_bytes, region_bytes=16 * BLOCK_BYTES)
        self.n_fit = self.tier.capacity_bytes // BLOCK_BYTES

    def allocate(self, n: int) -> Int64s:
        return self.tier.allocate(DAEMON_WRITER, "tenant", BLOCK_BYTES, n)

    def _fill(self, slots: Int64s, contents: Sequence[bytes]) -> None:
        for row, content in zip(self._rows, contents, strict=False):
            row[:] = np.frombuffer(content, np.uint8)
        self._copy(self.tier.addresses(slots), self._row_addresses(len(slots)))

    def commit(self, slots: Int64s) -> None:
        self.tier.commit(slots, slots)

    def free(self, slots: Int64s) -> None:
        self.tier.free(slots)

    def serve(self, slots: Int64s) -> list[bytes | None]:
        self._copy(self._row_addresses(len(slots)), self.tier.addresses(slots))
        return [
            row.tobytes() if tag == slot else None
            for row, slot, tag in zip(self._rows, slots.tolist(), self.tier.tags(slots).tolist(), strict=False)
        ]

    def settle(self) -> None:
        return

    def check(self) -> None:
        self.tier.check()

    def close(self) -> None:
        self.tier.close()
        self._host.close()
        self._device.close()

    def _row_addresses(self, n: int) -> NDArray[np.uint64]:
        return np.uint64(self._host.address) + np.arange(n, dtype=np.uint64) * np.uint64(BLOCK_BYTES)

    def _copy(self, dsts: NDArray[np.uint64], srcs: NDArray[np.uint64]) -> None:
        self._device.copy_batch(dsts, srcs, np.full(len(dsts), BLOCK_BYTES, np.uint64), self._stream)
        self._device.sync_stream(self._stream)

    def lies_at(self, slot: int) -> bytes:
        handle = Handle.unpack(self.tier.region(slot >> 20).handle)
        return os.pread(handle.fd, BLOCK_BYTES, handle.offset_bytes + (slot & 0xFFFFF) * BLOCK_BYTES)

    def findable(self) -> set[bytes]:
        table = self.tier._table
        found: set[bytes] = set()
        for region_id, base, n in zip(table.ids.tolist(), table.bases.tolist(), table.n_slots.tolist(), strict=True):
            live = np.flatnonzero((table.states[base : base + n] == 2) & (table.tags[base : base + n] >= 0))
            found.update(self.lies_at(region_id << 20 | index) for index in live.tolist())
        return found

    def identity(self, slot: int) -> object:
        place = int(self.tier.generation_index(np.array([slot]))[0])
        return slot, os.pread(self.tier.generations_fd, 8, place * 8)

    def taken_bytes(self) -> int:
        return region_file_bytes(DEVICE_FILES) - self._others_bytes

    @property
    def capacity_bytes(self) -> int:
        return N_BLOCKS * BLOCK_BYTES
