"""A daemon of one's own for the time of a command."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvstore.config.file import CONFIG_VARIABLE
from kvstore.config.settings import BY_VARIABLE
from kvstore.errors import ConfigError, UnavailableError

STOP_S_MAX = 30.0
READY = b"ready\n"
EXIT_BAD_INPUT = 2


class DaemonProcess:
    """``kvstore serve`` as a child process, which can be killed and started again with the same settings.

    The child also ends if this process dies: it watches its standard input.
    """

    def __init__(self, arguments: Sequence[str], socket_path: Path) -> None:
        self.socket_path = socket_path
        self._arguments = list(arguments)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; returns once it accepts clients.

        Raises UnavailableError if it does not come up, ConfigError if it can't be as it was asked for; what it had
        to say is on standard error.
        """
        ready_fd, child_fd = os.pipe()
        command = [
            sys.executable, "-m", "kvstore.cli", "serve", "--socket", str(self.socket_path),
            "--ready-fd", str(child_fd), "--until-stdin-closes", "--log-level", "warning", *self._arguments,
        ]  # fmt: skip
        with os.fdopen(ready_fd, "rb") as ready:
            try:
                # A session of its own: Ctrl-C reaches this process only, which then stops the child in order.
                self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and arguments
                    command, stdin=subprocess.PIPE, pass_fds=(child_fd,), start_new_session=True, env=_own_environment()
                )
            finally:
                os.close(child_fd)
            if ready.read(len(READY)) != READY:
                code = self._process.wait(STOP_S_MAX)
                kind = ConfigError if code == EXIT_BAD_INPUT else UnavailableError
                raise kind(f"the daemon did not start (exit code {code}); see its message above")

    @property
    def pid(self) -> int:
        """Of the running process; 0 if there is none."""
        return self._process.pid if self._process is not None else 0

    def kill(self) -> None:
        """SIGKILL; returns when the process is gone."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            if process.stdin is not None:
                process.stdin.close()

    def stop(self) -> None:
        """Ask it to end and wait; kill it if it doesn't. Idempotent."""
        if self._process is None:
            return
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None


def _own_environment() -> dict[str, str]:
    """Without the settings of the user's own daemon: this one is as its arguments say."""
    kept = {name: value for name, value in os.environ.items() if name not in BY_VARIABLE}
    return {**kept, CONFIG_VARIABLE: ""}


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listened on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def own_process(arguments: Sequence[str], socket_path: Path | None = None) -> Iterator[DaemonProcess]:
    """A running ``kvstore serve`` that ends with the block. Raises as ``DaemonProcess.start``."""
    with contextlib.ExitStack() as stack:
        if socket_path is None:
            socket_path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-"))) / "kvstored.sock"
        daemon = DaemonProcess(arguments, socket_path)
        stack.callback(daemon.stop)
        daemon.start()
        yield daemon


@contextlib.contextmanager
def own_daemon(arguments: Sequence[str], socket_path: Path | None = None) -> Iterator[Path]:
    """As ``own_process``; yields the socket."""
    with own_process(arguments, socket_path) as daemon:
        yield daemon.socket_path
