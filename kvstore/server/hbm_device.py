"""The device of an HBM tier: opened, and checked for what the tier wants of it."""

from __future__ import annotations

from kvstore.config import HbmOptions, format_size
from kvstore.device import Device, open_device
from kvstore.errors import BadInputError, ConfigError, DeviceError


def open_hbm_device(options: HbmOptions) -> Device:
    """The device of that name, to be closed by the caller. ``options`` must name one.

    Raises ConfigError where there is no such device, or it is smaller than the tier.
    """
    sizes = {"total_bytes": 2 * options.capacity_bytes} if options.is_simulated else {}
    try:
        device = open_device(options.device, **sizes)
    except (DeviceError, BadInputError) as error:
        raise ConfigError(f"--hbm-device {options.device}: {error}", ("hbm.device",)) from error
    facts = device.facts
    if options.capacity_bytes > facts.total_bytes:
        device.close()
        raise ConfigError(
            f"--hbm is {format_size(options.capacity_bytes)}; {facts.name} has {format_size(facts.total_bytes)}: lower "
            "it, and leave most of that to the engines",
            ("hbm.capacity_bytes",),
        )
    return device


def check_hbm_device(options: HbmOptions) -> None:
    """Raises what ``open_hbm_device`` raises; nothing without an HBM tier."""
    if options.device:
        open_hbm_device(options).close()
