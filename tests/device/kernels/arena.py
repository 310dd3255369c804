"""Memory of a device with a picture of it on the host: whatever a kernel writes beyond what it should is seen.

A test puts its arrays into the picture, which is full of noise otherwise, and says how it should look afterwards. All
of the device's memory is compared with that, so that everything around an output is a canary.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.device.seam import Device

Bytes = NDArray[np.uint8]
SIZE_BYTES = 4 << 20
_GAP_BYTES = 64


class Arena:
    """One allocation on the device, and registered host memory with the same contents."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.stream = device.stream()
        self._maps = [mmap.mmap(-1, SIZE_BYTES) for _ in range(2)]
        self._picture, self._result = (np.frombuffer(each, np.uint8) for each in self._maps)
        self._on_host = device.host_register(self._picture.ctypes.data, SIZE_BYTES)
        device.host_register(self._result.ctypes.data, SIZE_BYTES)
        self._on_device = device.malloc(SIZE_BYTES)
        self.used = 0
        self._noise = np.random.default_rng(7).integers(0, 256, SIZE_BYTES, np.uint8)

    def clear(self) -> None:
        """Forget all arrays of the test before."""
        self._picture[: self.used] = self._noise[: self.used]
        self.used = 0

    def put(self, array: NDArray[Any], *, skew_bytes: int = 0) -> int:
        """Where the array begins from now on: a multiple of 64 bytes, plus ``skew_bytes``."""
        packed = np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)
        begin = -(-(self.used + _GAP_BYTES) // 64) * 64 + skew_bytes
        end = begin + len(packed) + _GAP_BYTES
        assert end <= SIZE_BYTES, "the arena is too small for this test"
        self._picture[self.used : end] = self._noise[self.used : end]
        self._picture[begin : begin + len(packed)] = packed
        self.used = end
        return begin

    def put_room(self, shape: tuple[int, ...], dtype: Any, *, skew_bytes: int = 0) -> int:
        """As ``put`` for an array that the kernel is to write."""
        return self.put(np.full(shape, 0x5A, np.uint8).repeat(np.dtype(dtype).itemsize), skew_bytes=skew_bytes)

    def address(self, begin: int, *, on_host: bool = False) -> int:
        """Of what lies there, for kernels: on the device, or on the host (for what is only read)."""
        return (self._on_host if on_host else self._on_device) + begin

    def picture(self) -> Bytes:
        """A copy of how everything looks now, to be made into what is expected."""
        return self._picture[: self.used].copy()

    def upload(self) -> None:
        """Bring the picture to the device."""
        self.device.copy(self._on_device, self._picture.ctypes.data, self.used, self.stream)

    def result(self) -> Bytes:
        """How the device's memory looks after all work."""
        self.device.copy(self._result.ctypes.data, self._on_device, self.used, self.stream)
        self.device.sync_stream(self.stream)
        return self._result[: self.used].copy()

    def array(self, image: Bytes, begin: int, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """What lies there in an image, as an array that shares its memory."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        found: NDArray[Any] = image[begin : begin + size].view(dtype).reshape(shape)
        return found

    def close(self) -> None:
        self.device.close()
