"""The simulated device is stricter than a GPU: what would go wrong there now and then goes wrong here each time."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.device import PinnedBuffer
from kvstore.device.seam import Argument
from kvstore.device.simulated import Dimensions, SimulatedDevice
from kvstore.device.simulated_memory import POISON
from kvstore.errors import BadInputError, DeviceError, DeviceMemoryError
from kvstore.native import Mapping
from tests.device.memory import MIB, read_back, write_to

Simulated = Callable[..., SimulatedDevice]
PAGE = mmap.PAGESIZE
ONE: Dimensions = (1, 1, 1)


def words(*values: int) -> NDArray[np.uint64]:
    return np.array(values, np.uint64)


def answer_of(device: SimulatedDevice, data: NDArray[np.uint8], *, waits: bool) -> NDArray[np.uint8]:
    """What a reader gets that copies by way of the device and then looks, having waited or not."""
    address, stream = device.malloc(data.nbytes), device.stream()
    with PinnedBuffer(device, data.nbytes) as source, PinnedBuffer(device, data.nbytes) as target:
        source.array[:] = data
        device.copy(address, source.address, data.nbytes, stream)
        device.copy(target.address, address, data.nbytes, stream)
        if waits:
            device.sync_stream(stream)
        return target.array.copy()


def test_a_missing_wait_is_a_wrong_answer(simulated: Simulated, rng: np.random.Generator) -> None:
    device = simulated()
    data = rng.integers(1, 256, MIB, np.uint8)
    assert np.array_equal(answer_of(device, data, waits=True), data)
    for _ in range(10):
        assert not answer_of(device, data, waits=False).any()


@pytest.mark.parametrize("has_event", [True, False])
def test_a_missing_event_between_streams_is_a_wrong_answer(simulated: Simulated, has_event: bool) -> None:
    device = simulated()
    first, second, event = device.stream(), device.stream(), device.event()
    source, target = device.malloc(MIB), device.malloc(MIB)
    device.fill(source, 1, MIB, first)
    device.record(event, first)
    if has_event:
        device.wait_event(second, event)
    device.copy(target, source, MIB, second)
    device.sync_stream(second)
    assert set(read_back(device, target, MIB).tolist()) == {1 if has_event else POISON}


def test_what_must_not_run_early_does_under_some_seed(simulated: Simulated) -> None:
    """A buffer is filled again without an event behind its reader: right only if nobody runs ahead."""
    seen = set()
    for seed in (None, *range(16)):
        device = simulated(seed=seed)
        reader, writer = device.stream(), device.stream()
        source, target = device.malloc(8), device.malloc(8)
        device.fill(source, 1, 8, reader)
        device.copy(target, source, 8, reader)
        device.fill(source, 2, 8, writer)
        device.sync_stream(reader)
        seen.add(int(read_back(device, target, 8)[0]))
        if seed is None:
            assert seen == {1}
    assert seen == {1, 2}


def test_an_early_release_is_caught(simulated: Simulated) -> None:
    """A slot that is used again before the copy out of it is over gives the new bytes, not the old ones."""
    device = simulated()
    address, stream = device.malloc(MIB), device.stream()
    with PinnedBuffer(device, MIB) as slot:
        slot.array[:] = 1
        device.copy(address, slot.address, MIB, stream)
        slot.array[:] = 2
        device.sync_stream(stream)
        assert set(read_back(device, address, MIB).tolist()) == {2}
        slot.array[:] = 1
        device.copy(address, slot.address, MIB, stream)
        device.sync_stream(stream)
        slot.array[:] = 2
        assert set(read_back(device, address, MIB).tolist()) == {1}


def test_memory_unmapped_while_registered_is_caught(simulated: Simulated) -> None:
    device = simulated()
    fd = os.memfd_create("kvstore-test")
    os.ftruncate(fd, PAGE)
    mapping = Mapping(fd, PAGE, writable=True)
    address, stream = device.malloc(PAGE), device.stream()
    device.host_register(mapping.address, PAGE)
    device.copy(address, mapping.address, PAGE, stream)
    del mapping
    with pytest.raises(DeviceError, match="unmapped while it was registered"):
        device.sync_stream(stream)
    os.close(fd)


def test_new_memory_is_poisoned(simulated: Simulated) -> None:
    device = simulated()
    address = device.malloc(1000)
    write_to(device, address, np.zeros(1000, np.uint8))
    device.free(address)
    assert set(read_back(device, device.malloc(1000), 1000).tolist()) == {POISON}


def test_a_copy_out_of_bounds_is_refused(simulated: Simulated) -> None:
    device = simulated()
    address = device.malloc(1000)
    with PinnedBuffer(device, 2 * PAGE) as buffer:
        for dst, src, size_bytes in (
            (address, buffer.address, 1001),
            (address + 1, buffer.address, 1000),
            (address - 1, buffer.address, 8),
            (address + 1000, buffer.address, 1),
            (buffer.address, address + 999, 2),
            (address, buffer.address + 2 * PAGE - 8, 9),
            (address, buffer.address - 1, 8),
        ):
            with pytest.raises(BadInputError, match=r"too far|neither device memory"):
                device.copy(dst, src, size_bytes, 0)
            with pytest.raises(BadInputError):
                device.copy_batch(words(address, dst), words(buffer.address, src), words(0, size_bytes), 0)
        with pytest.raises(BadInputError):
            device.fill(address, 0, 1001, 0)


def test_host_memory_that_is_not_registered_is_refused(simulated: Simulated) -> None:
    device = simulated()
    address = device.malloc(64)
    host = np.zeros(64, np.uint8)
    for dst, src in ((address, host.ctypes.data), (host.ctypes.data, address)):
        with pytest.raises(BadInputError, match="host_register it first"):
            device.copy(dst, src, 64, 0)
    buffer = PinnedBuffer(device, 64)
    buffer.close()
    with pytest.raises(BadInputError, match="host_register it first"):
        device.copy(address, buffer.address, 64, 0)


def test_freed_memory_is_refused(simulated: Simulated) -> None:
    device = simulated()
    address, other = device.malloc(64), device.malloc(64)
    device.free(address)
    with pytest.raises(BadInputError, match="was freed"):
        device.copy(other, address, 64, 0)
    assert device.malloc(64) != address


def test_host_memory_has_another_address_on_the_device(simulated: Simulated) -> None:
    device = simulated()
    address = device.malloc(64)
    with PinnedBuffer(device, 64) as buffer:
        assert buffer.device_address != buffer.address
        with pytest.raises(BadInputError, match="copies take the host's address"):
            device.copy(address, buffer.device_address, 64, 0)
        with pytest.raises(BadInputError, match="only device memory can be filled"):
            device.fill(buffer.address, 0, 64, 0)
    private = np.frombuffer(mmap.mmap(-1, PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    assert device.host_register(private.ctypes.data, PAGE) == private.ctypes.data


def test_copies_of_a_batch_must_not_overlap(simulated: Simulated) -> None:
    device = simulated()
    a = device.malloc(1000)
    device.copy_batch(words(a, a + 10), words(a + 100, a + 100), words(10, 10), 0)
    for dsts, srcs in ((words(a, a + 9), words(a + 100, a + 200)), (words(a, a + 50), words(a + 100, a + 9))):
        with pytest.raises(BadInputError, match="overlap"):
            device.copy_batch(dsts, srcs, words(10, 10), 0)
    with pytest.raises(BadInputError, match="overlap"):
        device.copy(a + 5, a, 10, 0)


def test_read_only_memory_is_registered_as_such_and_never_written(simulated: Simulated) -> None:
    fd = os.memfd_create("kvstore-test")
    os.ftruncate(fd, PAGE)
    mapping = Mapping(fd, PAGE, writable=False)
    device = simulated()
    with pytest.raises(BadInputError, match="read_only=True"):
        device.host_register(mapping.address, PAGE)
    device.host_register(mapping.address, PAGE, read_only=True)
    with pytest.raises(BadInputError, match="can't write it"):
        device.copy(mapping.address, device.malloc(8), 8, 0)
    with pytest.raises(DeviceError, match="can't register"):
        simulated(can_register_read_only=False).host_register(mapping.address, PAGE, read_only=True)
    os.close(fd)


def test_memory_holds_no_more_than_it_has(simulated: Simulated) -> None:
    device = simulated(total_bytes=1024)
    first = device.malloc(513)
    with pytest.raises(DeviceMemoryError, match="256 of 1024 bytes left"):
        device.malloc(257)
    device.malloc(256)
    device.free(first)
    device.malloc(700)


@pytest.mark.parametrize(
    "touch",
    [
        "device.malloc(64)",
        "device.malloc(64) + 64 + 192",
        "PinnedBuffer(device, 64).device_address",
        "freed(device)",
        "after_a_launch(device)",
    ],
)
@pytest.mark.parametrize("guarded", [True, False])
def test_host_code_that_touches_device_memory_dies(touch: str, guarded: bool) -> None:
    script = f"""
import ctypes, faulthandler
from kvstore.device import PinnedBuffer
from kvstore.device.simulated import SimulatedDevice
def freed(device):
    address = device.malloc(64)
    device.free(address)
    return address
def after_a_launch(device):
    address = device.malloc(64)
    device.launch("any", (1, 1, 1), (1, 1, 1), [], 0)
    device.sync_stream(0)
    return address
device = SimulatedDevice(guarded={guarded}, launcher=lambda *_: None)
ctypes.string_at({touch}, 1)
"""
    code = subprocess.run([sys.executable, "-c", script], check=False).returncode
    always = "+" in touch or touch.startswith("freed")
    assert code == (-signal.SIGSEGV if guarded or always else 0)


def poke(_: str, grid: Dimensions, block: Dimensions, arguments: Sequence[Argument], shared_bytes: int) -> None:
    """A kernel: writes the byte of its second argument to the address of its first."""
    ctypes.memset(int(arguments[0]), int(arguments[1]), 1)


def test_kernels_reach_all_memory_by_the_devices_addresses(simulated: Simulated) -> None:
    device = simulated(launcher=poke)
    fd = os.memfd_create("kvstore-test")
    # Two kinds of pages: those that fill a huge page are mapped apart from the rest.
    os.ftruncate(fd, 3 * MIB)
    mapping = Mapping(fd, 3 * MIB, writable=True)
    alias = device.host_register(mapping.address, 3 * MIB)
    address, stream = device.malloc(8), device.stream()
    at = (0, 2 * MIB - 1, 2 * MIB, 3 * MIB - 1)
    for place in (address, *(alias + offset for offset in at)):
        device.launch("poke", ONE, ONE, (np.uint64(place), np.uint32(5)), stream)
    assert not mapping.array().any()
    device.sync_stream(stream)
    assert read_back(device, address, 8).tolist() == [5, *[POISON] * 7]
    assert np.flatnonzero(mapping.array()).tolist() == list(at)
    device.host_unregister(mapping.address)
    os.close(fd)


def test_a_kernel_is_given_no_address_that_it_can_not_use(simulated: Simulated) -> None:
    device = simulated(launcher=poke)
    freed = device.malloc(8)
    device.free(freed)
    host = np.zeros(8)
    with PinnedBuffer(device, 8) as buffer:
        for address, why in (
            (buffer.address, "for kernels it is"),
            (freed, "was freed"),
            (host.ctypes.data, "neither device memory"),
        ):
            with pytest.raises(BadInputError, match=why):
                device.launch("poke", ONE, ONE, (np.uint64(address), np.uint32(5)), 0)
        device.launch("poke", ONE, ONE, (np.uint64(buffer.device_address), np.uint32(5)), 0)
        device.sync_stream(0)
        assert buffer.array[0] == 5


def test_a_kernel_that_fails_ends_the_device(simulated: Simulated) -> None:
    def fail(*_: object) -> None:
        raise DeviceError("threads wait in vain")

    device = simulated(launcher=fail)
    stream, event = device.stream(), device.event()
    address = device.malloc(8)
    device.launch("any", ONE, ONE, (), stream)
    device.fill(address, 1, 8, stream)
    device.record(event, stream)
    with pytest.raises(DeviceError, match="in vain"):
        device.sync_event(event)
    for call in (lambda: device.query(event), lambda: device.malloc(8), lambda: device.sync_stream(0)):
        with pytest.raises(DeviceError, match=r"earlier work.*in vain"):
            call()
    device.close()


def test_a_failure_that_nobody_saw_is_told_at_the_end() -> None:
    def fail(*_: object) -> None:
        raise DeviceError("threads wait in vain")

    device = SimulatedDevice(launcher=fail)
    device.launch("any", ONE, ONE, (), 0)
    with pytest.raises(DeviceError, match="in vain"):
        device.close()
    with pytest.raises(DeviceError, match="closed"):
        device.malloc(8)


def test_nobody_waits_for_work_that_another_thread_runs(simulated: Simulated) -> None:
    runs, go_on = threading.Event(), threading.Event()

    def block(*_: object) -> None:
        runs.set()
        assert go_on.wait(20)

    device = simulated(launcher=block)
    stream, other, event = device.stream(), device.stream(), device.event()
    address = device.malloc(8)
    device.launch("any", ONE, ONE, (), stream)
    device.record(event, stream)
    waiter = threading.Thread(target=device.sync_event, args=(event,))
    waiter.start()
    assert runs.wait(20)
    device.fill(address, 1, 8, other)
    assert not device.query(event)
    device.free_event(device.event())
    go_on.set()
    waiter.join()
    assert device.query(event)


def test_streams_and_events_of_nobody_are_refused(simulated: Simulated) -> None:
    device = simulated()
    stream, event = device.stream(), device.event()
    device.free_stream(stream)
    device.free_event(event)
    for call in (
        lambda: device.record(device.event(), stream),
        lambda: device.record(event, 0),
        lambda: device.wait_event(0, event),
        lambda: device.wait_event(stream, device.event()),
        lambda: device.query(event),
        lambda: device.sync_event(event),
        lambda: device.sync_stream(stream),
        lambda: device.free_stream(0),
        lambda: device.fill(device.malloc(8), 0, 8, stream),
    ):
        with pytest.raises(BadInputError, match=r"there is no|can't be freed"):
            call()


def test_all_is_given_back_at_the_end() -> None:
    def counts() -> tuple[int, int]:
        maps = Path("/proc/self/maps").read_text()
        return len(list(Path("/proc/self/fd").iterdir())), maps.count("memfd:kvstore-device") + maps.count("---")

    memory = np.frombuffer(mmap.mmap(-1, PAGE), np.uint8)
    before = counts()
    device = SimulatedDevice()
    for _ in range(3):
        device.free(device.malloc(MIB))
        device.malloc(MIB)
    device.host_register(memory.ctypes.data, PAGE)
    assert counts() != before
    device.close()
    assert counts() == before


def test_a_forked_child_can_not_use_it() -> None:
    script = """
import os
from kvstore.device.simulated import SimulatedDevice
from kvstore.errors import DeviceError
device = SimulatedDevice()
address = device.malloc(8)
if os.fork() == 0:
    try:
        device.fill(address, 1, 8, 0)
    except DeviceError as error:
        device.close()
        os._exit(7 if "forked child" in str(error) else 1)
_, status = os.wait()
device.close()
raise SystemExit(os.waitstatus_to_exitcode(status))
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 7
