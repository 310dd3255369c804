"""The seam between this project and a GPU: what is asked of one, in plain integers.

Two implementations: ``cuda`` for a real GPU, and ``simulated``, which needs none and is stricter than one. Addresses,
streams and events are integers, so that they can be handed to torch, cupy and kernels alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Addresses = NDArray[np.uint64]
Argument = np.generic
"""What a kernel is given: a numpy scalar as wide as its parameter; addresses are ``np.uint64``."""

IPC_HANDLE_BYTES = 64


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What a device is. ``uuid`` is the same in every process that sees it; sizes in bytes."""

    kind: str
    """``cuda`` or ``simulated``."""
    name: str
    uuid: str
    ordinal: int
    total_bytes: int
    capability: tuple[int, int]
    can_register_read_only: bool
    """Whether host memory that is mapped read-only may be registered."""
    can_batch_copies: bool
    """Whether ``copy_batch`` is one call to the driver; else it is one a piece."""


class Device(Protocol):
    """One device. Every method may be called from any thread. ``sync_*`` and ``malloc`` wait for the device; ``free``,
    ``host_unregister`` and ``ipc_close`` for what streams of this ``Device`` were given, no others: work on streams
    that somebody else made must be over by then. So graphs that other threads capture are left alone.

    Work given to a stream runs in order; streams know nothing of each other unless an event is between them. What is
    read and written belongs to the device from the call until the work is known to be over: by ``sync_stream``,
    ``sync_event``, or ``query`` that says True. Errors are ``DeviceError``; bad arguments are ``BadInputError``.
    """

    @property
    def facts(self) -> DeviceFacts:
        """What it is; constant."""
        ...

    # Memory --------------------------------------------------------------------------------------

    def malloc(self, size_bytes: int) -> int:
        """Address of new device memory, aligned to 256 bytes, contents undefined; DeviceMemoryError when full."""
        ...

    def free(self, address: int) -> None:
        """Give back what ``malloc`` gave. Waits for the work that is under way on streams made here."""
        ...

    def host_register(self, address: int, size_bytes: int, *, read_only: bool = False) -> int:
        """Pin mapped host memory (whole pages) and return its address for kernels; copies take ``address`` itself.

        Blocks for some 0.3 ms a MiB. Raises BadInputError for a range that overlaps one registered already.
        """
        ...

    def host_unregister(self, address: int) -> None:
        """Undo ``host_register``. Waits for the work that is under way. Must come before the memory is unmapped."""
        ...

    def ipc_export(self, address: int) -> bytes:
        """A handle, ``IPC_HANDLE_BYTES`` long, by which another process opens what ``malloc`` gave."""
        ...

    def ipc_open(self, handle: bytes) -> int:
        """Address here of memory that another process, or another ``Device`` of this one, exported.

        Valid until ``ipc_close``; close it before the other frees it, which on a GPU ends it for all.
        """
        ...

    def ipc_close(self, address: int) -> None:
        """Undo ``ipc_open``. Waits for the work that is under way."""
        ...

    # Streams and events --------------------------------------------------------------------------

    def stream(self) -> int:
        """A new stream, concurrent with all others."""
        ...

    def free_stream(self, stream: int) -> None:
        """End a stream; what was given to it is still done."""
        ...

    def event(self) -> int:
        """A new event. One that was never recorded counts as over."""
        ...

    def free_event(self, event: int) -> None:
        """End an event."""
        ...

    def record(self, event: int, stream: int) -> None:
        """The event is over when all that the stream was given until now is."""
        ...

    def wait_event(self, stream: int, event: int) -> None:
        """What the stream is given from now on begins after the event (as recorded by now) is over."""
        ...

    def query(self, event: int) -> bool:
        """Whether the event is over. Does not wait."""
        ...

    def sync_event(self, event: int) -> None:
        """Wait for an event, without holding Python's lock."""
        ...

    def sync_stream(self, stream: int) -> None:
        """Wait for all that the stream was given, without holding Python's lock."""
        ...

    # Work ----------------------------------------------------------------------------------------

    def copy(self, dst: int, src: int, size_bytes: int, stream: int) -> None:
        """Copy between any of device memory and registered host memory (by its host address)."""
        ...

    def copy_batch(self, dsts: Addresses, srcs: Addresses, sizes: NDArray[np.uint64], stream: int) -> None:
        """Many copies; uint64 ``[n]`` each, sizes in bytes. The arrays themselves may change after the call."""
        ...

    def fill(self, address: int, byte: int, size_bytes: int, stream: int) -> None:
        """Set device memory to one byte."""
        ...

    def launch(
        self,
        kernel: str,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        arguments: Sequence[Argument],
        stream: int,
        shared_bytes: int = 0,
    ) -> None:
        """Run a kernel of ``kernels.cu`` by name. Arrays that it is told of by address must be device-readable."""
        ...

    def close(self) -> None:
        """Wait for everything and give all back. Idempotent. Raises what failed that nobody was told of yet."""
        ...


def as_arguments(*values: Any) -> tuple[Argument, ...]:
    """Kernel arguments of numpy scalars; a plain int is an address (uint64)."""
    return tuple(np.uint64(value) if isinstance(value, int) else value for value in values)
