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
from numpy.typing import NDArray

from kvstore import __version__
from kvstore.bench import gpu_kernels
from kvstore.bench.device_packages import installed_packages
from kvstore.bench.device_ways import SMALL, effort_for, figures, measure_own_gb_per_s, measure_ways
from kvstore.client import Client
from kvstore.device import Device, PinnedBuffer, open_device
from kvstore.engine_adapter.counters import SharedCounters
from kvstore.engine_adapter.gpu.kernel_copies import SPREAD_BLOCKS, KernelCopies
from kvstore.engine_adapter.gpu.pinned_regions import PinnedRegions
from kvstore.errors import DeviceError, IntegrityError, KVStoreError
from kvstore.plan.links import read_links
from kvstore.types import KVSpec, Namespace

BLOCK_TOKENS = 16
REGISTER_S_MAX = 20.0
IPC_S_MAX = 20.0

Array = NDArray[Any]
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
        table = measure_ways(device, effort)
        return {
            "link_gb_per_s": {str(direction): table.link_gb_per_s(direction) for direction, _ in table.curves},
            "own_gb_per_s": measure_own_gb_per_s(device, effort),
            "rows": figures(table),
            "table": table.to_dict(),
        }


def arena(request: Request) -> Result:
    """Memory of a daemon's process, written by one client, is registered and read by kernels for another."""
    n_blocks, block_bytes = (64, 256 << 10) if _is_gpu(request) else (4, 16 << 10)
    namespace = Namespace("gpu-check", KVSpec.opaque(BLOCK_TOKENS, block_bytes))
    tokens = np.arange(n_blocks * BLOCK_TOKENS, dtype=np.uint32)
    blocks = np.random.default_rng(1).integers(0, 256, (n_blocks, block_bytes), np.uint8)
    with ExitStack() as stack:
        device = stack.enter_context(_opened(request))
        writer, reader = (stack.enter_context(Client(request["socket"], timeout_s=10.0)) for _ in range(2))
        stored = writer.open(namespace).put(tokens, blocks)
        pinned = PinnedRegions(device, SharedCounters())
        stack.callback(pinned.close)
        reader.watch_mappings(pinned)
        lease = stack.enter_context(reader.open(namespace).lease(tokens))
        if len(lease) != n_blocks:
            raise IntegrityError(f"{len(lease)} of {n_blocks} blocks were found ({stored!r}, {lease.reason!r})")
        sizes = np.full(n_blocks, block_bytes, np.uint64)
        begun_s = time.perf_counter()
        try:
            use = pinned.use_all(lease.addresses, sizes, time.monotonic() + REGISTER_S_MAX)
        except DeviceError as error:
            raise Skipped(f"the daemon's sealed memory can't be registered: {error}") from error
        registered_s = time.perf_counter() - begun_s
        stack.callback(use.end)
        came = {"kernel": _by_kernel(device, use.mapped, sizes), "copy": _by_copy(device, lease.addresses, sizes)}
        wrong = [way for way, array in came.items() if not np.array_equal(array, blocks.reshape(-1))]
        if wrong:
            raise IntegrityError(f"read by {', '.join(wrong)}, the daemon's memory came with wrong bytes")
        return {"bytes": blocks.nbytes, "registered_bytes": pinned.registered_bytes, "register_s": registered_s}


def _by_kernel(device: Device, mapped: Array, sizes: Array) -> Array:
    with KernelCopies(device, len(sizes), 1) as kernels:
        return _through(
            device, sizes, lambda to, stream: kernels.copy(to, mapped, sizes, stream, blocks=SPREAD_BLOCKS)
        )


def _by_copy(device: Device, addresses: Array, sizes: Array) -> Array:
    return _through(device, sizes, lambda to, stream: device.copy_batch(to, addresses, sizes, stream))


def _through(
    device: Device, sizes: Array, move: Callable[[Array, int], None]
) -> Array:
    """What ``move`` brought into the device's memory, uint8 [bytes]."""
    n_bytes = int(sizes.sum())
    stream, memory = device.stream(), device.malloc(n_bytes)
    try:
        with PinnedBuffer(device, n_bytes) as buffer:
            move(np.uint64(memory) + (np.cumsum(sizes) - sizes), stream)
            device.copy(buffer.address, memory, n_bytes, stream)
            device.sync_stream(stream)
            return buffer.array.copy()
    finally:
        device.free(memory)
        device.free_stream(stream)


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
        answer = mine.recv_bytes()
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


def kernels(request: Request) -> Result:
    """Every kernel once on small inputs, compared with numpy: what a sanitizer looks at."""
    with _opened(request) as device:
        table = measure_ways(device, SMALL)
        if table.absent:
            raise Skipped(next(iter(table.absent.values())))
        return gpu_kernels.compare(device)


STEPS: dict[str, Callable[[Request], Result]] = {
    "facts": facts, "bandwidth": bandwidth, "arena": arena, "ipc": ipc, "attention": attention, "kernels": kernels,
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
