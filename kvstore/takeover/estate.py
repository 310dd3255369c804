"""What a daemon has left with the holder, read with suspicion: nothing in it is used before it was checked."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvstore.errors import IntegrityError
from kvstore.takeover.link import Entry
from kvstore.takeover.notes import read_notes
from kvstore.tiers import memfd
from kvstore.tiers.adopted import Former, FormerRegion
from kvstore.tiers.directory import FormerDirectory, Labels

FORMAT = 1
TOKEN_BYTES = 16

log = logging.getLogger("kvstore.takeover")


@dataclass(frozen=True, slots=True)
class FormerSession:
    """A client of the earlier daemon whose process lives. ``pidfd`` belongs to whoever takes it."""

    id: int
    token: bytes
    tenant: str
    client_name: str
    pid: int
    pidfd: int


@dataclass(frozen=True, slots=True)
class Estate:
    """All that an earlier daemon left: memory, clients, and what the blocks in that memory belong to."""

    former: Former
    sessions: list[FormerSession]
    last_session_id: int
    namespaces: dict[bytes, str]
    """What the namespaces of blocks are, by the digest in the blocks' labels."""

    def close(self) -> None:
        """Close all descriptors. For an estate that nobody takes."""
        self.former.close()
        for session in self.sessions:
            os.close(session.pidfd)


def read_estate(entries: list[Entry]) -> Estate | None:
    """The estate in a holder's entries, whose descriptors it takes over; None if nothing was left.

    Raises IntegrityError for one that can't be believed; all descriptors are closed then.
    """
    if not entries:
        return None
    reader = _Reader(entries)
    try:
        return reader.read()
    except (ValueError, LookupError, TypeError, OSError, ArithmeticError) as error:
        raise IntegrityError(f"what the daemon before has left can't be read: {error!r}") from error
    finally:
        reader.close_rest()


class _Reader:
    def __init__(self, entries: list[Entry]) -> None:
        self._fds = {entry.fd for entry in entries if entry.fd >= 0}
        self._entries: dict[str, list[tuple[list[str], Entry]]] = {}
        for entry in entries:
            kind, *names = entry.key.split("/")
            self._entries.setdefault(kind, []).append((names, entry))

    def read(self) -> Estate:
        (_, directory_entry), *more = self._entries.get("directory", [])
        facts = json.loads(directory_entry.text)
        if more or facts["format"] != FORMAT or directory_entry.fd < 0:
            raise IntegrityError(f"its format is {facts['format']}; {FORMAT} is known here")
        directory = FormerDirectory(directory_entry.fd)
        namespaces = self._namespaces()
        sessions = self._sessions()
        try:
            mappers = self._mappers()
            regions = [
                self._region(int(names[0]), entry, mappers.get(int(names[0]), frozenset()) & sessions.keys(), directory)
                for names, entry in self._entries.get("region", [])
            ]
            ids = {client for clients in mappers.values() for client in clients} | sessions.keys()
            last_session_id = max([int(facts["last_session_id"]), *ids])
        except BaseException:
            for session in sessions.values():
                os.close(session.pidfd)
            raise
        regions.sort(key=lambda region: region.id)
        for region in regions:
            self._fds.discard(region.fd)
        former = Former(regions, max([directory.last_region_id, *(region.id for region in regions)]))
        return Estate(former, list(sessions.values()), last_session_id, namespaces)

    def close_rest(self) -> None:
        """The descriptors that nobody has taken."""
        for fd in self._fds:
            os.close(fd)

    def _namespaces(self) -> dict[bytes, str]:
        """Of a daemon that has labelled nothing there are none."""
        found: dict[bytes, str] = {}
        for _, entry in self._entries.get("namespaces", []):
            if entry.fd < 0:
                raise IntegrityError("descriptions of namespaces have no memory file")
            found |= read_notes(entry.fd)
        return found

    def _sessions(self) -> dict[int, FormerSession]:
        """Those whose process is alive: the mappings of others are gone."""
        poller = select.poll()
        by_fd: dict[int, FormerSession] = {}
        for names, entry in self._entries.get("session", []):
            facts = json.loads(entry.text)
            session = FormerSession(
                int(names[0]), bytes.fromhex(facts["token"]), str(facts["tenant"]), str(facts["name"]),
                int(facts["pid"]), entry.fd,
            )  # fmt: skip
            if session.id < 1 or len(session.token) != TOKEN_BYTES or entry.fd < 0:
                raise IntegrityError(f"session {session.id} is incomplete")
            by_fd[entry.fd] = session
            poller.register(entry.fd, select.POLLIN)
        for fd, _ in poller.poll(0):
            by_fd.pop(fd, None)
        self._fds -= by_fd.keys()
        return {session.id: session for session in by_fd.values()}

    def _mappers(self) -> dict[int, frozenset[int]]:
        found: dict[int, set[int]] = {}
        for names, _ in self._entries.get("map", []):
            found.setdefault(int(names[0]), set()).add(int(names[1]))
        return {region_id: frozenset(clients) for region_id, clients in found.items()}

    def _region(
        self, region_id: int, entry: Entry, mappers: frozenset[int], directory: FormerDirectory
    ) -> FormerRegion:
        facts: dict[str, Any] = json.loads(entry.text)
        size_bytes = int(facts["size_bytes"])
        if region_id < 1 or size_bytes < memfd.PAGE_BYTES or size_bytes % memfd.PAGE_BYTES:
            raise IntegrityError(f"region {region_id} has {size_bytes} bytes")
        none = np.empty(0, np.int64)
        inode = os.fstat(entry.fd).st_ino if entry.fd >= 0 else int(facts.get("inode", 0))
        memory = FormerRegion(region_id, -1, size_bytes, 0, "", None, mappers, none, Labels.join([]), inode)
        if entry.fd < 0:
            return memory  # retired: no block was found there
        slot_bytes, writer, base = int(facts["slot_bytes"]), int(facts["writer"]), int(facts["base"])
        indexes = directory.labelled(base, size_bytes // slot_bytes)
        if not _is_sealed(entry.fd, size_bytes, seal=bool(facts.get("unsealed"))):
            return memory  # never seen by anyone but its writer
        return FormerRegion(
            region_id, entry.fd, size_bytes, slot_bytes, str(facts["tenant"]), writer if writer in mappers else None,
            mappers, indexes, directory.labels(base + indexes), inode,
        )  # fmt: skip


def _is_sealed(fd: int, size_bytes: int, *, seal: bool) -> bool:
    """Whether nobody can map it writable from now on. What was left unsealed on purpose is sealed here."""
    with contextlib.suppress(OSError):
        if os.fstat(fd).st_size != size_bytes:
            return False
        if seal and not memfd.is_read_only(fd):
            memfd.seal_read_only(fd)
        return memfd.is_read_only(fd)
    return False
