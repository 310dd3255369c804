"""Slow work that the store hands out: disk reads, disk writes, names, copies to a GPU.

A job is made on the store's thread. ``run`` may then be called once on any other thread: it blocks, never
raises and touches no table. ``done`` is called afterwards on the store's thread again and takes the result
in. Whoever drives the store decides about threads; a test runs jobs one by one, in any order it likes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class Lane(StrEnum):
    """Which workers run a job. Jobs of the catalog's and of the device's lane must run one at a time and in order."""

    READ = "read"
    WRITE = "write"
    CATALOG = "catalog"
    DEVICE = "device"


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """One piece of work. ``n_bytes`` is what it moves."""

    lane: Lane
    run: Callable[[], None]
    done: Callable[[], None]
    n_bytes: int = 0


Jobs = deque[Job]
"""Jobs that wait to be run, in order."""
