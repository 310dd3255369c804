"""Where a command's own NVMe tier lies, and how large it must be for a number of blocks."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kvstore.compression.frame import FrameLayout
from kvstore.config import format_size
from kvstore.errors import BadInputError
from kvstore.tiers.nvme.tier import NvmeTier
from kvstore.types import Namespace


def room_for(blocks: int, namespace: Namespace) -> int:
    """Bytes to give to an NVMe tier for exactly ``blocks`` whole blocks of this namespace."""
    layout = FrameLayout.of(namespace.spec, namespace.row_bytes, namespace.digest())
    return NvmeTier.capacity_for(blocks * layout.frame_bytes, layout.frame_bytes)


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
