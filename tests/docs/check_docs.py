"""Run the commands and programs of README.md and docs/ that carry a ``check:`` comment, against a real daemon.

Not a pytest module: `make docs-check` and CI run it, as it takes the commands literally.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from kvstore.cli.daemon_process import own_daemon

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"<!-- check: (\w+) -->\n```\w+\n(.*?)```", re.DOTALL)
LINK = re.compile(r"\]\(([^)#:]+)\)")


def run_blocks(text: str, environment: dict[str, str]) -> int:
    """Run every marked block; returns how many there were. Raises CalledProcessError for one that fails."""
    blocks = BLOCK.findall(text)
    for kind, body in blocks:
        body = body.replace(".venv/bin/", f"{Path(sys.executable).parent}/")
        commands = [["sh", "-e", "-c", body]] if kind == "shell" else [[sys.executable, "-c", body]]
        for command in commands:
            print(f"--- {kind}\n{body}", flush=True)  # noqa: T201 - a program's output
            subprocess.run(command, check=True, env=environment, cwd=ROOT)
    return len(blocks)


def broken_links() -> list[str]:
    """Relative links of all documents that lead nowhere."""
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    return [
        f"{document.relative_to(ROOT)}: {target}"
        for document in documents
        for target in LINK.findall(document.read_text())
        if not (document.parent / target).exists()
    ]


def main() -> int:
    missing = broken_links()
    if missing:
        print("broken links: " + ", ".join(missing))  # noqa: T201 - as above
        return 1
    with tempfile.TemporaryDirectory() as folder:
        socket_path = Path(folder) / "docs.sock"
        arguments = ["--dram", "64MiB", "--nvme-dir", str(Path(folder) / "nvme"), "--nvme", "64MiB"]
        arguments += ["--hbm-device", "simulated", "--hbm", "16MiB"]
        with own_daemon(arguments, socket_path):
            commands = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
            environment = {**os.environ, "KVSTORE_SOCKET": str(socket_path), "PATH": commands}
            documents = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md"]
            count = sum(run_blocks(document.read_text(), environment) for document in documents)
    print(f"{count} blocks of README.md and docs/ run, no broken link")  # noqa: T201 - as above
    return 0 if count else 1


if __name__ == "__main__":
    sys.exit(main())
