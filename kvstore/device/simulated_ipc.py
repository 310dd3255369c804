"""Handles by which processes of one user share memory of the simulated device: memory files, by descriptor."""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path

from kvstore.device.checked import check_handle
from kvstore.device.seam import IPC_HANDLE_BYTES
from kvstore.errors import BadInputError, DeviceError, KVStoreError

_MAGIC = b"kvsimipc"
_FORMAT = struct.Struct("<8sIIQQ16s16x")
assert _FORMAT.size == IPC_HANDLE_BYTES  # noqa: S101


def memory_name(nonce: bytes) -> str:
    """What a memory file is called, so that whoever opens it sees that it is the one that was exported."""
    return f"kvstore-device-{nonce.hex()}"


@dataclass(frozen=True, slots=True)
class Handle:
    """Memory of process ``pid``: ``size_bytes`` from ``offset_bytes`` of its descriptor ``fd``; ``nonce`` ``[16]``."""

    pid: int
    fd: int
    size_bytes: int
    offset_bytes: int
    nonce: bytes

    def pack(self) -> bytes:
        """As bytes ``[IPC_HANDLE_BYTES]``."""
        return _FORMAT.pack(_MAGIC, self.pid, self.fd, self.size_bytes, self.offset_bytes, self.nonce)

    @classmethod
    def unpack(cls, packed: bytes) -> Handle:
        """Raises BadInputError for bytes that are no handle."""
        check_handle(packed)
        magic, *fields = _FORMAT.unpack(packed)
        if magic != _MAGIC:
            raise BadInputError("these bytes are no IPC handle of a simulated device")
        return cls(*fields)

    def open_file(self) -> int:
        """A descriptor of the memory. Raises DeviceError when it is gone, is other memory by now, or another user's."""
        path = f"/proc/{self.pid}/fd/{self.fd}"
        # A handle may come from anybody, and opening a pipe or a device does things: look first.
        self._must_be_at(path)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise self._gone(error) from error
        try:
            self._must_be_at(f"/proc/self/fd/{fd}")
            if not 0 < self.size_bytes <= os.fstat(fd).st_size - self.offset_bytes:
                raise BadInputError(f"an IPC handle names {self.size_bytes} bytes, but not so many are there")
        except KVStoreError:
            os.close(fd)
            raise
        return fd

    def _must_be_at(self, path: str) -> None:
        try:
            name = str(Path(path).readlink())
        except OSError as error:
            raise self._gone(error) from error
        if not name.startswith(f"/memfd:{memory_name(self.nonce)} "):
            raise DeviceError(f"device memory of process {self.pid} was freed since its handle was made")

    def _gone(self, error: OSError) -> DeviceError:
        return DeviceError(
            f"device memory of process {self.pid} can't be opened ({error.strerror}): it was freed, the process is "
            "gone, or it is another user's"
        )
