"""Where an engine's pages lie in tests: in memory of this process, or of the simulated device by each route."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.client import Client
from kvstore.device.pinned import PinnedBuffer
from kvstore.device.simulated import SimulatedDevice
from kvstore.engine_adapter.engine_layout import EngineKV
from kvstore.engine_adapter.gpu.choice import Choice, Route, unmeasured
from kvstore.engine_adapter.gpu.lane import LaneSizes
from kvstore.engine_adapter.gpu.mover import DeviceMover
from kvstore.engine_adapter.paged import PagedStore
from kvstore.engine_adapter.parts import Handle


class Place(Protocol):
    """Where tensors lie."""

    def hold(self, array: NDArray[Any]) -> Any:
        """The tensor that has the array's values; ``refresh`` brings them back."""
        ...

    def refresh(self) -> None:
        """All arrays have what their tensors have."""
        ...

    def store(self, handle: Handle, kv: EngineKV, *, kind: Any = PagedStore, **settings: Any) -> Any:
        """A paged store over such tensors."""
        ...


class HostPlace:
    """Tensors are the arrays."""

    def hold(self, array: NDArray[Any]) -> Any:
        return array

    def refresh(self) -> None:
        """They are there."""

    def store(self, handle: Handle, kv: EngineKV, *, kind: Any = PagedStore, **settings: Any) -> Any:
        return kind(handle, kv, **settings)


class OnDevice:
    """A tensor in a device's memory, as cupy's and torch's say where they lie."""

    def __init__(self, array: NDArray[Any], address: int) -> None:
        self.shape = array.shape
        self.__cuda_array_interface__: dict[str, Any] = {
            "version": 3,
            "shape": array.shape,
            "typestr": array.dtype.str,
            "data": (address, False),
            "strides": None,
        }


def only(route: Route) -> Choice:
    """Copies go this way, whatever they are."""
    measured = unmeasured()
    return Choice(measured.calibration, measured.spread_gb_per_s, (route,))


SMALL = LaneSizes(piece_bytes=4096, pieces=2, table_runs=64)
"""So that copies of tests go through several pieces."""


class DevicePlace:
    """Tensors of the simulated device. ``registered``: whether it may read the daemon's memory by itself."""

    def __init__(self, client: Client, choice: Choice | None, *, registered: bool, seed: int | None = 1) -> None:
        self.device = SimulatedDevice(total_bytes=64 << 20, seed=seed)
        clients = (client,) if registered else ()
        self.mover = DeviceMover(self.device, *clients, choice=choice, sizes=SMALL)
        self._held: list[tuple[NDArray[Any], int]] = []

    def hold(self, array: NDArray[Any]) -> Any:
        address = self.device.malloc(array.nbytes)
        self._held.append((array, address))
        with PinnedBuffer(self.device, array.nbytes) as buffer:
            buffer.array[:] = np.ascontiguousarray(array).view(np.uint8).ravel()
            self._copy(address, buffer.address, array.nbytes)
        return OnDevice(array, address)

    def refresh(self) -> None:
        for array, address in self._held:
            with PinnedBuffer(self.device, array.nbytes) as buffer:
                self._copy(buffer.address, address, array.nbytes)
                array.reshape(-1).view(np.uint8)[:] = buffer.array

    def store(self, handle: Handle, kv: EngineKV, *, kind: Any = PagedStore, **settings: Any) -> Any:
        return kind(handle, kv, mover=self.mover, **settings)

    def close(self) -> None:
        self.mover.close()
        self.device.close()

    def _copy(self, to: int, come_from: int, n_bytes: int) -> None:
        stream = self.device.stream()
        self.device.copy(to, come_from, n_bytes, stream)
        self.device.sync_stream(stream)
        self.device.free_stream(stream)


HERE = HostPlace()
PLACES: dict[str, tuple[Route | None, bool] | None] = {
    "host": None,
    "direct": (Route.DIRECT, True),
    "kernel": (Route.KERNEL, True),
    "staged": (Route.STAGED, True),
    "bounced": (None, False),
}
"""How copies go, and whether the daemon's memory is registered."""
