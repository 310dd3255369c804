"""Whether options have values of the types that their fields say; rules about values come after that."""

from __future__ import annotations

from dataclasses import MISSING, fields
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from kvstore.errors import ConfigError

_EXPECTED: dict[str, tuple[tuple[type, ...], str]] = {
    "int": ((Integral,), "a whole number"),
    "float": ((Real,), "a number"),
    "bool": ((bool,), "True or False"),
    "str": ((str,), "a text"),
    "Path | None": ((Path, type(None)), "a pathlib.Path or None"),
}
"""By a field's annotation: what its values are instances of, and that in words."""


def check_types(options: Any, prefix: str = "") -> None:
    """Raises ConfigError for the first field of a dataclass whose value is of another type.

    ``prefix`` is what the names of settings begin with, such as ``grpc.``.
    """
    for each in fields(options):
        value = getattr(options, each.name)
        kinds: tuple[type, ...]
        if each.default_factory is not MISSING:
            kinds, words = (type(each.default_factory()),), f"{each.type}(...)"
        else:
            kinds, words = _EXPECTED[str(each.type)]
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise ConfigError(f"{each.name} is {value!r:.80}; it must be {words}", (prefix + each.name,))
