"""A tier of copies in a GPU's memory: on which device, how large, and what comes there."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.config.checked import check_types
from kvstore.config.units import MIB
from kvstore.errors import ConfigError

PROMOTE_HITS = 2


@dataclass(frozen=True, slots=True)
class HbmOptions:
    """Without a ``device`` there is no such tier. Raises ConfigError.

    ``capacity_bytes`` of that device's memory are the daemon's as far as it needs them. A block gets a copy there at
    its access number ``promote_hits``, its insertion included, by a client that reads HBM.
    """

    device: str = ""
    capacity_bytes: int = 0
    promote_hits: int = PROMOTE_HITS

    def __post_init__(self) -> None:
        check_types(self, "hbm.")
        if bool(self.device) != (self.capacity_bytes != 0):
            raise ConfigError(
                "an HBM tier needs both a device and a capacity: give --hbm-device and --hbm",
                ("hbm.device", "hbm.capacity_bytes"),
            )
        if self.device and self.capacity_bytes < MIB:
            raise ConfigError(
                f"an HBM tier of {self.capacity_bytes} bytes is too small: give --hbm at least 1MiB",
                ("hbm.capacity_bytes",),
            )
        if not 1 <= self.promote_hits <= 255:
            raise ConfigError(
                f"--hbm-promote-hits is {self.promote_hits}; it must be from 1 to 255 accesses", ("hbm.promote_hits",)
            )
        if not self.device and self.promote_hits != PROMOTE_HITS:
            raise ConfigError(
                "--hbm-promote-hits needs --hbm-device and --hbm: without an HBM tier it has no effect",
                ("hbm.promote_hits",),
            )

    @property
    def is_simulated(self) -> bool:
        """Whether the device is made of this machine's own memory."""
        return self.device.startswith("simulated")

    @property
    def region_bytes(self) -> int:
        """The size of what is taken of the device at a time: 64 MiB, or a sixteenth of a small tier."""
        return max(2 * MIB, min(64 * MIB, self.capacity_bytes // 16 // (2 * MIB) * 2 * MIB))
