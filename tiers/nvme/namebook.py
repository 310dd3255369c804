"""The numbers of namespaces, and the one way by which names become durable: first the namespaces they refer to.

Namespaces lie in a file of their own and not in the catalog, which can be rebuilt without them but says little
without them: ``[[number, digest in hex, description], ...]`` as JSON.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence

from kvstore.tiers.nvme.catalog import Catalog, CatalogError
from kvstore.tiers.nvme.files import Files
from kvstore.tiers.nvme.health import means_full
from kvstore.tiers.nvme.superblock import NAMESPACES


class NameBook:
    """Known namespaces by number, and the catalog. ``commit`` may be called from any thread."""

    def __init__(self, files: Files, catalog: Catalog, room_bytes: int, known: dict[int, tuple[bytes, str]]) -> None:
        self.catalog = catalog
        self.known = known
        self._files = files
        self._room_bytes = room_bytes
        self._numbers = {digest: number for number, (digest, _) in known.items()}
        self._lock = threading.Lock()
        self._committing = threading.Lock()
        self._n_changes = 0
        self._n_durable = 0

    def number(self, digest: bytes, description: str) -> int:
        """The number of a namespace; a new one or another description is durable with the next ``commit``."""
        number = self._numbers.get(digest)
        if number is None:
            number = self._numbers[digest] = max(self.known, default=-1) + 1
        if self.known.get(number) != (digest, description):
            with self._lock:
                self.known[number] = (digest, description)
                self._n_changes += 1
        return number

    def commit(self, puts: Sequence[tuple[bytes, bytes]], deletes: Sequence[bytes]) -> None:
        """One durable transaction; blocks. Raises CatalogError: then nothing has changed."""
        with self._committing:
            if puts:
                self._write_namespaces()
            self.catalog.commit(puts, deletes)
            if puts or deletes:
                self._files.catalog_committed()

    def _write_namespaces(self) -> None:
        with self._lock:
            n_changes, known = self._n_changes, sorted(self.known.items())
        if n_changes == self._n_durable:
            return
        data = json.dumps([[number, digest.hex(), text] for number, (digest, text) in known]).encode()
        if len(data) > self._room_bytes:
            sizes = f"{len(known)} namespaces take {len(data)} bytes, room is for {self._room_bytes}"
            raise CatalogError(sizes, full=True)
        try:
            self._files.write_small(NAMESPACES, data)
        except OSError as error:
            full = means_full(error.errno or 0)
            raise CatalogError(f"the file of namespaces can't be written: {error}", full) from error
        self._n_durable = n_changes


def read_namespaces(files: Files) -> dict[int, tuple[bytes, str]] | None:
    """What the file of namespaces says; empty when there is none, None when it is damaged."""
    if NAMESPACES not in files.names():
        return {}
    try:
        rows = json.loads(files.read_small(NAMESPACES))
        known = {int(number): (bytes.fromhex(digest), str(text)) for number, digest, text in rows}
        return known if all(len(digest) == 16 and 0 <= n < 1 << 32 for n, (digest, _) in known.items()) else None
    except (OSError, ValueError, TypeError):
        return None
