"""A daemon killed in the middle of a replay: what it said was durable must be there when it is back.

The clients meet the SIGKILL wherever they are. They wait for the new daemon and then, ahead of their next
request, until everything that must have survived has been read back and compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvstore.bench import workload as work
from kvstore.bench.replay_client import ClientOptions, ReplayClient
from kvstore.bench.replay_journal import Journal, must_be_found
from kvstore.bench.workload import Workload
from kvstore.client import Client

SURE_SHARE = 0.8
"""Of the tier's capacity: blocks that few have been accessed since then are LRU's to keep in any case."""


class Restartable(Protocol):
    """A daemon process."""

    def kill(self) -> None:
        """SIGKILL; returns when the process is gone."""
        ...

    def start(self) -> None:
        """Start it again as it was; returns when it accepts clients."""
        ...


@dataclass(frozen=True, slots=True)
class CrashReport:
    """What a SIGKILL left. Blocks are counted once, however many requests share them.

    ``acknowledged``: durable, as the daemon had said by then. ``must_be_found``: those of them that LRU can't have let
    go. ``lost`` is to be 0, as is ``mismatches``: blocks that came back with other bytes.
    """

    at_request: int
    acknowledged: int
    must_be_found: int
    found: int
    mismatches: int
    down_s: float
    before: dict[str, Any] = field(default_factory=dict)
    """The daemon's numbers just before."""

    @property
    def lost(self) -> int:
        """Blocks that must be there and are not."""
        return self.must_be_found - self.found

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {name: getattr(self, name) for name in (*self.__dataclass_fields__, "lost")}


@dataclass(slots=True)
class Crash:
    """The kill of a replay of ``workload``, due when ``at_request`` requests are done."""

    daemon: Restartable
    workload: Workload
    options: ClientOptions
    nvme_blocks: int
    at_request: int
    report: CrashReport | None = None
    _killed_at: int = 0
    _down_s: float = 0.0
    _before: dict[str, Any] = field(default_factory=dict)

    def due(self, n_done: int) -> bool:
        """Whether it is time."""
        return not self._killed_at and n_done >= self.at_request

    def strike(self, n_done: int, hold: Callable[[], None]) -> None:
        """Kill the daemon and start it again; blocks until it is back. ``hold`` is called in between: from then on
        no client begins another request.
        """
        with Client(self.options.connect, timeout_s=self.options.timeout_s) as client:
            self._before = client.stats()
        start = time.monotonic()
        self.daemon.kill()
        hold()
        self._killed_at = n_done
        self.daemon.start()
        self._down_s = time.monotonic() - start

    def check(self, journal: Journal) -> None:
        """Read back what must be there; nobody else may use the daemon meanwhile. Blocks."""
        paths = [work.path_ids(self.workload, request) for request in range(self.workload.n_requests)]
        must = must_be_found(journal, paths, SURE_SHARE * self.nvme_blocks)
        found: set[int] = set()
        with Client(self.options.connect, timeout_s=self.options.timeout_s) as client:
            reader = ReplayClient(client, self.workload, self.options)
            # Oldest first: afterwards the tier's order of use is again what it was.
            for request, n_blocks in reversed(must.items()):
                found.update(paths[request][: reader.read_back(request, n_blocks)])
            mismatches = reader.result.mismatches
        wanted = _distinct(paths, must)
        self.report = CrashReport(
            at_request=self._killed_at,
            acknowledged=len(_distinct(paths, journal.durable)),
            must_be_found=len(wanted),
            found=len(wanted & found),
            mismatches=mismatches,
            down_s=self._down_s,
            before=self._before,
        )


def durable_blocks(workload: Workload, journal: Journal) -> int:
    """How many different blocks were acknowledged durable."""
    paths = {request: work.path_ids(workload, request) for request in journal.durable}
    return len(_distinct(paths, journal.durable))


def _distinct(paths: Sequence[list[int]] | dict[int, list[int]], leading: dict[int, int]) -> set[int]:
    return {block for request, n_blocks in leading.items() for block in paths[request][:n_blocks]}
