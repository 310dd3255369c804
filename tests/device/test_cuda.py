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

from kvstore.device import cuda, cuda_calls, cuda_kernels, cuda_streams, open_device
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
    assert "pip install '.[cuda13]' in a checkout" in said


@no_driver
def test_a_missing_driver_is_said() -> None:
    for call in (lambda: open_device("cuda"), lambda: open_device("cuda:3"), cuda.gpus):
        with pytest.raises(DeviceError, match=r"no NVIDIA driver.*`docker run --gpus all`"):
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


EXCHANGE = "cudaThreadExchangeStreamCaptureMode"
UNIVERSAL = (
    EXCHANGE,
    *("cudaGetDeviceCount", "cudaSetDevice", "cudaGetDeviceProperties", "cudaDeviceGetAttribute"),
    "cudaDriverGetVersion",
)
"""Calls that need no context, and that no capture of a graph minds."""
WAIT = ("cudaEventCreateWithFlags", "cudaEventRecord", "cudaEventSynchronize", "cudaEventDestroy")
"""For one stream, without touching others."""


class Driver:
    """Answers in the place of a driver. ``calls`` are the names and arguments of the calls that were made."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.context = threading.local()
        """Of each thread: ``now``, the context, and ``mode``, that of its calls while others capture graphs."""
        self.next = 1 << 30
        self.version = 13_000
        self.attributes: dict[str, int] = {}
        properties = runtime.cudaDeviceProp()
        self.answers: dict[str, Callable[..., Any]] = {
            "cudaGetDeviceCount": lambda: 2,
            "cudaGetDeviceProperties": lambda _: properties,
            "cudaDeviceGetAttribute": lambda attribute, _: self.attributes.get(attribute.name, 0),
            "cudaThreadExchangeStreamCaptureMode": self.exchange_mode,
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

    def mode(self) -> Any:
        return getattr(self.context, "mode", runtime.cudaStreamCaptureMode.cudaStreamCaptureModeGlobal)

    def exchange_mode(self, mode: Any) -> Any:
        previous, self.context.mode = self.mode(), mode
        return previous

    def do(self, function: Callable[..., Any], *arguments: Any) -> Any:
        name = function.__name__
        if name.startswith("nvrtc"):
            return cuda_calls.do(function, *arguments)
        with contextlib.suppress(cuda_pathfinder.DynamicLibNotFoundError):
            status = function(*arguments)[0]
            assert status.name in ("cudaErrorInsufficientDriver", "cudaSuccess")
        self.calls.append((name, arguments))
        if not name.startswith("cuCtx") and name not in UNIVERSAL:
            assert self.mode() == runtime.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed, name
            assert getattr(self.context, "now", 0) == 7, f"{name} without the context"
        answer = self.answers.get(name)
        return answer(*arguments) if answer is not None else None

    def names(self) -> list[str]:
        """Of the calls since the last question, besides those about contexts and modes of threads."""
        names = [name for name, _ in self.calls if not name.startswith("cuCtx") and name != EXCHANGE]
        self.calls.clear()
        return names


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Driver:
    if has_driver():
        pytest.skip("there is a driver here; the conformance suite runs on it")
    made = Driver()
    monkeypatch.setattr(cuda, "do", made.do)
    monkeypatch.setattr(cuda_kernels, "do", made.do)
    monkeypatch.setattr(cuda_streams, "do", made.do)
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
        *("cudaGetDeviceCount", "cudaSetDevice", "cudaFree", "cudaGetDeviceProperties"),
        *(*["cudaDeviceGetAttribute"] * 2, "cudaDriverGetVersion", "cudaDeviceGetAttribute"),
        *("cudaMalloc", "cudaIpcGetMemHandle", "cudaIpcOpenMemHandle", "cudaHostRegister"),
        *("cudaHostGetDevicePointer", "cudaStreamCreateWithFlags", "cudaEventCreateWithFlags", "cudaMemcpyAsync"),
        *("cudaMemsetAsync", "cudaEventRecord", "cudaStreamWaitEvent", "cudaEventSynchronize", "cudaStreamSynchronize"),
        *(*WAIT, "cudaHostUnregister", "cudaEventDestroy", *WAIT[:2], "cudaStreamDestroy"),
        *(*WAIT[2:], "cudaIpcCloseMemHandle", "cudaFree"),
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


def test_graphs_that_others_capture_are_left_alone(stand_in: Driver) -> None:
    device = CudaDevice()
    relaxed = runtime.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed
    modes = []

    def allocate(_: int) -> int:
        modes.append(stand_in.mode())
        return stand_in.number()

    stand_in.answers["cudaMalloc"] = allocate
    for own in (runtime.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal, relaxed):
        stand_in.context.mode = own
        device.malloc(8)
        assert stand_in.mode() == own
    assert modes == [relaxed] * 2

    def refuse(_: int) -> None:
        raise DeviceMemoryError("full")

    stand_in.context.mode = own = runtime.cudaStreamCaptureMode.cudaStreamCaptureModeGlobal
    stand_in.answers["cudaMalloc"] = refuse
    with pytest.raises(DeviceMemoryError):
        device.malloc(8)
    assert stand_in.mode() == own
    device.close()
    assert stand_in.mode() == own
    assert "cudaDeviceSynchronize" not in stand_in.names(), "it waits for streams that are being captured, too"


def test_waiting_is_for_all_own_streams_those_that_ended_too(stand_in: Driver) -> None:
    device = CudaDevice()
    address, ended = device.malloc(8), device.stream()
    device.free_stream(ended)
    kept = [device.stream() for _ in range(2)]
    device.free(address)
    recorded = {int(args[0]): int(args[1]) for name, args in stand_in.calls if name == "cudaEventRecord"}
    waited = [int(args[0]) for name, args in stand_in.calls if name == "cudaEventSynchronize"]
    assert sorted(recorded[event] for event in waited) == sorted([ended, *kept])
    assert stand_in.calls[-3][0] == "cudaFree"
    assert stand_in.names().count("cudaEventDestroy") == len(waited), "no event is kept"
    with pytest.raises(BadInputError, match="free_stream"):
        device.free_stream(ended)


def test_the_default_stream_is_torchs_whatever_the_bindings_call_it(stand_in: Driver) -> None:
    device = CudaDevice()
    stand_in.names()
    event, one = device.event(), np.array([1 << 30], np.uint64)
    device.record(event, 0)
    device.wait_event(0, event)
    device.copy(1 << 30, 1 << 31, 8, 0)
    device.copy_batch(one, one, np.array([8], np.uint64), 0)
    device.fill(1 << 30, 0, 8, 0)
    device.sync_stream(0)
    device._kernels._functions["kv_copy_runs"] = driver.CUfunction(5)
    parameters = KERNELS["kv_copy_runs"].parameters
    device.launch("kv_copy_runs", (1, 1, 1), (32, 1, 1), [each.dtype.type(1) for each in parameters], 0)
    at = {"cudaStreamWaitEvent": 0, "cudaStreamSynchronize": 0, "cuLaunchKernel": 8, "cudaEventRecord": 1}
    at |= {"cudaMemcpyAsync": 4, "cudaMemsetAsync": 3}
    given = [(name, args[at[name]]) for name, args in stand_in.calls if name in at]
    assert len(given) == 7
    assert all(stream == runtime.cudaStreamLegacy != 0 for _, stream in given), given


@pytest.mark.parametrize(("has_flag", "shares_tables"), [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_sealed_memory_is_registered_as_the_device_asks(stand_in: Driver, has_flag: int, shares_tables: int) -> None:
    stand_in.attributes = {
        "cudaDevAttrHostRegisterReadOnlySupported": has_flag,
        "cudaDevAttrPageableMemoryAccessUsesHostPageTables": shares_tables,
    }
    device = CudaDevice()
    assert device.facts.can_register_read_only == bool(has_flag or shares_tables)
    if not device.facts.can_register_read_only:
        with pytest.raises(DeviceError, match="read-only"):
            device.host_register(16 * PAGE, PAGE, read_only=True)
        return
    device.host_register(16 * PAGE, PAGE, read_only=True)
    ((_, (_, _, flags)),) = [call for call in stand_in.calls if call[0] == "cudaHostRegister"]
    assert bool(flags & runtime.cudaHostRegisterReadOnly) == (not shares_tables), "where it isn't known it is an error"
    device.close()


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
    assert names[: len(WAIT)] == list(WAIT)
    assert sorted(names[len(WAIT) :]) == sorted(
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
    assert stand_in.names() == []
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


def test_a_range_is_registered_once_for_all_gpus(stand_in: Driver) -> None:
    """CUDA refuses a second time; the other GPU asks for its own address."""
    registered: set[int] = set()

    def register(address: int, *_: Any) -> None:
        if address in registered:
            raise BadInputError("cudaErrorHostMemoryAlreadyRegistered")
        registered.add(address)

    stand_in.answers |= {"cudaHostRegister": register, "cudaHostUnregister": registered.remove}
    one, other = CudaDevice(0), CudaDevice(1)
    stand_in.names()
    first, second = one.host_register(16 * PAGE, PAGE), other.host_register(16 * PAGE, PAGE)
    assert stand_in.names() == ["cudaHostRegister", *["cudaHostGetDevicePointer"] * 2]
    assert first != second
    with pytest.raises(BadInputError, match="registered already"):
        one.host_register(16 * PAGE, PAGE)
    with pytest.raises(BadInputError, match="AlreadyRegistered"):
        CudaDevice(0).host_register(16 * PAGE, 2 * PAGE)
    stand_in.names()
    one.host_unregister(16 * PAGE)
    assert stand_in.names() == []
    with pytest.raises(BadInputError, match="no host_register gave"):
        one.host_unregister(16 * PAGE)
    other.close()
    assert "cudaHostUnregister" in stand_in.names()
    assert not registered
    # A failure on the way leaves nothing taken.
    stand_in.answers["cudaHostGetDevicePointer"] = lambda *_: 1 // 0
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            one.host_register(16 * PAGE, PAGE)
        assert not registered


def test_a_forked_child_is_told_so_and_gives_nothing_back(stand_in: Driver) -> None:
    device = CudaDevice()
    address = device.malloc(8)
    device._pid += 1
    stand_in.names()
    for call in (lambda: device.malloc(8), lambda: device.free(address), lambda: device.query(1)):
        with pytest.raises(DeviceError, match="can't be used in a forked child"):
            call()
    device.close()
    assert not stand_in.names()
    device._pid -= 1
    device.free(address)
