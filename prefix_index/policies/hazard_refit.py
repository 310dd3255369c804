"""Brings the default policy's model up to date: at once, or in another process while the old one stays in force."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Protocol

import kvstore
from kvstore.logs import about
from kvstore.prefix_index.policies.hazard_model import Episodes, Model, fit
from kvstore.prefix_index.policies.hazard_parcel import ParcelError, pack_request, unpack_answer
from kvstore.prefix_index.policies.hazard_worth import WorthTable, worth_table

Learnt = tuple[Model, WorthTable]

log = logging.getLogger(__name__)

_REST = 19.0
"""So many times as long as a child took there is none: at most a twentieth of a core goes into learning."""

_CHILD = ("-P", "-c", "from kvstore.prefix_index.policies.hazard_child import main; main()")


class Learner(Protocol):
    """Makes models out of episodes. All calls come from the policy's thread and none blocks on another process."""

    @property
    def is_free(self) -> bool:
        """Whether ``begin`` may be called."""
        ...

    def begin(self, before: Model, seen: Episodes) -> None:
        """Have a model made."""
        ...

    def take(self) -> Learnt | None:
        """What was made since the last call, or None."""
        ...

    def close(self) -> None:
        """Nothing is made any more, and nothing of it is left. Blocks for as long as a process takes to be killed."""
        ...


class RefitHere:
    """At once, in the caller's thread: for replays and tests, where equal calls must give equal results."""

    is_free = True

    def __init__(self) -> None:
        self._learnt: Learnt | None = None

    def begin(self, before: Model, seen: Episodes) -> None:
        model = fit(before, seen)
        self._learnt = (model, worth_table(model))

    def take(self) -> Learnt | None:
        learnt, self._learnt = self._learnt, None
        return learnt

    def close(self) -> None:
        """There is nothing to end."""


class RefitInChild:
    """Each time in a fresh process of low priority, fed and read by a thread that only waits.

    A child that dies, takes longer than ``timeout_s`` or answers nonsense makes no model: the old one stays in force,
    ``n_failed`` counts it, and the next time is as if nothing had been. ``command`` is what to run instead of the
    child's program, for tests.
    """

    def __init__(self, timeout_s: float = 60.0, command: tuple[str, ...] | None = None) -> None:
        self._timeout_s = timeout_s
        self._command = command if command is not None else (sys.executable or "python3", *_CHILD)
        self._lock = threading.Lock()
        self._learnt: Learnt | None = None
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False
        self._rests_until_s = 0.0
        self.n_made = 0
        self.n_failed = 0

    @property
    def is_free(self) -> bool:
        is_idle = self._thread is None or not self._thread.is_alive()
        return is_idle and not self._closed and time.monotonic() >= self._rests_until_s

    def begin(self, before: Model, seen: Episodes) -> None:
        self._thread = threading.Thread(target=self._run, args=(before, seen), name="kvstore-refit", daemon=True)
        self._thread.start()

    def take(self) -> Learnt | None:
        if self._learnt is None:
            return None
        with self._lock:
            learnt, self._learnt = self._learnt, None
        return learnt

    def wait(self, timeout_s: float) -> bool:
        """Until the child that runs is done; False if it isn't by then. Blocks."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self._thread is None or not self._thread.is_alive()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._process is not None:
                self._process.kill()
        if self._thread is not None:
            self._thread.join()

    def _run(self, before: Model, seen: Episodes) -> None:
        began_s = time.monotonic()
        try:
            learnt = unpack_answer(self._ask(pack_request(before, seen)))
        except (OSError, subprocess.SubprocessError, ParcelError) as error:
            if self._closed:
                return
            self.n_failed += 1
            log.warning(
                "the eviction model was not brought up to date, the old one stays: %s", error,
                extra=about("refit_failed", error=str(error)),
            )  # fmt: skip
            return
        finally:
            self._rests_until_s = time.monotonic() + _REST * (time.monotonic() - began_s)
        with self._lock:
            self._learnt = learnt
        self.n_made += 1

    def _ask(self, request: bytes) -> bytes:
        root = str(Path(kvstore.__file__).resolve().parent.parent)
        path = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH", "")) if p)
        with self._lock:
            if self._closed:
                raise subprocess.SubprocessError("closed")
            process = self._process = subprocess.Popen(  # noqa: S603 - its own program
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                start_new_session=True, env={**os.environ, "PYTHONPATH": path},
            )  # fmt: skip
        with process:
            try:
                answer, _ = process.communicate(request, self._timeout_s)
            finally:
                process.kill()
        with self._lock:
            self._process = None
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, self._command)
        return answer
