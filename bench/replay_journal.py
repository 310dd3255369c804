"""What a replay client did when, and what it was told is durable: enough to say what a crash must leave."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Journal:
    """Requests by their number. Times are ``time.monotonic``, which is one clock for all processes.

    ``accesses``: (request, start, end), in order. ``durable``: request -> leading blocks acknowledged durable.
    """

    accesses: list[tuple[int, float, float]] = field(default_factory=list)
    durable: dict[int, int] = field(default_factory=dict)

    def access(self, request: int, started_s: float, ended_s: float) -> None:
        """A request was served, hit or miss."""
        self.accesses.append((request, started_s, ended_s))

    def acknowledge(self, request: int, n_blocks: int) -> None:
        """The leading ``n_blocks`` blocks of a request are durable."""
        self.durable[request] = n_blocks

    def to_plain(self) -> dict[str, Any]:
        """JSON-able."""
        return {"accesses": self.accesses, "durable": list(self.durable.items())}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Journal:
        """The inverse of ``to_plain``."""
        accesses = [(request, started_s, ended_s) for request, started_s, ended_s in plain["accesses"]]
        return cls(accesses, {int(request): n_blocks for request, n_blocks in plain["durable"]})

    @classmethod
    def merged(cls, parts: Iterable[tuple[Journal, Sequence[int]]]) -> Journal:
        """One journal of several clients; each comes with the numbers that its requests have in the whole."""
        whole = cls()
        for journal, numbers in parts:
            whole.accesses += [(numbers[request], start_s, end_s) for request, start_s, end_s in journal.accesses]
            whole.durable |= {numbers[request]: n_blocks for request, n_blocks in journal.durable.items()}
        return whole


def must_be_found(journal: Journal, paths: list[list[int]], most_blocks: float) -> dict[int, int]:
    """Acknowledged requests that a tier of LRU can't have let go: request -> leading blocks that must be there.

    ``paths`` names the blocks of every request, whole prefixes with one number each. A request counts as long as
    fewer than ``most_blocks`` different blocks were accessed from its start on, by anybody, its own included: LRU
    gives up all others first. Newest first.
    """
    by_end = sorted(journal.accesses, key=lambda access: access[2])
    recent: set[int] = set()
    must: dict[int, int] = {}
    for request, started_s, _ in sorted(journal.accesses, key=lambda access: access[1], reverse=True):
        while by_end and by_end[-1][2] >= started_s:
            recent.update(paths[by_end.pop()[0]])
        if len(recent) >= most_blocks:
            break
        if request in journal.durable:
            must[request] = journal.durable[request]
    return must
