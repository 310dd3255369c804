"""Opening a device by name, and saying what is there."""

from __future__ import annotations

import inspect
from typing import Any

from kvstore.device.seam import Device
from kvstore.errors import BadInputError


def open_device(name: str, **options: Any) -> Device:
    """The device called ``simulated``, ``simulated:1``, ``cuda`` or ``cuda:1``; without a number, number 0.

    Options are those of ``SimulatedDevice`` (``total_bytes``, ``seed``, ...); a GPU has none. Raises BadInputError
    for another name or option, DeviceError that says what is missing where there is no such GPU.
    """
    kind, colon, number = name.partition(":")
    if kind not in ("simulated", "cuda") or (colon and not (number.isascii() and number.isdigit())):
        raise BadInputError(f"there is no device {name!r}; name 'simulated', 'cuda', or 'cuda:1' for the second GPU")
    ordinal = int(number or 0)
    if kind == "simulated":
        from kvstore.device.simulated import SimulatedDevice

        known = inspect.signature(SimulatedDevice).parameters.keys() - {"ordinal"}
        if unknown := options.keys() - known:
            raise BadInputError(
                f"a simulated device has no option {', '.join(sorted(unknown))}; it has {', '.join(sorted(known))}"
            )
        return SimulatedDevice(ordinal, **options)
    if options:
        raise BadInputError(f"a GPU takes no options, and {', '.join(sorted(options))} was given")
    from kvstore.device.cuda import CudaDevice

    return CudaDevice(ordinal)
