"""Regions of the daemon's memory in this process.

A mapping lives as long as anything looks at it: the client, or an array that a caller still keeps. It is
unmapped when the last of them is gone, and only then is the daemon told.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial

from kvstore.native import Mapping


class Regions:
    """The mapped regions of one session by region id.

    ``retire`` may be called on any thread at any time: the daemon retires a region only when nobody holds a
    lease or reservation in it. Everything else is called under the session's lock.

    ``on_unmapped(region_id)`` is called, on any thread, once a retired region is really unmapped.
    """

    def __init__(self, on_unmapped: Callable[[int], None]) -> None:
        self._mappings: dict[int, Mapping] = {}
        self._on_unmapped = on_unmapped
        self._alive: weakref.WeakSet[Mapping] = weakref.WeakSet()

    def add(self, region_id: int, fd: int, size_bytes: int, *, writable: bool) -> None:
        """Map a region's descriptor, with its page tables filled. Raises OSError if the kernel refuses."""
        mapping = Mapping(fd, size_bytes, writable=writable, inherit=False)
        mapping.populate()
        self._mappings[region_id] = mapping
        self._alive.add(mapping)

    def find(self, region_ids: list[int]) -> dict[int, Mapping]:
        """The mappings of those among these regions that are mapped."""
        mappings = self._mappings
        return {region_id: mappings[region_id] for region_id in region_ids if region_id in mappings}

    def retire(self, region_ids: Iterable[int]) -> None:
        """Let go of regions the daemon wants back; each is unmapped when nobody looks at it any more."""
        for region_id in region_ids:
            mapping = self._mappings.pop(region_id, None)
            if mapping is None:
                self._on_unmapped(region_id)
            else:
                mapping.after_unmap = partial(self._on_unmapped, region_id)

    def drop_all(self) -> bool:
        """Let go of everything. True if nothing is mapped any more, False if arrays still keep some."""
        self._mappings.clear()
        return not len(self._alive)
