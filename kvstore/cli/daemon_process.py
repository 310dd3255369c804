"""A daemon of one's own for the time of a command."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvstore.errors import ConfigError, UnavailableError

STOP_S_MAX = 30.0
READY = b"ready\n"
EXIT_BAD_INPUT = 2


@contextlib.contextmanager
def own_daemon(arguments: Sequence[str], socket_path: Path | None = None) -> Iterator[Path]:
    """Run ``kvstore serve`` as a child and yield its socket once it accepts clients.

    It ends with the block, and also if this process dies: it watches its standard input. Raises
    UnavailableError if it does not come up; what it had to say is on standard error.
    """
    with contextlib.ExitStack() as stack:
        if socket_path is None:
            socket_path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-"))) / "kvstored.sock"
        ready_fd, child_fd = os.pipe()
        command = [
            sys.executable, "-m", "kvstore.cli", "serve", "--socket", str(socket_path),
            "--ready-fd", str(child_fd), "--until-stdin-closes", *arguments,
        ]  # fmt: skip
        try:
            # A session of its own: Ctrl-C reaches this process only, which then stops the child in order.
            process = subprocess.Popen(  # noqa: S603 - our own interpreter and arguments
                command, stdin=subprocess.PIPE, pass_fds=(child_fd,), start_new_session=True
            )
        finally:
            os.close(child_fd)
        try:
            with os.fdopen(ready_fd, "rb") as ready:
                if ready.read(len(READY)) != READY:
                    code = process.wait(STOP_S_MAX)
                    kind = ConfigError if code == EXIT_BAD_INPUT else UnavailableError
                    raise kind(f"the daemon did not start (exit code {code}); see its message above")
            yield socket_path
        finally:
            stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ask the child to end and wait; kill it if it doesn't."""
    if process.stdin is not None:
        process.stdin.close()
    try:
        process.wait(STOP_S_MAX)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
