"""Devices for tests: a simulated one always, a GPU where there is one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from kvstore.device import Device, open_device
from kvstore.device.simulated import SimulatedDevice
from kvstore.errors import DeviceError


@pytest.fixture(params=["simulated", "cuda"])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """One of each kind; the GPU's tests are skipped where there is none."""
    try:
        opened = open_device(request.param, **({"total_bytes": 64 << 20} if request.param == "simulated" else {}))
    except DeviceError as error:
        if request.param == "simulated":
            raise
        pytest.skip(str(error))
    yield opened
    opened.close()


@pytest.fixture
def simulated() -> Iterator[Callable[..., SimulatedDevice]]:
    """``simulated(**options)``; all are closed at the end."""
    with ExitStack() as stack:

        def start(**options: object) -> SimulatedDevice:
            started = SimulatedDevice(**options)  # type: ignore[arg-type]
            stack.callback(started.close)
            return started

        yield start


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)
