"""Keeping the slot directory true to the slots."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import IntegrityError
from kvstore.tiers.directory import Labels, SlotDirectory
from kvstore.tiers.slots import Int64s, SlotState, SlotTable
from kvstore.types import SLOT_BITS


class Fresh(NamedTuple):
    """Slots to be labelled: their places, int64 ``[n]``, and their tags."""

    places: Int64s
    tags: Int64s


_NOTHING = Fresh(np.empty(0, np.int64), np.empty(0, np.int64))


class Labelling:
    """Labels for the live slots of a tier. Freed slots lose theirs without being asked for."""

    def __init__(self, table: SlotTable, directory: SlotDirectory) -> None:
        self._table = table
        self._directory = directory

    @property
    def fd(self) -> int:
        """The directory's descriptor: to be kept for a later daemon, and for nobody else."""
        return self._directory.fd

    @property
    def valid(self) -> bool:
        """Whether a later daemon may believe the directory; set it once everything beside it is kept as well."""
        return self._directory.valid

    @valid.setter
    def valid(self, value: bool) -> None:
        self._directory.valid = value

    def fresh(self) -> Fresh:
        """What became live since the last call, still is, and has no label yet."""
        table = self._table
        slots = self._directory.take_committed()
        if not len(slots):
            return _NOTHING
        try:
            places = table.resolve(slots).places
        except IntegrityError:  # a region is gone meanwhile
            places = table.resolve(slots[np.isin(slots >> SLOT_BITS, table.ids)]).places
        places = places[(table.states[places] == SlotState.LIVE) & ~self._directory.has_label(places)]
        return Fresh(places, table.tags[places])

    def publish(self, fresh: Fresh, labels: Labels) -> None:
        """Say what lies there: from now on a later daemon finds it."""
        self._directory.publish(fresh.places, labels)

    def note_ranks(self, slots: Int64s, ranks: NDArray[np.float64]) -> None:
        """Note the order of eviction of live slots for a later daemon."""
        self._directory.note_ranks(self._table.resolve(slots).places, ranks)

    def close(self) -> None:
        """Close the directory. Idempotent."""
        self._directory.close()
