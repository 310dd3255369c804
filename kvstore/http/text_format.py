"""The two text formats that Prometheus reads, written from samples whose names and labels are text already.

``prometheus_client`` checks every name and label of every page: eleven of the fifteen milliseconds that a page of 40 kB
took, during which the daemon's loop has to share the interpreter.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from functools import lru_cache
from math import inf
from typing import NamedTuple

from kvstore.http.exports import COUNTER, GAUGE

HISTOGRAM, INFO = "histogram", "info"
FAMILIES_AT_ONCE = 8
"""Then the interpreter is let go of: whoever waits for it does so for some dozens of microseconds, not for the page."""


class Family(NamedTuple):
    """One metric: its name without ``_total`` or ``_info``; of each sample what stands before the value, and that."""

    name: str
    kind: str
    help: str
    samples: Iterable[tuple[str, float]]


def write(families: Iterable[Family], *, openmetrics: bool) -> bytes:
    """The page. Lets go of Python's lock now and then."""
    parts: list[str] = []
    for i, family in enumerate(families):
        parts.append(_head(family.name, family.kind, family.help, openmetrics))
        parts += [f"{before} {number(value)}\n" for before, value in family.samples]
        if i % FAMILIES_AT_ONCE == 0:
            time.sleep(0)
    if openmetrics:
        parts.append("# EOF\n")
    return "".join(parts).encode()


def labelled(sample: str, labels: Mapping[str, str]) -> str:
    """What stands before a value: the name of a sample and its labels."""
    if not labels:
        return sample
    pairs = [f'{name}="{_escaped(value)}"' for name, value in labels.items()]
    return f"{sample}{{{','.join(pairs)}}}"


def number(value: float) -> str:
    """A value as both formats have it."""
    if value != value:
        return "NaN"
    return repr(float(value)) if abs(value) != inf else f"{'+' if value > 0 else '-'}Inf"


@lru_cache(maxsize=1024)
def _head(name: str, kind: str, help_: str, openmetrics: bool) -> str:
    if openmetrics:
        return f"# HELP {name} {_escaped(help_)}\n# TYPE {name} {kind}\n"
    name += {COUNTER: "_total", INFO: "_info"}.get(kind, "")
    told = help_.replace("\\", r"\\").replace("\n", r"\n")
    return f"# HELP {name} {told}\n# TYPE {name} {GAUGE if kind == INFO else kind}\n"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
