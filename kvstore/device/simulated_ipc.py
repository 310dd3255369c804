"""Handles by which processes of one user share memory of the simulated device: memory files, by descriptor."""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path

from kvstore.device.checked import check_handle
from kvstore.device.seam import IPC_HANDLE_BYTES
from kvstore.errors import BadInputError, DeviceError

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
        try:
            fd = os.open(f"/proc/{self.pid}/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise DeviceError(
                f"device memory of process {self.pid} can't be opened ({error.strerror}): it was freed, the process is "
                "gone, or it is another user's"
            ) from error
        name = Path(f"/proc/self/fd/{fd}").readlink()
        if not str(name).startswith(f"/memfd:{memory_name(self.nonce)} "):
            os.close(fd)
            raise DeviceError(f"device memory of process {self.pid} was freed since its handle was made")
        if self.offset_bytes + self.size_bytes > os.fstat(fd).st_size:
            os.close(fd)
            raise BadInputError(f"an IPC handle names {self.size_bytes} bytes, more than the memory has")
        return fd
