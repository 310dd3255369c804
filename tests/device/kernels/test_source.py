"""kernels.cu as text and as what CUDA's compilers make of it; none of it needs a GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvstore.device.kernels import ADDRESS, BYTES, COUNT, KERNELS, SOURCE, WARP_THREADS, Parameter, Width

GENERATIONS = ["sm_80", "sm_90", "sm_100"]
COPIES = ["kv_copy_runs", "kv_copy_pages"]
COMPILE_TIMEOUT_S = 200


def test_the_table_of_kernels_is_that_of_the_source() -> None:
    text = expanded(SOURCE.read_text())
    found = re.findall(r'extern "C" __global__ void __launch_bounds__\((\d+)\)\s*(\w+)\(([^)]*)\)', text)
    signatures = {name: (int(threads), parameters_of(listed)) for threads, name, listed in found}
    table = {name: (kernel.block_threads_max, kernel.parameters) for name, kernel in KERNELS.items()}
    assert signatures == table


def test_kernels_that_have_barriers_are_those_that_use_them() -> None:
    """A template that waits for other threads is named where it is used; all others run as plain loops on a CPU."""
    text = SOURCE.read_text()
    functions = re.split(r"\n(?=template|extern|#define KV_PAGE)", text)
    waiting = [each for each in functions if "__syncthreads" in each or "__shfl" in each]
    assert [re.findall(r"inline void (\w+)\(", each) for each in waiting] == [["score"]]
    assert {name for name, kernel in KERNELS.items() if kernel.has_barriers} == {
        name for name in KERNELS if name.startswith("kv_page_score")
    }


def test_nothing_is_used_that_only_a_gpu_has() -> None:
    assert not re.findall(r"\basm\b|cp\.async|__pipeline|wmma|mma_sync|#include", SOURCE.read_text())


def test_a_warp_has_as_many_threads_on_a_cpu() -> None:
    shim = (SOURCE.parent / "shim" / "cuda_on_cpu.hpp").read_text()
    assert f"kLanes = {WARP_THREADS};" in shim


@pytest.mark.parametrize("generation", GENERATIONS)
def test_nvcc_keeps_all_in_registers(generation: str, tmp_path: Path) -> None:
    log = nvcc(["-cubin", f"-arch={generation}", "-fmad=false", "-Xptxas", "-v", "-o", str(tmp_path / "k.cubin")])
    per_kernel = re.findall(r"Function properties for (\w+)\s+(.*)", log)
    assert dict(per_kernel) == dict.fromkeys(KERNELS, "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads")


@pytest.mark.parametrize("generation", GENERATIONS)
def test_copies_use_accesses_of_16_bytes_marked_as_used_once(generation: str) -> None:
    bodies = dict(re.findall(r"\.entry (\w+)\((.*?)\n}", ptx_of(generation.replace("sm", "compute")), re.DOTALL))
    assert set(bodies) == set(KERNELS)
    for name in COPIES:
        for access in ("ld", "st"):
            assert len(re.findall(rf"{access}\.global\.cs\.v4\.[bu]32", bodies[name])) == 4, name
    for name, body in bodies.items():
        assert ("ld.global.cs.v4" in body) == ("score" not in name)
        assert "fma" not in body, f"{name} rounds a product and a sum at once"


def ptx_of(target: str) -> str:
    """What NVRTC makes of the source, as text; without the options that forbid contraction, which it must not need."""
    nvrtc: Any = pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is missing: pip install '.[cuda13]'")
    try:
        _, program = nvrtc.nvrtcCreateProgram(SOURCE.read_bytes(), b"kernels.cu", 0, [], [])
    except RuntimeError as error:
        pytest.skip(f"NVRTC is missing: {error}")
    (status,) = nvrtc.nvrtcCompileProgram(program, 2, [b"--std=c++17", f"--gpu-architecture={target}".encode()])
    assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS
    _, size_bytes = nvrtc.nvrtcGetPTXSize(program)
    text: bytes = b" " * size_bytes
    nvrtc.nvrtcGetPTX(program, text)
    nvrtc.nvrtcDestroyProgram(program)
    return text.decode()


def expanded(text: str) -> str:
    """The source with the macros that make kernels replaced by those."""
    for macro in ("KV_PAGE_SUMMARY", "KV_PAGE_SCORE"):
        body = re.search(rf"#define {macro}\(suffix, Value\)((?:.*\\\n)+.*\n)", text)
        assert body is not None
        for suffix, value in re.findall(rf"^{macro}\((\w+), (\w+)\)$", text, re.MULTILINE):
            made = body[1].replace("\\\n", "\n").replace("##suffix", suffix)
            text += re.sub(r"\bValue\b", value, made)
        text = text.replace(body[0], "")
    return text


def parameters_of(listed: str) -> tuple[Parameter, ...]:
    dtypes: dict[str, Width] = {"Bytes": BYTES, "unsigned int": COUNT}
    parameters = []
    for each in " ".join(listed.split()).split(", "):
        kind, name = each.rsplit(" ", 1)
        parameters.append(Parameter(name, ADDRESS if kind.endswith("*") else dtypes[kind]))
    return tuple(parameters)


def nvcc(options: list[str]) -> str:
    compiler = shutil.which("nvcc")
    if compiler is None:
        pytest.skip("nvcc is missing: it comes with the CUDA toolkit")
    command = [compiler, "-std=c++17", *options, str(SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr + done.stdout
