"""Daemons with a holder, and a client that waits for the next one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvstore.client import Client
from tests.server.warm import Warm, patient_client, warm_daemon


@pytest.fixture
def warm() -> Iterator[Warm]:
    with warm_daemon() as made:
        yield made


@pytest.fixture
def client(warm: Warm) -> Iterator[Client]:
    with patient_client(warm) as connected:
        yield connected
