"""What a power cut leaves: a model of durability beside real files, frozen or read at any sync point.

``CrashFiles`` passes every call on and keeps its own account of what is durable: for each file the bytes as of
its last sync, and a log of everything that isn't durable yet, in order. ``materialize`` writes a directory as it
could be found after the power came back. All bytes are kept in memory, so this is for small directories.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from kvstore.tiers.nvme.files import Extent, Files, Int64s, pieces_of
from kvstore.tiers.nvme.memory import Bytes, gather, torn

Mode = Literal["drop_unsynced", "torn_last_write", "reordered"]
MODES: tuple[Mode, ...] = ("drop_unsynced", "torn_last_write", "reordered")


class Crashed(BaseException):
    """The power is gone. Not an Exception: code that survives I/O errors must not survive this."""


@dataclass(eq=False)
class _File:
    """The bytes as of the last sync. A new file is empty until it has been synced, however long it is."""

    durable: Bytes
    size_bytes: int


@dataclass(eq=False)
class _Write:
    file: _File
    offset: int
    data: Bytes
    returned: bool = False


@dataclass(eq=False)
class _Naming:
    """``file`` gets ``name``; None takes the name away. With ``old``: what is called that gets the name."""

    name: str
    file: _File | None = None
    old: str = ""


@dataclass
class _Disk:
    """Names and files, being brought up to date in a copy."""

    names: dict[str, _File]
    images: dict[_File, Bytes] = field(default_factory=dict)

    def apply(self, entry: _Write | _Naming) -> None:
        """Let one entry of the log happen."""
        if isinstance(entry, _Write):
            image = self.image(entry)
            image[entry.offset : entry.offset + len(entry.data)] = entry.data
        elif entry.old:
            if entry.old in self.names:
                self.names[entry.name] = self.names.pop(entry.old)
        elif entry.file is not None:
            self.names[entry.name] = entry.file
        else:
            self.names.pop(entry.name, None)

    def tear(self, entry: _Write, rng: np.random.Generator) -> None:
        """Let a part of a write happen."""
        place = self.image(entry)[entry.offset : entry.offset + len(entry.data)]
        place[:] = torn(rng, place, entry.data)

    def image(self, entry: _Write) -> Bytes:
        """The bytes of the file that is written to, long enough for that."""
        image = self.images.get(entry.file)
        if image is None:
            image = entry.file.durable.copy()
        self.images[entry.file] = image = _at_least(image, entry.offset + len(entry.data))
        return image


class CrashFiles(Files):
    """``inner`` on ``directory``, with an account of what is durable.

    Sync points are ``sync``, ``sync_directory``, both steps of ``write_small`` and ``catalog_committed``, numbered
    from 1; ``points`` lists those that were reached. At ``crash_at`` the call raises Crashed *before* it makes
    anything durable, and so does every later call; so the state right after point N is that at the crash at N + 1,
    with nothing of what came between. ``at_point``, if set, is called at each point with its number, before it
    takes effect: one run can so be judged at all of its points.

    The catalog, which doesn't go through ``Files``, is durable as of its last commit, for which
    ``set_catalog_copier`` gives the means.
    """

    def __init__(
        self,
        directory: Path,
        inner: Files,
        crash_at: int | None = None,
        at_point: Callable[[int], None] | None = None,
        catalog: str = "catalog",
    ) -> None:
        self.inner = inner
        self.direct = inner.direct
        self.crash_at = crash_at
        self.at_point = at_point
        self.points: list[str] = []
        self.crashed = False
        self._catalog_name = catalog
        self._catalog: dict[str, bytes] | None = None
        self._copy_catalog: Callable[[str], object] | None = None
        if (directory / catalog).is_dir():
            self._catalog = _folder(directory / catalog)
        self._durable_names: dict[str, _File] = {}
        for name in inner.names():
            image = np.fromfile(directory / name, dtype=np.uint8)
            self._durable_names[name] = _File(image, len(image))
        self._live_names = dict(self._durable_names)
        self._log: list[_Write | _Naming] = []
        self._handles: dict[int, _File] = {}
        self._lock = threading.RLock()

    def set_catalog_copier(self, copy: Callable[[str], object]) -> None:
        """``copy(path)`` writes the catalog as committed into an empty folder (``lmdb.Environment.copy``)."""
        self._copy_catalog = copy

    def materialize(self, target: Path, mode: Mode, seed: int = 0) -> None:
        """Make ``target`` a directory as it could be after a power cut now.

        ``drop_unsynced``: nothing that isn't durable is there. ``torn_last_write``: writes and names arrived in
        order up to a random write, of which a random part of its 512-byte pieces arrived. ``reordered``: of all
        writes and changes of names, a random part arrived. Raises FileExistsError if ``target`` is there.
        """
        rng = np.random.default_rng([seed, len(self.points), MODES.index(mode)])
        with self._lock:
            disk = _Disk(dict(self._durable_names))
            if mode == "torn_last_write":
                self._break_off(disk, rng)
            elif mode == "reordered":
                for entry in self._log:
                    if rng.random() < 0.5:
                        disk.apply(entry)
            target.mkdir(parents=True)
            for name, file in disk.names.items():
                disk.images.get(file, file.durable).tofile(target / name)
            if self._catalog is not None:
                (target / self._catalog_name).mkdir()
                for name, data in self._catalog.items():
                    (target / self._catalog_name / name).write_bytes(data)

    # Files

    def create(self, name: str, size_bytes: int) -> int:
        with self._lock:
            self._alive()
            handle = self.inner.create(name, size_bytes)
            file = _File(np.empty(0, dtype=np.uint8), size_bytes)
            self._handles[handle] = self._live_names[name] = file
            self._log.append(_Naming(name, file))
            return handle

    def open(self, name: str) -> int:
        with self._lock:
            self._alive()
            handle = self.inner.open(name)
            self._handles[handle] = self._live_names[name]
            return handle

    def size_bytes(self, handle: int) -> int:
        self._alive()
        return self.inner.size_bytes(handle)

    def close(self, handle: int) -> None:
        with self._lock:
            self._handles.pop(handle, None)
            self.inner.close(handle)

    def names(self) -> list[str]:
        self._alive()
        return self.inner.names()

    def remove(self, name: str) -> None:
        with self._lock:
            self._alive()
            self.inner.remove(name)
            del self._live_names[name]
            self._log.append(_Naming(name))

    def rename(self, old: str, new: str) -> None:
        with self._lock:
            self._alive()
            self.inner.rename(old, new)
            self._live_names[new] = self._live_names.pop(old)
            self._log.append(_Naming(new, old=old))

    def read(self, handle: int, extents: Sequence[Extent]) -> Int64s:
        self._alive()
        return self.inner.read(handle, extents)

    def write(self, handle: int, extents: Sequence[Extent]) -> Int64s:
        pieces_of(extents)
        # On its way to the disk from here on: a cut before the call returns may leave any part of it.
        with self._lock:
            self._alive()
            file = self._handles[handle]
            writes = [_Write(file, extent.offset, gather(extent)) for extent in extents]
            self._log.extend(writes)
        results = self.inner.write(handle, extents)
        with self._lock:
            self._alive()
            for write, result in zip(writes, results.tolist(), strict=True):
                write.data = write.data[: max(result, 0)]
                write.returned = True
                if result > 0:
                    file.size_bytes = max(file.size_bytes, write.offset + result)
        return results

    def sync(self, handle: int) -> None:
        with self._lock:
            file = self._handles[handle]
            covered = [w for w in self._log if isinstance(w, _Write) and w.file is file and w.returned]
        self._point("sync")
        self.inner.sync(handle)
        with self._lock:
            self._alive()
            file.durable = _at_least(file.durable, file.size_bytes)
            for write in covered:
                file.durable[write.offset : write.offset + len(write.data)] = write.data
            done = set(map(id, covered))
            self._log = [entry for entry in self._log if id(entry) not in done]

    def sync_directory(self) -> None:
        self._point("sync_directory")
        self.inner.sync_directory()
        self._names_are_durable()

    def read_small(self, name: str) -> bytes:
        self._alive()
        return self.inner.read_small(name)

    def write_small(self, name: str, data: bytes) -> None:
        self._point("write_small: data")
        with self._lock:
            self._alive()
            self.inner.write_small(name, data)
            file = _File(np.frombuffer(data, dtype=np.uint8).copy(), len(data))
            self._live_names[name] = file
            self._log.append(_Naming(name, file))
        self._point("write_small: name")
        self._names_are_durable()

    def disk_free_bytes(self) -> int:
        self._alive()
        return self.inner.disk_free_bytes()

    def on_disk_bytes(self) -> int:
        self._alive()
        return self.inner.on_disk_bytes()

    def catalog_committed(self) -> None:
        self._point("catalog")
        if self._copy_catalog is not None:
            with tempfile.TemporaryDirectory() as folder:
                self._copy_catalog(folder)
                snapshot = _folder(Path(folder))
            with self._lock:
                self._catalog = snapshot
        self.inner.catalog_committed()

    def end_threads(self) -> None:
        self.inner.end_threads()

    # Inside

    def _alive(self) -> None:
        if self.crashed:
            raise Crashed(f"the power went at sync point {len(self.points)} ({self.points[-1]})")

    def _point(self, what: str) -> None:
        with self._lock:
            self._alive()
            self.points.append(what)
            if self.at_point is not None:
                self.at_point(len(self.points))
            self.crashed = len(self.points) == self.crash_at
            self._alive()

    def _names_are_durable(self) -> None:
        with self._lock:
            self._alive()
            self._durable_names = dict(self._live_names)
            self._log = [entry for entry in self._log if not isinstance(entry, _Naming)]

    def _break_off(self, disk: _Disk, rng: np.random.Generator) -> None:
        writes = [entry for entry in self._log if isinstance(entry, _Write) and len(entry.data)]
        last = writes[int(rng.integers(0, len(writes)))] if writes else None
        for entry in self._log:
            if entry is last:
                disk.tear(last, rng)
                return
            disk.apply(entry)


def _at_least(image: Bytes, length_bytes: int) -> Bytes:
    """The image itself if it is long enough, else a copy with zeros behind."""
    if len(image) >= length_bytes:
        return image
    longer = np.zeros(length_bytes, dtype=np.uint8)
    longer[: len(image)] = image
    return longer


def _folder(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(path.iterdir()) if file.is_file()}
