"""``/dev/shm`` belongs to the whole machine: what lies there that a daemon of a test could have left."""

from __future__ import annotations

from pathlib import Path

# The names of what tests make there themselves begin so, for others to look past them.
OF_TESTS = "of-a-test-"
FOLDER = Path("/dev/shm")  # noqa: S108 - looked at, never written to with a foreseeable name


def shared_memory_files() -> set[str]:
    """Names, but for semaphores, which processes of Python make and remove all the time, and folders of tests."""
    return {path.name for path in FOLDER.iterdir() if not path.name.startswith(("sem.", OF_TESTS))}
