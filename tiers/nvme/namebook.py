"""The numbers of namespaces, and the one way by which names become durable: first the namespaces they refer to.

Namespaces lie in a file of their own and not in the catalog, which can be rebuilt without them but says little
without them: ``[[number, digest in hex, description], ...]`` as JSON. The file has a bounded room: those that
have been without frames for a while leave it when others need the room, and descriptions do before a namespace is
turned away.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Container, Mapping, Sequence

import numpy as np

from kvstore.clock import Clock, SystemClock
from kvstore.errors import BadInputError
from kvstore.tiers.nvme.catalog import Catalog, CatalogError
from kvstore.tiers.nvme.files import Files
from kvstore.tiers.nvme.health import means_full
from kvstore.tiers.nvme.names import NO_RECORDS, Records, items
from kvstore.tiers.nvme.superblock import NAMESPACES

IDLE_S = 10.0
LOOK_S = 1.0
"""Room is sought in a full list this often: there may be very many namespaces."""

Described = tuple[bytes, str]
"""Digest and description of a namespace."""


class NameBook:
    """Namespaces by number, and the catalog. ``commit`` may be called from any thread, the rest from one."""

    def __init__(
        self,
        files: Files,
        catalog: Catalog,
        room_bytes: int,
        known: dict[int, Described],
        in_file: dict[int, Described],
        is_there: Callable[[], bool] = lambda: True,
    ) -> None:
        """``known: those in use, which fit; ``in_file``: what the file says. ``taken``: numbers not to be given.

        ``is_there``: whether what is written now will be found in the directory; asked before each commit.
        """
        self.catalog = catalog
        self.known = known
        """All that have a number, whether they are listed in the file or not."""
        self._files = files
        self._room_bytes = room_bytes
        self._is_there = is_there
        self._numbers = {digest: number for number, (digest, _) in known.items()}
        self._listed = dict(known)
        self._listed_bytes = file_bytes(known)
        self._in_file = in_file
        self._n_frames: Mapping[int, int] = {}
        self._clock: Clock = SystemClock()
        self._used_at_s = dict.fromkeys(known, 0.0)
        self._looked_at_s = -LOOK_S
        self._lock = threading.Lock()
        self._committing = threading.Lock()

    def watch(self, n_frames: Mapping[int, int], clock: Clock) -> None:
        """``n_frames``: how many frames each has that has any, now and later."""
        self._n_frames, self._clock = n_frames, clock

    def number(self, digest: bytes, description: str) -> int:
        """The number of a namespace; durable with the first ``commit`` of a frame in it.

        Raises BadInputError when there is no room in the file for one more.
        """
        number = self._numbers.get(digest)
        if number is None:
            number = number_for(digest, self.known)
        if number in self._listed:
            self._enter(number, digest, description)
        else:
            if not self._list(number, digest, description):
                raise BadInputError(
                    f"the list of namespaces on NVMe has {self._room_bytes} bytes for those with blocks there, and "
                    f"{len(self._listed)} take it up: give the NVMe tier more capacity, or wait until blocks are gone"
                )
            self.known[number] = (digest, description)
            self._numbers[digest] = number
        self._used_at_s[number] = self._clock.now_s()
        return number

    def keep(self, number: int) -> bool:
        """Whether a frame may now be written in this namespace, which is known."""
        self._used_at_s[number] = self._clock.now_s()
        return number in self._listed or self._list(number, *self.known[number])

    def commit(self, records: Records, deletes: Sequence[bytes], renamed: Records = NO_RECORDS) -> None:
        """One durable transaction: these names in, those out; blocks. Raises CatalogError: then nothing has changed.

        ``renamed``: names that say something else from now on, if they are still there.
        """
        with self._committing:
            if len(records):
                if not self._is_there():
                    raise CatalogError("the directory was removed, or another is in its place", full=False)
                self._write_namespaces(np.unique(records["value"]["namespace"]).tolist())
            self.catalog.commit(items(records), deletes, items(renamed))
            if len(records) or deletes or len(renamed):
                self._files.catalog_committed()

    def _list(self, number: int, digest: bytes, description: str) -> bool:
        """Find room in the file for a namespace, with its description if that can be."""
        if self._enter(number, digest, description):
            return True
        now_s = self._clock.now_s()
        if now_s - self._looked_at_s < LOOK_S:
            return self._enter(number, digest, "")
        self._looked_at_s = now_s
        self._unlist_idle(now_s)
        if self._enter(number, digest, description):
            return True
        self._drop_descriptions()
        return self._enter(number, digest, description) or self._enter(number, digest, "")

    def _enter(self, number: int, digest: bytes, description: str) -> bool:
        """List a namespace, or give one that is listed another description, if it fits."""
        entry_bytes = _entry_bytes(number, digest, description)
        if number in self._listed:
            entry_bytes -= _entry_bytes(number, *self._listed[number])
        if self._listed_bytes + entry_bytes > self._room_bytes:
            return False
        with self._lock:
            self._listed[number] = (digest, description)
        self._listed_bytes += entry_bytes
        return True

    def _unlist_idle(self, now_s: float) -> None:
        """Those that have no frames, and had time to get some, leave the list."""
        idle = [number for number in self._listed if not self._n_frames.get(number)]
        with self._lock:
            for number in idle:
                if now_s - self._used_at_s[number] < IDLE_S:
                    continue
                self._listed_bytes -= _entry_bytes(number, *self._listed.pop(number))

    def _drop_descriptions(self) -> None:
        with self._lock:
            self._listed = {number: (digest, "") for number, (digest, _) in self._listed.items()}
            self._listed_bytes = file_bytes(self._listed)

    def _write_namespaces(self, used: Sequence[int]) -> None:
        with self._lock:
            listed = dict(self._listed)
        if all(number in self._in_file and self._in_file[number] == listed[number] for number in used):
            return
        write_namespaces(self._files, listed)
        self._in_file = listed


def number_for(digest: bytes, taken: Container[int]) -> int:
    """The number of a namespace that has none yet. It follows from the digest, so that an older list of namespaces,
    put back in place of a younger one, doesn't give the same numbers to others."""
    number = int.from_bytes(digest[:4], "little")
    while number in taken:
        number = (number + 1) & 0xFFFFFFFF
    return number


def fitting(known: dict[int, Described], room_bytes: int, n_frames: Mapping[int, int]) -> dict[int, Described]:
    """Namespaces that a file of this size can list: without descriptions if need be, then those with most frames."""
    if file_bytes(known) <= room_bytes:
        return known
    fit: dict[int, Described] = {}
    n_bytes = file_bytes(fit)
    for number in sorted(known, key=lambda each: -n_frames.get(each, 0)):
        digest, _ = known[number]
        n_bytes += _entry_bytes(number, digest, "")
        if n_bytes > room_bytes:
            break
        fit[number] = (digest, "")
    return fit


def write_namespaces(files: Files, listed: dict[int, Described]) -> None:
    """Replace the file of namespaces; durable on return. Raises CatalogError."""
    data = json.dumps([[number, digest.hex(), text] for number, (digest, text) in sorted(listed.items())])
    try:
        files.write_small(NAMESPACES, data.encode())
    except OSError as error:
        full = means_full(error.errno or 0)
        raise CatalogError(f"the file of namespaces can't be written: {error}", full) from error


def read_namespaces(files: Files) -> dict[int, Described] | None:
    """What the file of namespaces says; empty when there is none, None when it is damaged."""
    if NAMESPACES not in files.names():
        return {}
    try:
        rows = json.loads(files.read_small(NAMESPACES))
        known = {int(number): (bytes.fromhex(digest), str(text)) for number, digest, text in rows}
    except (OSError, ValueError, TypeError, OverflowError, RecursionError):
        return None
    good = all(len(digest) == 16 and 0 <= number < 1 << 32 for number, (digest, _) in known.items())
    return known if good and len({digest for digest, _ in known.values()}) == len(known) else None


def file_bytes(known: Mapping[int, Described]) -> int:
    """The size of a file that lists these."""
    return 2 + sum(_entry_bytes(number, *described) for number, described in known.items())


def _entry_bytes(number: int, digest: bytes, description: str) -> int:
    return len(json.dumps([number, digest.hex(), description])) + 2
