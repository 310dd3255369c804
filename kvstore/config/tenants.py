"""What each tenant may have: its weight, the least and the most of a tier."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from kvstore.config.checked import check_types
from kvstore.config.units import format_size, parse_size
from kvstore.errors import ConfigError

SHARES = ("fair", "none")
EVERYBODY = "*"
"""In a table: every tenant that is not named there."""
WEIGHT_MIN, WEIGHT_MAX = 1e-3, 1e6

_FLAGS = {
    "weights": "--tenant-weights",
    "dram_min": "--tenant-dram-min",
    "dram_max": "--tenant-dram-max",
    "nvme_min": "--tenant-nvme-min",
    "nvme_max": "--tenant-nvme-max",
}

ValueT = TypeVar("ValueT", int, float)


@dataclass(frozen=True, slots=True)
class TenantOptions:
    """How tenants share the tiers. Raises ConfigError for what can't work.

    ``shares`` is ``"fair"``: a tenant that holds more than its share of a tier gives up blocks before one that does
    not; or ``"none"``: the policy alone decides. The others are tables in one text, ``"a=2, b=1"``, where ``*`` stands
    for every tenant that is not named. ``weights``: of a tenant among those that have blocks, 1 if it has none.
    ``dram_min``, ``nvme_min``: sizes below which nothing of a tenant goes for another's sake; ``dram_max``,
    ``nvme_max``: the most that it may have.
    """

    shares: str = "fair"
    weights: str = ""
    dram_min: str = ""
    dram_max: str = ""
    nvme_min: str = ""
    nvme_max: str = ""

    def __post_init__(self) -> None:
        check_types(self, "tenants.")
        if self.shares not in SHARES:
            raise ConfigError(f"--tenant-shares is {self.shares!r}; known are {', '.join(SHARES)}", ("tenants.shares",))
        self.weight_of()
        for tier in ("dram", "nvme"):
            least, most = self.least(tier), self.most(tier)
            for tenant in sorted(least.keys() | most.keys()):
                low, high = _value(least, tenant, 0), _value(most, tenant, math.inf)
                if low > high:
                    raise ConfigError(
                        f"tenant {tenant!r} is to have {format_size(low)} of {tier} at least and "
                        f"{format_size(high)} at most: lower {_FLAGS[f'{tier}_min']} or raise {_FLAGS[f'{tier}_max']}",
                        (f"tenants.{tier}_min", f"tenants.{tier}_max"),
                    )
        if self.shares == "none" and (
            idle := [name for name in ("weights", "dram_min", "nvme_min") if self._given(name)]
        ):
            raise ConfigError(
                f"{_FLAGS[idle[0]]} needs --tenant-shares fair: without shares it has no effect",
                (f"tenants.{idle[0]}", "tenants.shares"),
            )

    def check_fits(self, dram_bytes: int, nvme_bytes: int) -> None:
        """Raises ConfigError if what tenants are promised is more than a tier has, or of a tier that is not there."""
        for tier, capacity_bytes in (("dram", dram_bytes), ("nvme", nvme_bytes)):
            for field in (f"{tier}_min", f"{tier}_max"):
                if self._given(field) and not capacity_bytes:
                    raise ConfigError(
                        f"{_FLAGS[field]} needs --nvme-dir and --nvme: without an NVMe tier it has no effect",
                        (f"tenants.{field}",),
                    )
            promised_bytes = sum(self.least(tier).values())
            if promised_bytes > capacity_bytes:
                raise ConfigError(
                    f"{_FLAGS[f'{tier}_min']} promises {format_size(promised_bytes)} of a tier that has "
                    f"{format_size(capacity_bytes)}: promise less",
                    (f"tenants.{tier}_min", f"{tier}_bytes"),
                )

    def weight_of(self) -> dict[str, float]:
        """Weights by tenant."""
        return _table(self.weights, "weights", _weight)

    def least(self, tier: str) -> dict[str, int]:
        """Bytes that are guaranteed, by tenant; ``tier`` is ``"dram"`` or ``"nvme"``, as for ``most``."""
        return _table(getattr(self, f"{tier}_min"), f"{tier}_min", parse_size)

    def most(self, tier: str) -> dict[str, int]:
        """The most bytes, by tenant."""
        return _table(getattr(self, f"{tier}_max"), f"{tier}_max", parse_size)

    def _given(self, name: str) -> bool:
        return bool(getattr(self, name))


def write_table(given: Any) -> Any:
    """A table of a file as the one text that options have it in; anything else as it is, for others to judge."""
    if isinstance(given, Mapping) and all(isinstance(value, int | float | str) for value in given.values()):
        return ", ".join(f"{tenant}={value}" for tenant, value in given.items())
    return given


def table_names(text: str, field: str) -> set[str]:
    """The tenants that a table names. ``field``: which of ``TenantOptions``. Raises ConfigError for no table."""
    return set(_table(text, field, lambda _: 0))


def _table(text: str, field: str, read: Callable[[str], ValueT]) -> dict[str, ValueT]:
    found: dict[str, ValueT] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        tenant, equals, value = (part.strip() for part in entry.rpartition("="))
        if not equals or not tenant:
            raise ConfigError(
                f"{_FLAGS[field]} has {entry!r:.80}; write tenant=value, several after commas, * for all others",
                (f"tenants.{field}",),
            )
        if tenant in found:
            raise ConfigError(
                f"{_FLAGS[field]} names tenant {tenant!r:.80} twice: leave one out", (f"tenants.{field}",)
            )
        try:
            found[tenant] = read(value)
        except ConfigError as error:
            raise ConfigError(f"{_FLAGS[field]}, tenant {tenant!r:.80}: {error}", (f"tenants.{field}",)) from None
    return found


def _weight(text: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not WEIGHT_MIN <= weight <= WEIGHT_MAX:
        raise ConfigError(f"{text!r:.80} is no weight; give a number from {WEIGHT_MIN:g} to {WEIGHT_MAX:g}")
    return weight


def _value(table: Mapping[str, ValueT], tenant: str, default: float) -> float:
    return table.get(tenant, table.get(EVERYBODY, default))
