"""What every slot of every region is: free, reserved, live or quarantined, and whose tag it bears.

One structure of arrays for all regions; a slot's place in them is also the place of its generation.
A slot id is ``region id << 20 | index in the region``.

    free     -> reserved                        handed out
    reserved -> live                            committed
    reserved, live -> quarantined               a client may still use it though its right ended
    reserved, live, quarantined -> free
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import IntegrityError
from kvstore.tiers.directory import SlotDirectory
from kvstore.tiers.generations import Generations
from kvstore.types import SLOT_BITS

MOST_SLOTS = 1 << SLOT_BITS
NO_TAG = -1

Int64s = NDArray[np.int64]


class SlotState(IntEnum):
    """A slot's state. Only a live slot has a tag; only a free one may be handed out."""

    FREE = 0
    RESERVED = 1
    LIVE = 2
    QUARANTINED = 3


_FREE, _LIVE = int(SlotState.FREE), int(SlotState.LIVE)
# States that a change may start from: free, reserved, live, quarantined.
_IF_FREE = np.array([True, False, False, False])
_IF_RESERVED = np.array([False, True, False, False])
_IF_LIVE = np.array([False, False, True, False])
_IF_HELD = np.array([False, True, True, False])
_IF_USED = np.array([False, True, True, True])


class Described(NamedTuple):
    """What a client needs to find slots: generations (uint64 [n]), and the regions they lie in."""

    generations: NDArray[np.uint64]
    region_ids: list[int]
    slot_bytes: list[int]
    generation_bases: list[int]


@dataclass(frozen=True, slots=True)
class Resolved:
    """Slots found: the row of each one's region, its place in the arrays, its index in the region."""

    rows: Int64s
    places: Int64s
    indexes: Int64s


class SlotTable:
    """States and tags of all slots, counted per region."""

    def __init__(self, generations: Generations, directory: SlotDirectory | None = None) -> None:
        """``directory``: where labels of live slots are kept, if anywhere; it hears first of slots that are freed."""
        self.generations = generations
        self.directory = directory
        # One row per region, sorted by id (ids only grow).
        self.ids: Int64s = np.zeros(0, np.int64)
        self.bases: Int64s = np.zeros(0, np.int64)
        self.n_slots: Int64s = np.zeros(0, np.int64)
        self.slot_bytes: Int64s = np.zeros(0, np.int64)
        self.counts: Int64s = np.zeros((len(SlotState), 0), np.int64)
        self._layouts: dict[int, tuple[int, int, int, int]] = {}
        # One place per slot.
        self.states: NDArray[np.uint8] = np.zeros(0, np.uint8)
        self.tags: Int64s = np.zeros(0, np.int64)
        self._stamps: NDArray[np.int32] = np.zeros(0, np.int32)

    def add_region(self, region_id: int, n_slots: int, slot_bytes: int) -> None:
        """All slots start free. ``region_id`` is above all earlier ones."""
        base = self.generations.ranges.take(n_slots)
        self._grow(base + n_slots)
        self.states[base : base + n_slots] = SlotState.FREE
        self.tags[base : base + n_slots] = NO_TAG
        self.ids = np.append(self.ids, region_id)
        self.bases = np.append(self.bases, base)
        self.n_slots = np.append(self.n_slots, n_slots)
        self.slot_bytes = np.append(self.slot_bytes, slot_bytes)
        self._layouts[region_id] = (region_id, n_slots, slot_bytes, base)
        if self.directory is not None:
            self.directory.region_made(region_id)
        column = np.array([[n_slots], [0], [0], [0]], np.int64)
        self.counts = np.ascontiguousarray(np.hstack((self.counts, column)))

    def remove_region(self, region_id: int) -> None:
        """Forget a region, all of whose slots are free."""
        row = self.row(region_id)
        if self.counts[SlotState.FREE, row] != self.n_slots[row]:
            raise IntegrityError(f"region {region_id} still has slots in use; only an empty one may go")
        del self._layouts[region_id]
        self.generations.ranges.give(int(self.bases[row]), int(self.n_slots[row]))
        for name in ("ids", "bases", "n_slots", "slot_bytes"):
            setattr(self, name, np.delete(getattr(self, name), row))
        self.counts = np.ascontiguousarray(np.delete(self.counts, row, axis=1))

    def row(self, region_id: int) -> int:
        """The row of a region. Raises IntegrityError for an unknown one."""
        row = int(np.searchsorted(self.ids, region_id))
        if row == len(self.ids) or self.ids[row] != region_id:
            raise IntegrityError(f"region {region_id} is not in the tier (retired, or never made)")
        return row

    def base(self, region_id: int) -> int:
        """The place of a region's first slot. Raises IntegrityError for an unknown one."""
        return int(self.bases[self.row(region_id)])

    def rows(self, region_ids: Int64s) -> Int64s:
        """The rows of regions that are known to be there."""
        return np.searchsorted(self.ids, region_ids).astype(np.int64, copy=False)

    def resolve(self, slots: Int64s) -> Resolved:
        """Find slots. Raises IntegrityError for an unknown one."""
        region_ids = slots >> SLOT_BITS
        indexes = slots & (MOST_SLOTS - 1)
        rows = np.searchsorted(self.ids, region_ids)
        if not len(slots):
            return Resolved(rows, slots, slots)
        if not len(self.ids):
            raise IntegrityError(f"slot {int(slots[0])} is in no region of the tier; it has none")
        safe = np.minimum(rows, len(self.ids) - 1)
        known = (self.ids[safe] == region_ids) & (indexes < self.n_slots[safe])
        if not known.all():
            bad = int(slots[~known][0])
            raise IntegrityError(f"slot {bad} (region {bad >> SLOT_BITS}) is in no region of the tier")
        return Resolved(safe, self.bases[safe] + indexes, indexes)

    def describe(self, slots: Int64s) -> Described:
        """What a client needs to find slots. Raises IntegrityError for an unknown one."""
        if not len(slots):
            return Described(np.empty(0, np.uint64), [], [], [])
        low, high = int(slots.min()), int(slots.max())
        layout = self._layouts.get(low >> SLOT_BITS)
        if layout is not None and low >> SLOT_BITS == high >> SLOT_BITS:
            # One region is the common case, and every lease comes through here: a quarter of ``resolve``.
            region_id, n_slots, slot_bytes, base = layout
            first = region_id << SLOT_BITS
            if high - first >= n_slots:
                raise IntegrityError(f"slot {high} is in no region of the tier")
            generations = self.generations.values[slots + (base - first)]
            return Described(generations, [region_id], [slot_bytes], [base])
        found = self.resolve(slots)
        rows = np.flatnonzero(np.bincount(found.rows))
        return Described(
            self.generations.values[found.places],
            self.ids[rows].tolist(),
            self.slot_bytes[rows].tolist(),
            self.bases[rows].tolist(),
        )

    def first_run(self, region_id: int, n: int) -> Int64s:
        """The first ``n`` free neighbours of a region; an empty array when it has no such run."""
        row = self.row(region_id)
        base = int(self.bases[row])
        free = np.flatnonzero(self.states[base : base + int(self.n_slots[row])] == _FREE)
        starts = np.flatnonzero(free[n - 1 :] - free[: max(len(free) - n + 1, 0)] == n - 1)
        first = free[starts[0]] if len(starts) else 0
        return np.arange(first, first + (n if len(starts) else 0)) + (region_id << SLOT_BITS)

    def lowest_free(self, region_ids: Int64s, most: int) -> Int64s:
        """Up to ``most`` free slots of regions in that order, lowest first in each."""
        rows = self.rows(region_ids)
        n_needed = int(np.searchsorted(np.cumsum(self.counts[_FREE, rows]), most)) + 1
        region_ids, rows = region_ids[:n_needed], rows[:n_needed]
        if not len(rows) or not most:
            return np.zeros(0, np.int64)
        n_slots = self.n_slots[rows]
        spans = zip(self.bases[rows].tolist(), n_slots.tolist(), strict=True)
        # All regions laid end to end: a region at a time costs several times as much.
        free = np.flatnonzero(np.concatenate([self.states[base : base + n] for base, n in spans]) == _FREE)[:most]
        ends = np.cumsum(n_slots)
        which = np.searchsorted(ends, free, side="right")
        return (region_ids[which] << SLOT_BITS) + free - (ends - n_slots)[which]

    def move(self, slots: Int64s, allowed: NDArray[np.bool_], new: SlotState) -> Resolved:
        """Change the state of slots, each now in one that ``allowed`` (bool by state) permits.

        Raises IntegrityError before any change for a slot that is unknown, given twice or in another state.
        """
        found = self.resolve(slots)
        states = self.states[found.places]
        fits = allowed[states]
        if not fits.all():
            at = int(np.flatnonzero(~fits)[0])
            wanted = " or ".join(SlotState(state).name.lower() for state in np.flatnonzero(allowed).tolist())
            raise IntegrityError(f"slot {int(slots[at])} is {SlotState(states[at]).name.lower()}, not {wanted}")
        self._must_differ(slots, found.places)
        counts, n_rows = self.counts.reshape(-1), len(self.ids)
        np.subtract.at(counts, states.astype(np.int64) * n_rows + found.rows, 1)
        np.add.at(counts, found.rows + int(new) * n_rows, 1)
        self.states[found.places] = int(new)
        return found

    def hand_out(self, slots: Int64s) -> None:
        """Free slots become reserved; their generations move on."""
        self.generations.bump(self.move(slots, _IF_FREE, SlotState.RESERVED).places)

    def commit(self, slots: Int64s, tags: Int64s) -> None:
        """Reserved slots become live under tags of 0 or above."""
        _must_be_tags(slots, tags)
        self.tags[self.move(slots, _IF_RESERVED, SlotState.LIVE).places] = tags
        if self.directory is not None:
            self.directory.committed(slots)

    def set_tags(self, slots: Int64s, tags: Int64s) -> None:
        """Live slots get other tags of 0 or above."""
        _must_be_tags(slots, tags)
        self.tags[self.move(slots, _IF_LIVE, SlotState.LIVE).places] = tags

    def quarantine(self, slots: Int64s) -> None:
        """Reserved or live slots are held back and lose their tags."""
        found = self.move(slots, _IF_HELD, SlotState.QUARANTINED)
        self._let_go(found.places)

    def free(self, slots: Int64s) -> None:
        """Slots in use become free; their generations move on."""
        found = self.move(slots, _IF_USED, SlotState.FREE)
        self._let_go(found.places)
        self.generations.bump(found.places)

    def tags_of(self, slots: Int64s) -> Int64s:
        """The tags of slots, -1 for those not live."""
        return self.tags[self.resolve(slots).places]

    def is_empty(self, region_id: int) -> bool:
        """Whether all slots of a region are free."""
        row = self.row(region_id)
        return bool(self.counts[SlotState.FREE, row] == self.n_slots[row])

    def live_in(self, region_id: int) -> tuple[Int64s, Int64s]:
        """All live slots of a region, ascending, and their tags."""
        row = self.row(region_id)
        base, n = int(self.bases[row]), int(self.n_slots[row])
        indexes = np.flatnonzero(self.states[base : base + n] == _LIVE)
        return indexes + (region_id << SLOT_BITS), self.tags[base + indexes]

    def bytes_in(self, state: SlotState) -> int:
        """Bytes of all slots in a state."""
        return int(self.counts[state] @ self.slot_bytes)

    def check(self) -> None:
        """Raises IntegrityError when counts, tags or ranges contradict the states."""
        taken = 0
        ends = np.argsort(self.bases)
        if (self.bases[ends][1:] < (self.bases + self.n_slots)[ends][:-1]).any():
            raise IntegrityError("two regions share places of the slot arrays")
        for row, region_id in enumerate(self.ids.tolist()):
            part = slice(int(self.bases[row]), int(self.bases[row] + self.n_slots[row]))
            states = self.states[part]
            counts = np.bincount(states, minlength=len(SlotState))
            if not np.array_equal(counts, self.counts[:, row]):
                raise IntegrityError(f"region {region_id} counts {self.counts[:, row]} but its slots are {counts}")
            if (self.tags[part][states != SlotState.LIVE] != NO_TAG).any():
                raise IntegrityError(f"region {region_id} has a tag on a slot that is not live")
            taken += int(self.n_slots[row])
        if taken + self.generations.ranges.free != self.generations.ranges.limit:
            raise IntegrityError(f"{taken} places belong to regions, which is not what the ranges say")

    def withdraw(self, slots: Int64s) -> None:
        """See ``DramTier.withdraw``."""
        if self.directory is not None and len(slots):
            self.directory.forget(self.resolve(slots).places)

    def _let_go(self, places: Int64s) -> None:
        self.tags[places] = NO_TAG
        if self.directory is not None:
            self.directory.forget(places)

    def _must_differ(self, slots: Int64s, places: Int64s) -> None:
        order = np.arange(len(places), dtype=np.int32)
        self._stamps[places] = order
        twice = self._stamps[places] != order
        if twice.any():
            raise IntegrityError(f"slot {int(slots[twice][0])} is given twice in one call")

    def _grow(self, n_places: int) -> None:
        if n_places <= len(self.states):
            return
        more = max(n_places, 2 * len(self.states)) - len(self.states)
        self.states = np.concatenate((self.states, np.zeros(more, np.uint8)))
        self.tags = np.concatenate((self.tags, np.full(more, NO_TAG, np.int64)))
        self._stamps = np.concatenate((self._stamps, np.zeros(more, np.int32)))


def _must_be_tags(slots: Int64s, tags: Int64s) -> None:
    if len(tags) != len(slots):
        raise IntegrityError(f"{len(slots)} slots but {len(tags)} tags")
    if len(tags) and int(tags.min()) < 0:
        raise IntegrityError(f"tag {int(tags.min())} is negative; tags are 0 or above")
