"""Devices by name."""

from __future__ import annotations

import pytest

from kvstore.device import open_device
from kvstore.errors import BadInputError


def test_a_simulated_device_takes_a_number_and_options() -> None:
    for name, ordinal in (("simulated", 0), ("simulated:3", 3)):
        device = open_device(name, total_bytes=5000)
        assert device.facts.ordinal == ordinal
        assert device.facts.uuid == f"simulated-{ordinal}"
        assert device.facts.total_bytes == 5000
        device.close()


@pytest.mark.parametrize("name", ["", "gpu", "cuda:", "cuda:-1", "cuda:x", "cuda:1:2", "CUDA", "simulated:\u0663"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(BadInputError, match="there is no device"):
        open_device(name)


def test_options_that_it_does_not_have_are_refused() -> None:
    with pytest.raises(BadInputError, match="total_bytes"):
        open_device("cuda", total_bytes=1)
    with pytest.raises(BadInputError, match="bandwidth"):
        open_device("simulated", bandwidth=1)
