"""Whose directory it is: the superblock ``kvstore.json``, the lock, and what a tier's directory may hold."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

from kvstore.errors import ConfigError
from kvstore.tiers.nvme.files import Files

MAGIC = "kvstore-nvme"
VERSION = 1
SUPERBLOCK, LOCK, CATALOG, NAMESPACES = "kvstore.json", "lock", "catalog", "namespaces.json"
SEGMENT_PREFIX = "segment-"
_NOT_FOREIGN = {LOCK, "lost+found"}


def segment_name(number: int) -> str:
    """The file of a segment."""
    return f"{SEGMENT_PREFIX}{number:08d}"


def segment_numbers(names: list[str]) -> list[int]:
    """The segments among file names, ascending."""
    tails = (name.removeprefix(SEGMENT_PREFIX) for name in names if name.startswith(SEGMENT_PREFIX))
    return sorted(int(tail) for tail in tails if len(tail) == 8 and tail.isdecimal() and tail.isascii())


@dataclass(frozen=True, slots=True)
class Superblock:
    """What is fixed when a directory is made."""

    uuid: str
    segment_bytes: int
    magic: str = MAGIC
    version: int = VERSION

    @property
    def uuid_bytes(self) -> bytes:
        """16 bytes."""
        return bytes.fromhex(self.uuid)


class DirectoryLock:
    """Held as long as a tier uses a directory; the kernel drops it when the process ends."""

    def __init__(self, directory: Path) -> None:
        """Makes the directory if need be. Raises ConfigError when it can't be used or somebody has it."""
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._fd = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(
                f"the NVMe directory {str(directory)!r} can't be used: {error.strerror}; "
                "give a directory that this user may write to"
            ) from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._fd)
            raise ConfigError(
                f"the NVMe directory {str(directory)!r} is in use by another process: "
                "stop that daemon, or give this one a directory of its own"
            ) from error

    def release(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def open_superblock(files: Files, directory: Path, segment_bytes: int) -> Superblock:
    """Read the superblock, or make a new one in an empty directory, with this segment size.

    Raises ConfigError for a directory that is somebody else's or was made by a newer version.
    """
    present = {entry.name for entry in directory.iterdir()}
    if SUPERBLOCK not in present:
        foreign = sorted(name for name in present - _NOT_FOREIGN if not name.startswith("."))
        if foreign:
            raise ConfigError(
                f"{str(directory)!r} holds {foreign[0]!r} and is no NVMe directory of kvstore: "
                "give an empty directory, or a new path"
            )
        return _make(files, segment_bytes)
    return _parse(files.read_small(SUPERBLOCK), directory)


def clear(files: Files, directory: Path, segment_bytes: int) -> None:
    """Remove everything that a tier made, and make the directory a new one; does nothing without a superblock.

    Raises ConfigError for a superblock that isn't ours.
    """
    if not (directory / SUPERBLOCK).exists():
        return
    try:
        _parse(files.read_small(SUPERBLOCK), directory)
    except ConfigError as error:
        # A superblock of ours that can't be used any more may go; one that isn't ours may not.
        if MAGIC.encode() not in files.read_small(SUPERBLOCK):
            raise error from None
    shutil.rmtree(directory / CATALOG, ignore_errors=True)
    names = files.names()
    for name in [*(segment_name(number) for number in segment_numbers(names)), NAMESPACES]:
        if name in names:
            files.remove(name)
    _make(files, segment_bytes)


def _make(files: Files, segment_bytes: int) -> Superblock:
    superblock = Superblock(uuid.uuid4().hex, segment_bytes)
    files.write_small(SUPERBLOCK, json.dumps(asdict(superblock)).encode())
    return superblock


def _parse(data: bytes, directory: Path) -> Superblock:
    where = f"{str(directory / SUPERBLOCK)!r}"
    way_out = "give another directory, or start with recovery 'none' to empty this one"
    try:
        fields = json.loads(data)
        if not isinstance(fields, dict) or fields.get("magic") != MAGIC:
            raise ConfigError(f"{where} is no superblock of kvstore: give another directory")
        version = fields["version"]
        if version != VERSION:
            raise ConfigError(f"{where} has format version {version!r}, this program knows {VERSION}: {way_out}")
        superblock = Superblock(fields["uuid"], fields["segment_bytes"])
        if len(superblock.uuid_bytes) != 16 or not isinstance(superblock.segment_bytes, int):
            raise ConfigError(f"{where} is damaged: {way_out}")
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{where} is damaged ({error}): {way_out}") from error
    return superblock
