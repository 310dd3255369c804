"""Sizes and durations as people write them."""

from __future__ import annotations

import re
from fractions import Fraction

from kvstore.errors import ConfigError

PAGE_BYTES = 4096
MIB = 1 << 20
GIB = 1 << 30

_SIZE_UNITS = {
    "": 1, "b": 1,
    "k": 1 << 10, "kib": 1 << 10, "kb": 1000,
    "m": 1 << 20, "mib": 1 << 20, "mb": 1000**2,
    "g": 1 << 30, "gib": 1 << 30, "gb": 1000**3,
    "t": 1 << 40, "tib": 1 << 40, "tb": 1000**4,
}  # fmt: skip
_DURATION_UNITS = {
    "us": Fraction(1, 1_000_000), "ms": Fraction(1, 1000), "s": Fraction(1),
    "m": Fraction(60), "min": Fraction(60), "h": Fraction(3600), "d": Fraction(86400),
}  # fmt: skip
_AMOUNT = re.compile(r"\s*([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_size(text: str | int) -> int:
    """Bytes of a size such as ``64KiB``, ``1.5GiB``, ``2GB`` or ``4096``; raises ConfigError."""
    match = _AMOUNT.fullmatch(str(text))
    unit = match and match[2].lower()
    if match is None or unit not in _SIZE_UNITS:
        raise ConfigError(f"{text!r:.80} is not a size; write for example 4096, 64KiB, 1.5GiB or 2GB")
    return int(Fraction(match[1]) * _SIZE_UNITS[unit])


def format_size(size_bytes: float) -> str:
    """A size for people, in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size_bytes) < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"


def parse_duration(text: str | float, bare_unit: str = "s") -> float:
    """Seconds of a duration such as ``30s``, ``5m``, ``250ms`` or ``1.5h``; a bare number is in ``bare_unit``.

    Raises ConfigError.
    """
    match = _AMOUNT.fullmatch(str(text))
    unit = match and (match[2].lower() or bare_unit)
    if match is None or unit not in _DURATION_UNITS:
        raise ConfigError(f"{text!r:.80} is not a duration; write for example 250ms, 30s, 5m or 1.5h")
    return float(Fraction(match[1]) * _DURATION_UNITS[unit])
