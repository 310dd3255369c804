"""No test of the asyncio client leaves a thread; and what some of them look at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvstore import Client
from kvstore.client.transport import Transport
from kvstore.tiers.nvme.direct import DirectFiles
from kvstore.tiers.nvme.faults import FaultyFiles
from kvstore.wire.framing import Method
from tests.client.aio.scene import NAMESPACE, WAIT_S, content, hands, prompt


@pytest.fixture(autouse=True)
def _no_threads_left() -> Any:
    assert not hands()
    yield
    assert not hands()


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Method]:
    """What clients have sent, but for what tests ask in between."""
    found: list[Method] = []
    send = Transport.send

    def spied(self: Transport, method: Method, *arguments: Any, **more: Any) -> int:
        request_id = send(self, method, *arguments, **more)
        if method not in (Method.STATS, Method.HEARTBEAT, Method.HELLO):
            found.append(method)
        return request_id

    monkeypatch.setattr(Transport, "send", spied)
    return found


@pytest.fixture
def disk(start_daemon: Callable[..., Any], nvme: dict[str, Any]) -> Iterator[tuple[Any, FaultyFiles]]:
    """A daemon that has prompt 0 on its disk only, and that disk."""
    first = start_daemon(**nvme)
    with Client(first.config.socket_path, timeout_s=WAIT_S) as client:
        assert client.open(NAMESPACE).put(prompt(8), content(8), durable_within_s=WAIT_S).n_durable == 8
    first.stop()
    files = FaultyFiles(DirectFiles(nvme["nvme_dir"]))
    yield start_daemon(files=files, **nvme, io_timeout_s=600.0), files
    files.release_all()
