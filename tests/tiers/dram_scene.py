"""What the tests of the DRAM tier share: short names, a scene of slots in each state, what is open."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvstore.tiers.dram import DramTier

PAGE = 4096
Int64s = NDArray[np.int64]


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def region_file_bytes(kind: str = "kvstore-region") -> int:
    """Bytes of all memory files of a kind whose descriptors this process has, counted once each."""
    sizes: dict[int, int] = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if str(entry.readlink()).startswith(f"/memfd:{kind}"):
                facts = entry.stat()
                sizes[facts.st_ino] = facts.st_size
        except FileNotFoundError:
            continue  # the descriptor of this very listing
    return sum(sizes.values())


def regions_of(slots: Int64s) -> list[int]:
    return sorted(set((slots >> 20).tolist()))


def array(*slots: int) -> Int64s:
    return np.array(slots, np.int64)


def live(tier: DramTier, writer: int, n: int, slot_bytes: int = PAGE, tenant: str = "a") -> Int64s:
    slots = tier.allocate(writer, tenant, slot_bytes, n)
    tier.commit(slots, slots)
    return slots


@dataclass
class Scene:
    """A tier with two slots in each of three states."""

    tier: DramTier
    reserved: Int64s
    live: Int64s
    free: Int64s


def scene(tier: DramTier) -> Scene:
    slots = tier.allocate(1, "a", PAGE, 6)
    tier.commit(slots[2:4], array(7, 8))
    tier.free(slots[4:])
    return Scene(tier, slots[:2], slots[2:4], slots[4:])
