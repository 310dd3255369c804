"""Several replay clients, a process each, started together and watched until the last one is done."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from multiprocessing.synchronize import Barrier, Event
from typing import Any

from kvstore.bench import workload as work
from kvstore.bench.measure import leave_interrupts_to_parent, uninterrupted
from kvstore.bench.replay_client import ClientOptions, ClientResult, run_client
from kvstore.bench.replay_crash import Crash
from kvstore.bench.replay_dealing import dealt, tenant_of
from kvstore.bench.replay_journal import Journal
from kvstore.bench.simulate import Progress
from kvstore.bench.workload import Workload
from kvstore.errors import KVStoreError

START_S_MAX = 120.0
_POLL_S = 0.1
_REPORT_EVERY = 16


@dataclass(frozen=True, slots=True)
class _Signals:
    """What the members share: ``barrier`` for the start; ``go`` is clear while they must pause.

    ``report_every``: requests between two reports of progress, each of which costs as much as a short request.
    """

    barrier: Barrier
    go: Event
    report_every: int


def run_fleet(
    workload: Workload,
    options: ClientOptions,
    clients: int,
    progress: Progress | None = None,
    crash: Crash | None = None,
    tenants: int = 1,
) -> list[ClientResult]:
    """Deal the requests to ``clients`` processes, of so many tenants (see ``dealt``); blocks until all are done.

    Results are in the order of the clients. With ``crash`` the daemon is killed on the way. Raises KVStoreError,
    after ending the others, if one of them fails or dies.
    """
    context = multiprocessing.get_context("spawn")
    signals = _Signals(context.Barrier(clients), context.Event(), _REPORT_EVERY if crash is None else 1)
    signals.go.set()
    with contextlib.ExitStack() as stack:
        fleet = _Fleet(signals, progress, crash)
        for number in range(clients):
            part = work.take(workload, dealt(workload, clients, number, tenants))
            own = replace(options, tenant=tenant_of(number, tenants))
            mine, theirs = context.Pipe(duplex=False)
            stack.callback(mine.close)
            process = context.Process(target=_main, args=(part, own, signals, theirs), daemon=True)
            with uninterrupted():  # or it is told only half of what to do
                process.start()
                stack.callback(_end, process)
            theirs.close()
            fleet.members.append(mine)
        return fleet.collect(workload)


class _Fleet:
    """The parent's side. A member sends counts of requests done, its journal when it pauses, then its result."""

    def __init__(self, signals: _Signals, progress: Progress | None, crash: Crash | None) -> None:
        self.members: list[Connection] = []
        self._signals = signals
        self._progress = progress
        self._crash = crash
        self._n_done = 0
        self._results: dict[Connection, ClientResult] = {}
        self._paused: dict[Connection, Journal] = {}

    def collect(self, workload: Workload) -> list[ClientResult]:
        while len(self._results) < len(self.members):
            for pipe in wait([each for each in self.members if each not in self._results], _POLL_S):
                if isinstance(pipe, Connection):
                    self._take(pipe)
            if self._crash is None:
                continue
            if self._crash.due(self._n_done):
                self._crash.strike(self._n_done, self._signals.go.clear)
            if not self._signals.go.is_set() and len(self._paused) + len(self._results) == len(self.members):
                self._crash.check(self._journal(workload))
                self._signals.go.set()
        return [self._results[pipe] for pipe in self.members]

    def _take(self, pipe: Connection) -> None:
        message = _receive(pipe)
        if "error" in message:
            raise KVStoreError(f"a replay client failed: {message['error']}")
        if "result" in message:
            self._results[pipe] = ClientResult.from_plain(message["result"])
            self._paused.pop(pipe, None)
        elif "paused" in message:
            self._paused[pipe] = Journal.from_plain(message["paused"])
        else:
            self._n_done += message["done"]
            if self._progress is not None:
                self._progress(message["done"])

    def _journal(self, workload: Workload) -> Journal:
        """What all have done so far, by the numbers of the whole."""
        journals = [
            self._results[pipe].journal if pipe in self._results else self._paused[pipe] for pipe in self.members
        ]
        return Journal.merged(
            (journal, dealt(workload, len(journals), number)) for number, journal in enumerate(journals)
        )


def _receive(pipe: Connection) -> dict[str, Any]:
    try:
        message: dict[str, Any] = json.loads(pipe.recv_bytes())
    except EOFError:
        return {"error": "its process ended without a result"}
    return message


def _end(process: SpawnProcess) -> None:
    if process.exitcode is None:
        process.join(1.0)
    if process.exitcode is None:
        process.kill()
    process.join()
    process.close()


def _main(workload: Workload, options: ClientOptions, signals: _Signals, pipe: Connection) -> None:
    """Entry of a client process. Every failure is told to the parent, which reports it."""
    leave_interrupts_to_parent()

    def pause(journal: Journal) -> None:
        if not signals.go.is_set():
            _send(pipe, {"paused": journal.to_plain()})
            signals.go.wait()

    try:
        report = _reporter(pipe, signals.report_every)
        result = run_client(workload, options, report, lambda: signals.barrier.wait(START_S_MAX), pause)
        report(0)
        _send(pipe, {"result": result.to_plain()})
    except threading.BrokenBarrierError:
        _send(pipe, {"error": "not all clients started in time"})
    except Exception as error:  # the process ends here in any case
        signals.barrier.abort()
        _send(pipe, {"error": f"{type(error).__name__}: {error}"})


def _reporter(pipe: Connection, every: int) -> Callable[[int], None]:
    """Progress in batches."""
    waiting = 0

    def report(done: int) -> None:
        nonlocal waiting
        waiting += done
        if waiting >= every or not done:
            _send(pipe, {"done": waiting})
            waiting = 0

    return report


def _send(pipe: Connection, message: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):
        pipe.send_bytes(json.dumps(message).encode())
