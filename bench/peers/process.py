"""The harness's end of a driver process."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from kvstore.bench.peers import driver
from kvstore.bench.peers.environments import Place
from kvstore.errors import UnavailableError

SYSTEMS = Path(driver.__file__).parent / "systems"
SETUP_S_MAX = 300.0
OPERATION_S_MAX = 120.0
_STOP_S_MAX = 30.0
_READ_BYTES = 1 << 16
_LOG_CHARACTERS = 300


class Driver:
    """A process in which one system is measured. A context manager.

    What the system prints goes to the file ``log``. Every call has a deadline, after which the process and all that it
    started are killed.
    """

    def __init__(self, module: str, place: Place, log: Path) -> None:
        """Starts the process. Raises UnavailableError if that can't be done."""
        self._log = log
        self._rest = b""
        self._closed = False
        # -P: modules beside the driver must not stand in for a library's.
        command = [place.python, "-P", driver.__file__, str(SYSTEMS / f"{module}.py")]
        with log.open("wb") as output:
            try:
                self._process = subprocess.Popen(  # noqa: S603 - our own program
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output, start_new_session=True,
                    env={**_plain_environment(), **place.variables},
                )  # fmt: skip
            except OSError as error:
                raise UnavailableError(f"{place.python}: {error.strerror or error}") from error
        self._requests, self._answers = _both(self._process)

    def set_up(self, setup: driver.Setup) -> str:
        """Make the system ready, from nothing, and say what it is: its version. Blocks.

        Raises UnavailableError with the reason if it can't be.
        """
        version: str = self._ask({"do": "setup", **asdict(setup)}, SETUP_S_MAX)["version"]
        return version

    def end_system(self) -> None:
        """End the system, not the process; blocks. Nothing happens after ``close``. Raises UnavailableError."""
        if not self._closed:
            self._ask({"do": "end"}, _STOP_S_MAX)

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def ask(self, operation: str) -> dict[str, Any]:
        """One of ``driver.OPERATIONS``; its figures. Raises UnavailableError with the reason if it failed."""
        return self._ask({"do": operation}, OPERATION_S_MAX)

    def close(self) -> None:
        """End the system; blocks until its processes are gone. Idempotent."""
        if self._closed:
            return
        with contextlib.suppress(UnavailableError):
            self._ask({"do": "close"}, _STOP_S_MAX)
        with contextlib.suppress(OSError):
            self._requests.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_S_MAX)
        self._kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        try:
            self._requests.write(json.dumps(request).encode() + b"\n")
            self._requests.flush()
        except OSError as error:
            raise UnavailableError(f"{request['do']}: the process is gone: {self._last_words()}") from error
        answer: dict[str, Any] = json.loads(self._line(str(request["do"]), time.monotonic() + timeout_s))
        if "error" in answer:
            raise UnavailableError(answer["error"])
        return answer

    def _line(self, what: str, deadline_s: float) -> bytes:
        with selectors.DefaultSelector() as selector:
            selector.register(self._answers, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                if not selector.select(max(0.0, deadline_s - time.monotonic())):
                    self._kill()
                    raise UnavailableError(f"{what}: no answer in time: {self._last_words()}")
                part = os.read(self._answers.fileno(), _READ_BYTES)
                if not part:
                    raise UnavailableError(f"{what}: the process ended: {self._last_words()}")
                self._rest += part
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _kill(self) -> None:
        """The process and its session, which has what it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._closed = True
        for pipe in (self._requests, self._answers):
            with contextlib.suppress(OSError):
                pipe.close()

    def _last_words(self) -> str:
        with contextlib.suppress(OSError):
            return " ".join(self._log.read_text(errors="replace").split())[-_LOG_CHARACTERS:]
        return "it said nothing"


def _both(process: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes]]:
    """Its standard input and output, which are pipes."""
    if process.stdin is None or process.stdout is None:
        raise UnavailableError("the driver was started without pipes")
    return process.stdin, process.stdout


def _plain_environment() -> dict[str, str]:
    """Without what would lead a peer's Python to another one's packages."""
    misleading = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if name not in misleading}
