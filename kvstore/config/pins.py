"""How much pins may hold, and how long."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.config.checked import check_types
from kvstore.config.units import format_size
from kvstore.errors import ConfigError

PIN_S_MAX = 30 * 86400.0


@dataclass(frozen=True, slots=True)
class PinOptions:
    """What pins may hold, and how long. Raises ConfigError.

    All together ``dram_bytes`` (0: a quarter of the DRAM tier), a tenant ``tenant_bytes`` of that (0: its share by
    weight among the tenants that have blocks). A pin lives for ``default_s`` if its client does not say how long, and
    never longer than ``max_s``.
    """

    dram_bytes: int = 0
    tenant_bytes: int = 0
    default_s: float = 30.0
    max_s: float = 600.0

    def __post_init__(self) -> None:
        check_types(self, "pins.")
        for name, flag in (("dram_bytes", "--pin-dram"), ("tenant_bytes", "--pin-tenant")):
            if getattr(self, name) < 0:
                raise ConfigError(
                    f"{flag} is {getattr(self, name)}; it must be a size, or 0 for the default", (f"pins.{name}",)
                )
        for name, flag in (("default_s", "--pin-default"), ("max_s", "--pin-max")):
            if not 0.01 <= getattr(self, name) <= PIN_S_MAX:
                raise ConfigError(
                    f"{flag} is {getattr(self, name)!r}; it must be from 0.01 to {PIN_S_MAX:.0f} seconds",
                    (f"pins.{name}",),
                )
        if self.default_s > self.max_s:
            raise ConfigError(
                f"--pin-default {self.default_s} is above --pin-max {self.max_s}", ("pins.default_s", "pins.max_s")
            )

    def check_fits(self, dram_bytes: int) -> None:
        """Raises ConfigError if that is more than the DRAM tier has."""
        if self.dram_bytes > dram_bytes:
            raise ConfigError(
                f"--pin-dram is {format_size(self.dram_bytes)}, more than the {format_size(dram_bytes)} of --dram: "
                "lower it",
                ("pins.dram_bytes", "dram_bytes"),
            )
        room_bytes = self.room_bytes(dram_bytes)
        if self.tenant_bytes > room_bytes:
            raise ConfigError(
                f"--pin-tenant is {format_size(self.tenant_bytes)}, more than the {format_size(room_bytes)} that all "
                "pins together may hold (--pin-dram): lower it",
                ("pins.tenant_bytes", "pins.dram_bytes"),
            )

    def room_bytes(self, dram_bytes: int) -> int:
        """What all pins together may hold of a tier of this size."""
        return self.dram_bytes or dram_bytes // 4
