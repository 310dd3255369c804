"""Memory of the simulated device in two real processes, and their ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from kvstore.device.simulated import SimulatedDevice
from kvstore.device.simulated_ipc import Handle
from kvstore.errors import BadInputError, DeviceError
from tests.device.memory import MIB, read_back
from tests.device.processes import Child


@pytest.fixture
def child() -> Iterator[Child]:
    started = Child("simulated")
    yield started
    started.end(kill=True)


@pytest.mark.parametrize("how", ["freed", "closed", "killed"])
def test_opened_memory_outlives_its_maker(simulated: Callable[..., SimulatedDevice], child: Child, how: str) -> None:
    device = simulated()
    handle = bytes.fromhex(child.say(f"export 7 {MIB}"))
    address = device.ipc_open(handle)
    if how == "freed":
        assert child.say("free") == "freed"
    else:
        child.end(kill=how == "killed")
    assert set(read_back(device, address, MIB).tolist()) == {7}
    device.ipc_close(address)
    with pytest.raises(DeviceError, match=r"freed|gone"):
        device.ipc_open(handle)


def test_a_handle_never_opens_the_memory_that_came_after(
    simulated: Callable[..., SimulatedDevice], child: Child
) -> None:
    device = simulated()
    old = bytes.fromhex(child.say(f"export 7 {MIB}"))
    assert child.say("free") == "freed"
    new = bytes.fromhex(child.say(f"export 8 {MIB}"))
    assert Handle.unpack(old).fd == Handle.unpack(new).fd
    with pytest.raises(DeviceError, match="was freed since"):
        device.ipc_open(old)
    assert set(read_back(device, device.ipc_open(new), MIB).tolist()) == {8}


def test_a_changed_handle_is_refused(simulated: Callable[..., SimulatedDevice], child: Child) -> None:
    device = simulated()
    good = Handle.unpack(bytes.fromhex(child.say(f"export 7 {MIB}")))
    more = Handle(good.pid, good.fd, good.size_bytes + 1, good.offset_bytes, good.nonce)
    guessed = Handle(good.pid, good.fd, good.size_bytes, good.offset_bytes, bytes(16))
    not_ours = Handle(good.pid, 1, good.size_bytes, good.offset_bytes, good.nonce)
    none = Handle(good.pid, good.fd, 0, good.offset_bytes, good.nonce)
    for handle in (more, guessed, not_ours, none):
        with pytest.raises((BadInputError, DeviceError)):
            device.ipc_open(handle.pack())
    with pytest.raises(BadInputError, match="no IPC handle"):
        device.ipc_open(bytes(64))
    assert device.ipc_open(good.pack())
