"""Kernels are run on the simulated device, and on a GPU where there is one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from kvstore.device.choose import open_device
from kvstore.errors import DeviceError
from tests.device.kernels.arena import Arena


@pytest.fixture(scope="module", params=["simulated", "cuda"])
def arena(request: pytest.FixtureRequest) -> Iterator[Arena]:
    try:
        device = open_device(request.param)
    except DeviceError as error:
        pytest.skip(str(error))
    if request.param == "simulated" and shutil.which("g++") is None:
        pytest.skip("g++ is missing: kernels can't be compiled for the CPU")
    made = Arena(device)
    yield made
    made.close()
