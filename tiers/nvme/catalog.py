"""The catalog: which frames are there. An LMDB file of small records, see ``names``.

Every transaction is durable on return. The file is bounded by ``room_bytes``, of which some is kept for
transactions that only remove names: these can be made also when no more names fit.

LMDB ends the process when it meets a page that makes no sense. So a file that was there before is only ever
read, by another process; what is written to is made anew from what was read, each time.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
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
_DENSE_BYTES = 112
"""A name in a file that was just made takes less than this."""
_DATA, _LOCK, _NEW = "data.mdb", "lock.mdb", "new.mdb"


class CatalogError(Exception):
    """A transaction could not be made durable; the catalog is as it was before."""

    def __init__(self, message: str, full: bool) -> None:
        super().__init__(message)
        self.full = full
        """For lack of room."""


class Catalog:
    """An open catalog. ``commit`` may be called from any thread, one at a time goes on."""

    def __init__(self, path: Path, room_bytes: int, records: Records) -> None:
        """Make the catalog at ``path`` with these names, in place of what is there; no two have one place. Blocks.

        A catalog that is there already stays until the new one is whole, if there is room for both. Raises
        CatalogError.
        """
        self._path = path
        self._hard_bytes = max((room_bytes - _LOCK_FILE_BYTES) // PAGE_BYTES * PAGE_BYTES, _LEAST_ROOM_BYTES)
        kept_bytes = max(self._hard_bytes // 8, _KEPT_BYTES_MIN) // PAGE_BYTES * PAGE_BYTES
        self._soft_bytes = self._hard_bytes - kept_bytes
        self._set_aside_bytes = 0
        self.file_bytes = 0
        """What the catalog's files took up on the disk after the last transaction."""
        self._lock = threading.Lock()
        self._env: lmdb.Environment | None = None
        with self._lock:
            self._make(records)
            self._open()
            self._set_aside()

    @property
    def n_names(self) -> int:
        """Names that are durable now. Reads the file."""
        with self._lock, self._open().begin() as reading:
            return int(reading.stat(self._names)["entries"])

    def commit(
        self,
        puts: Sequence[tuple[bytes, bytes]],
        deletes: Sequence[bytes],
        changes: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:
        """One durable transaction: names out, names in, names changed. Blocks on the disk. Raises CatalogError.

        A name that is to go, or to change, and isn't there is ignored.
        """
        if not puts and not deletes and not changes:
            return
        with self._lock:
            try:
                self._write(puts, deletes, changes)
            except CatalogError as error:
                if puts or changes or not error.full:
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
            with suppress(OSError), (self._path / _DATA).open("r+b") as file:
                os.posix_fallocate(file.fileno(), 0, wanted_bytes)
                self._set_aside_bytes = wanted_bytes
        with suppress(OSError):
            self.file_bytes = sum(path.stat().st_blocks * 512 for path in self._path.iterdir())

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
        data = self._path / _DATA
        try:
            if not _is_folder(self._path):
                _remove(self._path)
                self._path.mkdir(mode=0o700)
            for other in [path for path in self._path.iterdir() if path != data]:
                _remove(other)
            if not _is_file(data):
                _remove(data)
            elif data.stat().st_size + _AHEAD_BYTES + len(records) * _DENSE_BYTES > self._hard_bytes:
                data.unlink()
            try:
                self._fill(self._path / _NEW, records)
            except (OSError, lmdb.Error):
                if not data.exists():
                    raise
                data.unlink()  # for lack of room for both; until the new one is whole the segments have to do
                self._fill(self._path / _NEW, records)
            (self._path / _NEW).replace(data)
            folder = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            os.fsync(folder)
            os.close(folder)
        except (OSError, lmdb.Error) as error:
            raise _as_catalog_error(error) from error

    def _fill(self, path: Path, records: Records) -> None:
        """Make a whole, durable file of these names."""
        path.unlink(missing_ok=True)
        room_bytes = self._soft_bytes
        with closing(
            lmdb.open(str(path), subdir=False, lock=False, sync=False, map_size=room_bytes, max_dbs=2, mode=0o600)
        ) as env:
            names, facts = env.open_db(NAMES), env.open_db(FACTS)
            for chunk in _in_order(records):
                with env.begin(write=True) as writing, writing.cursor(names) as cursor:
                    cursor.putmulti(chunk, append=True)
            with env.begin(write=True) as writing:
                writing.put(COMPLETE, b"1", db=facts)
            env.sync(True)

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

    def _write(
        self,
        puts: Sequence[tuple[bytes, bytes]],
        deletes: Sequence[bytes],
        changes: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:
        env = self._open()
        try:
            with env.begin(write=True) as writing, writing.cursor(self._names) as cursor:
                for key in deletes:
                    if cursor.set_key(key):
                        cursor.delete()
                cursor.putmulti(puts)
                for key, value in changes:
                    if cursor.set_key(key):
                        cursor.put(key, value)
        except lmdb.MapFullError as error:
            raise _as_catalog_error(error) from error
        except Exception as error:
            # Not all that goes wrong is an lmdb.Error. LMDB may refuse everything until the file is opened again.
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
    if not (_is_folder(path) and _is_file(path / _DATA)):
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


def _in_order(records: Records) -> Iterator[list[tuple[bytes, bytes]]]:
    """Keys and values in the order of keys, some at a time."""
    order = np.lexsort((records["place"]["page"], records["place"]["log_seq"]))
    for start in range(0, len(records), _CHUNK):
        yield items(records[order[start : start + _CHUNK]])


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _is_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _remove(path: Path) -> None:
    """Whatever is there. Raises OSError."""
    if _is_folder(path):
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _as_catalog_error(error: Exception) -> CatalogError:
    text = str(error)
    no_room = any(os.strerror(code) in text for code in (errno.ENOSPC, errno.EDQUOT))
    full = isinstance(error, lmdb.MapFullError) or no_room
    return CatalogError(f"the catalog can't be written: {text}", full)
