"""What the blocks of shard families are to each other: kept up as they are stored and asked for.

Without it the shards drift apart under pressure: the memory of each rank's blocks is its own, so that the rank with
the least of it decides how far back a hit can reach, and what the others hold beyond that is worth nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvstore.prefix_index.block_table import Ids
from kvstore.prefix_index.index import PrefixIndex
from kvstore.prefix_index.rows import RowPath
from kvstore.store.namespaces import OpenNamespace


class Kinship:
    """The families that were asked for, by their namespaces. One that is in several counts for the latest."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._family_of: dict[int, tuple[OpenNamespace, ...]] = {}
        self._latest: dict[int, int] = {}
        """Per family, by its first namespace: which one has stored something last."""

    def know(self, spaces: Sequence[OpenNamespace]) -> None:
        """These are a family. Cheap if that is known."""
        known = self._family_of.get(spaces[0].ordinal)
        if len(spaces) > 1 and (known is None or len(known) != len(spaces) or known[-1] is not spaces[-1]):
            family = tuple(spaces)
            self._family_of.update((opened.ordinal, family) for opened in family)

    def stored(
        self,
        namespace: int,
        root: tuple[str, str],
        path: RowPath,
        first_row: int,
        ids: Ids,
        is_new: NDArray[np.bool_],
    ) -> None:
        """Blocks for rows from ``first_row`` on are stored in a namespace: they join those of the other shards.

        One look into another shard, best that of the rank which has stored something before: it has most likely
        the same prompt, and its blocks know those of all others.
        """
        family = self._family_of.get(namespace)
        if family is None:
            return
        latest = self._latest.get(family[0].ordinal, namespace)
        others = [opened for opened in family if opened.ordinal != namespace]
        other = next((opened for opened in others if opened.ordinal == latest), others[0])
        if latest != namespace:
            self._latest[family[0].ordinal] = namespace
        theirs = self._index.match(other.root_key(*root), path).ids[first_row : first_row + len(ids)]
        joins = is_new[: len(theirs)]
        self._index.kin.join(ids[: len(theirs)][joins].astype(np.intp), theirs[joins].astype(np.intp), len(family))
