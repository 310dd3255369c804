"""Processes of tests, which talk with them through a pipe."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

SPAWN = multiprocessing.get_context("spawn")


@contextmanager
def child(target: Any, *args: Any) -> Iterator[tuple[Any, Connection]]:
    """``target(*args, pipe)`` in a process of its own, and our end of the pipe. It must end with the block, somehow."""
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=target, args=(*args, theirs))
    process.start()
    theirs.close()
    try:
        yield process, ours
    finally:
        if process.pid is not None and process.is_alive():
            os.kill(process.pid, signal.SIGCONT)
        process.join(20)
        did_end = process.exitcode is not None
        if not did_end:
            process.kill()
        ours.close()
        assert did_end, "the child did not end"
