"""What operators ask of a store: which namespaces there are and what they hold, and what becomes of a prompt.

What takes longer with many blocks or namespaces is a generator here: each step is short, and whoever takes the steps
lets others have their turn in between.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import BadInputError
from kvstore.prefix_index.block_table import COLD, DRAM, HBM, NVME, PART, STORED, Ids
from kvstore.prefix_index.explain import Explanation
from kvstore.store.namespaces import Described, OpenNamespace, described
from kvstore.store.requests import Prompt
from kvstore.store.store import Store
from kvstore.types import KEY_BYTES, Namespace

CENSUS_BLOCKS = 1 << 13
"""Blocks counted in one step: a few tenths of a millisecond."""
NAMESPACES_PER_STEP = 8
"""Descriptions read in one step."""
_BYTES = slice(3, 5)
"""Which of the columns of ``Holdings`` are bytes: of all parts, where the others are of the blocks themselves."""
_HEX = frozenset("0123456789abcdef")


@dataclass(frozen=True, slots=True)
class NamespaceFilter:
    """Fits the namespaces that agree with every field given. Raises BadInputError for one that can't fit any.

    ``name``: one bound to it. ``digest_prefix``: hexadecimal digits that its digest begins with. ``tp_rank``,
    ``pp_rank``: of its shard.
    """

    name: str = ""
    digest_prefix: str = ""
    model: str = ""
    revision: str | None = None
    tp_rank: int | None = None
    pp_rank: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "digest_prefix", self.digest_prefix.lower())
        if len(self.digest_prefix) > 2 * KEY_BYTES or not _HEX.issuperset(self.digest_prefix):
            raise BadInputError(
                f"the digest of a namespace has {2 * KEY_BYTES} hexadecimal digits; "
                f"{self.digest_prefix[:80]!r} can't be how one begins"
            )
        if self.revision is not None and not self.model:
            raise BadInputError(f"revision {self.revision[:80]!r} of which model? Name the model too")

    @property
    def is_empty(self) -> bool:
        """Whether every namespace fits."""
        return self == NamespaceFilter()

    def fits(self, known: KnownNamespace) -> bool:
        """Whether this is one of those meant. One without a description has no model."""
        described = known.namespace
        return (
            (not self.name or self.name in known.names)
            and known.digest.hex().startswith(self.digest_prefix)
            and (not self.model or (described is not None and described.model == self.model))
            and (self.revision is None or (described is not None and described.revision == self.revision))
            and (self.tp_rank is None or (described is not None and described.shard.tp_rank == self.tp_rank))
            and (self.pp_rank is None or (described is not None and described.shard.pp_rank == self.pp_rank))
        )


@dataclass(slots=True)
class KnownNamespace:
    """A namespace that has been opened since the start, or has blocks from before.

    ``namespace`` is None where nothing but blocks on NVMe tells of it. ``ordinals``: its numbers in the block table;
    ``ordinal`` is that of the blocks themselves where they have parts with other numbers, -1 if there is none.
    """

    digest: bytes
    namespace: Namespace | None
    ordinals: list[int]
    ordinal: int = -1
    names: tuple[str, ...] = ()
    opened: OpenNamespace | None = None


@dataclass(slots=True)
class Holdings:
    """What a namespace has: blocks, with a copy in each tier, their bytes there, and those that are in use."""

    n_blocks: int = 0
    n_dram_blocks: int = 0
    n_nvme_blocks: int = 0
    dram_bytes: int = 0
    nvme_bytes: int = 0
    n_pinned_blocks: int = 0


class BlockFacts(NamedTuple):
    """Blocks of a prompt, arrays ``[n]``. ``keys``: uint8 [n, 16]. ``hits`` is empty where they aren't counted."""

    keys: NDArray[np.uint8]
    in_dram: NDArray[np.bool_]
    on_nvme: NDArray[np.bool_]
    in_hbm: NDArray[np.bool_]
    size_bytes: NDArray[np.uint32]
    hits: NDArray[np.uint8]
    idle_s: NDArray[np.float64]
    pins: NDArray[np.int32]


class Administration:
    """Operators' questions to one store. Called on its thread only."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._described: dict[bytes, Described] = {}
        """By digest of what lies on NVMe, or was taken over: the namespace that it belongs to."""

    def namespaces(self, wanted: NamespaceFilter, tenant: str | None, out: list[KnownNamespace]) -> Iterator[None]:
        """Put the namespaces of a tenant (None: of all) that fit into ``out``.

        One without a description is nobody's: only who asks for all tenants gets it.
        """
        for known in (yield from self._all()):
            if tenant is not None and (known.namespace is None or known.namespace.tenant != tenant):
                continue
            if wanted.fits(known):
                out.append(known)

    def census(self, known: list[KnownNamespace], out: list[Holdings]) -> Iterator[None]:
        """Put what each of these namespaces holds into ``out``. What changes meanwhile may count or not."""
        table = self._store.index.table
        sums: dict[int, NDArray[np.int64]] = {}
        for first in range(0, table.n_used, CENSUS_BLOCKS):
            for ordinal, counts in self._counts(first, first + CENSUS_BLOCKS).items():
                sums[ordinal] = sums.get(ordinal, 0) + counts
            yield
        zeros = np.zeros(6, np.int64)
        for each in known:
            counts = sums.get(each.ordinal, zeros).copy()
            counts[_BYTES] = sum((sums.get(ordinal, zeros) for ordinal in each.ordinals), zeros)[_BYTES]
            out.append(Holdings(*counts.tolist()))

    def whose(self, ordinal: int) -> tuple[bytes, Namespace | None]:
        """The namespace that has this number in the block table, and its digest; None if nobody has described it."""
        spaces, hierarchy = self._store.namespaces, self._store.hierarchy
        opened = spaces.opened_as(ordinal)
        if opened is not None:
            return opened.digest, opened.namespace
        digest = spaces.digest(ordinal)
        known = self._described.get(digest)
        if known is None:
            text = spaces.description(ordinal)
            if not text and hierarchy is not None:
                text = dict(hierarchy.nvme.namespaces().values()).get(digest, "")
            known = self._description(digest, text)
        return known.digest, known.namespace

    def fitting(
        self, ordinals: NDArray[np.uint32], wanted: NamespaceFilter, tenant: str | None
    ) -> dict[int, KnownNamespace]:
        """The namespaces with these numbers that fit, as ``namespaces`` says, by number."""
        names = self._store.namespaces.names() if wanted.name else {}
        found = {}
        for ordinal in np.unique(ordinals).tolist():
            digest, namespace = self.whose(ordinal)
            known = KnownNamespace(digest, namespace, [ordinal], ordinal, names.get(digest, ()))
            is_theirs = tenant is None or (namespace is not None and namespace.tenant == tenant)
            if is_theirs and wanted.fits(known):
                found[ordinal] = known
        return found

    def blocks(self, ids: Ids) -> BlockFacts:
        """What is known of these blocks."""
        index, table, at = self._store.index, self._store.index.table, ids.astype(np.intp)
        return BlockFacts(
            table.key[at],
            index.resident(ids, DRAM),
            index.resident(ids, NVME),
            index.resident(ids, HBM),
            table.size_bytes[at],
            table.hits[at] if table.counts_hits else np.empty(0, np.uint8),
            self._store.clock.now_s() - table.last_use_s[at],
            table.refs[at],
        )

    def explain(self, prompt: Prompt) -> Explanation:
        """How far a prompt is stored, and why no further. Changes nothing."""
        return self._store.index.explain(prompt.root_key, prompt.path)

    def _counts(self, first: int, end: int) -> dict[int, NDArray[np.int64]]:
        """By ordinal what ``Holdings`` has, of the blocks with these ids."""
        table = self._store.index.table
        end = min(end, table.n_used)
        state = table.state[first:end]
        at = np.flatnonzero((state == STORED) | (state == COLD) | (state == PART)) + first
        if not len(at):
            return {}
        ordinals, which = np.unique(table.namespace[at], return_inverse=True)
        which = which.reshape(-1)
        is_block = (table.state[at] != PART).astype(np.int64)
        in_dram, on_nvme = table.resident(at, DRAM).astype(np.int64), table.resident(at, NVME).astype(np.int64)
        sizes, pinned = table.size_bytes[at].astype(np.int64), (table.refs[at] > 0).astype(np.int64)
        columns = (
            is_block, is_block * in_dram, is_block * on_nvme, sizes * in_dram, sizes * on_nvme, is_block * pinned
        )  # fmt: skip
        sums = np.stack([np.bincount(which, column, len(ordinals)) for column in columns], axis=1).astype(np.int64)
        return dict(zip(ordinals.tolist(), sums, strict=True))

    def _all(self) -> Generator[None, None, list[KnownNamespace]]:
        """Every namespace that is known, as the generator's value."""
        spaces = self._store.namespaces
        names = spaces.names()
        found = {
            opened.digest: KnownNamespace(
                opened.digest,
                opened.namespace,
                list(opened.ordinals),
                opened.ordinal,
                names.get(opened.digest, ()),
                opened,
            )
            for opened in spaces.opened()
        }
        hierarchy = self._store.hierarchy
        listed = dict(hierarchy.nvme.namespaces().values()) if hierarchy is not None else {}
        for n, (ordinal, digest) in enumerate(spaces.unopened()):
            if n % NAMESPACES_PER_STEP == 0:
                yield
            told = self._description(digest, spaces.description(ordinal) or listed.get(digest, ""))
            known = found.setdefault(told.digest, KnownNamespace(told.digest, told.namespace, []))
            known.ordinals.append(ordinal)
            if known.ordinal < 0 and not told.part:
                known.ordinal = ordinal
        return list(found.values())

    def _description(self, digest: bytes, text: str) -> Described:
        """What has this digest and description on NVMe, or as the daemon before has noted it."""
        known = self._described.get(digest)
        if known is None or (known.namespace is None and text):
            known = self._described[digest] = described(digest, text)
        return known
