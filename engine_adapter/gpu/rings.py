"""Bounded memory that transfers pass through: equal pieces, each free again when the event of its last use is over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvstore.device.pinned import PinnedBuffer
from kvstore.device.seam import Device
from kvstore.errors import DeviceError


@dataclass(slots=True, eq=False)
class Piece:
    """A part of the memory. ``address`` is for copies, ``device_address`` for kernels; ``start`` is its first byte's
    place in the whole. ``finish``: what the host has yet to do with it when its event is over."""

    start: int
    address: int
    device_address: int
    event: int
    finish: Callable[[], None] | None = None


class Ring:
    """Pieces taken in turn. For one thread at a time."""

    def __init__(self, device: Device, address: int, device_address: int, piece_bytes: int, n: int) -> None:
        self.piece_bytes = piece_bytes
        self._device = device
        self._pieces: list[Piece] = []
        self._next = 0
        try:
            for start in range(0, n * piece_bytes, piece_bytes):
                self._pieces.append(Piece(start, address + start, device_address + start, device.event()))
        except BaseException:
            self.close()
            raise

    def take(self, stream: int) -> Piece:
        """A piece for what the stream is given next, which then waits for the piece's last use. Does not block."""
        piece = self._turn()
        self._device.wait_event(stream, piece.event)
        return piece

    def take_for_host(self) -> Piece:
        """A piece that the caller may touch at once. Blocks until its last use is over."""
        piece = self._turn()
        self.finish(piece)
        return piece

    def used(self, piece: Piece, stream: int, finish: Callable[[], None] | None = None) -> None:
        """The piece is in use until all is over that the stream was given by now; then ``finish`` is called, at the
        latest when the piece is taken again."""
        self._device.record(piece.event, stream)
        piece.finish = finish

    def finish(self, piece: Piece) -> None:
        """Block until the use of a piece is over, and do what the host has to do then."""
        self._device.sync_event(piece.event)
        finish, piece.finish = piece.finish, None
        if finish is not None:
            finish()

    def close(self) -> None:
        """Give the events back, and what was to be done with pieces up."""
        while self._pieces:
            self._device.free_event(self._pieces.pop().event)

    def _turn(self) -> Piece:
        if not self._pieces:
            raise DeviceError("the transfers of this device are closed; open them again")
        piece = self._pieces[self._next]
        self._next = (self._next + 1) % len(self._pieces)
        return piece


class DeviceRing(Ring):
    """In device memory of its own."""

    def __init__(self, device: Device, piece_bytes: int, n: int) -> None:
        """Raises DeviceError, as DeviceMemoryError where there is no room; nothing is left of it then."""
        self._memory = device.malloc(piece_bytes * n)
        super().__init__(device, self._memory, self._memory, piece_bytes, n)

    def close(self) -> None:
        """Give the memory back too; waits for the device."""
        super().close()
        if self._memory:
            self._device.free(self._memory)
            self._memory = 0


class HostRing(Ring):
    """In registered host memory of its own; ``buffer.array`` has the bytes."""

    def __init__(self, device: Device, piece_bytes: int, n: int) -> None:
        """Raises DeviceError where no memory can be registered; nothing is left of it then."""
        self.buffer = PinnedBuffer(device, piece_bytes * n)
        super().__init__(device, self.buffer.address, self.buffer.device_address, piece_bytes, n)

    def close(self) -> None:
        """Give the memory back too; waits for the device."""
        super().close()
        self.buffer.close()
