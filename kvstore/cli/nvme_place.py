"""Where a command's own NVMe tier lies, and how large it must be for a number of blocks."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kvstore.compression.frame import FrameLayout
from kvstore.config import format_size
from kvstore.errors import BadInputError, ConfigError
from kvstore.tiers.nvme.tier import NvmeTier
from kvstore.types import Namespace


def room_for(blocks: int, namespace: Namespace) -> int:
    """Bytes to give to an NVMe tier for exactly ``blocks`` whole blocks of this namespace."""
    layout = FrameLayout.of(namespace.spec, namespace.row_bytes, namespace.digest())
    return NvmeTier.capacity_for(blocks * layout.frame_bytes, layout.frame_bytes)


def check_reachable(directory: Path) -> None:
    """Raises ConfigError if it can't even be told whether ``directory`` exists: no permission, too long a name."""
    try:
        directory.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass  # whether it can be made is the tier's to say
    except OSError as error:
        raise ConfigError(
            f"--nvme-dir {str(directory)[:200]!r} can't be used: {error.strerror}; "
            "give a directory that this user may reach",
            ("nvme_dir",),
        ) from error


def kept_in_memory(directory: Path) -> str:
    """The kind of ``directory``'s file system if that lives in memory only, else an empty text."""
    device = directory.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        place, _, kind = line.partition(" - ")
        if place.split()[2] == number and kind.split()[0] in ("tmpfs", "ramfs"):
            return kind.split()[0]
    return ""


@contextlib.contextmanager
def nvme_directory(given: Path | None, near: Path | None, n_bytes: int) -> Iterator[Path]:
    """The directory ``given``; else a new one in ``near`` (or the working directory), removed at the end.

    Raises BadInputError if it can't be made, or if its file system has less than ``n_bytes`` of room.
    """
    with contextlib.ExitStack() as stack:
        base = given or near or Path.cwd()
        try:
            if given is None:
                place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-nvme-", dir=base)))
            else:
                given.mkdir(parents=True, exist_ok=True)
                place = given
            free_bytes = shutil.disk_usage(place).free
            # What is there already counts as room: the tier that it belongs to goes on using it.
            free_bytes += sum(each.stat().st_blocks * 512 for each in place.rglob("*") if each.is_file())
        except OSError as error:
            raise BadInputError(
                f"{base}: can't hold an NVMe tier ({error.strerror or error}); choose another --nvme-dir"
            ) from error
        if free_bytes < n_bytes:
            raise BadInputError(
                f"{base} has room for {format_size(free_bytes)}, the NVMe tier needs {format_size(n_bytes)}: "
                "choose an --nvme-dir on a larger disk, or a smaller tier"
            )
        yield place
