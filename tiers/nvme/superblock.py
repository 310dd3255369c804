"""Whose directory it is: the superblock ``kvstore.json``, the lock, and what a tier's directory may hold."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

from kvstore.errors import ConfigError, InUseError
from kvstore.tiers.nvme.files import Files

MAGIC = "kvstore-nvme"
VERSION = 1
SUPERBLOCK, LOCK, CATALOG, NAMESPACES = "kvstore.json", "lock", "catalog", "namespaces.json"
CLEARED = "cleared.json"
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
    """Held as long as a tier uses a directory; the kernel drops it when the process ends.

    The directory is locked as well as the file, which somebody may remove.
    """

    def __init__(self, directory: Path) -> None:
        """Makes the directory if need be. Raises ConfigError when it can't be used, InUseError if somebody has it."""
        self._directory = directory
        self._fds: list[int] = []
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._fds.append(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._fds.append(os.open(directory / LOCK, flags, 0o600))
        except OSError as error:
            self.release()
            raise ConfigError(
                f"the NVMe directory {str(directory)!r} can't be used: {error.strerror} ({error.filename}); "
                "give a directory that this user may write to"
            ) from error
        try:
            for fd in self._fds:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.release()
            raise InUseError(
                f"the NVMe directory {str(directory)!r} is in use by another process: "
                "stop that daemon, or give this one a directory of its own",
                ("nvme_dir",),
            ) from error

    def is_there(self) -> bool:
        """Whether the path still leads to this directory, and the directory to its superblock. May block."""
        try:
            facts, own = self._directory.stat(), os.fstat(self._fds[0])
            return (facts.st_dev, facts.st_ino) == (own.st_dev, own.st_ino) and (self._directory / SUPERBLOCK).exists()
        except OSError:
            return False

    def release(self) -> None:
        """Idempotent."""
        for fd in self._fds:
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)  # closing would not do while a forked child has the descriptor
        self.abandon()

    def abandon(self) -> None:
        """In a forked child: the lock is its parent's, and does not outlive that one because of the child."""
        while self._fds:
            os.close(self._fds.pop())


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
    return _parse(_read(files, directory), directory)


def clear(files: Files, directory: Path, segment_bytes: int) -> None:
    """Remove everything that a tier made, and make the directory a new one; does nothing without a superblock.

    Raises ConfigError for a superblock that isn't ours.
    """
    if not (directory / SUPERBLOCK).exists():
        return
    data = _read(files, directory)
    try:
        _parse(data, directory)
    except ConfigError:
        # A superblock of ours that can't be used any more may go; one that isn't ours may not.
        if MAGIC.encode() not in data:
            raise
    shutil.rmtree(directory / CATALOG, ignore_errors=True)
    names = files.names()
    for name in [*(segment_name(number) for number in segment_numbers(names)), NAMESPACES, CLEARED]:
        if name in names:
            files.remove(name)
    _make(files, segment_bytes)


def taken_numbers(files: Files, directory: Path) -> list[int]:
    """Numbers of segments whose names something has that is no file."""
    ours = set(files.names())
    return segment_numbers([entry.name for entry in directory.iterdir() if entry.name not in ours])


def _read(files: Files, directory: Path) -> bytes:
    try:
        return files.read_small(SUPERBLOCK)
    except OSError as error:
        raise ConfigError(
            f"{str(directory / SUPERBLOCK)!r} can't be read ({error.strerror}): "
            "make it readable, or give another directory"
        ) from error


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
        if len(superblock.uuid_bytes) != 16 or superblock.segment_bytes <= 0:
            raise ConfigError(f"{where} is damaged: {way_out}")
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{where} is damaged ({error}): {way_out}") from error
    return superblock
