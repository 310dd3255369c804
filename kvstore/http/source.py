"""What the HTTP server asks a daemon for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from kvstore.metrics import Distribution


class Phase(StrEnum):
    """Where a daemon is in its life."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class Pulse:
    """What can be told of a daemon from any thread at any time. ``seen_s_ago``: when its loop last went round."""

    phase: Phase
    seen_s_ago: float
    stall_s: float

    @property
    def stuck(self) -> bool:
        """The loop does not go round. While the daemon starts it may be busy with the catalog for long."""
        return self.phase is not Phase.STARTING and self.seen_s_ago > self.stall_s


@dataclass(frozen=True, slots=True)
class TenantSample:
    """What tenants of one label have in one tier, and how many copies went for whose sake: see ``TENANT_METRICS``."""

    tenant: str
    tier: str
    used_bytes: int
    share_bytes: int
    n_evicted: int
    n_suffered: int
    n_caused: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The numbers of a daemon at one moment, as ``stats`` gives them, and its histograms by name.

    ``by_method``: histograms that there is one of for each method; ``failures``: requests that failed, by method.
    """

    numbers: Mapping[str, float] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    histograms: Mapping[str, Distribution] = field(default_factory=dict)
    by_method: Mapping[str, Mapping[str, Distribution]] = field(default_factory=dict)
    failures: Mapping[str, int] = field(default_factory=dict)
    tenants: Sequence[TenantSample] = ()


class Source(Protocol):
    """A daemon, for threads that are not its own."""

    def pulse(self) -> Pulse:
        """Never blocks."""
        ...

    def snapshot(self, timeout_s: float) -> Snapshot | None:
        """Asks the daemon's loop; blocks for ``timeout_s`` at most. None if the loop does not answer."""
        ...
