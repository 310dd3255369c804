"""``kvstore serve`` as a process that a case may kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from kvstore.cli.daemon_process import READY

END_S = 30


class DaemonProcess:
    """A daemon on a socket and an NVMe directory below ``folder``. ``start`` returns when clients are accepted."""

    def __init__(self, folder: Path, *options: str, before: Sequence[str] = ()) -> None:
        """``before``: a command that runs the rest of its command line."""
        self.socket_path, self.nvme_dir = folder / "d.sock", folder / "nvme"
        self.before = before
        self._options = ("--dram", "16MiB", "--no-prefault", "--nvme-dir", str(self.nvme_dir), *options)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        ready, child = os.pipe()
        command = [*self.before, sys.executable, "-m", "kvstore.cli", "serve", "--socket", str(self.socket_path),
                   "--ready-fd", str(child), *self._options]  # fmt: skip
        self._process = subprocess.Popen(command, pass_fds=(child,), stderr=subprocess.PIPE)
        os.close(child)
        with os.fdopen(ready, "rb") as pipe:
            assert pipe.read(len(READY)) == READY, self._process.communicate()[1]

    def end(self, number: int = signal.SIGKILL) -> int:
        """Signal it and wait for its end; does nothing when it has ended."""
        if self._process is None:
            return 0
        if self._process.poll() is None:
            self._process.send_signal(number)
        self._process.communicate(timeout=END_S)
        return self._process.returncode
