"""The steps of ``gpu_check``, each run in a process of its own: ``python -m kvstore.bench.gpu_steps REQUEST``.

REQUEST is one JSON object: ``step``, ``device``, ``result`` (a file to write) and what a step needs besides.
"""

from __future__ import annotations

import json
import multiprocessing
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from kvstore import __version__
from kvstore.bench import gpu_arena, gpu_kernels
from kvstore.bench.device_packages import installed_packages
from kvstore.bench.device_ways import (
    SMALL,
    effort_for,
    figures,
    measure_block_counts,
    measure_own_gb_per_s,
    measure_ways,
)
from kvstore.bench.gpu_arena import Leased
from kvstore.bench.gpus_together import measure_all
from kvstore.device import Device, PinnedBuffer, open_device
from kvstore.device.copy_kernels import COPY_BLOCKS
from kvstore.device.cuda import gpus
from kvstore.engine_adapter.gpu.block_counts import fewest_blocks
from kvstore.errors import DeviceError, IntegrityError, KVStoreError
from kvstore.plan.links import read_links

BLOCK_BYTES, SMALL_BLOCK_BYTES = 2 << 20, 64 << 10
"""Of blocks of the store; the small ones are for a simulated device."""
ARENA_BYTES, STAGED_BYTES = 16 << 20, 256 << 20
PIECES = (16 << 10, 64 << 10, 256 << 10, 1 << 20, 2 << 20)
IPC_S_MAX = 20.0

Request = Mapping[str, Any]
Result = dict[str, Any]


class Skipped(Exception):  # noqa: N818 - no error: it says why there is nothing to do
    """The step can't be taken here."""


def facts(request: Request) -> Result:
    """Versions, links, and what the device says of itself."""
    with _opened(request) as device:
        told = asdict(device.facts)
    return {
        "kvstore": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "packages": installed_packages(),
        "device": told,
        "links": asdict(read_links()),
    }


def bandwidth(request: Request) -> Result:
    """Every way at every size, both ways round, beside the largest copies."""
    with _opened(request) as device:
        effort = effort_for(device)
        counts = measure_block_counts(device, effort)
        blocks = fewest_blocks(counts) if counts else COPY_BLOCKS
        table = measure_ways(device, effort, blocks)
        return {
            "kernel_blocks": blocks,
            "gb_per_s_by_kernel_blocks": {str(n): rate for n, rate in counts.items()},
            "link_gb_per_s": {str(direction): table.link_gb_per_s(direction) for direction, _ in table.curves},
            "own_gb_per_s": measure_own_gb_per_s(device, effort),
            "rows": figures(table),
            "table": table.to_dict(),
        }


def arena(request: Request) -> Result:
    """Memory of a daemon's process, written by one client, is registered and read by kernels and copies for another."""
    with _leased(request, ARENA_BYTES) as (device, leased):
        if leased.refused and not device.facts.can_register_read_only:
            raise Skipped(f"sealed memory can't be registered with this device: {leased.refused}")
        if leased.refused:
            raise DeviceError(leased.refused)
        return gpu_arena.read_in_place(device, leased)


def staged(request: Request) -> Result:
    """The same memory, read as engines read it, into scattered pages; beside the link."""
    with _leased(request, STAGED_BYTES) as (device, leased):
        sizes = [size for size in PIECES if leased.expected.shape[1] >= size]
        return gpu_arena.read_staged(device, leased, sizes, effort_for(device))


@contextmanager
def _leased(request: Request, total_bytes: int) -> Iterator[tuple[Device, Leased]]:
    block_bytes = BLOCK_BYTES if _is_gpu(request) else SMALL_BLOCK_BYTES
    n_blocks = total_bytes // BLOCK_BYTES if _is_gpu(request) else 4
    with (
        _opened(request) as device,
        gpu_arena.leased_blocks(device, request["socket"], n_blocks, block_bytes) as leased,
    ):
        yield device, leased


def ipc(request: Request) -> Result:
    """Memory of this process' device is opened by another process, which reads it and writes to it."""
    n_bytes = 4 << 20 if _is_gpu(request) else 64 << 10
    rng = np.random.default_rng(2)
    here, there = (rng.integers(0, 256, n_bytes, np.uint8) for _ in range(2))
    with ExitStack() as stack:
        device = stack.enter_context(_opened(request))
        stream, memory = device.stream(), device.malloc(n_bytes)
        stack.callback(device.free, memory)
        buffer = stack.enter_context(PinnedBuffer(device, n_bytes))
        buffer.array[:] = here
        device.copy(memory, buffer.address, n_bytes, stream)
        device.sync_stream(stream)
        context = multiprocessing.get_context("spawn")
        mine, theirs = context.Pipe()
        child = context.Process(target=_ipc_child, args=(request["device"], theirs), daemon=True)
        child.start()
        theirs.close()
        stack.callback(child.join)
        stack.callback(mine.close)
        begun_s = time.perf_counter()
        mine.send_bytes(device.ipc_export(memory))
        mine.send_bytes(there.tobytes())
        if not mine.poll(IPC_S_MAX):
            child.kill()
            raise DeviceError(f"the other process did not open the memory within {IPC_S_MAX} s")
        try:
            answer = mine.recv_bytes()
        except EOFError as error:
            raise DeviceError("the other process ended without an answer: what it printed says why") from error
        if not answer.startswith(b"read "):
            raise DeviceError(f"the other process failed: {answer.decode()}")
        if answer[5:] != here.tobytes():
            raise IntegrityError("the other process read other bytes than this one wrote")
        device.copy(buffer.address, memory, n_bytes, stream)
        device.sync_stream(stream)
        if not np.array_equal(buffer.array, there):
            raise IntegrityError("this process does not see what the other one wrote")
        return {"bytes": n_bytes, "round_trip_s": time.perf_counter() - begun_s}


def _ipc_child(device_name: str, pipe: Connection) -> None:
    try:
        device = open_device(device_name)
        address, given = device.ipc_open(pipe.recv_bytes()), pipe.recv_bytes()
        stream = device.stream()
        with PinnedBuffer(device, len(given)) as buffer:
            device.copy(buffer.address, address, len(given), stream)
            device.sync_stream(stream)
            found = buffer.array.tobytes()
            buffer.array[:] = np.frombuffer(given, np.uint8)
            device.copy(address, buffer.address, len(given), stream)
            device.sync_stream(stream)
        device.ipc_close(address)
        device.close()
        pipe.send_bytes(b"read " + found)
    except (KVStoreError, EOFError) as error:
        pipe.send_bytes(repr(error).encode())


def attention(request: Request) -> Result:
    """Decode attention where K and V lie in host memory, are staged, or lie in the GPU's."""
    try:
        from kvstore.bench import gpu_attention
    except ImportError as error:
        raise Skipped(f"{error.name} is not installed") from error
    with _opened(request) as device:
        return gpu_attention.compare(device)


def together(request: Request) -> Result:
    """All GPUs load at once, and each alone."""
    if not _is_gpu(request):
        return measure_all(["simulated:0", "simulated:1"], SMALL.total_bytes, SMALL.repeats).to_dict()
    n_gpus = len(gpus())
    if n_gpus < 2:
        raise Skipped("this machine has one GPU")
    return measure_all([f"cuda:{ordinal}" for ordinal in range(n_gpus)]).to_dict()


def kernels(request: Request) -> Result:
    """Every kernel once on small inputs, compared with numpy: what a sanitizer looks at."""
    with _opened(request) as device:
        table = measure_ways(device, SMALL)
        if table.absent:
            raise Skipped(next(iter(table.absent.values())))
        return gpu_kernels.compare(device)


STEPS: dict[str, Callable[[Request], Result]] = {
    "facts": facts, "bandwidth": bandwidth, "arena": arena, "staged": staged, "ipc": ipc, "attention": attention,
    "together": together, "kernels": kernels,
}  # fmt: skip


@contextmanager
def _opened(request: Request) -> Iterator[Device]:
    device = open_device(request["device"])
    try:
        yield device
    finally:
        device.close()


def _is_gpu(request: Request) -> bool:
    return str(request["device"]).startswith("cuda")


def main() -> None:
    """Take the step of the request, and write what came of it: ``status``, ``reason``, ``figures``."""
    request: Request = json.loads(sys.argv[1])
    outcome: dict[str, Any] = {"status": "passed", "reason": "", "figures": {}}
    try:
        outcome["figures"] = STEPS[request["step"]](request)
    except Skipped as why:
        outcome |= {"status": "skipped", "reason": str(why)}
    except KVStoreError as error:
        outcome |= {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
    Path(request["result"]).write_text(json.dumps(outcome))


if __name__ == "__main__":
    main()
