"""Measured rates of a link by way, direction and size of a piece."""

from __future__ import annotations

import bisect
import math
import mmap
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import BadInputError, IntegrityError
from kvstore.plan.ways import Addresses, Direction, Mover, Pieces, Way

SIZES = tuple(4096 << step for step in range(13))
"""4 KiB to 16 MiB."""
TOTAL_BYTES = 64 << 20
REPEATS = 7


class MovingDevice(Protocol):
    """What is asked of a device here; ``kvstore.device.seam.Device`` is one."""

    def malloc(self, size_bytes: int) -> int: ...
    def free(self, address: int) -> None: ...
    def host_register(self, address: int, size_bytes: int, *, read_only: bool = False) -> int: ...
    def host_unregister(self, address: int) -> None: ...
    def stream(self) -> int: ...
    def free_stream(self, stream: int) -> None: ...
    def sync_stream(self, stream: int) -> None: ...
    def copy(self, dst: int, src: int, size_bytes: int, stream: int) -> None: ...
    def copy_batch(self, dsts: Addresses, srcs: Addresses, sizes: Addresses, stream: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Curve:
    """Rates of one way in one direction over the size of a piece, ascending in both."""

    piece_bytes: tuple[int, ...]
    gb_per_s: tuple[float, ...]
    """Never falls with the size: what was measured, smoothed."""
    measured_gb_per_s: tuple[float, ...]
    start_s: float
    """What a transfer costs before its first byte: giving it to the device and waiting for its end."""

    def rate(self, piece_bytes: float) -> float:
        """GB/s for many pieces of this size. Smaller ones than measured cost as much each as the smallest did."""
        if piece_bytes <= 0:
            raise BadInputError(f"a piece of {piece_bytes} bytes has no rate; give a positive size")
        sizes, rates = self.piece_bytes, self.gb_per_s
        if piece_bytes < sizes[0]:
            return rates[0] * piece_bytes / sizes[0]
        after = bisect.bisect_right(sizes, piece_bytes)
        if after == len(sizes):
            return rates[-1]
        share = math.log(piece_bytes / sizes[after - 1]) / math.log(sizes[after] / sizes[after - 1])
        return float(rates[after - 1] * (rates[after] / rates[after - 1]) ** share)

    def expected_s(self, piece_bytes: float, n_pieces: float) -> float:
        """Seconds that so many pieces take."""
        return self.start_s + piece_bytes * n_pieces / (self.rate(piece_bytes) * 1e9)


class BandwidthTable:
    """Curves by direction and way; a way that can't be used here has none, and a reason in ``absent``."""

    def __init__(
        self, curves: Mapping[tuple[Direction, Way], Curve], absent: Mapping[tuple[Direction, Way], str] | None = None
    ) -> None:
        self.curves = dict(curves)
        self.absent = dict(absent or {})

    def curve(self, direction: Direction, way: Way) -> Curve | None:
        """None if that way was not measured."""
        return self.curves.get((direction, way))

    def link_gb_per_s(self, direction: Direction) -> float:
        """The most that copies reached; 0 if none were measured."""
        curves = (self.curve(direction, way) for way in (Way.COPY, Way.BATCH))
        return max((rate for curve in curves if curve is not None for rate in curve.measured_gb_per_s), default=0.0)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; ``from_dict`` reads it."""
        curves = [
            {
                "direction": str(direction),
                "way": str(way),
                "piece_bytes": list(curve.piece_bytes),
                "gb_per_s": list(curve.measured_gb_per_s),
                "start_s": curve.start_s,
            }
            for (direction, way), curve in self.curves.items()
        ]
        absent = [
            {"direction": str(direction), "way": str(way), "reason": reason}
            for (direction, way), reason in self.absent.items()
        ]
        return {"curves": curves, "absent": absent}

    @classmethod
    def from_dict(cls, told: Mapping[str, Any]) -> BandwidthTable:
        """What ``to_dict`` made. Raises BadInputError for anything else."""
        try:
            curves = {
                (Direction(each["direction"]), Way(each["way"])): make_curve(
                    each["piece_bytes"], each["gb_per_s"], float(each["start_s"])
                )
                for each in told["curves"]
            }
            absent = {
                (Direction(each["direction"]), Way(each["way"])): str(each["reason"]) for each in told.get("absent", [])
            }
        except (KeyError, TypeError, ValueError) as error:
            raise BadInputError(f"this is no table of bandwidths ({error!r:.100}): measure again") from error
        return cls(curves, absent)


def make_curve(piece_bytes: Sequence[int], gb_per_s: Sequence[float], start_s: float = 0.0) -> Curve:
    """A curve through measured rates, smoothed so that it never falls. Raises BadInputError for ones that can't be."""
    sizes, rates = np.asarray(piece_bytes, np.float64), np.asarray(gb_per_s, np.float64)
    if sizes.ndim != 1 or sizes.shape != rates.shape or not len(sizes):
        raise BadInputError(f"{len(rates)} rates for {len(sizes)} sizes; give one for each, and one at least")
    if not (np.isfinite(rates).all() and (rates > 0).all() and (sizes > 0).all() and (np.diff(sizes) > 0).all()):
        raise BadInputError("sizes must be positive and ascend, rates positive and finite")
    if not 0 <= start_s < math.inf:
        raise BadInputError(f"start_s is {start_s}; it must be 0 or more seconds")
    smooth = np.exp(_never_falling(np.log(rates)))
    return Curve(
        tuple(int(size) for size in sizes), tuple(map(float, smooth)), tuple(map(float, rates)), float(start_s)
    )


def _never_falling(values: NDArray[np.float64]) -> list[float]:
    """The nearest sequence (least squares) that never falls: neighbours that do are pooled."""
    pools: list[tuple[float, int]] = []
    for value in values.tolist():
        mean, count = value, 1
        while pools and pools[-1][0] >= mean:
            other, n = pools.pop()
            mean, count = (mean * count + other * n) / (count + n), count + n
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]


def copy_movers(device: MovingDevice) -> dict[Way, Mover]:
    """The ways that need no kernel."""

    def single(pieces: Pieces, stream: int) -> None:
        dsts, srcs = _ends(pieces)
        for dst, src in zip(dsts.tolist(), srcs.tolist(), strict=True):
            device.copy(dst, src, pieces.piece_bytes, stream)

    def batch(pieces: Pieces, stream: int) -> None:
        dsts, srcs = _ends(pieces)
        device.copy_batch(dsts, srcs, np.full(len(dsts), pieces.piece_bytes, np.uint64), stream)

    return {Way.COPY: single, Way.BATCH: batch}


def measure(
    device: MovingDevice,
    movers: Mapping[Way, Mover],
    *,
    sizes: Sequence[int] = SIZES,
    total_bytes: int = TOTAL_BYTES,
    repeats: int = REPEATS,
    absent: Mapping[Way, str] | None = None,
    timer: Callable[[], float] = time.perf_counter,
) -> BandwidthTable:
    """Measure every way at every size, both directions; blocks for that long, some seconds on a GPU.

    Pieces are scattered over ``total_bytes`` on either side; the median of ``repeats`` counts, after one that does not.
    What came is compared with what was sent, after the timing. Host memory of twice ``total_bytes`` is registered
    meanwhile, and as much as ``total_bytes`` of the device's used. ``absent`` says why other ways are missing. Raises
    IntegrityError when a way moves wrong bytes, DeviceError when the device fails.
    """
    if total_bytes < max(sizes):
        raise BadInputError(f"total_bytes is {total_bytes}; pieces of {max(sizes)} bytes need at least as much")
    with ExitStack() as stack:
        bench = _Bench(device, total_bytes, stack, timer)
        curves = {
            (direction, way): bench.curve(way, mover, direction, sizes, repeats)
            for way, mover in movers.items()
            for direction in Direction
        }
    missing = {(direction, way): why for way, why in (absent or {}).items() for direction in Direction}
    return BandwidthTable(curves, missing)


class _Bench:
    """Memory on both sides, and a stream."""

    def __init__(self, device: MovingDevice, total_bytes: int, stack: ExitStack, timer: Callable[[], float]) -> None:
        self._device = device
        self._timer = timer
        self._stream = device.stream()
        stack.callback(device.free_stream, self._stream)
        self._sent, self._came = _whole_pages(total_bytes), _whole_pages(total_bytes)
        self._sent[:] = np.frombuffer(np.random.default_rng(0).bytes(len(self._sent)), np.uint8)
        self._memory = device.malloc(len(self._sent))
        stack.callback(device.free, self._memory)
        self._mapped = {}
        for array in (self._sent, self._came):
            address = int(array.ctypes.data)
            self._mapped[address] = device.host_register(address, len(array))
            stack.callback(device.host_unregister, address)
        stack.callback(device.sync_stream, self._stream)

    def curve(self, way: Way, mover: Mover, direction: Direction, sizes: Sequence[int], repeats: int) -> Curve:
        rates = []
        for size in sizes:
            pieces = self._pieces(direction, size, len(self._sent) // size)
            self._prepare(direction)
            seconds = self._median_s(mover, pieces, repeats)
            self._compare(way, pieces)
            rates.append(pieces.total_bytes / seconds / 1e9)
        one = self._pieces(direction, sizes[0], 1)
        start_s = self._median_s(mover, one, repeats) - one.total_bytes / rates[0] / 1e9
        return make_curve(sizes, rates, max(start_s, 0.0))

    def _pieces(self, direction: Direction, size: int, n: int) -> Pieces:
        array = self._sent if direction is Direction.LOAD else self._came
        start = int(array.ctypes.data)
        offsets = np.random.default_rng(size).permutation(n).astype(np.uint64) * np.uint64(size)
        host = np.uint64(start) + offsets
        mapped = np.uint64(self._mapped[start]) + offsets
        return Pieces(direction, host, mapped, np.uint64(self._memory) + offsets, size)

    def _prepare(self, direction: Direction) -> None:
        """What is read is random, what is written is something else."""
        if direction is Direction.STORE:
            self._device.copy(self._memory, int(self._sent.ctypes.data), len(self._sent), self._stream)
            self._device.sync_stream(self._stream)
            self._came[:] = 0
        else:
            self._came[:] = 0
            self._device.copy(self._memory, int(self._came.ctypes.data), len(self._came), self._stream)
            self._device.sync_stream(self._stream)

    def _median_s(self, mover: Mover, pieces: Pieces, repeats: int) -> float:
        seconds = []
        for _ in range(repeats + 1):
            start = self._timer()
            mover(pieces, self._stream)
            self._device.sync_stream(self._stream)
            seconds.append(self._timer() - start)
        return max(float(np.median(seconds[1:])), 1e-9)

    def _compare(self, way: Way, pieces: Pieces) -> None:
        if pieces.direction is Direction.LOAD:
            self._device.copy(int(self._came.ctypes.data), self._memory, len(self._came), self._stream)
            self._device.sync_stream(self._stream)
        n = pieces.total_bytes
        if not np.array_equal(self._sent[:n], self._came[:n]):
            raise IntegrityError(
                f"{way}, {pieces.direction}: pieces of {pieces.piece_bytes} bytes came wrong; do not use this device"
            )


def _whole_pages(n_bytes: int) -> NDArray[np.uint8]:
    """Memory that can be registered: uint8, at least ``n_bytes``."""
    return np.frombuffer(mmap.mmap(-1, -(-n_bytes // mmap.PAGESIZE) * mmap.PAGESIZE), np.uint8)


def _ends(pieces: Pieces) -> tuple[Addresses, Addresses]:
    """Destinations and sources of copies."""
    if pieces.direction is Direction.LOAD:
        return pieces.device, pieces.host
    return pieces.host, pieces.device


def kernel_ends(pieces: Pieces) -> tuple[Addresses, Addresses]:
    """Destinations and sources as kernels see them."""
    if pieces.direction is Direction.LOAD:
        return pieces.device, pieces.mapped
    return pieces.mapped, pieces.device
