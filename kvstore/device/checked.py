"""What every device refuses, before it does anything."""

from __future__ import annotations

import mmap
import os

import numpy as np
from numpy.typing import NDArray

from kvstore.device.seam import IPC_HANDLE_BYTES, Addresses
from kvstore.errors import BadInputError, DeviceError


def check_process(pid: int) -> None:
    """Raise DeviceError unless this is the process that opened the device."""
    if os.getpid() != pid:
        raise DeviceError(
            f"this device was opened by process {pid} and can't be used in a forked child: start that afresh (spawn)"
        )


def check_size(size_bytes: int) -> None:
    """Raise BadInputError unless memory of that size can be asked for."""
    if size_bytes <= 0:
        raise BadInputError(f"size_bytes is {size_bytes}; it must be positive")


def check_pages(address: int, size_bytes: int) -> None:
    """Raise BadInputError unless a range is made of whole pages."""
    if address <= 0 or size_bytes <= 0 or address % mmap.PAGESIZE or size_bytes % mmap.PAGESIZE:
        raise BadInputError(
            f"{size_bytes} bytes of host memory at {address:#x} can't be registered; they must be whole pages of "
            f"{mmap.PAGESIZE} bytes"
        )


def check_handle(handle: bytes) -> None:
    """Raise BadInputError for bytes that can't be an IPC handle."""
    if len(handle) != IPC_HANDLE_BYTES:
        raise BadInputError(f"an IPC handle has {IPC_HANDLE_BYTES} bytes, not {len(handle)}")


def check_fill(byte: int, size_bytes: int) -> None:
    """Raise BadInputError for what ``fill`` can't do."""
    if not 0 <= byte <= 255 or size_bytes < 0:
        raise BadInputError(f"a fill of {size_bytes} bytes with {byte}: give 0 or more bytes, and one of 0 to 255")


def check_copy(size_bytes: int) -> None:
    """Raise BadInputError for a size that can't be copied."""
    if size_bytes < 0:
        raise BadInputError(f"size_bytes is {size_bytes}; it must be 0 or more")


def some_copies(
    dsts: Addresses, srcs: Addresses, sizes: NDArray[np.uint64]
) -> tuple[Addresses, Addresses, NDArray[np.uint64]]:
    """The copies of a batch that have bytes. Raises BadInputError unless all are uint64 of one length."""
    for name, values in (("dsts", dsts), ("srcs", srcs), ("sizes", sizes)):
        if values.dtype != np.uint64 or values.ndim != 1 or len(values) != len(sizes):
            raise BadInputError(f"{name} is {values.dtype} {list(values.shape)}; it must be uint64 [{len(sizes)}]")
    some = sizes > 0
    return dsts[some], srcs[some], sizes[some]
