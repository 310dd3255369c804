"""What runs in a process of its own, since Triton interprets or compiles as its environment said when it was imported.

Reads a line of JSON a question, ``[name, {arguments}]``, and answers with one: the result, or what was raised.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
from triton.compiler import ASTSource
from triton.runtime.errors import InterpreterError

from kvstore.engine_adapter.attention import KVPages, PageLayout, Part, decode_attention, kernels, launch, merge
from tests.engine_adapter.attention import scenes
from tests.engine_adapter.attention.scenes import Scene, make_scene

CANARY = -1234.5
CANARIES = 64
POINTERS = {"outputs": "*fp32", "lses": "*fp32", "addresses": "*u64", "indptr": "*i32"} | dict.fromkeys(
    ("first_tokens", "end_tokens", "sink_tokens"), "*i32"
)
STRIDES = ("q_request_stride", "q_head_stride", "token_stride", "head_stride", "value_offset")
TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
LOADS = {
    "wide": r"cp\.async\.c[ag]\.shared\.global [^;]*, 0x10,|ld\.global\S*\.v4\.b32",
    "narrow": r"ld\.global\S*\.b16",
}


# Under TRITON_INTERPRET=1 ----------------------------------------------------------------------------


def agrees(seed: int, n_tokens: list[int], splits: int = 1, **scene: Any) -> str:
    """Triton's answer, of one split or of several merged: where it differs from the definition."""
    asked = _scene(seed, n_tokens, **scene)
    return asked.disagreement(decode_attention(asked.q, asked.pages, n_splits=splits, backend="triton"))


def windowed(seed: int, n_tokens: list[int], window: int, sinks: int, splits: int, **scene: Any) -> str:
    """With a window before each request's last token, and sinks."""
    asked = _scene(seed, n_tokens, **scene)
    positions = torch.tensor(n_tokens, dtype=torch.int64) - 1
    pages = asked.pages.windowed(positions, window, sink_tokens=sinks)
    for visible in asked.visible:
        visible[sinks : max(len(visible) - window, sinks)] = False
    return asked.disagreement(decode_attention(asked.q, pages, n_splits=splits, backend="triton"))


def parts_agree(seed: int, n_tokens: list[int], splits: int, as_float32: bool, **scene: Any) -> str:
    """Splits that ``merge`` puts together, multiplied in 16 bits unless told otherwise; canaries around all that is
    written, and every element written."""
    asked = _scene(seed, n_tokens, **scene)
    shape = (splits, *asked.q.shape[:2], asked.pages.layout.value_dim)
    (output, outputs), (lse, lses) = _between_canaries(shape), _between_canaries(shape[:3])
    launch.decode_splits(asked.q, asked.pages, 1 / asked.q.shape[2] ** 0.5, Part(outputs, lses), as_float32=as_float32)
    whole = merge(list(outputs), list(lses))
    (output_2, merged), (lse_2, merged_lse) = _between_canaries(shape[1:]), _between_canaries(shape[1:3])
    launch.merge_splits(Part(outputs, lses), Part(merged, merged_lse))
    for name, buffer in (("output", output), ("lse", lse), ("merged", output_2), ("merged lse", lse_2)):
        if not (buffer[:CANARIES] == CANARY).all() or not (buffer[-CANARIES:] == CANARY).all():
            return f"written outside of {name}"
        if (buffer[CANARIES:-CANARIES] == CANARY).any():
            return f"part of {name} is not written"
    return asked.disagreement(whole) or asked.disagreement(Part(merged, merged_lse))


def from_another_process(
    file: str,
    n_bytes: int,
    rows: list[list[int]],
    n_tokens: list[int],
    q: list[Any],
    dtype: str,
    layout: dict[str, int],
) -> list[Any]:
    """Output and lse over pages (``rows`` of offsets) that another process wrote into a file, mapped here."""
    address, mapping = scenes.map_for_reading(Path(file), n_bytes)
    pages = KVPages.of(
        PageLayout(scenes.DTYPES[dtype], **layout),
        [np.array(row, np.uint64) + np.uint64(address) for row in rows],
        n_tokens,
    )
    part = decode_attention(torch.tensor(q, dtype=pages.layout.dtype), pages, backend="triton")
    assert len(mapping) == n_bytes
    return [part.output.tolist(), part.lse.tolist()]


def planted(old: str, new: str, asked: str, arguments: dict[str, Any]) -> Any:
    """What a check says of the kernels with one piece of their source replaced."""
    source = Path(kernels.__file__).read_text()
    assert source.count(old) == 1, f"{old!r} is there {source.count(old)} times"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "planted.py")
        path.write_text(source.replace(old, new))
        spec = importlib.util.spec_from_file_location("planted", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        right = kernels.decode_split, kernels.merge_splits
        kernels.decode_split, kernels.merge_splits = module.decode_split, module.merge_splits
        try:
            return CHECKS[asked](**arguments)
        except InterpreterError as error:  # as of NaN where no token is
            return str(error)
        finally:
            kernels.decode_split, kernels.merge_splits = right


def _scene(seed: int, n_tokens: list[int], mapped: bool = False, **scene: Any) -> Scene:
    return make_scene(seed, n_tokens, memory=scenes.mapped_elsewhere if mapped else scenes.own_memory, **scene)


def _between_canaries(shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """A buffer, and the array in the middle of it."""
    size = int(torch.Size(shape).numel())
    buffer = torch.full((size + 2 * CANARIES,), CANARY)
    return buffer, buffer[CANARIES : CANARIES + size].view(shape)


# Without it ------------------------------------------------------------------------------------------


def compiled(
    arch: int,
    dtype: str,
    group: int,
    key_dim: int,
    latent_value_dim: int = 0,
    page_tokens: int = 16,
    is_aligned: bool = True,
    has_sinks: bool = False,
    tiling: list[int] | None = None,
) -> dict[str, int]:
    """``decode_split`` for one kind of GPU, as ptxas reports on it: bytes spilled, registers, and loads by width."""
    layout = PageLayout(
        scenes.DTYPES[dtype],
        page_tokens,
        kv_heads=2,
        key_dim=key_dim,
        value_dim=latent_value_dim or key_dim,
        token_stride=2 * key_dim,
        head_stride=key_dim,
        value_offset=0 if latent_value_dim else 1 << 33,
    )
    is_float32 = dtype == "float32"
    fixed = launch.constants(layout, group, is_aligned=is_aligned, has_sinks=has_sinks, as_float32=is_float32)
    chosen = launch.tiling(layout, group)
    if tiling is not None:
        chosen = launch.Tiling(*tiling)
        fixed |= {"block_heads": chosen.block_heads, "block_tokens": chosen.block_tokens}
    types = POINTERS | {"q": f"*{TYPES[layout.dtype]}", "scale_log2": "fp32"} | dict.fromkeys(STRIDES, "i64")
    divisible = [name for name, kind in types.items() if kind.startswith("*")] + list(STRIDES if is_aligned else ())
    return _compile(kernels.decode_split, types, fixed, divisible, arch, chosen.n_warps, launch.N_STAGES)


def compiled_merge(arch: int, value_dim: int, splits: int) -> dict[str, int]:
    """``merge_splits`` likewise."""
    types = dict.fromkeys(("output", "lse", "outputs", "lses"), "*fp32")
    fixed = {"value_dim": value_dim, "block_value": triton.next_power_of_2(value_dim), "block_splits": splits}
    return _compile(kernels.merge_splits, types | {"n_splits": "i32"}, fixed, list(types), arch, 4, 3)


def _compile(
    kernel: Any, types: dict[str, str], fixed: dict[str, Any], divisible: list[str], arch: int, warps: int, stages: int
) -> dict[str, int]:
    names = kernel.arg_names
    signature = {name: "constexpr" if name in fixed else types[name] for name in names}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in divisible}
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
    built = triton.compile(
        ASTSource(kernel, signature, fixed, attributes), target=GPUTarget("cuda", arch, 32), options=options
    )
    assert built.asm["cubin"][:4] == b"\x7fELF"
    return _resources(built.asm["ptx"], arch) | {"shared_bytes": built.metadata.shared}


def _resources(ptx: str, arch: int) -> dict[str, int]:
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        # With the options that Triton compiles with: it keeps no log of a compilation that went well.
        options = ["-v", "--regAllocOptLevel=2", f"--gpu-name={sm_arch_from_capability(arch)}"]
        command = [get_ptxas(arch).path, *options, file.name, "-o", "/dev/null"]
        log = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    spilled = re.findall(r"(\d+) bytes spill (?:stores|loads)", log)
    registers = re.search(r"Used (\d+) registers", log)
    assert len(spilled) == 2, log
    assert registers is not None, log
    loads = {kind: len(re.findall(pattern, ptx)) for kind, pattern in LOADS.items()}
    return {"spilled_bytes": sum(map(int, spilled)), "registers": int(registers[1])} | loads


CHECKS = {
    check.__name__: check
    for check in (agrees, windowed, parts_agree, from_another_process, planted, compiled, compiled_merge)
}


def main() -> None:
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            answer = {"result": CHECKS[name](**arguments)}
        except Exception:
            answer = {"raised": traceback.format_exc()}
        print(json.dumps(answer), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
