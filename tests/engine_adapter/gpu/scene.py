"""A device, host memory that it reads by itself or not, and copies between them."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.device.choose import open_device
from kvstore.device.pinned import PinnedBuffer
from kvstore.device.simulated import SimulatedDevice
from kvstore.engine_adapter.counters import SharedCounters
from kvstore.engine_adapter.gpu.choice import Choice, Route
from kvstore.engine_adapter.gpu.lane import LaneSizes
from kvstore.engine_adapter.gpu.pinned_regions import PinnedRegions
from kvstore.engine_adapter.gpu.staged import StagedReader, StagedWriter
from kvstore.engine_adapter.moving import Copy
from kvstore.engine_adapter.runs import Runs
from kvstore.native import Mapping
from tests.engine_adapter.places import SMALL, only

Bytes = NDArray[np.uint8]
FAR_S = 30.0


def far() -> float:
    return time.monotonic() + FAR_S


def region(n_bytes: int, values: Bytes | None = None) -> Mapping:
    """Shared memory as the daemon's, with these values."""
    fd = os.memfd_create("kvstore-test")
    try:
        os.ftruncate(fd, -(-n_bytes // 4096) * 4096)
        mapping = Mapping(fd, -(-n_bytes // 4096) * 4096, writable=True)
    finally:
        os.close(fd)
    if values is not None:
        mapping.array()[: len(values)] = values
    return mapping


@dataclass
class Scene:
    """``closing`` ends in the reverse order."""

    device: Any
    counters: SharedCounters = field(default_factory=SharedCounters)
    closing: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pinned = PinnedRegions(self.device, self.counters)
        # A GPU is opened once for all tests, as its kernels are compiled then.
        self.closing += [self.pinned] if self.device.facts.kind == "cuda" else [self.device, self.pinned]

    def registered(self, mapping: Mapping) -> Mapping:
        """The device reads it by itself from here on."""
        self.pinned.mapped(mapping)
        start = np.array([mapping.address], np.uint64)
        self.pinned.use_all(start, np.array([mapping.length_bytes], np.uint64), far()).end()
        return mapping

    def reader(self, choice: Choice | Route, sizes: LaneSizes = SMALL, **more: Any) -> StagedReader:
        chosen = only(choice) if isinstance(choice, Route) else choice
        made = StagedReader(self.device, self.pinned, chosen, sizes=sizes, counters=self.counters, **more)
        self.closing.append(made)
        return made

    def writer(self, choice: Choice | Route, sizes: LaneSizes = SMALL, **more: Any) -> StagedWriter:
        chosen = only(choice) if isinstance(choice, Route) else choice
        made = StagedWriter(self.device, self.pinned, chosen, sizes=sizes, counters=self.counters, **more)
        self.closing.append(made)
        return made

    def upload(self, values: Bytes) -> int:
        """New device memory with these values."""
        address = int(self.device.malloc(len(values)))
        with PinnedBuffer(self.device, len(values)) as buffer:
            buffer.array[:] = values
            self._copy(address, buffer.address, len(values))
        return address

    def download(self, address: int, n_bytes: int) -> Bytes:
        """What device memory holds once all work that was waited for is done."""
        with PinnedBuffer(self.device, n_bytes) as buffer:
            self._copy(buffer.address, address, n_bytes)
            return buffer.array.copy()

    def _copy(self, to: int, come_from: int, n_bytes: int) -> None:
        stream = self.device.stream()
        self.device.copy(to, come_from, n_bytes, stream)
        self.device.sync_stream(stream)
        self.device.free_stream(stream)

    def close(self) -> None:
        while self.closing:
            self.closing.pop().close()


@functools.cache
def gpu() -> Any:
    """Raises DeviceError where there is none."""
    return open_device("cuda")


@contextmanager
def scene(kind: str = "simulated", **options: Any) -> Iterator[Scene]:
    """``options`` are the simulated device's."""
    made = Scene(gpu() if kind == "cuda" else SimulatedDevice(**{"total_bytes": 16 << 20, **options}))
    try:
        yield made
    finally:
        made.close()


def runs_of(to: Any, come_from: Any, sizes: Any) -> Runs:
    return Runs(np.asarray(to, np.int64), np.asarray(come_from, np.int64), np.asarray(sizes, np.uint64))


def one(to: int, come_from: int, n_bytes: int) -> list[Copy]:
    """A copy of one run."""
    return [Copy(runs_of([0], [0], [n_bytes]), to, come_from)]
