"""``kernels.cu`` on a GPU: compiled by NVRTC when first needed, launched through the driver."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvstore.device.cuda_calls import bindings, do
from kvstore.device.kernel_cache import digest_of, kept
from kvstore.device.kernels import SOURCE
from kvstore.device.seam import Argument
from kvstore.errors import DeviceError

OPTIONS = ("--std=c++17", "--fmad=false")
"""No contraction to FMA: the same bytes as on the CPU."""


def compile_kernels(capability: tuple[int, int], options: Sequence[str] = ()) -> tuple[bytes, str]:
    """Machine code for GPUs of a compute capability, and what the compiler said. Takes about a second; needs no GPU.

    PTX, which the driver compiles further, where this NVRTC knows only older GPUs. Raises DeviceError.
    """
    nvrtc = bindings("nvrtc")
    target, is_machine_code = _target(capability, do(nvrtc.nvrtcGetSupportedArchs))
    program = do(nvrtc.nvrtcCreateProgram, SOURCE.read_bytes(), SOURCE.name.encode(), 0, [], [])
    try:
        given = [option.encode() for option in (f"--gpu-architecture={target}", *OPTIONS, *options)]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(given), given)
        log = bytes(do(nvrtc.nvrtcGetProgramLogSize, program))
        do(nvrtc.nvrtcGetProgramLog, program, log)
        said = log.rstrip(b"\0").decode(errors="replace")
        if status.value:
            raise DeviceError(f"NVRTC does not compile {SOURCE.name} for {target} ({status.name}): {said}")
        size, get = (
            (nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
            if is_machine_code
            else (nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX)
        )
        code = bytes(do(size, program))
        do(get, program, code)
        return code, said
    finally:
        do(nvrtc.nvrtcDestroyProgram, program)


def _target(capability: tuple[int, int], known: Sequence[int]) -> tuple[str, bool]:
    """What to compile for. Machine code runs on GPUs of the same major number and no lower a minor one."""
    major, minor = capability
    older = [arch for arch in known if arch <= major * 10 + minor]
    if not older:
        raise DeviceError(f"this NVRTC compiles for no GPU of compute capability {major}.{minor}; install an older one")
    newest = max(older)
    is_machine_code = newest // 10 == major
    return f"{'sm' if is_machine_code else 'compute'}_{newest}", is_machine_code


def _code_for(capability: tuple[int, int]) -> bytes:
    """What ``compile_kernels`` gives, compiled once for each version of source and compiler."""
    version = do(bindings("nvrtc").nvrtcVersion)
    digest = digest_of(SOURCE.read_bytes(), repr((version, capability, OPTIONS)).encode())
    return kept(f"kernels-{digest}.cubin", lambda path: path.write_bytes(compile_kernels(capability)[0])).read_bytes()


class CudaKernels:
    """The kernels in one context, loaded at the first launch. The context is current in every call."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self._capability = capability
        self._loading = threading.Lock()
        self._module: Any = None
        self._functions: dict[str, Any] = {}

    def launch(
        self,
        name: str,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        arguments: Sequence[Argument],
        stream: int,
        shared_bytes: int,
    ) -> None:
        """Queue a kernel whose launch was checked. Blocks for a second the first time on a machine."""
        # The driver takes a pointer to each value, and copies what they point to in this call.
        values = [np.array(argument) for argument in arguments]
        pointers = np.array([value.ctypes.data for value in values], np.uint64)
        driver = bindings("driver")
        do(
            driver.cuLaunchKernel,
            self._function(name), *grid, *block, shared_bytes, stream, pointers.ctypes.data, 0,
        )  # fmt: skip

    def unload(self) -> None:
        """Forget the code. No kernel may be under way."""
        with self._loading:
            if self._module is not None:
                do(bindings("driver").cuModuleUnload, self._module)
            self._module = None
            self._functions = {}

    def _function(self, name: str) -> Any:
        with self._loading:
            if name not in self._functions:
                driver = bindings("driver")
                if self._module is None:
                    self._module = do(driver.cuModuleLoadData, _code_for(self._capability))
                self._functions[name] = do(driver.cuModuleGetFunction, self._module, name.encode())
            return self._functions[name]
