"""A daemon's memory, in another process, read by a device: by kernels, by copies, and as engines read it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.bench.device_ways import Effort
from kvstore.client import Client, Lease
from kvstore.device import Device, PinnedBuffer
from kvstore.engine_adapter.counters import SharedCounters
from kvstore.engine_adapter.gpu.choice import measure
from kvstore.engine_adapter.gpu.kernel_copies import SPREAD_BLOCKS, KernelCopies
from kvstore.engine_adapter.gpu.pinned_regions import PinnedRegions
from kvstore.engine_adapter.gpu.staged import StagedReader
from kvstore.engine_adapter.moving import Copy
from kvstore.engine_adapter.runs import Runs
from kvstore.errors import DeviceError, IntegrityError
from kvstore.plan.ways import Addresses
from kvstore.types import KVSpec, Namespace

BLOCK_TOKENS = 16
REGISTER_S_MAX = 20.0

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Leased:
    """Blocks that one client wrote and another has leased; ``expected``, uint8 ``[n, block_bytes]``, is what was
    written. ``register_s``: how long until the device could reach all of it; ``refused``: why it can't."""

    lease: Lease
    pinned: PinnedRegions
    expected: Bytes
    register_s: float
    refused: str = ""

    @property
    def sizes(self) -> Addresses:
        """Of the blocks, in bytes."""
        return np.full(len(self.expected), self.expected.shape[1], np.uint64)


@contextmanager
def leased_blocks(device: Device, socket: str, n_blocks: int, block_bytes: int) -> Iterator[Leased]:
    """Store and lease blocks in the daemon behind ``socket``, registered with the device if it can do that.

    Raises IntegrityError if the daemon does not find them.
    """
    namespace = Namespace(f"gpu-check-{block_bytes}", KVSpec.opaque(BLOCK_TOKENS, block_bytes))
    tokens = np.arange(n_blocks * BLOCK_TOKENS, dtype=np.uint32)
    blocks = np.frombuffer(np.random.default_rng(1).bytes(n_blocks * block_bytes), np.uint8).reshape(n_blocks, -1)
    with ExitStack() as stack:
        writer, reader = (stack.enter_context(Client(socket, timeout_s=10.0)) for _ in range(2))
        stored = writer.open(namespace).put(tokens, blocks)
        pinned = PinnedRegions(device, SharedCounters())
        stack.callback(pinned.close)
        reader.watch_mappings(pinned)
        stack.callback(reader.unwatch_mappings, pinned)
        lease = stack.enter_context(reader.open(namespace).lease(tokens))
        if len(lease) != n_blocks:
            raise IntegrityError(f"{len(lease)} of {n_blocks} blocks were found ({stored!r}, {lease.reason!r})")
        begun_s = time.perf_counter()
        sizes = np.full(n_blocks, block_bytes, np.uint64)
        refused = ""
        try:
            pinned.use_all(lease.addresses, sizes, time.monotonic() + REGISTER_S_MAX).end()
        except DeviceError as error:
            refused = str(error)
        yield Leased(lease, pinned, blocks, time.perf_counter() - begun_s, refused)


def read_in_place(device: Device, leased: Leased) -> dict[str, Any]:
    """By a kernel, as it is registered, and by copies. Raises IntegrityError for other bytes than were written."""
    sizes = leased.sizes
    with (
        leased.pinned.use(leased.lease.addresses, sizes) as use,
        KernelCopies(device, len(sizes), 1) as kernels,
    ):
        here, mapped = leased.lease.addresses, use.mapped
        came = {
            "kernel": _through(
                device, sizes, lambda to, stream: kernels.copy(to, mapped, sizes, stream, blocks=SPREAD_BLOCKS)
            ),
            "copies": _through(device, sizes, lambda to, stream: device.copy_batch(to, here, sizes, stream)),
        }
    wrong = [way for way, array in came.items() if not np.array_equal(array, leased.expected.reshape(-1))]
    if wrong:
        raise IntegrityError(f"the daemon's memory came with other bytes than were written, by {' and '.join(wrong)}")
    return {
        "bytes": leased.expected.nbytes,
        "registered_bytes": leased.pinned.registered_bytes,
        "register_s": leased.register_s,
    }


def read_staged(device: Device, leased: Leased, piece_sizes: list[int], effort: Effort) -> dict[str, Any]:
    """Rates of ``StagedReader`` from leased blocks into scattered pages, beside the largest copy of pinned memory.

    Raises IntegrityError for other bytes than were written.
    """
    total_bytes = leased.expected.nbytes
    chosen = measure(device, sizes=effort.sizes, total_bytes=effort.total_bytes, repeats=effort.repeats)
    link = _link_gb_per_s(device, total_bytes, effort.repeats)
    memory = device.malloc(total_bytes)
    reader = StagedReader(device, leased.pinned, chosen)
    try:
        rows = []
        for piece_bytes in piece_sizes:
            places = np.random.default_rng(piece_bytes).permutation(total_bytes // piece_bytes)
            copies = list(_copies(leased.lease, memory, piece_bytes, places))
            seconds = [_staged_s(reader, leased.lease, copies) for _ in range(effort.repeats + 1)]
            _compare(device, leased, memory, piece_bytes, places)
            rate = total_bytes / float(np.median(seconds[1:])) / 1e9
            rows.append(
                {
                    "direction": "load", "way": "reader", "piece_bytes": piece_bytes, "gb_per_s": rate,
                    "share_of_link": rate / link,
                }
            )  # fmt: skip
    finally:
        reader.close()
        device.free(memory)
    told = {"bytes": total_bytes, "link_gb_per_s": {"load": link}, "rows": rows}
    return told | ({"not_registered": leased.refused} if leased.refused else {})


def _copies(lease: Lease, memory: int, piece_bytes: int, places: NDArray[np.int64]) -> Iterator[Copy]:
    """Every block, cut into pieces that go to places of their own."""
    for block, come_from in enumerate(lease.addresses.tolist()):
        n = lease.view(block).nbytes // piece_bytes
        to = places[block * n : (block + 1) * n] * piece_bytes
        runs = Runs(to, np.arange(n, dtype=np.int64) * piece_bytes, np.full(n, piece_bytes, np.uint64))
        yield Copy(runs, memory, come_from)


def _staged_s(reader: StagedReader, lease: Lease, copies: list[Copy]) -> float:
    begun_s = time.perf_counter()
    moves = reader.begin()
    moves.hold(lease)
    moves.copy(copies)
    why = moves.finish()
    took_s = time.perf_counter() - begun_s
    if why:
        raise IntegrityError(f"a staged read can't be used: {why}")
    return took_s


def _compare(device: Device, leased: Leased, memory: int, piece_bytes: int, places: NDArray[np.int64]) -> None:
    found = _download(device, memory, leased.expected.nbytes).reshape(-1, piece_bytes)
    if not np.array_equal(found[places], leased.expected.reshape(-1, piece_bytes)):
        raise IntegrityError(f"a staged read of pieces of {piece_bytes} bytes brought other bytes than were written")


def _link_gb_per_s(device: Device, n_bytes: int, repeats: int) -> float:
    stream, memory = device.stream(), device.malloc(n_bytes)
    try:
        with PinnedBuffer(device, n_bytes) as buffer:
            seconds = []
            for _ in range(repeats + 1):
                begun_s = time.perf_counter()
                device.copy(memory, buffer.address, n_bytes, stream)
                device.sync_stream(stream)
                seconds.append(time.perf_counter() - begun_s)
    finally:
        device.free(memory)
        device.free_stream(stream)
    return n_bytes / float(np.median(seconds[1:])) / 1e9


def _through(device: Device, sizes: Addresses, move: Callable[[Addresses, int], None]) -> Bytes:
    """What ``move`` brought into new device memory, uint8 [bytes]."""
    n_bytes = int(sizes.sum())
    stream, memory = device.stream(), device.malloc(n_bytes)
    try:
        move(np.uint64(memory) + (np.cumsum(sizes) - sizes), stream)
        device.sync_stream(stream)
        return _download(device, memory, n_bytes)
    finally:
        device.free(memory)
        device.free_stream(stream)


def _download(device: Device, memory: int, n_bytes: int) -> Bytes:
    stream = device.stream()
    try:
        with PinnedBuffer(device, n_bytes) as buffer:
            device.copy(buffer.address, memory, n_bytes, stream)
            device.sync_stream(stream)
            return buffer.array.copy()
    finally:
        device.free_stream(stream)
