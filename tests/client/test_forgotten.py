"""Clients that nobody closes."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import Any

import pytest

from kvstore.client import Client


@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")  # Python says the same of what is below it
def test_a_client_that_is_never_closed_is_logged(
    daemon: Any, caplog: pytest.LogCaptureFixture, wait_until: Callable[[Callable[[], bool], str], None]
) -> None:
    def events() -> list[str]:
        return [getattr(record, "event", "") for record in caplog.records]

    with caplog.at_level(logging.WARNING, "kvstore.client"):
        with Client(daemon.config.socket_path):
            pass
        forgotten = Client(daemon.config.socket_path)
        gc.collect()
        assert "client_not_closed" not in events()
        del forgotten
        gc.collect()
        wait_until(lambda: events().count("client_not_closed") == 1, "it is logged")
    assert str(daemon.config.socket_path) in caplog.text
    wait_until(lambda: not len(daemon.call(lambda running: list(running.sessions))), "the daemon lets go of it")
