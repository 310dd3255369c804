"""Regions registered in the background: what is used meanwhile, what is refused, what goes away in which order."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvstore.client import Client
from kvstore.clock import ManualClock
from kvstore.device.simulated import SimulatedDevice
from kvstore.engine_adapter.counters import SharedCounters
from kvstore.engine_adapter.gpu.choice import Route
from kvstore.engine_adapter.gpu.pinned_regions import RETRY_S, PinnedRegions
from kvstore.errors import DeviceError, DeviceMemoryError
from kvstore.native import Mapping
from kvstore.types import KVSpec, Namespace
from tests.engine_adapter.gpu.scene import FAR_S, Scene, far, one, region, scene

WaitUntil = Callable[[Callable[[], bool], str], None]


def span(mapping: Mapping) -> tuple[Any, Any]:
    return np.array([mapping.address], np.uint64), np.array([mapping.length_bytes], np.uint64)


class SlowDevice(SimulatedDevice):
    """One whose registrations stand still until ``go``."""

    def __init__(self) -> None:
        super().__init__(total_bytes=1 << 20)
        self.go, self.order = threading.Event(), list[int]()

    def host_register(self, address: int, size_bytes: int, *, read_only: bool = False) -> int:
        assert self.go.wait(FAR_S)
        self.order.append(address)
        return super().host_register(address, size_bytes, read_only=read_only)


def test_what_is_not_registered_yet_is_copied_meanwhile_and_waited_for_by_who_must(wait_until: WaitUntil) -> None:
    device = SlowDevice()
    pinned = PinnedRegions(device, SharedCounters())
    regions = [region(4096) for _ in range(4)]
    for each in regions:
        pinned.mapped(each)
    with pinned.use(*span(regions[3])) as use:
        assert use.mapped.tolist() == [0]
    waiter = threading.Thread(target=lambda: pinned.use_all(*span(regions[3]), far()).end())
    waiter.start()
    wait_until(lambda: pinned._to_register[0].mapping is regions[3], "what is waited for comes first")
    device.go.set()
    waiter.join(FAR_S)
    pinned.use_all(np.concatenate([span(each)[0] for each in regions]), np.full(4, 4096, np.uint64), far()).end()
    # The first was under way already.
    assert device.order[:2] == [regions[0].address, regions[3].address]
    assert pinned.registered_bytes == 4 * 4096
    pinned.close()
    device.close()


def test_who_waits_gives_up_at_the_deadline() -> None:
    device = SlowDevice()
    pinned = PinnedRegions(device, SharedCounters())
    mapping = region(4096)
    pinned.mapped(mapping)
    with pytest.raises(DeviceError, match="1 of 1 blocks can't be read by the device in place: their memory is not"):
        pinned.use_all(*span(mapping), time.monotonic() + 0.01)
    device.go.set()
    pinned.close()
    device.close()


def test_addresses_are_the_devices_own_and_what_reaches_out_of_a_region_has_none(on_device: Scene) -> None:
    mapping = on_device.registered(region(8192))
    start = np.uint64(mapping.address)
    addresses = start + np.array([0, 100, 8191, 8192, 2**64 - 1], np.uint64)
    with on_device.pinned.use(addresses, np.array([8192, 50, 2, 1, 1], np.uint64)) as use:
        assert use.mapped[1] == use.mapped[0] + 100
        assert use.mapped[0] != start, "kernels see it elsewhere"
        assert use.mapped[2:].tolist() == [0, 0, 0]
        assert use.regions.tolist() == [0, 0, -1, -1, -1]
        assert not use.whole


def test_a_region_in_use_is_unregistered_when_it_is_not(on_device: Scene, wait_until: WaitUntil) -> None:
    mapping = on_device.registered(region(4096))
    use = on_device.pinned.use(*span(mapping))
    on_device.pinned.leaving(mapping)
    on_device.pinned.let_go()  # of all that are not in use
    assert on_device.device._memory.reach(*span(mapping), write=False), "it is registered still"
    with on_device.pinned.use(*span(mapping)) as later:
        assert not later.whole, "nobody new gets it"
    gone = weakref.ref(mapping)
    del mapping
    assert gone() is not None
    use.end()
    wait_until(lambda: gone() is None, "it is let go of")


def test_memory_that_is_unmapped_while_it_is_registered_is_caught(on_device: Scene, wait_until: WaitUntil) -> None:
    """The planted bug: a region is forgotten without being unregistered, so that it is unmapped under the device."""
    mapping = on_device.registered(region(4096))
    there = on_device.device.malloc(4096)
    moves = on_device.reader(Route.DIRECT).begin()
    moves.copy(one(there, mapping.address, 4096))
    held = on_device.pinned._regions.pop(mapping.address)
    on_device.pinned._make_table()
    del held, mapping
    assert "was unmapped while it was registered" in moves.finish()


def test_read_only_memory_is_refused_where_the_device_can_not(client: Client) -> None:
    with scene(can_register_read_only=False) as made:
        client.watch_mappings(made.pinned)
        cache = client.open(Namespace("m", KVSpec.opaque(16, 8192)))
        tokens = np.arange(32)
        blocks = np.random.default_rng(1).integers(0, 256, (2, 8192), dtype=np.uint8)
        assert cache.put(tokens, blocks).n_stored == 2
        with Client(client._session._link.address, timeout_s=5.0) as reader:
            reader.watch_mappings(made.pinned)
            lease = reader.open(cache.namespace).lease(tokens)
            assert made.counters.snapshot()["pin_refused_regions"] == 1
            with pytest.raises(DeviceError, match="can't register memory that is mapped read-only"):
                made.pinned.use_all(lease.addresses, np.full(2, 8192, np.uint64), far())
            moves = made.reader(Route.DIRECT).begin()
            moves.hold(lease)
            there = made.device.malloc(2 * 8192)
            for i, address in enumerate(lease.addresses.tolist()):
                moves.copy(one(there + i * 8192, address, 8192))
            assert moves.finish() == ""
            lease.release()
        assert (made.download(there, 2 * 8192) == blocks.reshape(-1)).all()
        counts = made.counters.snapshot()
        assert counts["load_bounced_bytes"] == 2 * 8192
        client.unwatch_mappings(made.pinned)


def test_a_refusal_of_the_device_is_counted_and_said_once_a_region(
    on_device: Scene, caplog: pytest.LogCaptureFixture, wait_until: WaitUntil
) -> None:
    mapping = on_device.registered(region(8192))
    twice = weakref.proxy(mapping)

    class Overlapping:
        address, length_bytes, writable = twice.address + 4096, 4096, True

    on_device.pinned.mapped(Overlapping())  # type: ignore[arg-type]
    wait_until(lambda: on_device.counters.snapshot().get("pin_refused_regions") == 1, "it is counted")
    assert [record.__dict__["event"] for record in caplog.records] == ["pin_refused"]


class RefusingDevice(SimulatedDevice):
    """Registers nothing while it has ``no_memory``."""

    no_memory = True

    def host_register(self, address: int, size_bytes: int, *, read_only: bool = False) -> int:
        if self.no_memory:
            raise DeviceMemoryError("the host has no more memory that can be pinned")
        return super().host_register(address, size_bytes, read_only=read_only)


def test_what_was_refused_is_tried_again_after_a_while(wait_until: WaitUntil) -> None:
    device, clock, counters = RefusingDevice(), ManualClock(), SharedCounters()
    pinned = PinnedRegions(device, counters, clock)
    mapping, leaving = region(4096), region(4096)
    for each in (mapping, leaving):
        pinned.mapped(each)
        with pytest.raises(DeviceError, match="no more memory that can be pinned"):
            pinned.use_all(*span(each), far())
    device.no_memory = False
    clock.advance(RETRY_S - 0.1)
    with pytest.raises(DeviceError, match="no more memory that can be pinned"):
        pinned.use_all(*span(mapping), far())
    clock.advance(0.1)
    gone = weakref.ref(leaving)
    pinned.leaving(leaving)
    del leaving, each
    wait_until(lambda: gone() is None, "nothing keeps what is to be tried again")
    pinned.use(*span(mapping)).end()  # whoever asks first brings it about, and does not wait
    pinned.use_all(*span(mapping), far()).end()
    assert pinned.registered_bytes == 4096
    assert counters.snapshot()["pin_refused_regions"] == 2
    pinned.close()
    device.close()


def test_a_client_that_is_closed_says_goodbye_with_nothing_mapped(on_device: Scene, daemon: Any) -> None:
    client = Client(daemon.config.socket_path, timeout_s=5.0)
    client.watch_mappings(on_device.pinned)
    cache = client.open(Namespace("m", KVSpec.opaque(16, 8192)))
    assert cache.put(np.arange(32), np.zeros((2, 8192), np.uint8)).n_stored == 2
    with cache.lease(np.arange(32)) as lease:
        on_device.pinned.use_all(lease.addresses, np.full(2, 8192, np.uint64), far()).end()
    client.close()
    assert on_device.pinned.registered_bytes == 0
    with Client(daemon.config.socket_path, timeout_s=5.0) as other:
        stats = other.stats()
        assert (stats["sessions"], stats["sessions_lingering"]) == (1, 0)
