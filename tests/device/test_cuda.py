"""What of the CUDA device can be tested without a GPU: what it says where one is missing, the compiler, its calls.

The calls are made for real, so that the bindings check names and argument types; without a driver each fails at that,
and the test answers in the driver's place.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.device import cuda, cuda_calls, cuda_kernels, open_device
from kvstore.device.cuda import CudaDevice
from kvstore.device.cuda_calls import bindings
from kvstore.device.cuda_kernels import compile_kernels
from kvstore.device.kernels import KERNELS
from kvstore.device.seam import IPC_HANDLE_BYTES
from kvstore.errors import BadInputError, DeviceError, DeviceMemoryError

PAGE = 4096
runtime, driver = bindings("runtime"), bindings("driver")
cuda_pathfinder = importlib.import_module("cuda.pathfinder")


def has_driver() -> bool:
    return bool(runtime.cudaDriverGetVersion()[1])


no_driver = pytest.mark.skipif(has_driver(), reason="there is a driver here; the conformance suite runs on it")


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)


def test_importing_needs_no_package_of_cuda() -> None:
    code = """
import sys
before = set(sys.modules)
import kvstore, kvstore.device, kvstore.device.cuda, kvstore.device.cuda_kernels
new = set(sys.modules) - before
assert not [name for name in new if name.partition(".")[0] in ("cuda", "pynvml", "torch", "cupy")]
"""
    done = python(code)
    assert done.returncode == 0, done.stderr


def test_a_missing_package_is_named_with_what_to_install() -> None:
    code = """
import sys
sys.modules["cuda"] = None
from kvstore.device import open_device
open_device("cuda")
"""
    said = python(code).stderr.splitlines()[-1]
    assert said.startswith("kvstore.errors.DeviceError: a GPU needs the package cuda-bindings, which is missing")
    assert "pip install 'kvstored[cuda13]'" in said


@no_driver
def test_a_missing_driver_is_said() -> None:
    for call in (lambda: open_device("cuda"), lambda: open_device("cuda:3"), cuda.gpus):
        with pytest.raises(DeviceError, match="no NVIDIA driver"):
            call()


@no_driver
def test_a_missing_library_of_the_driver_is_said() -> None:
    with pytest.raises(DeviceError, match="cuCtxGetCurrent found no library"):
        cuda_calls.do(driver.cuCtxGetCurrent)


@pytest.mark.parametrize(
    ("name", "kind", "says"),
    [
        ("cudaErrorMemoryAllocation", DeviceMemoryError, "nvidia-smi"),
        ("cudaErrorHostMemoryAlreadyRegistered", BadInputError, "once"),
        ("cudaErrorInvalidValue", BadInputError, "documentation"),
        ("cudaErrorNoDevice", DeviceError, "CUDA_VISIBLE_DEVICES"),
        ("cudaErrorIllegalAddress", DeviceError, "can't use this GPU again"),
        ("cudaErrorUnknown", DeviceError, "documentation"),
    ],
)
def test_what_failed_and_why_is_in_the_error(name: str, kind: type[Exception], says: str) -> None:
    error = cuda_calls.error_of("cudaMalloc", getattr(runtime.cudaError_t, name))
    assert type(error) is kind
    assert f"cudaMalloc failed with {name}: " in str(error)
    assert says in str(error)


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
def test_the_kernels_compile_without_a_gpu_and_spill_nothing(capability: tuple[int, int]) -> None:
    code, said = compile_kernels(capability, ["-Xptxas=-v"])
    assert code[:4] == b"\x7fELF"
    assert all(name.encode() in code for name in KERNELS)
    assert said.count("0 bytes spill stores, 0 bytes spill loads") == said.count("spill stores") == len(KERNELS)


def test_a_gpu_newer_than_the_compiler_gets_ptx() -> None:
    code, _ = compile_kernels((99, 0))
    assert b".version" in code[:400]
    with pytest.raises(DeviceError, match="install an older one"):
        compile_kernels((1, 0))


def test_what_does_not_compile_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_kernels, "OPTIONS", ("-DKV_BROKEN", "--pre-include=missing.h"))
    with pytest.raises(DeviceError, match=r"kernels\.cu for sm_90 .*missing\.h"):
        compile_kernels((9, 0))


class Driver:
    """Answers in the place of a driver. ``calls`` are the names and arguments of the calls that were made."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.context = threading.local()
        self.next = 1 << 30
        self.version = 13_000
        properties = runtime.cudaDeviceProp()
        self.answers: dict[str, Callable[..., Any]] = {
            "cudaGetDeviceCount": lambda: 2,
            "cudaGetDeviceProperties": lambda _: properties,
            "cudaDeviceGetAttribute": lambda *_: 0,
            "cudaDriverGetVersion": lambda: self.version,
            "cudaSetDevice": lambda _: self.set(7),
            "cuCtxGetCurrent": lambda: driver.CUcontext(getattr(self.context, "now", 0)),
            "cuCtxSetCurrent": lambda context: self.set(cuda_calls.number_of(context)),
            "cudaMalloc": lambda _: self.number(),
            "cudaHostGetDevicePointer": lambda *_: self.number(),
            "cudaIpcGetMemHandle": lambda _: runtime.cudaIpcMemHandle_t(),
            "cudaIpcOpenMemHandle": lambda *_: 1 << 40,
            "cudaStreamCreateWithFlags": lambda _: runtime.cudaStream_t(self.number()),
            "cudaEventCreateWithFlags": lambda _: runtime.cudaEvent_t(self.number()),
            "cuModuleLoadData": lambda _: driver.CUmodule(self.number()),
            "cuModuleGetFunction": lambda *_: driver.CUfunction(self.number()),
        }

    def number(self) -> int:
        self.next += 1 << 21
        return self.next

    def set(self, context: int) -> None:
        self.context.now = context

    def do(self, function: Callable[..., Any], *arguments: Any) -> Any:
        name = function.__name__
        if name.startswith("nvrtc"):
            return cuda_calls.do(function, *arguments)
        with contextlib.suppress(cuda_pathfinder.DynamicLibNotFoundError):
            status = function(*arguments)[0]
            assert status.name in ("cudaErrorInsufficientDriver", "cudaSuccess")
        self.calls.append((name, arguments))
        if not name.startswith("cuCtx") and name not in ("cudaGetDeviceCount", "cudaSetDevice"):
            assert getattr(self.context, "now", 0) == 7, f"{name} without the context"
        answer = self.answers.get(name)
        return answer(*arguments) if answer is not None else None

    def names(self) -> list[str]:
        """Of the calls since the last question, besides those about contexts."""
        names = [name for name, _ in self.calls if not name.startswith("cuCtx")]
        self.calls.clear()
        return names


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Driver:
    if has_driver():
        pytest.skip("there is a driver here; the conformance suite runs on it")
    made = Driver()
    monkeypatch.setattr(cuda, "do", made.do)
    monkeypatch.setattr(cuda_kernels, "do", made.do)
    return made


def test_every_call_has_arguments_that_the_bindings_take(stand_in: Driver) -> None:
    device = CudaDevice(1)
    assert stand_in.context.now == 0
    address = device.malloc(5)
    handle = device.ipc_export(address)
    assert len(handle) == IPC_HANDLE_BYTES
    opened = device.ipc_open(bytes([1] * 64))
    assert device.host_register(16 * PAGE, PAGE) != 16 * PAGE
    stream, event = device.stream(), device.event()
    device.copy(address, 16 * PAGE, 5, stream)
    device.fill(address, 1, 5, stream)
    device.record(event, stream)
    device.wait_event(stream, event)
    device.sync_event(event)
    device.sync_stream(stream)
    device.host_unregister(16 * PAGE)
    device.free_event(event)
    device.free_stream(stream)
    device.ipc_close(opened)
    device.free(address)
    assert stand_in.names() == [
        *("cudaGetDeviceCount", "cudaSetDevice", "cudaFree", "cudaGetDeviceProperties", "cudaDeviceGetAttribute"),
        *("cudaDriverGetVersion", "cudaMalloc", "cudaIpcGetMemHandle", "cudaIpcOpenMemHandle", "cudaHostRegister"),
        *("cudaHostGetDevicePointer", "cudaStreamCreateWithFlags", "cudaEventCreateWithFlags", "cudaMemcpyAsync"),
        *("cudaMemsetAsync", "cudaEventRecord", "cudaStreamWaitEvent", "cudaEventSynchronize", "cudaStreamSynchronize"),
        *("cudaDeviceSynchronize", "cudaHostUnregister", "cudaEventDestroy", "cudaStreamDestroy"),
        *("cudaDeviceSynchronize", "cudaIpcCloseMemHandle", "cudaDeviceSynchronize", "cudaFree"),
    ]
    with pytest.raises(DeviceError):
        device.query(event)


def test_a_batch_is_one_call_where_the_driver_has_it(stand_in: Driver) -> None:
    two = np.array([1 << 30, 1 << 31, 7], np.uint64)
    sizes = np.array([8, 9, 0], np.uint64)
    device = CudaDevice()
    stand_in.names()
    device.copy_batch(two, two, sizes, device.stream())
    assert [args[2:4] for name, args in stand_in.calls if name == "cudaMemcpyBatchAsync"] == [([8, 9], 2)]
    stand_in.names()
    # The bindings refuse nothing here, but CUDA takes no batch on the legacy default stream.
    device.copy_batch(two, two, sizes, 0)
    assert stand_in.names() == ["cudaMemcpyAsync"] * 2
    stand_in.version = 12_070
    older = CudaDevice()
    stand_in.names()
    older.copy_batch(two, two, sizes, 5)
    assert stand_in.names() == ["cudaMemcpyAsync"] * 2


def test_a_kernel_is_compiled_once_and_given_its_values(
    stand_in: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    device = CudaDevice()
    kernel = KERNELS["kv_copy_runs"]
    arguments = tuple(each.dtype.type(i + 1) for i, each in enumerate(kernel.parameters))
    seen = []

    def read(*given: Any) -> None:
        pointers = (ctypes.c_uint64 * len(arguments)).from_address(given[9])
        seen.append([ctypes.string_at(at, a.itemsize) for at, a in zip(pointers, arguments, strict=True)])

    stand_in.answers["cuLaunchKernel"] = read
    device._kernels = cuda_kernels.CudaKernels((9, 0))
    stand_in.names()
    for _ in range(2):
        device.launch("kv_copy_runs", (2, 1, 1), (64, 1, 1), arguments, 5)
    assert seen == [[argument.tobytes() for argument in arguments]] * 2
    (kept,) = (tmp_path / "kvstore" / "kernels").iterdir()
    assert ("cuModuleLoadData", (kept.read_bytes(),)) in stand_in.calls
    assert stand_in.names() == ["cuModuleLoadData", "cuModuleGetFunction", "cuLaunchKernel", "cuLaunchKernel"]
    kept.write_bytes(b"as it was kept")
    device._kernels = cuda_kernels.CudaKernels((9, 0))
    device.launch("kv_copy_runs", (2, 1, 1), (64, 1, 1), arguments, 5)
    assert ("cuModuleLoadData", (b"as it was kept",)) in stand_in.calls
    with pytest.raises(BadInputError, match="no kernel"):
        device.launch("none", (1, 1, 1), (1, 1, 1), (), 5)


def test_every_thread_gets_the_context_and_keeps_its_own(stand_in: Driver) -> None:
    device = CudaDevice()
    kept = []

    def work() -> None:
        stand_in.set(5)
        device.fill(1 << 30, 0, 8, 3)
        kept.append(stand_in.context.now)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert kept == [5]
    with pytest.raises(DeviceError, match="no NVIDIA driver"):
        device.query(1)
    assert stand_in.context.now == 0


def test_all_is_given_back_after_all_work(stand_in: Driver) -> None:
    device = CudaDevice()
    for _ in range(2):
        device.malloc(8)
    device.stream()
    device.event()
    device.host_register(16 * PAGE, PAGE)
    for _ in range(2):
        device.ipc_open(bytes(64))
    stand_in.names()
    device.close()
    names = stand_in.names()
    assert names[0] == "cudaDeviceSynchronize"
    assert sorted(names[1:]) == sorted(
        ["cudaStreamDestroy", "cudaEventDestroy", "cudaHostUnregister", *["cudaIpcCloseMemHandle", "cudaFree"] * 2]
    )
    assert stand_in.context.now == 0
    device.close()
    assert not stand_in.names()
    with pytest.raises(DeviceError, match="closed"):
        device.stream()


def test_a_handle_of_this_process_is_not_given_to_the_driver(stand_in: Driver) -> None:
    one, other = CudaDevice(), CudaDevice()
    address = one.malloc(8)
    handle = one.ipc_export(address)
    stand_in.names()
    assert other.ipc_open(handle) == address
    other.ipc_close(address)
    assert stand_in.names() == ["cudaDeviceSynchronize"]
    with pytest.raises(BadInputError, match="no ipc_open gave"):
        other.ipc_close(address)
    one.free(address)
    assert other.ipc_open(handle) == 1 << 40
    assert "cudaIpcOpenMemHandle" in stand_in.names()


def test_shared_memory_is_whole_units(stand_in: Driver) -> None:
    device = CudaDevice()
    stand_in.names()
    device.malloc(1)
    device.malloc((2 << 20) + 1)
    assert [args for name, args in stand_in.calls if name == "cudaMalloc"] == [(2 << 20,), (4 << 20,)]


def test_a_gpu_that_is_not_there_is_said(stand_in: Driver) -> None:
    with pytest.raises(DeviceError, match="no GPU number 2: CUDA shows 2"):
        CudaDevice(2)
