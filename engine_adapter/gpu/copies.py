"""Copies between host memory and a device as arrays of addresses: put in order, cut to bounded pieces, packed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.engine_adapter.moving import Copy
from kvstore.engine_adapter.runs import Runs

Addresses = NDArray[np.uint64]
Sizes = NDArray[np.uint64]

ALIGNMENT_BYTES = 16
"""What lies alike modulo this on both sides is moved by kernels in accesses of as many bytes."""
PADDING_BYTES = 2 * ALIGNMENT_BYTES


Orders = dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[NDArray[np.intp], list[Runs]]]
"""By which runs (their ids, and the runs, so that no others get these) and how far these lie apart in host memory."""


@dataclass(frozen=True, slots=True)
class Copies:
    """Runs of bytes that lie at ``host`` and at ``device``, uint64 ``[n]`` each, ``sizes`` in bytes; none is empty.

    ``regions``, int64 ``[n]``: what lies in different ones is never moved as one, however close it is.
    """

    host: Addresses
    device: Addresses
    sizes: Sizes
    regions: NDArray[np.int64]

    @classmethod
    def of(cls, copies: Sequence[Copy], *, to_device: bool, orders: Orders | None = None) -> Copies:
        """All runs of these copies, in the order in which they lie in host memory.

        ``orders`` has the orders of earlier calls: layers that are alike are put in order once.
        """
        if not copies:
            nothing = np.empty(0, np.uint64)
            return cls(nothing, nothing, nothing, np.empty(0, np.int64))
        to = np.concatenate([each.runs.to + each.to for each in copies]).view(np.uint64)
        come_from = np.concatenate([each.runs.come_from + each.come_from for each in copies]).view(np.uint64)
        sizes = np.concatenate([each.runs.sizes for each in copies])
        host, device = (come_from, to) if to_device else (to, come_from)
        made = cls(host, device, sizes, np.zeros(len(sizes), np.int64))
        if len(made) < 2 or bool((host[1:] >= host[:-1]).all()):
            return made
        starts = [each.come_from if to_device else each.to for each in copies]
        key = tuple(id(each.runs) for each in copies), tuple(start - starts[0] for start in starts)
        known = orders.get(key) if orders is not None else None
        if known is None:
            known = np.argsort(host, kind="stable"), [each.runs for each in copies]
            if orders is not None:
                orders[key] = known
        return made.chosen(known[0])

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def n_bytes(self) -> int:
        """Of all runs."""
        return int(self.sizes.sum())

    def chosen(self, which: NDArray[np.intp] | NDArray[np.bool_] | slice) -> Copies:
        """Some of them, by index."""
        return Copies(self.host[which], self.device[which], self.sizes[which], self.regions[which])

    def cut(self, run_bytes_max: int) -> Copies:
        """The same bytes with no run longer than that, in the order of their host addresses."""
        if not len(self) or int(self.sizes.max()) <= run_bytes_max:
            return self
        most = np.uint64(run_bytes_max)
        counts = (self.sizes + most - np.uint64(1)) // most
        which = np.repeat(np.arange(len(self)), counts.astype(np.int64))
        first = np.cumsum(counts) - counts
        offsets = (np.arange(len(which), dtype=np.uint64) - first[which]) * most
        sizes = np.minimum(self.sizes[which] - offsets, most)
        made = Copies(self.host[which] + offsets, self.device[which] + offsets, sizes, self.regions[which])
        if bool((made.host[1:] >= made.host[:-1]).all()):
            return made
        # A run that lies in the one before it in host memory begins before that one's later parts.
        return made.chosen(np.argsort(made.host, kind="stable"))

    def span_starts(self) -> NDArray[np.intp]:
        """Where contiguous spans of host memory begin, as indices of runs. The runs are in the order of their host
        addresses; some may lie in one another, as rows share blocks."""
        if not len(self):
            return np.empty(0, np.intp)
        ends = np.maximum.accumulate(self.host + self.sizes)
        apart = (self.host[1:] > ends[:-1]) | (self.regions[1:] != self.regions[:-1])
        return np.concatenate(([0], np.flatnonzero(apart) + 1))

    def pieces(self, bytes_max: int, runs_max: int) -> Iterator[Copies]:
        """Cut into parts that take no more than ``bytes_max`` when packed, and have no more than ``runs_max`` runs."""
        whole = self.cut(bytes_max - PADDING_BYTES)
        room = np.cumsum(whole.sizes + np.uint64(PADDING_BYTES))
        start = 0
        while start < len(whole):
            before = np.uint64(0) if not start else room[start - 1]
            end = int(np.searchsorted(room, before + np.uint64(bytes_max), "right"))
            end = min(max(end, start + 1), start + runs_max)
            yield whole.chosen(slice(start, end))
            start = end


class Packed(NamedTuple):
    """How runs lie when what is contiguous in host memory is put one behind the other.

    ``starts``, ``offsets`` and ``sizes`` are of the contiguous spans (host address, where packed, bytes), uint64;
    ``at`` is where each run lies, packed. ``n_bytes`` are needed.
    """

    starts: Addresses
    offsets: NDArray[np.uint64]
    sizes: Sizes
    at: NDArray[np.uint64]
    n_bytes: int


def packed(copies: Copies) -> Packed:
    """Pack runs that are in the order of their host addresses."""
    first = copies.span_starts()
    starts = copies.host[first]
    sizes = np.maximum.reduceat(copies.host + copies.sizes, first) - starts
    # As far from an aligned address as in host memory.
    inside = starts % np.uint64(ALIGNMENT_BYTES)
    room = (inside + sizes + np.uint64(ALIGNMENT_BYTES - 1)) // np.uint64(ALIGNMENT_BYTES) * np.uint64(ALIGNMENT_BYTES)
    behind = np.cumsum(room)
    offsets = behind - room + inside
    span = np.repeat(np.arange(len(first)), np.diff(first, append=len(copies)))
    return Packed(starts, offsets, sizes, copies.host - starts[span] + offsets[span], int(behind[-1]))
