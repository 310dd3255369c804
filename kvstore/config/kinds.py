"""The kinds of values a setting can have: how each is written, checked and shown."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvstore.config.tenants import write_table
from kvstore.config.units import parse_duration, parse_size
from kvstore.errors import ConfigError

NONE = "none"
"""How a path or an address that a layer below has set is taken back."""

_SIZE_STEPS = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
_DURATION_STEPS = (("h", 3600.0), ("m", 60.0), ("s", 1.0), ("ms", 1e-3), ("us", 1e-6))


@dataclass(frozen=True, slots=True)
class Kind:
    """``read`` makes the value of what stands in a file, a variable or a flag, before ``type`` checks it strictly.

    ``write`` is the way back, as a TOML value. ``expects`` says what to write.
    """

    metavar: str
    expects: str
    type: Any
    read: Callable[[Any], Any]
    write: Callable[[Any], str]
    choices: Sequence[str] = ()


def _size(given: Any) -> Any:
    return parse_size(given) if isinstance(given, int | str) and not isinstance(given, bool) else given


def _write_size(size_bytes: int) -> str:
    for unit, step in _SIZE_STEPS:
        if size_bytes and size_bytes % step == 0:
            return f'"{size_bytes // step}{unit}"'
    return str(size_bytes)


def _duration(bare_unit: str, unit_s: float) -> Callable[[Any], Any]:
    def read(given: Any) -> Any:
        if isinstance(given, bool) or not isinstance(given, int | float | str):
            return given
        try:
            return round(parse_duration(given, bare_unit) / unit_s, 9)
        except ConfigError:
            # Whether a number makes sense is for the rules to say: -1, nan.
            try:
                return float(given)
            except ValueError:
                pass
            raise

    return read


def _write_duration(unit_s: float) -> Callable[[float], str]:
    def write(value: float) -> str:
        seconds = value * unit_s
        for unit, step in _DURATION_STEPS:
            if seconds >= step * (1 - 1e-12) and (n := round(seconds / step)) and abs(n * step - seconds) < 1e-9:
                return f'"{n}{unit}"'
        return f'"{value:g}{"s" if unit_s == 1 else "us"}"'

    return write


def _path(given: Any) -> Any:
    if not isinstance(given, str):
        return given
    return None if given == NONE else Path(given)


def _write_path(path: Path | None) -> str:
    return _write_text(NONE if path is None else str(path))


def _address(given: Any) -> Any:
    return "" if given == NONE else given


def _write_text(text: str) -> str:
    # What JSON escapes TOML escapes alike.
    return json.dumps(text, ensure_ascii=False)


SIZE = Kind("SIZE", 'a size such as "64KiB", "1.5GiB", or bytes', int, _size, _write_size)
SECONDS = Kind(
    "DURATION", 'a duration such as "250ms", "30s", "5m", or seconds', float, _duration("s", 1.0), _write_duration(1.0)
)
MICROSECONDS = Kind(
    "DURATION", 'a duration such as "200us", or microseconds', float, _duration("us", 1e-6), _write_duration(1e-6)
)
COUNT = Kind("N", "a whole number", int, lambda given: given, str)
SWITCH = Kind("", "true or false", bool, lambda given: given, lambda value: str(value).lower())
PATH = Kind("PATH", f'a path in quotes, or "{NONE}"', Path | None, _path, _write_path)
ADDRESS = Kind("ADDRESS", f'an address in quotes, or "{NONE}"', str, _address, lambda text: _write_text(text or NONE))
TABLE = Kind("TABLE", 'a table {a = ..., b = ...}, or "a=..., b=..." in quotes', str, write_table, _write_text)
TEXT = Kind("TEXT", "a text in quotes", str, lambda given: given, _write_text)


NODE = Kind(
    "[auto|off|N]", 'auto, off, or the number of a node', str,
    lambda given: str(given) if isinstance(given, int) and not isinstance(given, bool) else given, _write_text,
)  # fmt: skip


def choice(choices: Sequence[str]) -> Kind:
    """One of some words."""
    words = "|".join(choices)
    expects = "one of " + ", ".join(choices)
    return Kind(f"[{words}]", expects, Literal[tuple(choices)], lambda given: given, _write_text, tuple(choices))
