"""What every device does, simulated or not. Nothing here holds for one kind only."""

from __future__ import annotations

import mmap
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.device import Device, PinnedBuffer, open_device
from kvstore.device.copy_kernels import copy, table_of_runs
from kvstore.device.kernels import KERNELS
from kvstore.device.seam import IPC_HANDLE_BYTES
from kvstore.errors import BadInputError, DeviceError, DeviceMemoryError
from kvstore.native import Mapping
from tests.device.memory import MIB, read_back, write_to
from tests.device.processes import Child

PAGE = mmap.PAGESIZE


def words(*values: int) -> NDArray[np.uint64]:
    return np.array(values, np.uint64)


def test_a_device_says_what_it_is(device: Device) -> None:
    facts = device.facts
    assert facts.kind in ("simulated", "cuda")
    assert facts.name
    assert facts.uuid
    assert facts.total_bytes > 0
    assert facts is device.facts


@pytest.mark.parametrize("size_bytes", [1, 255, 4096, MIB + 3])
def test_bytes_come_back_by_way_of_the_device(device: Device, rng: np.random.Generator, size_bytes: int) -> None:
    data = rng.integers(0, 256, size_bytes, np.uint8)
    first, second = device.malloc(size_bytes), device.malloc(size_bytes)
    stream = device.stream()
    with PinnedBuffer(device, size_bytes) as source, PinnedBuffer(device, size_bytes) as target:
        source.array[:] = data
        device.copy(first, source.address, size_bytes, stream)
        device.copy(second, first, size_bytes, stream)
        device.copy(target.address, second, size_bytes, stream)
        device.sync_stream(stream)
        assert np.array_equal(target.array, data)


def test_a_batch_is_all_its_copies(device: Device, rng: np.random.Generator) -> None:
    n, piece = 100, 300
    data = rng.integers(0, 256, n * piece, np.uint8)
    pool = device.malloc(n * piece)
    stream = device.stream()
    order = rng.permutation(n).astype(np.uint64)
    with PinnedBuffer(device, n * piece) as source, PinnedBuffer(device, n * piece) as target:
        source.array[:] = data
        dsts = pool + order * piece
        srcs = source.address + np.arange(n, dtype=np.uint64) * piece
        sizes = np.full(n, piece, np.uint64)
        sizes[::10] = 0
        device.copy(pool, target.address, n * piece, stream)
        device.copy_batch(dsts, srcs, sizes, stream)
        dsts[:] = srcs[:] = sizes[:] = 0
        device.copy(target.address, pool, n * piece, stream)
        device.sync_stream(stream)
        expected = np.zeros((n, piece), np.uint8)
        moved = np.arange(n) % 10 != 0
        expected[order[moved].astype(int)] = data.reshape(n, piece)[moved]
        assert np.array_equal(target.array.reshape(n, piece), expected)


def test_a_batch_of_nothing_is_nothing(device: Device) -> None:
    none = words()
    stream = device.stream()
    device.copy_batch(none, none, none, stream)
    device.copy(0, 0, 0, stream)
    device.sync_stream(stream)


def test_a_batch_on_the_default_stream(device: Device) -> None:
    a = device.malloc(16)
    with PinnedBuffer(device, 16) as source:
        source.array[:] = np.arange(16)
        at = source.address
        device.copy_batch(words(a, a + 8), words(at + 8, at), words(8, 8), 0)
        device.sync_stream(0)
    assert read_back(device, a, 16).tolist() == [*range(8, 16), *range(8)]


@pytest.mark.parametrize(
    ("dsts", "srcs", "sizes"),
    [
        (np.zeros(2, np.int64), words(0, 0), words(0, 0)),
        (words(0), words(0, 0), words(0, 0)),
        (words(0, 0), words(0, 0), np.zeros((1, 2), np.uint64)),
    ],
)
def test_a_batch_of_other_arrays_is_refused(
    device: Device, dsts: NDArray[np.uint64], srcs: NDArray[np.uint64], sizes: NDArray[np.uint64]
) -> None:
    with pytest.raises(BadInputError, match="uint64"):
        device.copy_batch(dsts, srcs, sizes, 0)


def test_sizes_below_zero_are_refused(device: Device) -> None:
    with pytest.raises(BadInputError):
        device.copy(0, 0, -1, 0)
    with pytest.raises(BadInputError):
        device.malloc(0)
    address = device.malloc(8)
    for byte, size_bytes in ((256, 8), (-1, 8), (0, -1)):
        with pytest.raises(BadInputError):
            device.fill(address, byte, size_bytes, 0)


def test_a_fill_touches_nothing_else(device: Device) -> None:
    address = device.malloc(1000)
    stream = device.stream()
    device.fill(address, 1, 1000, stream)
    device.fill(address + 10, 2, 980, stream)
    device.fill(address, 3, 0, stream)
    device.sync_stream(stream)
    assert read_back(device, address, 1000).tolist() == [1] * 10 + [2] * 980 + [1] * 10


def test_a_stream_runs_in_order(device: Device) -> None:
    address = device.malloc(MIB)
    stream = device.stream()
    for byte in range(50):
        device.fill(address, byte, MIB, stream)
    device.sync_stream(stream)
    assert set(read_back(device, address, MIB).tolist()) == {49}


def test_an_event_orders_streams(device: Device) -> None:
    source, target = device.malloc(4 * MIB), device.malloc(4 * MIB)
    first, second = device.stream(), device.stream()
    event = device.event()
    for byte in (5, 6, 7):
        device.fill(source, byte, 4 * MIB, first)
    device.record(event, first)
    device.wait_event(second, event)
    device.copy(target, source, 4 * MIB, second)
    device.sync_stream(second)
    assert set(read_back(device, target, 4 * MIB).tolist()) == {7}


def test_a_wait_is_for_what_the_event_stood_for_then(device: Device) -> None:
    """A later record of the same event binds nobody who waited before it: these two would else wait for each other."""
    first, second = device.stream(), device.stream()
    event, other = device.event(), device.event()
    address = device.malloc(8)
    device.fill(address, 1, 8, first)
    device.record(event, first)
    device.wait_event(second, event)
    device.fill(address, 2, 8, second)
    device.record(other, second)
    device.wait_event(first, other)
    device.fill(address, 3, 8, first)
    device.record(event, first)
    device.sync_event(event)
    assert read_back(device, address, 8).tolist() == [3] * 8


def test_an_event_that_was_never_recorded_is_over(device: Device) -> None:
    event, stream = device.event(), device.stream()
    assert device.query(event)
    device.sync_event(event)
    device.wait_event(stream, event)
    device.sync_stream(stream)


def test_whoever_asks_an_event_often_enough_sees_it_over(device: Device) -> None:
    first, second = device.stream(), device.stream()
    event, last = device.event(), device.event()
    address = device.malloc(8)
    for byte in range(5):
        device.fill(address, byte, 8, first)
    device.record(event, first)
    device.wait_event(second, event)
    device.fill(address, 9, 8, second)
    device.record(last, second)
    while not device.query(last):
        pass
    assert device.query(event)
    assert read_back(device, address, 8).tolist() == [9] * 8


def test_streams_and_events_end_before_their_work(device: Device) -> None:
    stream, waiting = device.stream(), device.stream()
    event = device.event()
    address = device.malloc(8)
    device.fill(address, 4, 8, stream)
    device.record(event, stream)
    device.wait_event(waiting, event)
    device.free_event(event)
    device.free_stream(stream)
    device.sync_stream(waiting)
    assert read_back(device, address, 8).tolist() == [4] * 8


def test_memory_is_aligned_apart_and_comes_back(device: Device) -> None:
    sizes = [1, 255, 256, 257, 5000]
    addresses = [device.malloc(size) for size in sizes]
    assert all(address % 256 == 0 for address in addresses)
    spans = sorted(zip(addresses, sizes, strict=True))
    assert all(a + size <= b for (a, size), (b, _) in pairwise(spans))
    for address in addresses:
        device.free(address)
    most = device.facts.total_bytes // 2
    for _ in range(3):
        device.free(device.malloc(most))


def test_a_full_device_says_so(device: Device) -> None:
    with pytest.raises(DeviceMemoryError):
        device.malloc(device.facts.total_bytes + 1)
    device.free(device.malloc(MIB))


def test_what_was_not_given_is_not_taken_back(device: Device) -> None:
    address = device.malloc(1000)
    stream, event = device.stream(), device.event()
    calls: list[Callable[[int], object]] = [*(device.free, device.host_unregister, device.ipc_export, device.ipc_close)]
    for call in calls:
        with pytest.raises(BadInputError):
            call(address + 256)
    for call in (device.host_unregister, device.ipc_close):
        with pytest.raises(BadInputError):
            call(address)
    device.free(address)
    device.free_stream(stream)
    device.free_event(event)
    for call, number in ((device.free, address), (device.free_stream, stream), (device.free_event, event)):
        with pytest.raises(BadInputError):
            call(number)


def test_host_memory_is_registered_once_and_by_pages(device: Device) -> None:
    with PinnedBuffer(device, 4 * PAGE) as buffer:
        for address, size_bytes in (
            (buffer.address, 4 * PAGE),
            (buffer.address + PAGE, PAGE),
            (buffer.address - PAGE, 2 * PAGE),
        ):
            with pytest.raises(BadInputError):
                device.host_register(address, size_bytes)
    memory = np.frombuffer(mmap.mmap(-1, 2 * PAGE), np.uint8)
    at = int(memory.ctypes.data)
    for address, size_bytes in ((at + 1, PAGE), (at, PAGE + 1), (at, 0), (at, -PAGE)):
        with pytest.raises(BadInputError, match="whole pages"):
            device.host_register(address, size_bytes)
    for _ in range(2):
        device.host_register(at, 2 * PAGE)
        device.host_unregister(at)


def test_memory_that_is_not_mapped_is_not_registered(device: Device) -> None:
    fd = os.memfd_create("kvstore-test")
    os.ftruncate(fd, 2 * PAGE)
    mapping = Mapping(fd, 2 * PAGE, writable=True)
    at = mapping.address
    mapping.shrink(PAGE)
    with pytest.raises((BadInputError, DeviceError)):
        device.host_register(at, 2 * PAGE)
    os.close(fd)


def test_read_only_host_memory_is_read_where_the_device_can(device: Device, rng: np.random.Generator) -> None:
    data = rng.integers(0, 256, PAGE, np.uint8)
    fd = os.memfd_create("kvstore-test")
    os.write(fd, data.tobytes())
    mapping = Mapping(fd, PAGE, writable=False)
    if not device.facts.can_register_read_only:
        with pytest.raises(DeviceError, match="read-only"):
            device.host_register(mapping.address, PAGE, read_only=True)
        return
    device.host_register(mapping.address, PAGE, read_only=True)
    address = device.malloc(PAGE)
    stream = device.stream()
    device.copy(address, mapping.address, PAGE, stream)
    device.sync_stream(stream)
    assert np.array_equal(read_back(device, address, PAGE), data)
    device.host_unregister(mapping.address)
    os.close(fd)


def test_what_ends_memory_waits_for_the_work_on_it(device: Device, rng: np.random.Generator) -> None:
    data = rng.integers(0, 256, MIB, np.uint8)
    address = device.malloc(MIB)
    stream = device.stream()
    target = PinnedBuffer(device, MIB)
    with PinnedBuffer(device, MIB) as source:
        source.array[:] = data
        device.copy(address, source.address, MIB, stream)
    source.array[:] = 0
    device.copy(target.address, address, MIB, stream)
    device.free(address)
    assert np.array_equal(target.array, data)
    target.close()


@pytest.mark.parametrize("way", ["in", "out"])
def test_a_kernel_copies_from_and_to_registered_host_memory(device: Device, rng: np.random.Generator, way: str) -> None:
    if device.facts.kind == "simulated" and shutil.which("g++") is None:
        pytest.skip("g++ is not installed; it compiles the kernels for the simulated device")
    n_runs, run_bytes = 40, 48
    n_bytes = n_runs * run_bytes
    data = rng.integers(0, 256, n_bytes, np.uint8)
    address, stream = device.malloc(n_bytes), device.stream()
    order = rng.permutation(n_runs) * run_bytes
    with PinnedBuffer(device, n_bytes) as buffer:
        buffer.array[:] = 0
        host, own = (buffer.device_address, order), (address, np.arange(n_runs) * run_bytes)
        (to, to_offsets), (of, offsets) = (own, host) if way == "in" else (host, own)
        table = table_of_runs(words(to), words(of), to_offsets, offsets, np.full(n_runs, run_bytes, np.uint64))
        if way == "in":
            buffer.array[:] = data
        else:
            write_to(device, address, data)
        with PinnedBuffer(device, table.words.nbytes) as table_buffer:
            table_buffer.array[:] = table.words.view(np.uint8)
            copy(device, table, table_buffer.device_address, stream)
            device.sync_stream(stream)
        rows = data.reshape(n_runs, run_bytes)
        if way == "in":
            got = read_back(device, address, n_bytes)
            assert np.array_equal(got, rows[order // run_bytes].reshape(-1))
        else:
            assert np.array_equal(buffer.array.reshape(n_runs, run_bytes)[order // run_bytes], rows)


def test_kernels_are_checked_when_they_are_given(device: Device) -> None:
    arguments = [parameter.dtype.type(0) for parameter in KERNELS["kv_copy_runs"].parameters]
    for kernel, grid, given in (
        ("no_such_kernel", (1, 1, 1), arguments),
        ("kv_copy_runs", (0, 1, 1), arguments),
        ("kv_copy_runs", (1, 1, 1), arguments[1:]),
    ):
        with pytest.raises(BadInputError):
            device.launch(kernel, grid, (32, 1, 1), given, 0)


def test_threads_have_streams_of_their_own(device: Device) -> None:
    n_bytes = MIB

    def work(seed: int) -> bool:
        data = np.random.default_rng(seed).integers(0, 256, n_bytes, np.uint8)
        address = device.malloc(n_bytes)
        ok = True
        for _ in range(5):
            write_to(device, address, data)
            ok &= np.array_equal(read_back(device, address, n_bytes), data)
        device.free(address)
        return ok

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(8)))


def test_a_closed_device_does_nothing(device: Device) -> None:
    device.malloc(8)
    device.fill(device.malloc(8), 1, 8, device.stream())
    device.close()
    device.close()
    with pytest.raises(DeviceError, match="closed"):
        device.malloc(8)


def test_another_process_reads_and_writes_what_was_exported(device: Device, rng: np.random.Generator) -> None:
    data = rng.integers(0, 256, MIB, np.uint8)
    address = device.malloc(MIB)
    write_to(device, address, data)
    handle = device.ipc_export(address)
    assert len(handle) == IPC_HANDLE_BYTES
    child = Child(device.facts.kind)
    assert child.say(f"open {handle.hex()}") == "opened"
    assert child.say(f"read {MIB}") == data.tobytes()[:64].hex() + data.tobytes()[-64:].hex()
    assert child.say(f"fill 9 {MIB}") == "filled"
    assert set(read_back(device, address, MIB).tolist()) == {9}
    assert child.say("close") == "closed"
    child.end()


def test_a_handle_is_opened_more_than_once(device: Device) -> None:
    child = Child(device.facts.kind)
    handle = bytes.fromhex(child.say(f"export 7 {MIB}"))
    first, second = device.ipc_open(handle), device.ipc_open(handle)
    assert first == second
    device.ipc_close(first)
    assert set(read_back(device, first, MIB).tolist()) == {7}
    device.ipc_close(first)
    with pytest.raises(BadInputError):
        device.ipc_close(first)
    child.end()


def test_another_device_of_the_same_process_opens_a_handle_too(device: Device) -> None:
    address = device.malloc(MIB)
    handle = device.ipc_export(address)
    other = open_device(device.facts.kind)
    opened = other.ipc_open(handle)
    stream = other.stream()
    other.fill(opened, 6, MIB, stream)
    other.sync_stream(stream)
    assert set(read_back(device, address, MIB).tolist()) == {6}
    assert other.ipc_open(handle) == opened
    for _ in range(2):
        other.ipc_close(opened)
    with pytest.raises(BadInputError):
        other.ipc_close(opened)
    other.close()
    device.free(address)
    with pytest.raises((BadInputError, DeviceError)):
        device.ipc_open(handle)


@pytest.mark.parametrize("handle", [b"", bytes(63), bytes(65)])
def test_other_bytes_are_no_handle(device: Device, handle: bytes) -> None:
    with pytest.raises(BadInputError):
        device.ipc_open(handle)


def test_two_devices_of_a_process_use_the_same_host_memory(device: Device, rng: np.random.Generator) -> None:
    other = open_device(device.facts.kind)
    data = rng.integers(0, 256, PAGE, np.uint8)
    with PinnedBuffer(device, PAGE) as buffer:
        buffer.array[:] = data
        assert other.host_register(buffer.address, PAGE)
        there, stream = other.malloc(PAGE), other.stream()
        other.copy(there, buffer.address, PAGE, stream)
        other.sync_stream(stream)
        assert np.array_equal(read_back(other, there, PAGE), data)
        other.host_unregister(buffer.address)
        here, stream = device.malloc(PAGE), device.stream()
        device.copy(here, buffer.address, PAGE, stream)
        device.sync_stream(stream)
        assert np.array_equal(read_back(device, here, PAGE), data)
    other.close()
