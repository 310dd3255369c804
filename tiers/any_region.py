"""What is the same of regions in any memory: whose they are, how they are cut in slots, and who maps them."""

from __future__ import annotations

from abc import ABC, abstractmethod

from kvstore.errors import IntegrityError

DAEMON_WRITER = 0
"""The daemon itself as writer: no client can write such a region."""


class AnyRegion(ABC):
    """``size_bytes`` of some memory. Raw until ``assign``; used by one thread at a time."""

    def __init__(self, size_bytes: int) -> None:
        self.id = 0
        self.size_bytes = size_bytes
        self.slot_bytes = 0
        self.tenant = ""
        self.writer: int | None = None
        self.read_only = False
        """This daemon can't write here."""
        self.sealed = False
        self.draining = False
        self.mappers: set[int] = set()
        self.unsettled: set[int] = set()
        """Mappers that may use slots by rights of an earlier epoch: no slot that gets free is used again yet."""
        self.inode = 0
        """What the kernel calls its memory, in ``/proc/<pid>/maps`` for one; 0 if it calls it nothing."""

    @property
    @abstractmethod
    def address(self) -> int:
        """Where it starts for the daemon."""

    @property
    def n_slots(self) -> int:
        """Slots of the assigned class; 0 while raw."""
        return self.size_bytes // self.slot_bytes if self.slot_bytes else 0

    @property
    def is_stale(self) -> bool:
        """Nobody can ever write here again: its room comes back with the whole region only."""
        return self.read_only and self.writer is None

    def assign(self, region_id: int, writer: int, tenant: str, slot_bytes: int) -> None:
        """Give a raw region its id, class and its only writer."""
        self._must_be_raw()
        self._assign(region_id, writer, tenant, slot_bytes)

    def adopt(self, region_id: int, writer: int | None, tenant: str, slot_bytes: int, mappers: frozenset[int]) -> None:
        """Give an adopted region what it was, and those who map it. ``writer`` None if that one is gone."""
        self._must_be_raw()
        self._assign(region_id, writer, tenant, slot_bytes)
        self.mappers.update(mappers)
        self.unsettled.update(mappers)

    def can_be_filled_by(self, writer: int) -> bool:
        """Whether slots that are free now may be handed to this writer, whose region (or an orphan) it is."""
        return not self.draining and not self.unsettled and not (self.read_only and writer == DAEMON_WRITER)

    def unmapped_by(self, client: int) -> bool:
        """A client maps it no longer. False if it did not."""
        self.unsettled.discard(client)
        mapped = client in self.mappers
        self.mappers.discard(client)
        return mapped

    def orphan(self) -> None:
        """The writer is gone."""
        self.writer = None

    def check(self) -> None:
        """Raises IntegrityError when what it says of itself can't be."""
        if not self.unsettled <= self.mappers:
            raise IntegrityError(f"region {self.id} waits for clients {sorted(self.unsettled - self.mappers)} in vain")

    def close(self) -> None:
        """The daemon uses it no more. Idempotent."""
        return

    def gone(self) -> None:
        """After ``close``: no client maps it any more either. Idempotent."""
        return

    def _assign(self, region_id: int, writer: int | None, tenant: str, slot_bytes: int) -> None:
        self.id, self.writer, self.tenant, self.slot_bytes = region_id, writer, tenant, slot_bytes

    def _must_be_raw(self) -> None:
        if self.slot_bytes:
            raise IntegrityError(
                f"region {self.id} has slots of {self.slot_bytes} bytes already; only a raw one may change"
            )
