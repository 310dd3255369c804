"""The catalog: which frames are there. An LMDB file of small records, see ``names``.

Every transaction is durable on return. The file is bounded by ``room_bytes``, of which some is kept for
transactions that only remove names: these can be made also when no more names fit.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import lmdb
import numpy as np

from kvstore.tiers.nvme import catalog_probe
from kvstore.tiers.nvme.catalog_probe import COMPLETE, FACTS, NAMES
from kvstore.tiers.nvme.layout import PAGE_BYTES
from kvstore.tiers.nvme.names import RECORD, Records, intact, items

_LOCK_FILE_BYTES = 16 << 10
_LEAST_ROOM_BYTES = 128 << 10
_KEPT_BYTES_MIN = 64 << 10
_READ_TIMEOUT_S = 3600.0
_CHUNK = 50_000
_FEW = 64
_AHEAD_BYTES = 128 << 10


class CatalogError(Exception):
    """A transaction could not be made durable; the catalog is as it was before."""

    def __init__(self, message: str, full: bool) -> None:
        super().__init__(message)
        self.full = full
        """For lack of room."""


class Catalog:
    """An open catalog. ``commit`` may be called from any thread, one at a time goes on."""

    def __init__(self, path: Path, room_bytes: int, records: Records | None = None) -> None:
        """Open the catalog at ``path``, one that ``read_names`` could read; or make it anew with these names.

        Until it is made whole it counts as damaged. Raises CatalogError.
        """
        self._path = path
        self._hard_bytes = max((room_bytes - _LOCK_FILE_BYTES) // PAGE_BYTES * PAGE_BYTES, _LEAST_ROOM_BYTES)
        kept_bytes = max(self._hard_bytes // 8, _KEPT_BYTES_MIN) // PAGE_BYTES * PAGE_BYTES
        self._soft_bytes = self._hard_bytes - kept_bytes
        self._set_aside_bytes = 0
        self._lock = threading.Lock()
        self._env: lmdb.Environment | None = None
        with self._lock:
            if records is None:
                self._open()
            else:
                self._make(records)
            self._set_aside()

    @property
    def n_names(self) -> int:
        """Names that are durable now. Reads the file."""
        with self._lock, self._open().begin() as reading:
            return int(reading.stat(self._names)["entries"])

    @property
    def file_bytes(self) -> int:
        """What the catalog's files take up on the disk."""
        try:
            return sum(path.stat().st_blocks * 512 for path in self._path.iterdir())
        except OSError:
            return 0

    def commit(self, puts: Sequence[tuple[bytes, bytes]], deletes: Sequence[bytes]) -> None:
        """One durable transaction: names out, names in. Blocks on the disk. Raises CatalogError.

        A name that is to go and isn't there is ignored.
        """
        if not puts and not deletes:
            return
        with self._lock:
            try:
                self._write(puts, deletes)
            except CatalogError as error:
                if puts or not error.full:
                    raise
                self._remove(sorted(deletes))
            self._set_aside()

    def read(self) -> dict[bytes, bytes]:
        """All names by key. For tests: reads everything."""
        with self._lock, self._open().begin() as reading:
            return dict(reading.cursor(self._names))

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            if self._env is not None:
                self._env.close()
                self._env = None

    def _set_aside(self) -> None:
        """Keep room on the disk for the next transactions, so that names can go when the disk is full."""
        wanted_bytes = min((int(self._open().info()["last_pgno"]) + 1) * PAGE_BYTES + _AHEAD_BYTES, self._hard_bytes)
        if wanted_bytes > self._set_aside_bytes:
            with suppress(OSError), (self._path / "data.mdb").open("r+b") as file:
                os.posix_fallocate(file.fileno(), 0, wanted_bytes)
                self._set_aside_bytes = wanted_bytes

    def _remove(self, deletes: Sequence[bytes]) -> None:
        """Names that go need pages for a moment: take those that new names don't get, and few at a time."""
        self._open().set_mapsize(self._hard_bytes)
        try:
            for start in range(0, len(deletes), _FEW):
                self._write((), deletes[start : start + _FEW])
        finally:
            if self._env is not None:
                self._env.set_mapsize(self._soft_bytes)

    def _make(self, records: Records) -> None:
        try:
            shutil.rmtree(self._path, ignore_errors=True)
            self._path.mkdir(mode=0o700)
            env = self._open()
            for start in range(0, len(records), _CHUNK):
                self._write(items(records[start : start + _CHUNK]), ())
            with env.begin(write=True) as writing:
                writing.put(COMPLETE, b"1", db=self._facts)
            folder = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            os.fsync(folder)
            os.close(folder)
        except (OSError, lmdb.Error) as error:
            self._drop()
            raise _as_catalog_error(error) from error

    def _open(self) -> lmdb.Environment:
        if self._env is None:
            try:
                self._env = lmdb.open(
                    str(self._path), map_size=self._soft_bytes, max_dbs=2, mode=0o600, readahead=False, max_readers=8
                )
                self._names, self._facts = self._env.open_db(NAMES), self._env.open_db(FACTS)
            except (lmdb.Error, OSError) as error:
                self._drop()
                raise _as_catalog_error(error) from error
        return self._env

    def _write(self, puts: Sequence[tuple[bytes, bytes]], deletes: Sequence[bytes]) -> None:
        env = self._open()
        try:
            with env.begin(write=True) as writing, writing.cursor(self._names) as cursor:
                for key in deletes:
                    if cursor.set_key(key):
                        cursor.delete()
                cursor.putmulti(puts)
        except lmdb.MapFullError as error:
            raise _as_catalog_error(error) from error
        except lmdb.Error as error:
            # After a failed write LMDB may refuse everything until the file is opened again.
            self._drop()
            raise _as_catalog_error(error) from error

    def _drop(self) -> None:
        if self._env is not None:
            self._env.close()
            self._env = None


def read_names(path: Path) -> Records | None:
    """All names of a catalog in order of writing, or None when it is missing, unfinished or damaged.

    Reads it in another process and blocks until that has ended.
    """
    if not (path / "data.mdb").is_file():
        return None
    command = [sys.executable, "-I", catalog_probe.__file__, str(path)]
    try:
        result = subprocess.run(command, capture_output=True, timeout=_READ_TIMEOUT_S, check=False)  # noqa: S603 - our own program and script
    except subprocess.TimeoutExpired:
        return None
    if result.returncode != 0 or len(result.stdout) % RECORD.itemsize:
        return None
    records = np.frombuffer(result.stdout, RECORD)
    return records if intact(records).all() else None


def _as_catalog_error(error: Exception) -> CatalogError:
    text = str(error)
    no_room = any(os.strerror(code) in text for code in (errno.ENOSPC, errno.EDQUOT))
    full = isinstance(error, lmdb.MapFullError) or no_room
    return CatalogError(f"the catalog can't be written: {text}", full)
