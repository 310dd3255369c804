"""Blocks of leases in HBM: until when their addresses may be read, and who keeps them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvstore.client import Client, NamespaceHandle
from kvstore.device.pinned import PinnedBuffer
from kvstore.device.simulated import SimulatedDevice
from kvstore.errors import BadInputError, EndedError
from tests.client.hbm_scene import HBM, N, WaitUntil, churn, content, opened, promoted, prompt
from tests.conftest import DaemonThread

Start = Callable[..., DaemonThread]


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    made = SimulatedDevice(total_bytes=16 << 20)
    yield made
    made.close()


@pytest.fixture
def daemon(start_daemon: Start) -> DaemonThread:
    return start_daemon(hbm=HBM)


@pytest.fixture
def cache(daemon: DaemonThread, device: SimulatedDevice) -> Iterator[NamespaceHandle]:
    with Client(daemon.config.socket_path, timeout_s=5.0) as client:
        client.use_hbm(device)
        yield opened(client)


def read(device: SimulatedDevice, addresses: Any) -> list[bytes]:
    """What lies there now."""
    stream, found = device.stream(), []
    with PinnedBuffer(device, content(1).shape[1]) as buffer:
        for address in addresses.tolist():
            device.copy(buffer.address, address, buffer.size_bytes, stream)
            device.sync_stream(stream)
            found.append(buffer.array.tobytes())
    return found


def test_addresses_end_with_the_right_to_read_them(cache: NamespaceHandle, wait_until: WaitUntil) -> None:
    lease = promoted(cache, 1, wait_until)
    assert len(lease.hbm.addresses) == N
    lease.release()
    with pytest.raises(EndedError, match="it was released"):
        _ = lease.hbm.addresses
    with pytest.raises(EndedError):
        lease.hold_hbm()


def test_a_lease_that_nobody_has_any_more_gives_no_addresses(cache: NamespaceHandle, wait_until: WaitUntil) -> None:
    hbm = promoted(cache, 1, wait_until).hbm
    gc.collect()
    with pytest.raises(EndedError, match="keep it"):
        _ = hbm.addresses


def test_what_is_lent_to_a_device_can_not_be_released(cache: NamespaceHandle, wait_until: WaitUntil) -> None:
    lease = promoted(cache, 1, wait_until)
    loan = lease.lend([lease.hold_hbm()])
    with pytest.raises(BadInputError, match="still read from"):
        lease.release()
    loan.end()
    lease.release()


def test_what_is_held_stays_as_it_is_after_the_lease(
    cache: NamespaceHandle, device: SimulatedDevice, wait_until: WaitUntil
) -> None:
    lease = promoted(cache, 1, wait_until)
    held = lease.hold_hbm()
    lease.release()
    churn(cache, wait_until)
    assert read(device, held.addresses) == [row.tobytes() for row in content(1)]
    assert held.vouched()
    del held
    churn(cache, wait_until)
    promoted(cache, 2, wait_until).release()


def test_what_is_held_does_not_count_once_the_daemon_is_gone(
    cache: NamespaceHandle, daemon: DaemonThread, wait_until: WaitUntil
) -> None:
    """Its memory ended with it: on a GPU nobody knows what is read there."""
    held = promoted(cache, 1, wait_until).hold_hbm()
    assert held.vouched()
    daemon.stop()
    assert not held.vouched()


def test_explain_says_what_is_in_hbm(cache: NamespaceHandle, wait_until: WaitUntil) -> None:
    cache.put(prompt(3), content(3))
    assert cache.explain(prompt(3)).n_hbm_blocks == 0
    promoted(cache, 1, wait_until).release()
    told = cache.explain(prompt(1))
    assert (told.n_blocks, told.n_dram_blocks, told.n_hbm_blocks) == (N, N, N)
    assert any(f"{N} of all have a copy in HBM" in line for line in told.lines)
