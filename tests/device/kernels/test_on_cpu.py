"""The shim is stricter than a GPU: what one would hang on or leave undefined is an error here, told with its place."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.device import on_cpu
from kvstore.device.cpu_build import compiled
from kvstore.device.kernels import KERNELS, SHARED_BYTES_MAX, SOURCE
from kvstore.device.on_cpu import CpuKernels, load_kernels
from kvstore.device.seam import Argument
from kvstore.errors import BadInputError, DeviceError

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is missing: kernels can't be compiled")

HALF, ONE = np.array([1.5, -2.0, 0.0, 4.0], np.float16), np.ones(1, np.uint32)
SCORES = np.zeros(3, np.float32)


def score_arguments(n_pages: int = 1) -> list[Argument]:
    """Of a launch of kv_page_score_float16 with one kv head, one query, four channels."""
    addresses = [np.uint64(each.ctypes.data) for each in (HALF, HALF, HALF, SCORES)]
    return [*addresses, *(np.uint32(each) for each in (n_pages, 1, 4, 1, 0))]


def launch_score(kernels: CpuKernels) -> None:
    kernels.launch("kv_page_score_float16", (1, 1, 1), (64, 1, 1), score_arguments(), 16)


Patched = Callable[[str, str], CpuKernels]


@pytest.fixture
def patched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Patched:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def make(old: str, new: str) -> CpuKernels:
        text = SOURCE.read_text()
        assert text.count(old) == 1
        source = tmp_path / "patched.cu"
        source.write_text(text.replace(old, new))
        return CpuKernels(compiled(source))

    return make


def test_a_launch_gives_the_result() -> None:
    launch_score(load_kernels())
    assert SCORES[0] == np.float32(1.5 * 1.5 + 4 + 16)


FIRST_BARRIER = "__syncthreads();  // all are done with the queries before"


@pytest.mark.parametrize(
    "divergence",
    [
        "if (threadIdx.x == 3) return;",
        "if (threadIdx.x == 63) __syncthreads();",
        "if (threadIdx.x == 40) __shfl_xor_sync(0xffffffffu, 1.0f, 1);",
    ],
)
def test_threads_that_wait_in_vain_are_told_and_do_not_hang(patched: Patched, divergence: str) -> None:
    kernels = patched(FIRST_BARRIER, divergence + FIRST_BARRIER)
    with pytest.raises(DeviceError, match=r"wait for each other without end: \d+ at a barrier"):
        launch_score(kernels)


def test_a_shuffle_reads_only_lanes_that_take_part(patched: Patched) -> None:
    kernels = patched("sum, apart)", "sum, apart + 32)")
    with pytest.raises(DeviceError, match=r"reads a lane that its mask does not name, in thread \(0, 0, 0\) of block"):
        launch_score(kernels)


def test_a_kernel_without_barriers_has_none(patched: Patched) -> None:
    kernels = patched("const RunCursor cursor =", "__syncthreads();\n  const RunCursor cursor =")
    with pytest.raises(DeviceError, match="said to have no barriers waits for other threads, in thread"):
        kernels.launch("kv_copy_runs", (1, 1, 1), (32, 1, 1), copy_arguments(np.zeros(32, np.uint8), 1), 0)


def copy_arguments(memory: NDArray[np.uint8], access_bytes: int) -> list[Argument]:
    """A copy of 16 bytes from the 16th byte of memory to its first; the table is static."""
    TABLE[:] = [memory.ctypes.data, memory.ctypes.data, 0, 16, 16]
    addresses = [np.uint64(TABLE.ctypes.data + 8 * i) for i in range(5)]
    return [*addresses, *(np.uint32(each) for each in (1, 1, 1, 16 // access_bytes, access_bytes))]


TABLE = np.zeros(5, np.uint64)


@pytest.mark.parametrize("access_bytes", [16, 8, 4, 2])
def test_an_access_that_is_not_aligned_is_an_error(access_bytes: int) -> None:
    memory = np.arange(80, dtype=np.uint8)
    begin = -memory.ctypes.data % 16
    for skew in (0, access_bytes // 2):
        there = memory[begin + skew : begin + skew + 32]
        arguments = copy_arguments(there, access_bytes)
        if skew == 0:
            load_kernels().launch("kv_copy_runs", (1, 1, 1), (32, 1, 1), arguments)
            assert np.array_equal(there[:16], there[16:])
        else:
            with pytest.raises(
                DeviceError, match=f"an access of {access_bytes} bytes at an address that is not aligned"
            ):
                load_kernels().launch("kv_copy_runs", (1, 1, 1), (32, 1, 1), arguments)


def test_what_a_device_would_refuse_is_refused_before_it_runs() -> None:
    launch, arguments = load_kernels().launch, score_arguments()
    name = "kv_page_score_float16"
    with pytest.raises(BadInputError, match="no kernel 'kv_nothing'; there are kv_copy_runs"):
        launch("kv_nothing", (1, 1, 1), (32, 1, 1), [])
    with pytest.raises(BadInputError, match="1 to 256 in all"):
        launch(name, (1, 1, 1), (16, 16, 2), arguments)
    with pytest.raises(BadInputError, match="1 to 256 in all"):
        launch(name, (1, 1, 1), (32, 0, 1), arguments)
    with pytest.raises(BadInputError, match="blocks of 48 threads; it needs whole warps of 32"):
        launch(name, (1, 1, 1), (48, 1, 1), arguments)
    with pytest.raises(BadInputError, match="grid of"):
        launch(name, (1, 65_536, 1), (32, 1, 1), arguments)
    with pytest.raises(BadInputError, match="49153 bytes of shared memory"):
        launch(name, (1, 1, 1), (32, 1, 1), arguments, SHARED_BYTES_MAX + 1)
    with pytest.raises(BadInputError, match=r"takes \(queries: uint64, low: uint64"):
        launch(name, (1, 1, 1), (32, 1, 1), arguments[:-1])
    with pytest.raises(
        BadInputError, match=r"is given \(uint64, uint64, uint64, uint64, uint32, uint32, uint32, uint32, int64"
    ):
        launch(name, (1, 1, 1), (32, 1, 1), [*arguments[:-1], np.int64(0)])


def test_launches_of_several_threads_do_not_mix() -> None:
    kernels = load_kernels()
    failures: list[int] = []

    def work(number: int) -> None:
        memory = np.concatenate((np.zeros(16, np.uint8), np.full(16, number, np.uint8)))
        table = np.array([memory.ctypes.data, memory.ctypes.data, 0, 16, 16], np.uint64)
        addresses: list[Argument] = [np.uint64(table.ctypes.data + 8 * i) for i in range(5)]
        for _ in range(50):
            memory[:16] = 0
            arguments = [*addresses, *(np.uint32(each) for each in (1, 1, 1, 16, 1))]
            kernels.launch("kv_copy_runs", (1, 1, 1), (32, 1, 1), arguments)
            failures.extend(memory[memory != number].tolist())

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_library_with_other_parameters_than_the_table_is_refused(patched: Patched) -> None:
    with pytest.raises(DeviceError, match=r"kv_copy_runs has parameters of \[8, 8, 8, 8, 8, 4, 4, 4, 4, 8\] bytes"):
        patched(
            "unsigned int pieces_of_run, unsigned int lanes, unsigned int access_bytes) {\n  const RunCursor",
            "unsigned int pieces_of_run, unsigned int lanes, Bytes access_bytes) {\n  const RunCursor",
        )


def test_a_file_that_is_no_library_is_told(tmp_path: Path) -> None:
    (tmp_path / "k.so").write_text("nothing")
    with pytest.raises(DeviceError, match=r"can't be loaded: .*; remove .*k\.so to have them compiled anew"):
        CpuKernels(tmp_path / "k.so")


def test_the_sanitizer_must_be_there_from_the_start() -> None:
    with pytest.raises(DeviceError, match=r"start it with LD_PRELOAD=/.*libasan"):
        on_cpu.load_kernels(sanitize=True)


def test_all_kernels_are_in_the_library_of_the_package() -> None:
    assert load_kernels() is load_kernels()
    assert len(KERNELS) == 8
