"""What a process uses, as /proc tells: processor time, memory, and when its children work."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
WATCH_EVERY_S = 0.02
"""Two of the ticks in which the kernel counts a process's time."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Resident memory of a process in bytes: its own, and shared memory that it maps."""

    own_bytes: int
    shared_bytes: int


def processor_s(pid: int) -> float:
    """Processor seconds that a process and its threads have used; 0 for one that is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def memory_of(pid: int) -> Memory:
    """Raises OSError if the process is gone."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = {name: value for name, _, value in (line.partition(":") for line in lines)}
    own, shared = (int(fields[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem"))
    return Memory(own, shared)


class ChildWatch:
    """Notes when children of a process work. A context manager: watches on a thread, from entering to leaving it."""

    def __init__(self, pid: int) -> None:
        self.spans_s: list[tuple[float, float]] = []
        """From when to when any of them did, by ``time.monotonic``, as exact as ``WATCH_EVERY_S``."""
        self._pid = pid
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        used_s, since_s = self._used_s(), time.monotonic()
        while not self._stop.wait(WATCH_EVERY_S):
            before_s, used_s, now_s = used_s, self._used_s(), time.monotonic()
            if any(spent_s > before_s.get(pid, 0.0) for pid, spent_s in used_s.items()):
                self._add(since_s, now_s)
            since_s = now_s

    def _add(self, start_s: float, end_s: float) -> None:
        if self.spans_s and self.spans_s[-1][1] == start_s:
            start_s = self.spans_s.pop()[0]
        self.spans_s.append((start_s, end_s))

    def _used_s(self) -> dict[int, float]:
        children: list[str] = []
        for path in Path(f"/proc/{self._pid}/task").glob("*/children"):
            try:
                children += path.read_text().split()
            except OSError:  # a thread that has just ended
                continue
        return {int(pid): processor_s(int(pid)) for pid in children}
