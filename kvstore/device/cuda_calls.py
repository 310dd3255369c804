"""Calls to CUDA through NVIDIA's own bindings (the distribution ``cuda-bindings``), and what their errors mean."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

from kvstore.errors import BadInputError, DeviceError, DeviceMemoryError

INSTALL = "pip install '.[cuda13]' in a checkout of kvstored (or '.[cuda12]' for a driver of CUDA 12)"

_NO_MEMORY = frozenset({"cudaErrorMemoryAllocation", "CUDA_ERROR_OUT_OF_MEMORY"})
_BAD_INPUT = frozenset(
    {
        "cudaErrorInvalidValue",
        "cudaErrorInvalidResourceHandle",
        "cudaErrorInvalidDevicePointer",
        "cudaErrorHostMemoryAlreadyRegistered",
        "cudaErrorHostMemoryNotRegistered",
    }
)
_ADVICE = {
    "cudaErrorInsufficientDriver": "the NVIDIA driver is older than these libraries: update it, or install "
    "'.[cuda12]' in place of '.[cuda13]'",
    "cudaErrorNoDevice": "the driver shows no GPU: look at CUDA_VISIBLE_DEVICES, and how the container was given GPUs",
    "cudaErrorInvalidDevice": "there are fewer GPUs; `nvidia-smi -L` lists them",
    "cudaErrorInitializationError": "CUDA can't be used in a forked child: start the process afresh (spawn)",
    "cudaErrorMemoryAllocation": "other programs may use the GPU's memory (`nvidia-smi`), or the host has no more "
    "memory that can be pinned",
    "cudaErrorHostMemoryAlreadyRegistered": "register a range once",
    "cudaErrorNotSupported": "this GPU or driver lacks it",
    "cudaErrorIllegalAddress": "a kernel or copy used memory it should not have; the process can't use this GPU again",
    "cudaErrorMapBufferObjectFailed": "the memory was freed, or its process is gone",
}


@cache
def bindings(module: str) -> Any:
    """``cuda.bindings.<module>``: ``runtime``, ``driver``, ``nvrtc`` or ``utils``. Needs no GPU and no driver.

    Raises DeviceError that says what to install.
    """
    try:
        return importlib.import_module(f"cuda.bindings.{module}")
    except ImportError as error:
        raise DeviceError(f"a GPU needs the package cuda-bindings, which is missing ({error}): {INSTALL}") from error


def do(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of the bindings and return what it gives besides its status. Raises what the status means."""
    try:
        status, *results = function(*arguments)
    except RuntimeError as error:
        # The bindings look for libcuda and libnvrtc at the first call.
        raise DeviceError(f"{function.__name__} found no library of CUDA: {error}") from error
    if status.value:
        raise error_of(function.__name__, status)
    return results[0] if len(results) == 1 else tuple(results) or None


def error_of(call: str, status: Any) -> Exception:
    """The error that a failed status stands for; forgets it in the runtime, so that no later call reports it."""
    runtime = bindings("runtime")
    runtime.cudaGetLastError()
    name = str(status.name)
    if name == "cudaErrorInsufficientDriver" and not runtime.cudaDriverGetVersion()[1]:
        return DeviceError(
            "there is no NVIDIA driver on this machine, or a container was not given it: install the driver, or start "
            "the container with `docker run --gpus all`"
        )
    text = f"{call} failed with {name}: {_ADVICE.get(name, 'see its documentation by NVIDIA')}"
    if name in _NO_MEMORY:
        return DeviceMemoryError(text)
    return BadInputError(text) if name in _BAD_INPUT else DeviceError(text)


def number_of(handle: Any) -> int:
    """A stream, event or context as an integer, which torch and cupy take."""
    return int(bindings("utils").get_cuda_native_handle(handle))
