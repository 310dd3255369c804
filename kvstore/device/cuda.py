"""A GPU, through the CUDA runtime.

Importing this needs neither a GPU nor CUDA's packages; opening a device does. Streams and events are CUDA's own, as
integers: ``torch.cuda.ExternalStream`` takes them, and the streams and events of others may be given.
"""

from __future__ import annotations

import ctypes
import os
import threading
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.device.checked import (
    check_copy,
    check_fill,
    check_handle,
    check_pages,
    check_process,
    check_size,
    some_copies,
)
from kvstore.device.cuda_calls import bindings, do, error_of, number_of
from kvstore.device.cuda_host import RANGES
from kvstore.device.cuda_kernels import CudaKernels
from kvstore.device.cuda_streams import OwnStreams, or_legacy, relaxed
from kvstore.device.kernels import check_launch
from kvstore.device.seam import IPC_HANDLE_BYTES, Addresses, Argument, DeviceFacts
from kvstore.errors import BadInputError, DeviceError

_SHARED_UNIT_BYTES = 2 << 20
"""CUDA cuts smaller allocations out of blocks of this size, and IPC shares the whole block."""

_BATCHES_SINCE = 12080
"""The version of the driver that has ``cudaMemcpyBatchAsync``."""

_NO_BATCHES = (0, 1)
"""The legacy default stream, by either of its names, takes no batches."""

_exported: dict[bytes, int] = {}
"""Handles of this process' memory, of all its devices, with addresses. CUDA opens none of them in this process."""
_exporting = threading.Lock()


class CudaDevice:
    """``Device`` number ``ordinal`` of those that CUDA shows this process. Uses its primary context, as torch does.

    Every call makes the context current for its time, and leaves the thread as it was. Raises DeviceError that says
    what is missing: the package, the driver or the GPU.
    """

    def __init__(self, ordinal: int = 0) -> None:
        runtime, driver = bindings("runtime"), bindings("driver")
        n_devices = do(runtime.cudaGetDeviceCount)
        if not 0 <= ordinal < n_devices:
            raise DeviceError(f"there is no GPU number {ordinal}: CUDA shows {n_devices}, counted from 0")
        self._pid = os.getpid()
        self._closed = False
        self._lock = threading.Lock()
        self._allocated: set[int] = set()
        self._registered: set[int] = set()
        self._opened: Counter[int] = Counter()
        self._opened_at_home: Counter[int] = Counter()
        self._streams = OwnStreams()
        self._events: set[int] = set()
        previous = do(driver.cuCtxGetCurrent)
        try:
            do(runtime.cudaSetDevice, ordinal)
            # Kernels and copies need the context from the first call on; this makes it.
            with relaxed():
                do(runtime.cudaFree, 0)
            self._context = do(driver.cuCtxGetCurrent)
            self._facts = _facts_of(ordinal)
            self._uses_host_page_tables = _uses_host_page_tables(ordinal)
        finally:
            do(driver.cuCtxSetCurrent, previous)
        self._kernels = CudaKernels(self._facts.capability)

    @property
    def facts(self) -> DeviceFacts:
        return self._facts

    # Memory ------------------------------------------------------------------------------------------

    def malloc(self, size_bytes: int) -> int:
        """Whole units of 2 MiB are taken, so that sharing this memory never shares another's."""
        check_size(size_bytes)
        rounded_bytes = -(-size_bytes // _SHARED_UNIT_BYTES) * _SHARED_UNIT_BYTES
        with self._current() as runtime:
            address = int(do(runtime.cudaMalloc, rounded_bytes))
        with self._lock:
            self._allocated.add(address)
        return address

    def free(self, address: int) -> None:
        with self._current() as runtime:
            self._forget(self._allocated, address, "free", "malloc")
            self._streams.drain()
            _export_ends({address})
            do(runtime.cudaFree, address)

    def host_register(self, address: int, size_bytes: int, *, read_only: bool = False) -> int:
        check_pages(address, size_bytes)
        if read_only and not self._facts.can_register_read_only:
            raise DeviceError(
                f"{self._facts.name} can't register host memory as read-only; copy through memory of yours"
            )
        with self._current() as runtime, ExitStack() as undo:
            flags = runtime.cudaHostRegisterMapped | runtime.cudaHostRegisterPortable
            if read_only and not self._uses_host_page_tables:
                flags |= runtime.cudaHostRegisterReadOnly
            with self._lock:
                if address in self._registered:
                    raise BadInputError(f"host memory at {address:#x} is registered already: register a range once")
                self._registered.add(address)
            undo.callback(self._registered.discard, address)
            register = partial(do, runtime.cudaHostRegister, address, size_bytes, flags)
            RANGES.take(address, size_bytes, read_only, register)
            undo.callback(RANGES.give_back, address, partial(do, runtime.cudaHostUnregister, address))
            for_kernels = int(do(runtime.cudaHostGetDevicePointer, address, 0))
            undo.pop_all()
        return for_kernels

    def host_unregister(self, address: int) -> None:
        with self._current() as runtime:
            self._forget(self._registered, address, "host_unregister", "host_register")
            self._streams.drain()
            RANGES.give_back(address, partial(do, runtime.cudaHostUnregister, address))

    def ipc_export(self, address: int) -> bytes:
        with self._current() as runtime:
            if address not in self._allocated:
                raise BadInputError(
                    f"ipc_export of {address:#x}, which no malloc gave, or which was given back already"
                )
            handle = do(runtime.cudaIpcGetMemHandle, address)
            # Some versions of the bindings show the bytes of a handle as an attribute, some don't.
            packed = ctypes.string_at(handle.getPtr(), IPC_HANDLE_BYTES)
        with _exporting:
            _exported[packed] = address
        return packed

    def ipc_open(self, handle: bytes) -> int:
        check_handle(handle)
        with _exporting:
            at_home = _exported.get(handle)
        if at_home is not None:
            with self._lock:
                self._opened_at_home[at_home] += 1
            return at_home
        with self._current() as runtime:
            filled = runtime.cudaIpcMemHandle_t()
            ctypes.memmove(filled.getPtr(), handle, IPC_HANDLE_BYTES)
            address = int(do(runtime.cudaIpcOpenMemHandle, filled, runtime.cudaIpcMemLazyEnablePeerAccess))
        with self._lock:
            self._opened[address] += 1
        return address

    def ipc_close(self, address: int) -> None:
        with self._current() as runtime:
            with self._lock:
                at_home = self._opened_at_home[address] > 0
                opened = self._opened_at_home if at_home else self._opened
                if not opened[address]:
                    raise BadInputError(
                        f"ipc_close of {address:#x}, which no ipc_open gave, or which was closed already"
                    )
                opened[address] -= 1
            self._streams.drain()
            if not at_home:
                do(runtime.cudaIpcCloseMemHandle, address)

    # Streams and events ------------------------------------------------------------------------------

    def stream(self) -> int:
        with self._current():
            return self._streams.make()

    def free_stream(self, stream: int) -> None:
        with self._current():
            self._streams.end(stream)

    def event(self) -> int:
        with self._current() as runtime:
            flags = runtime.cudaEventDisableTiming | runtime.cudaEventBlockingSync
            event = number_of(do(runtime.cudaEventCreateWithFlags, flags))
        with self._lock:
            self._events.add(event)
        return event

    def free_event(self, event: int) -> None:
        with self._current() as runtime:
            self._forget(self._events, event, "free_event", "event")
            do(runtime.cudaEventDestroy, event)

    def record(self, event: int, stream: int) -> None:
        with self._current() as runtime:
            do(runtime.cudaEventRecord, event, or_legacy(stream))

    def wait_event(self, stream: int, event: int) -> None:
        with self._current() as runtime:
            do(runtime.cudaStreamWaitEvent, or_legacy(stream), event, runtime.cudaEventWaitDefault)

    def query(self, event: int) -> bool:
        with self._current() as runtime:
            (status,) = runtime.cudaEventQuery(event)
            if status == runtime.cudaError_t.cudaErrorNotReady:
                return False
            if status.value:
                raise error_of("cudaEventQuery", status)
            return True

    def sync_event(self, event: int) -> None:
        with self._current() as runtime:
            do(runtime.cudaEventSynchronize, event)

    def sync_stream(self, stream: int) -> None:
        with self._current() as runtime:
            do(runtime.cudaStreamSynchronize, or_legacy(stream))

    # Work --------------------------------------------------------------------------------------------

    def copy(self, dst: int, src: int, size_bytes: int, stream: int) -> None:
        check_copy(size_bytes)
        with self._current() as runtime:
            kind = runtime.cudaMemcpyKind.cudaMemcpyDefault
            do(runtime.cudaMemcpyAsync, dst, src, size_bytes, kind, or_legacy(stream))

    def copy_batch(self, dsts: Addresses, srcs: Addresses, sizes: NDArray[np.uint64], stream: int) -> None:
        to, of, n_bytes = (values.tolist() for values in some_copies(dsts, srcs, sizes))
        if not to:
            return
        with self._current() as runtime:
            if not self._facts.can_batch_copies or stream in _NO_BATCHES:
                kind = runtime.cudaMemcpyKind.cudaMemcpyDefault
                for dst, src, size_bytes in zip(to, of, n_bytes, strict=True):
                    do(runtime.cudaMemcpyAsync, dst, src, size_bytes, kind, or_legacy(stream))
                return
            in_order = runtime.cudaMemcpyAttributes()
            in_order.srcAccessOrder = runtime.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
            do(runtime.cudaMemcpyBatchAsync, to, of, n_bytes, len(to), [in_order], [0], 1, stream)

    def fill(self, address: int, byte: int, size_bytes: int, stream: int) -> None:
        check_fill(byte, size_bytes)
        with self._current() as runtime:
            do(runtime.cudaMemsetAsync, address, byte, size_bytes, or_legacy(stream))

    def launch(
        self,
        kernel: str,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        arguments: Sequence[Argument],
        stream: int,
        shared_bytes: int = 0,
    ) -> None:
        """Compiles the kernels at the first launch on a machine, which takes about a second."""
        check_launch(kernel, grid, block, arguments, shared_bytes)
        with self._current():
            self._kernels.launch(kernel, grid, block, arguments, or_legacy(stream), shared_bytes)

    def close(self) -> None:
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
        _export_ends(self._allocated)
        driver = bindings("driver")
        previous = do(driver.cuCtxGetCurrent)
        do(driver.cuCtxSetCurrent, self._context)
        # Each of these is tried, whatever the others raise; the last is done first.
        with ExitStack() as stack:
            stack.callback(do, driver.cuCtxSetCurrent, previous)
            stack.enter_context(relaxed())
            runtime = bindings("runtime")
            stack.callback(self._kernels.unload)
            for give_back, taken in (
                (runtime.cudaFree, self._allocated),
                (runtime.cudaIpcCloseMemHandle, self._opened.elements()),
                (runtime.cudaEventDestroy, self._events),
            ):
                for each in taken:
                    stack.callback(do, give_back, each)
            stack.callback(self._streams.destroy)
            for address in self._registered:
                stack.callback(RANGES.give_back, address, partial(do, runtime.cudaHostUnregister, address))
            stack.callback(self._streams.drain)

    # Inside ------------------------------------------------------------------------------------------

    @contextmanager
    def _current(self) -> Iterator[Any]:
        """The runtime, with this device's context current on this thread; afterwards the thread has what it had.

        What is asked meanwhile does not spoil a graph that another thread captures.
        """
        check_process(self._pid)
        if self._closed:
            raise DeviceError("the device is closed; open another")
        driver = bindings("driver")
        previous = do(driver.cuCtxGetCurrent)
        with relaxed():
            if previous == self._context:
                yield bindings("runtime")
                return
            do(driver.cuCtxSetCurrent, self._context)
            try:
                yield bindings("runtime")
            finally:
                do(driver.cuCtxSetCurrent, previous)

    def _forget(self, taken: set[int], number: int, call: str, maker: str) -> None:
        with self._lock:
            if number not in taken:
                raise BadInputError(f"{call} of {number:#x}, which no {maker} gave, or which was given back already")
            taken.remove(number)


def _export_ends(addresses: set[int]) -> None:
    with _exporting:
        for handle in [handle for handle, address in _exported.items() if address in addresses]:
            del _exported[handle]


def gpus() -> list[DeviceFacts]:
    """The GPUs that CUDA shows this process. Touches none of them. Raises DeviceError that says what is missing."""
    return [_facts_of(ordinal) for ordinal in range(do(bindings("runtime").cudaGetDeviceCount))]


def _uses_host_page_tables(ordinal: int) -> bool:
    """Whether host memory that is mapped read-only is registered like any other, without a flag for it (GH200)."""
    runtime = bindings("runtime")
    attribute = runtime.cudaDeviceAttr.cudaDevAttrPageableMemoryAccessUsesHostPageTables
    return bool(do(runtime.cudaDeviceGetAttribute, attribute, ordinal))


def _facts_of(ordinal: int) -> DeviceFacts:
    runtime = bindings("runtime")
    attribute = runtime.cudaDeviceAttr
    properties = do(runtime.cudaGetDeviceProperties, ordinal)
    read_only = do(runtime.cudaDeviceGetAttribute, attribute.cudaDevAttrHostRegisterReadOnlySupported, ordinal)
    read_only = read_only or _uses_host_page_tables(ordinal)
    has_batches = hasattr(runtime, "cudaMemcpyBatchAsync") and do(runtime.cudaDriverGetVersion) >= _BATCHES_SINCE
    return DeviceFacts(
        kind="cuda",
        name=properties.name.decode(errors="replace"),
        uuid=f"GPU-{uuid.UUID(bytes=bytes(properties.uuid.bytes))}",
        ordinal=ordinal,
        total_bytes=int(properties.totalGlobalMem),
        capability=(int(properties.major), int(properties.minor)),
        can_register_read_only=bool(read_only),
        can_batch_copies=has_batches,
    )
