"""Runs the CUDA kernels on the CPU: the same source, compiled by g++, every thread in turn.

For devices without a GPU and for tests; see shim/cuda_on_cpu.hpp for what is stricter than on a GPU. Slow: some
hundred MB/s for copies, about one for kernels whose threads wait for each other.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvstore.device.cpu_build import compiled, sanitizer_runtime
from kvstore.device.kernels import KERNELS, check_launch
from kvstore.device.seam import Argument
from kvstore.errors import DeviceError

_MESSAGE_BYTES = 512
_PARAMETERS_MAX = 64


@functools.cache
def load_kernels(*, sanitize: bool = False) -> CpuKernels:
    """The kernels of this package; blocks for some seconds the first time on a machine, while g++ compiles them.

    Raises DeviceError where that can't be done. With ``sanitize``, what goes out of bounds ends the process with a
    report; the process must have been started with ``sanitizer_runtime`` in ``LD_PRELOAD``.
    """
    if sanitize and "libasan" not in Path("/proc/self/maps").read_text():
        raise DeviceError(
            f"AddressSanitizer is not in this process: start it with LD_PRELOAD={sanitizer_runtime()} and "
            "ASAN_OPTIONS=detect_leaks=0"
        )
    return CpuKernels(compiled(sanitize=sanitize))


class CpuKernels:
    """Kernels in a shared object of ``cpu_build.compiled``."""

    def __init__(self, library: Path) -> None:
        """Raises DeviceError if it can't be loaded or does not have the kernels of ``KERNELS``."""
        try:
            loaded = ctypes.CDLL(str(library))
        except OSError as error:
            raise DeviceError(
                f"the compiled kernels can't be loaded: {error}; remove {library} to have them compiled anew"
            ) from error
        self._launch = loaded.kv_launch
        self._launch.argtypes = (
            ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t,
            ctypes.c_char_p, ctypes.c_size_t,
        )  # fmt: skip
        sizes = (ctypes.c_uint * _PARAMETERS_MAX)()
        for kernel in KERNELS.values():
            count = loaded.kv_parameters(kernel.name.encode(), sizes, _PARAMETERS_MAX)
            wanted = [each.dtype.itemsize for each in kernel.parameters]
            if count < 0 or list(sizes[:count]) != wanted:
                raise DeviceError(
                    f"{kernel.name} has parameters of {list(sizes[: max(count, 0)])} bytes; the table says {wanted}"
                )

    def launch(
        self,
        name: str,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        arguments: Sequence[Argument],
        shared_bytes: int = 0,
    ) -> None:
        """Run a kernel to its end, without Python's lock; one launch of the process at a time.

        Addresses are this process' own; a wrong one is a segmentation fault. Raises BadInputError as ``check_launch``,
        and DeviceError for what a GPU would hang on or leave undefined: threads that wait for others in vain, and
        accesses that are not aligned. Memory may have been written by then.
        """
        kernel = check_launch(name, grid, block, arguments, shared_bytes)
        held = [np.array(value) for value in arguments]
        pointers = np.array([each.ctypes.data for each in held], np.uint64)
        message = ctypes.create_string_buffer(_MESSAGE_BYTES)
        shape = np.array([*grid, *block], np.uint32)
        failed = self._launch(
            name.encode(), shape[:3].ctypes.data, shape[3:].ctypes.data, pointers.ctypes.data,
            kernel.has_barriers, shared_bytes, message, _MESSAGE_BYTES,
        )  # fmt: skip
        if failed:
            raise DeviceError(f"{name} failed: {message.value.decode(errors='replace')}")
