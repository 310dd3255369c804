"""Several replay clients, a process each, started together and watched until the last one is done."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from multiprocessing.synchronize import Barrier
from typing import Any

from kvstore.bench import workload as work
from kvstore.bench.measure import leave_interrupts_to_parent
from kvstore.bench.replay_client import ClientOptions, ClientResult, run_client
from kvstore.bench.simulate import Progress
from kvstore.bench.workload import Workload
from kvstore.errors import KVStoreError

_START_TIMEOUT_S = 120.0
_POLL_S = 0.1
_REPORT_EVERY = 16


def run_fleet(
    workload: Workload, options: ClientOptions, clients: int, progress: Progress | None = None
) -> list[ClientResult]:
    """Deal the requests round-robin to ``clients`` processes; blocks until all are done.

    Raises KVStoreError, after ending the others, if one of them fails or dies.
    """
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(clients)
    with contextlib.ExitStack() as stack:
        members = []
        for number in range(clients):
            part = work.take(workload, range(number, workload.n_requests, clients))
            mine, theirs = context.Pipe(duplex=False)
            stack.callback(mine.close)
            process = context.Process(target=_main, args=(part, options, barrier, theirs), daemon=True)
            process.start()
            stack.callback(_end, process)
            theirs.close()
            members.append(mine)
        return list(_collect(members, progress))


def _collect(members: list[Connection], progress: Progress | None) -> Iterator[ClientResult]:
    """Results in order of their ends. A member sends counts of requests done, then its result."""
    open_members = list(members)
    while open_members:
        for pipe in wait(open_members, _POLL_S):
            if not isinstance(pipe, Connection):
                continue
            message = _receive(pipe)
            if "error" in message:
                raise KVStoreError(f"a replay client failed: {message['error']}")
            if "result" in message:
                open_members.remove(pipe)
                yield ClientResult.from_plain(message["result"])
            elif progress is not None:
                progress(message["done"])


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


def _main(workload: Workload, options: ClientOptions, barrier: Barrier, pipe: Connection) -> None:
    """Entry of a client process. Every failure is told to the parent, which reports it."""
    leave_interrupts_to_parent()
    try:
        report = _reporter(pipe)
        result = run_client(workload, options, report, ready=lambda: barrier.wait(_START_TIMEOUT_S))
        report(0)
        _send(pipe, {"result": result.to_plain()})
    except threading.BrokenBarrierError:
        _send(pipe, {"error": "not all clients started in time"})
    except Exception as error:  # the process ends here in any case
        barrier.abort()
        _send(pipe, {"error": f"{type(error).__name__}: {error}"})


def _reporter(pipe: Connection) -> Callable[[int], None]:
    """Progress in batches: a message per request would cost more than a short request itself."""
    waiting = 0

    def report(done: int) -> None:
        nonlocal waiting
        waiting += done
        if waiting >= _REPORT_EVERY or not done:
            _send(pipe, {"done": waiting})
            waiting = 0

    return report


def _send(pipe: Connection, message: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):
        pipe.send_bytes(json.dumps(message).encode())
