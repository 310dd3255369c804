"""What is done after events: in order, once, and whatever became of the event that was given."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from kvstore.device.simulated import SimulatedDevice
from kvstore.engine_adapter.gpu.events import AfterEvents
from kvstore.errors import BadInputError, DeviceError
from tests.engine_adapter.gpu.scene import FAR_S


class Work:
    """A stream with work on it, and an event behind that."""

    def __init__(self, device: SimulatedDevice) -> None:
        self.device = device
        self.memory, self.stream = device.malloc(4096), device.stream()

    def event(self) -> int:
        event = self.device.event()
        self.device.fill(self.memory, 1, 4096, self.stream)
        self.device.record(event, self.stream)
        return event


@pytest.fixture
def work() -> Iterator[Work]:
    device = SimulatedDevice(total_bytes=1 << 20)
    yield Work(device)
    device.close()


def ended(after: AfterEvents) -> bool:
    """Whether ``close`` returns."""
    closing = threading.Thread(target=after.close, daemon=True)
    closing.start()
    closing.join(FAR_S)
    return not closing.is_alive()


def test_an_event_may_be_freed_or_recorded_again_once_it_was_given(work: Work) -> None:
    after = AfterEvents(work.device)
    done: list[str] = []
    first, second = work.event(), work.event()
    go = threading.Event()
    after.do(work.event(), lambda: done.append(str(go.wait(FAR_S))))
    after.do(first, lambda: done.append("first"))
    after.do(second, lambda: done.append("second"))
    work.device.free_event(first)
    work.device.record(second, work.stream)
    go.set()
    assert ended(after)
    assert done == ["True", "first", "second"]
    assert not after._lost


def test_what_is_no_event_is_refused_and_holds_nobody_up(work: Work) -> None:
    after = AfterEvents(work.device)
    done: list[str] = []
    freed = work.event()
    work.device.free_event(freed)
    with pytest.raises(BadInputError):
        after.do(freed, lambda: done.append("freed"))
    after.do(work.event(), lambda: done.append("another"))
    assert ended(after)
    assert done == ["another"]


def test_what_fails_is_logged_and_the_next_is_done(work: Work, caplog: pytest.LogCaptureFixture) -> None:
    after = AfterEvents(work.device)
    done: list[str] = []

    def fail() -> None:
        raise ZeroDivisionError

    after.do(work.event(), fail)
    after.do(work.event(), lambda: done.append("second"))
    assert ended(after)
    assert done == ["second"]
    assert [record.__dict__["event"] for record in caplog.records] == ["after_event_failed"]


def test_a_device_that_failed_ends_what_waits(caplog: pytest.LogCaptureFixture) -> None:
    def broken(*_: object) -> None:
        raise DeviceError("an illegal address was met")

    device = SimulatedDevice(total_bytes=1 << 20, launcher=broken)
    after = AfterEvents(device)
    event, stream = device.event(), device.stream()
    device.launch("any", (1, 1, 1), (1, 1, 1), (), stream)
    device.record(event, stream)
    done: list[str] = []
    after.do(event, lambda: done.append("never"))
    assert ended(after)
    assert not done
    assert {record.__dict__["event"] for record in caplog.records} == {"device_failed"}


def test_it_is_used_again_after_it_was_closed(work: Work) -> None:
    after = AfterEvents(work.device)
    done: list[int] = []
    for i in range(3):
        after.do(work.event(), lambda i=i: done.append(i))  # type: ignore[misc]
        after.close()
    assert done == [0, 1, 2]
