"""Keeping the slot directory true to the slots."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.tiers.directory import Labels, SlotDirectory
from kvstore.tiers.slots import Int64s, SlotState, SlotTable
from kvstore.types import SLOT_BITS


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

    def fresh(self) -> Int64s:
        """Slots that became live since the last call, still are, and have no label yet."""
        slots = self._directory.take_committed()
        if not len(slots):
            return slots
        slots = slots[np.isin(slots >> SLOT_BITS, self._table.ids)]
        places = self._table.resolve(slots).places
        fresh: Int64s = slots[(self._table.states[places] == SlotState.LIVE) & ~self._directory.has_label(places)]
        return fresh

    def publish(self, slots: Int64s, labels: Labels) -> None:
        """Say what lies in these ``fresh`` slots: from now on a later daemon finds it there."""
        self._directory.publish(self._table.resolve(slots).places, labels)

    def note_ranks(self, slots: Int64s, ranks: NDArray[np.float64]) -> None:
        """Note the order of eviction of live slots for a later daemon."""
        self._directory.note_ranks(self._table.resolve(slots).places, ranks)

    def close(self) -> None:
        """Close the directory. Idempotent."""
        self._directory.close()
