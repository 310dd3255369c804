"""What a daemon keeps with its holder while it lives: regions, clients, the slot directory, what namespaces are.

It writes down everything before it has an effect outside: a region before a client hears of it, a mapping
before the client gets the descriptor. A packet that was sent is safe even if this process dies at once; if one
can't be sent, the slot directory says at once that nothing of it is to be believed, until a holder has all
of it again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Callable, Collection
from pathlib import Path

import numpy as np

from kvstore.errors import ConfigError, IntegrityError, UnavailableError
from kvstore.logs import about
from kvstore.prefix_index.block_table import NO_PARENT, Ids
from kvstore.prefix_index.index import PrefixIndex
from kvstore.takeover.estate import FORMAT
from kvstore.takeover.link import SEND_S, Entry, HolderLink
from kvstore.takeover.notes import NamespaceNotes
from kvstore.tiers.directory import Labels
from kvstore.tiers.dram import DramTier
from kvstore.tiers.labelling import Labelling
from kvstore.tiers.region import Region
from kvstore.types import KEY_BYTES

RETRY_S = 5.0
RANKS_PER_TICK = 2048
"""Ranks noted at a time: what a tick may take of the loop."""
SETTLE_S = 2.0
"""How long after the start those are waited for who mapped the memory that was taken over."""

DigestOf = Callable[[int], bytes]
"""The digest of a namespace by its number in the block table; zeros for one that no next daemon is told of."""

log = logging.getLogger("kvstore.takeover")


class Keeper:
    """A tier's ledger, and more. Called on the store's thread only; never raises, blocks for a packet at most.

    ``start_serving`` makes what it has the current generation; before that a daemon that dies leaves the
    holder as it was.
    """

    def __init__(self, path: Path, owner: str, grace_s: float, name: str, link: HolderLink | None) -> None:
        """``name``: one that no other daemon's keeper ever has. Without a link it tries again later."""
        self._path = path
        self._owner = owner
        self._grace_s = grace_s
        self._name = name
        self._n_found = 0
        self._generation = ""
        self._link = link
        self._entries: dict[str, Entry] = {}
        self._notes: NamespaceNotes | None = None
        self._notes_failed = False
        self._dram: DramTier | None = None
        self._labelling: Labelling | None = None
        self._serving = False
        self._retry_at_s = 0.0
        self._searching = False
        self._found: list[HolderLink] = []
        self._settle_until_s = 0.0
        self._rank_at = 0
        self._rank_rounds = 0

    @property
    def linked(self) -> bool:
        """Whether a holder has it all."""
        return self._link is not None and self._serving

    # The tier's ledger ---------------------------------------------------------------------------

    def region_made(self, region: Region, base: int) -> None:
        facts = {
            "size_bytes": region.size_bytes,
            "slot_bytes": region.slot_bytes,
            "tenant": region.tenant,
            "writer": -1 if region.writer is None else region.writer,
            "base": base,
            "unsealed": region.unsealed,
        }
        self._put(Entry(f"region/{region.id}", json.dumps(facts), region.fd))

    def region_mapped(self, region_id: int, client: int) -> None:
        self._put(Entry(f"map/{region_id}/{client}", ""))

    def regions_unmapped(self, region_ids: Collection[int], client: int) -> None:
        self._drop([f"map/{region_id}/{client}" for region_id in region_ids])

    def region_retired(self, region_id: int, size_bytes: int, inode: int) -> None:
        self._put(Entry(f"region/{region_id}", json.dumps({"size_bytes": size_bytes, "inode": inode})))
        self._confirm()

    def region_gone(self, region_id: int) -> None:
        entry = self._entries.get(f"region/{region_id}")
        self._drop([f"region/{region_id}"])
        if entry is not None and entry.fd >= 0:
            self._confirm()

    # Clients -------------------------------------------------------------------------------------

    def session_opened(self, session_id: int, token: bytes, tenant: str, name: str, pid: int, pidfd: int) -> None:
        """A client that is about to be told its token. ``pidfd`` stays the caller's, open until ``session_gone``."""
        facts = {"token": token.hex(), "tenant": tenant, "name": name, "pid": pid}
        self._put(Entry(f"session/{session_id}", json.dumps(facts), pidfd))

    def session_gone(self, session_id: int) -> None:
        """Nothing of its memory can be in use any more. Before its pidfd is closed."""
        self._drop([f"session/{session_id}"])

    # Namespaces ----------------------------------------------------------------------------------

    def note_namespace(self, digest: bytes, description: str) -> bool:
        """Say what has this digest, before a label does; cheap if it was said. False if it can't be.

        Blocks of one that the next daemon is not told of must not be taken over: nobody could tell what to clear.
        """
        if self._notes is not None and digest in self._notes:
            return True
        if not description:
            return False
        try:
            if self._notes is None:
                self._notes = NamespaceNotes()
                self._put(Entry("namespaces", "", self._notes.fd))
            self._notes.add(digest, description)
        except OSError as error:
            if not self._notes_failed:
                log.warning(
                    "a restart would find some blocks cold: what a namespace is can't be noted: %s", error,
                    extra=about("namespace_not_noted", error=str(error)),
                )  # fmt: skip
            self._notes_failed = True
            return False
        return True

    # The daemon's life ---------------------------------------------------------------------------

    def start_serving(self, dram: DramTier, last_session_id: int, now_s: float) -> None:
        """All that was taken over is written down: from now on this daemon is the one to be succeeded."""
        if dram.labelling is None:
            raise IntegrityError("the tier has another ledger, or none: give it this keeper")
        self._dram, self._labelling = dram, dram.labelling
        facts = {"format": FORMAT, "last_session_id": last_session_id}
        self._entries["directory"] = Entry("directory", json.dumps(facts), dram.labelling.fd)
        self._serving = True
        self._settle_until_s = now_s + SETTLE_S
        self._retry_at_s = now_s + RETRY_S
        if self._link is not None:
            self._succeed()

    def after_request(self, index: PrefixIndex, digest_of: DigestOf) -> None:
        """Label what became live. Call it before a reply that says so goes out; cheap if there is nothing."""
        self._rank_rounds = 2
        self._label(index, digest_of)

    def tick(self, index: PrefixIndex, digest_of: DigestOf, now_s: float) -> None:
        """Label the rest, note the order of eviction, a part at a time, and look for a holder if there is none."""
        if self._dram is None or self._labelling is None:
            return
        self._label(index, digest_of)
        self._note_ranks(index, self._labelling)
        if now_s >= self._settle_until_s:
            self._dram.end_settling()
        if self._found:
            self._link = self._found.pop()
            self._begin_again()
        elif self._link is None and now_s >= self._retry_at_s and not self._searching:
            self._retry_at_s = now_s + RETRY_S
            self._searching = True
            threading.Thread(target=self._search, name="kvstore-holder", daemon=True).start()

    def leave(self) -> None:
        """The daemon ends, and leaves all as it is to the next one. Nothing is written down after that. Idempotent."""
        self._serving = False
        self._entries.clear()
        self._dram = self._labelling = None
        for link in (self._link, *self._found):
            if link is not None:
                link.close()
        self._link = None
        self._found.clear()
        if self._notes is not None:
            self._notes.close()
            self._notes = None

    def end(self) -> None:
        """As ``leave``, but nobody is to find anything: the holder ends and lets go of the memory."""
        if self._link is not None:
            with contextlib.suppress(UnavailableError):
                self._link.end()
        self.leave()

    # Own -----------------------------------------------------------------------------------------

    def _put(self, entry: Entry) -> None:
        self._entries[entry.key] = entry
        if self._serving and self._link is not None:
            self._try(lambda link: link.put(self._generation, [entry]))

    def _drop(self, keys: list[str]) -> None:
        known = [key for key in keys if self._entries.pop(key, None) is not None]
        if known and self._serving and self._link is not None:
            self._try(lambda link: link.drop(self._generation, known))

    def _confirm(self) -> None:
        """Only when the holder has closed its descriptor, too, is the memory of a region free for others."""
        if self._serving and self._link is not None:
            self._try(lambda link: link.sync(SEND_S))

    def _try(self, send: Callable[[HolderLink], object]) -> bool:
        if self._link is None:
            return False
        try:
            send(self._link)
        except UnavailableError as error:
            if self._labelling is not None:
                self._labelling.valid = False
            self._link.close()
            self._link = None
            log.warning("a restart would find DRAM cold: %s", error, extra=about("holder_lost", error=str(error)))
            return False
        return True

    def _succeed(self) -> None:
        """Take the place of what the holder keeps of the daemon before, in one step."""
        self._generation = f"{self._name}.0"
        if self._put_all():
            self._set_valid()  # nobody sees it yet
            if self._try(lambda link: link.switch(self._generation)):
                self._try(lambda link: link.sync())  # what is not kept any more is closed

    def _begin_again(self) -> None:
        """With a holder that was found later: what it has of this daemon, if anything, is out of date."""
        self._n_found += 1
        self._generation = f"{self._name}.{self._n_found}"
        if self._try(lambda link: link.switch(self._generation)) and self._put_all():
            self._set_valid()

    def _put_all(self) -> bool:
        return self._try(lambda link: link.put(self._generation, self._entries.values()))

    def _set_valid(self) -> None:
        if self._labelling is not None:
            self._labelling.valid = True

    def _search(self) -> None:
        """On a thread of its own, as it may take seconds. Whatever a holder keeps by now is of no use to anybody."""
        try:
            link, entries = HolderLink.claim(self._path, self._owner, self._grace_s, start=True)
            for entry in entries:
                entry.close()
            self._found.append(link)
        except (UnavailableError, ConfigError) as error:
            log.info("still without a descriptor holder: %s", error, extra=about("holder_missing", error=str(error)))
        finally:
            self._searching = False

    def _label(self, index: PrefixIndex, digest_of: DigestOf) -> None:
        if self._labelling is None:
            return
        fresh = self._labelling.fresh()
        if len(fresh.tags):
            self._labelling.publish(fresh, self._labels(index, fresh.tags.astype(np.uint32), digest_of))

    def _labels(self, index: PrefixIndex, ids: Ids, digest_of: DigestOf) -> Labels:
        table = index.table
        at = ids.astype(np.intp)
        namespaces = np.zeros((len(ids), KEY_BYTES), np.uint8)
        for ordinal in np.unique(table.namespace[at]).tolist():
            namespaces[table.namespace[at] == ordinal] = np.frombuffer(digest_of(ordinal), np.uint8)
        return Labels(
            table.key[at], index.parent_keys(ids), table.parent[at] == NO_PARENT, namespaces,
            table.size_bytes[at], table.rank[at],
        )  # fmt: skip

    def _note_ranks(self, index: PrefixIndex, labelling: Labelling) -> None:
        """Go round the block table, until nothing can have changed since the last round began."""
        table = index.table
        if self._rank_at >= table.n_used:
            self._rank_at, self._rank_rounds = 0, max(self._rank_rounds - 1, 0)
        if not self._rank_rounds:
            return
        first = self._rank_at
        end = self._rank_at = min(first + RANKS_PER_TICK, table.n_used)
        slots = table.slot[first:end]
        there = (table.residency[first:end] != 0) & (slots >= 0)
        if there.any():
            labelling.note_ranks(slots[there], table.rank[first:end][there])
