"""A device without a GPU, stricter than one: what a GPU may do at any time, this one does at the worst time.

Work is queued and runs when somebody waits for it, so that a missing wait is a wrong answer each time. New memory is
full of ``POISON``. Host memory that is not registered, addresses outside of what was allocated and kernels' addresses
given to copies are refused. Host code that touches a device's address gets a SIGSEGV. Kernels are those of
``kernels.cu``, compiled for the CPU.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from functools import cache, partial

import numpy as np
from numpy.typing import NDArray

from kvstore.device import simulated_pages as pages
from kvstore.device.checked import check_copy, check_fill, check_pages, check_process, check_size, some_copies
from kvstore.device.kernels import check_launch
from kvstore.device.seam import Addresses, Argument, DeviceFacts
from kvstore.device.simulated_memory import Memory, Range
from kvstore.device.simulated_pages import PAGE_BYTES
from kvstore.device.simulated_work import Streams
from kvstore.errors import BadInputError, DeviceError
from kvstore.native import copy_batch

Dimensions = tuple[int, int, int]
Launcher = Callable[[str, Dimensions, Dimensions, Sequence[Argument], int], None]
"""Runs a kernel at once: name, grid, block, arguments, bytes of shared memory."""


class SimulatedDevice:
    """``Device`` of this process. ``total_bytes`` of memory are had as they are touched, by ``malloc`` at the latest.

    ``seed``: see ``Streams``. ``guarded=False`` lets host code touch device memory, as no GPU would; a kernel's
    launch is cheaper by two system calls an allocation. ``launcher`` replaces the kernels of ``on_cpu``.

    IPC handles are for processes of the same user on this machine; each process has ``total_bytes`` of its own.
    What another process does with memory is not ordered behind this one's streams, by events or otherwise.
    """

    def __init__(
        self,
        ordinal: int = 0,
        *,
        total_bytes: int = 1 << 30,
        seed: int | None = None,
        guarded: bool = True,
        can_register_read_only: bool = True,
        launcher: Launcher | None = None,
    ) -> None:
        self._facts = DeviceFacts(
            kind="simulated",
            name="simulated device",
            uuid=f"simulated-{ordinal}",
            ordinal=ordinal,
            total_bytes=total_bytes,
            capability=(0, 0),
            can_register_read_only=can_register_read_only,
            can_batch_copies=True,
        )
        self._pid = os.getpid()
        self._closed = False
        self._launcher = launcher
        self._memory = Memory(total_bytes, guarded, can_register_read_only)
        self._changing = threading.RLock()
        self._streams = Streams(seed)

    @property
    def facts(self) -> DeviceFacts:
        return self._facts

    # Memory ------------------------------------------------------------------------------------------

    def malloc(self, size_bytes: int) -> int:
        self._check()
        check_size(size_bytes)
        with self._changing:
            return self._memory.malloc(size_bytes)

    def free(self, address: int) -> None:
        self._check()
        with self._changing:
            self._streams.sync_all()
            self._memory.free(address)

    def host_register(self, address: int, size_bytes: int, *, read_only: bool = False) -> int:
        self._check()
        check_pages(address, size_bytes)
        with self._changing:
            return self._memory.register(address, size_bytes, read_only)

    def host_unregister(self, address: int) -> None:
        self._check()
        with self._changing:
            self._streams.sync_all()
            self._memory.unregister(address)

    def ipc_export(self, address: int) -> bytes:
        self._check()
        with self._changing:
            return self._memory.handle_of(address)

    def ipc_open(self, handle: bytes) -> int:
        self._check()
        with self._changing:
            return self._memory.open(handle)

    def ipc_close(self, address: int) -> None:
        self._check()
        with self._changing:
            self._streams.sync_all()
            self._memory.close(address)

    # Streams and events ------------------------------------------------------------------------------

    def stream(self) -> int:
        self._check()
        return self._streams.stream()

    def free_stream(self, stream: int) -> None:
        self._check()
        self._streams.free_stream(stream)

    def event(self) -> int:
        self._check()
        return self._streams.event()

    def free_event(self, event: int) -> None:
        self._check()
        self._streams.free_event(event)

    def record(self, event: int, stream: int) -> None:
        self._check()
        self._streams.record(event, stream)

    def wait_event(self, stream: int, event: int) -> None:
        self._check()
        self._streams.wait_event(stream, event)

    def query(self, event: int) -> bool:
        """Whether the event is over. Runs one piece of work towards it, so that who asks often enough gets on."""
        self._check()
        return self._streams.query(event)

    def sync_event(self, event: int) -> None:
        self._check()
        self._streams.sync_event(event)

    def sync_stream(self, stream: int) -> None:
        self._check()
        self._streams.sync_stream(stream)

    # Work --------------------------------------------------------------------------------------------

    def copy(self, dst: int, src: int, size_bytes: int, stream: int) -> None:
        check_copy(size_bytes)
        to, of, size = np.array([[dst], [src], [size_bytes]], np.uint64)
        self.copy_batch(to, of, size, stream)

    def copy_batch(self, dsts: Addresses, srcs: Addresses, sizes: NDArray[np.uint64], stream: int) -> None:
        """Many copies in no order; what one writes no other may touch. Raises BadInputError if one does."""
        self._check()
        dsts, srcs, sizes = some_copies(dsts, srcs, sizes)
        with self._changing:
            to, written = self._memory.reach(dsts, sizes, write=True)
            of, read = self._memory.reach(srcs, sizes, write=False)
            _refuse_overlaps(to, of, sizes)
            self._streams.give(stream, partial(_copy, to, of, sizes, [*written, *read]))

    def fill(self, address: int, byte: int, size_bytes: int, stream: int) -> None:
        self._check()
        check_fill(byte, size_bytes)
        if not size_bytes:
            return
        with self._changing:
            to, (filled,) = self._memory.reach(np.array([address], np.uint64), np.array([size_bytes], np.uint64), True)
            if not filled.on_device:
                raise BadInputError(f"{address:#x} is host memory; only device memory can be filled")
            self._streams.give(stream, partial(ctypes.memset, int(to[0]), byte, size_bytes))

    def launch(
        self,
        kernel: str,
        grid: Dimensions,
        block: Dimensions,
        arguments: Sequence[Argument],
        stream: int,
        shared_bytes: int = 0,
    ) -> None:
        """Queue a kernel. Each address among the arguments is checked; what tables in memory name is not."""
        self._check()
        with self._changing:
            if self._launcher is None:
                check_launch(kernel, grid, block, arguments, shared_bytes)
            launcher = self._launcher or _kernels_on_cpu()
            for argument in arguments:
                if isinstance(argument, np.uint64) and argument:
                    self._memory.check_argument(int(argument))
            self._streams.give(
                stream, partial(self._run, launcher, kernel, grid, block, tuple(arguments), shared_bytes)
            )

    def close(self) -> None:
        if self._closed or os.getpid() != self._pid:
            return
        with self._changing:
            try:
                if not self._streams.failed:
                    self._streams.sync_all()
            finally:
                self._closed = True
                self._memory.give_all_back()

    # Inside ------------------------------------------------------------------------------------------

    def _run(
        self,
        launcher: Launcher,
        kernel: str,
        grid: Dimensions,
        block: Dimensions,
        arguments: Sequence[Argument],
        shared_bytes: int,
    ) -> None:
        with self._memory.open_to_kernels():
            launcher(kernel, grid, block, arguments, shared_bytes)

    def _check(self) -> None:
        check_process(self._pid)
        if self._closed:
            raise DeviceError("the device is closed; open another")
        self._streams.check()


def _copy(to: Addresses, of: Addresses, sizes: NDArray[np.uint64], ranges: list[Range]) -> None:
    for r in ranges:
        if not r.on_device and not pages.is_mapped(r.start, min(r.size_bytes, PAGE_BYTES)):
            raise DeviceError(f"host memory at {r.start:#x} was unmapped while it was registered; unregister it first")
    copy_batch(to, of, sizes)


def _refuse_overlaps(to: Addresses, of: Addresses, sizes: NDArray[np.uint64]) -> None:
    order = np.argsort(to)
    starts, ends = to[order], (to + sizes)[order]
    if (starts[1:] < ends[:-1]).any():
        raise BadInputError("destinations of a batch overlap; their order is not defined")
    # The last destination that begins before a source ends is the only one that can reach into it.
    before = np.searchsorted(starts, of + sizes, "left")
    if ((before > 0) & (ends[before - 1] > of)).any():
        raise BadInputError("a source overlaps a destination of the same batch; their order is not defined")


@cache
def _kernels_on_cpu() -> Launcher:
    from kvstore.device.on_cpu import load_kernels

    return load_kernels().launch
