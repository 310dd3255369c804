"""Another process with a device."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CHILD = Path(__file__).with_name("ipc_child.py")


class Child:
    """Another process with a device of the same kind. ``say`` sends a line and returns the answer."""

    def __init__(self, kind: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(CHILD), kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def say(self, line: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def end(self, kill: bool = False) -> None:
        if kill:
            self.process.kill()
        self.process.communicate()
