"""The beginning: claim the holder, read what is there, and make the blocks known to the index again."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import BadInputError, IntegrityError, UnavailableError
from kvstore.logs import about
from kvstore.prefix_index.block_table import DRAM
from kvstore.prefix_index.index import PrefixIndex
from kvstore.prefix_index.policy import Use
from kvstore.takeover.estate import Estate, read_estate
from kvstore.takeover.keeper import Keeper
from kvstore.takeover.link import HolderLink
from kvstore.tiers.adopted import FormerBlocks
from kvstore.tiers.directory import Labels
from kvstore.tiers.dram import DramTier
from kvstore.types import KEY_BYTES, SLOT_BITS

log = logging.getLogger("kvstore.takeover")

OrdinalOf = Callable[[bytes], int | None]
Keys = NDArray[np.uint8]


def open_keeper(path: Path, owner: str, grace_s: float, name: str) -> tuple[Keeper, Estate | None]:
    """The keeper of a new daemon and what the one before has left, if anything that can be used.

    Starts a holder if there is none. Raises ConfigError if the holder there is another daemon's; anything else
    that goes wrong makes a cold start, said in the log. Blocks for a few seconds at most.
    """
    link: HolderLink | None = None
    estate: Estate | None = None
    try:
        link, entries = HolderLink.claim(path, owner, grace_s, start=True)
        estate = read_estate(entries)
    except UnavailableError as error:
        log.warning("DRAM starts cold: %s", error, extra=about("dram_cold", error=str(error)))
    except IntegrityError as error:
        log.warning("DRAM starts cold, what was left is dropped: %s", error, extra=about("dram_cold", error=str(error)))
    return Keeper(path, owner, grace_s, name, link), estate


def adopt_blocks(index: PrefixIndex, dram: DramTier, ordinal_of: OrdinalOf, now_s: float) -> int:
    """Make the blocks that a tier has taken over known to an index without warm blocks; returns how many.

    ``ordinal_of`` numbers a namespace by its digest, zeros if it was not noted; blocks for which it gives None
    are left out. So are those with an ancestor that is in no tier, and second copies. Their slots are freed.
    """
    former = dram.former_blocks
    at = np.empty(0, np.intp)
    try:
        at = _insert(index, dram, former, ordinal_of, now_s)
    except (IntegrityError, BadInputError) as error:
        log.warning(
            "DRAM starts cold, what its labels say can't be: %s", error, extra=about("dram_cold", error=str(error))
        )
    left_out = np.ones(len(former), np.bool_)
    left_out[at] = False
    dram.free(former.slots[left_out])
    return len(at)


def _insert(
    index: PrefixIndex, dram: DramTier, former: FormerBlocks, ordinal_of: OrdinalOf, now_s: float
) -> NDArray[np.intp]:
    """Places of the blocks that are known to the index now; none when it raises."""
    labels, slots = former.labels, former.slots
    ordinals, usable = _ordinals(labels.namespaces, ordinal_of)
    usable &= _fits(labels.size_bytes, slots, dram)
    usable &= _is_first_copy(labels.keys, usable)
    at = np.flatnonzero(usable)
    at = at[_parents_first(labels.take(at), index)]
    if len(at):
        ids = index.insert_cold(
            labels.keys[at], labels.parents[at], slots[at], labels.size_bytes[at], ordinals[at], now_s, DRAM
        )
        dram.set_tags(slots[at], ids.astype(np.int64))
        index.touch(ids[np.argsort(-labels.ranks[at], kind="stable")], Use(now_s))
    return at


def _fits(size_bytes: NDArray[np.uint32], slots: NDArray[np.int64], dram: DramTier) -> NDArray[np.bool_]:
    """Whether blocks have the size that their slots are for."""
    region_ids, which = np.unique(slots >> SLOT_BITS, return_inverse=True)
    slot_bytes = np.array([dram.region(region_id).slot_bytes for region_id in region_ids.tolist()], np.int64)
    fits: NDArray[np.bool_] = (size_bytes > 0) & (size_bytes <= slot_bytes[which.reshape(-1)])
    return fits


def _ordinals(digests: Keys, ordinal_of: OrdinalOf) -> tuple[NDArray[np.uint32], NDArray[np.bool_]]:
    first, which = np.unique(_prefixes(digests), return_index=True, return_inverse=True)[1:]
    which = which.reshape(-1)
    found = [ordinal_of(digests[i].tobytes()) for i in first.tolist()]
    known = np.array([ordinal is not None for ordinal in found], np.bool_)[which]
    known &= (digests == digests[first[which]]).all(axis=1)
    return np.array([ordinal or 0 for ordinal in found], np.uint32)[which], known


def _is_first_copy(keys: Keys, usable: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Of blocks with the same key, one."""
    first = np.zeros(len(keys), np.bool_)
    at = np.flatnonzero(usable)
    first[at[np.unique(_prefixes(keys[at]), return_index=True)[1]]] = True
    return first


def _parents_first(labels: Labels, index: PrefixIndex) -> NDArray[np.intp]:
    """Places of the blocks all of whose ancestors are among them, or known to the index; parents before children."""
    n = len(labels)
    above = _find(labels.keys, labels.parents)
    above[labels.is_first] = -1
    known = _find(index.table.key[index.table.alive()], labels.parents) >= 0
    is_top = labels.is_first | known
    # Pointer jumping: after k rounds everybody has looked 2**k generations up. The last place stands for nobody.
    up = np.append(np.where(above < 0, n, above), n)
    depth = np.append((above >= 0).astype(np.int64), 0)
    lost = np.append((above < 0) & ~is_top, False)
    while (up[:n] != n).any():
        lost |= lost[up]
        depth += depth[up]
        up = up[up]
        if depth.max(initial=0) > n:
            raise IntegrityError("blocks that were taken over follow each other in a circle")
    good = np.flatnonzero(~lost[:n])
    return good[np.argsort(depth[good], kind="stable")]


def _find(keys: Keys, wanted: Keys) -> NDArray[np.intp]:
    """Where each wanted key stands in ``keys``, -1 for none.

    Two keys whose first half is the same count as one that is missing: a block that is left out is no harm.
    """
    if not len(keys):
        return np.full(len(wanted), -1, np.intp)
    prefixes = _prefixes(keys)
    order = np.argsort(prefixes, kind="stable")
    at = order[np.minimum(np.searchsorted(prefixes, _prefixes(wanted), sorter=order), len(keys) - 1)]
    return np.where((keys[at] == wanted).all(axis=1), at, -1)


def _prefixes(keys: Keys) -> NDArray[np.uint64]:
    return np.ascontiguousarray(keys).view(np.uint64).reshape(-1, KEY_BYTES // 8)[:, 0]
