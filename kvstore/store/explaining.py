"""Why a prompt is no hit as far as it is none: what became of the first block that is missing, and what comes near it.

Everything here is of one tenant. Another's tokens, namespaces or blocks are never looked at: block keys and roots have
the tenant in them, and namespaces are those of the prompt's tenant. Salts keep users of one tenant apart: of roots with
another one than the prompt's only operators are told, and they how much of the prompt is there, not the salt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from kvstore.facts import NearRoot
from kvstore.prefix_index.block_table import DRAM, HBM
from kvstore.prefix_index.explain import Explanation
from kvstore.prefix_index.history import Departure, Left
from kvstore.prefix_index.keys import part_key
from kvstore.prefix_index.rows import RowPath
from kvstore.store.admin import Administration, Holdings, KnownNamespace, NamespaceFilter
from kvstore.store.being_written import written_end
from kvstore.store.requests import Prompt
from kvstore.store.store import Store
from kvstore.types import Namespace, Root, RowKind

LOOKED_AT_MAX = 256
"""Missing blocks that are accounted for: their keys have to be computed."""
NEAR_MAX = 3
"""Namespaces, and roots, that are told."""


class State(StrEnum):
    """In what state a block is that did not leave, as far as is known.

    STORED: it can be used. BEING_WRITTEN: a client has reserved it and not committed it yet. UNREACHABLE: it is stored
    behind one that is missing. NEVER_STORED: nothing is known of it.
    """

    STORED = "stored"
    BEING_WRITTEN = "being_written"
    UNREACHABLE = "unreachable"
    NEVER_STORED = "never_stored"


Reason = State | Left
"""Why a block can't be used: in what state it is, or how it left."""


@dataclass(frozen=True, slots=True)
class NearNamespace:
    """Another namespace of the tenant's, in what the prompt's differs from it, and its blocks: the prompt's, all."""

    known: KnownNamespace
    differences: list[str]
    n_matching: int
    n_blocks: int


@dataclass(slots=True)
class Explained:
    """What can be used of a prompt, and what became of the first block that can't.

    ``n_hit`` leading blocks can be used, the first ``n_in_dram`` of them without waiting; ``n_on_nvme`` are on NVMe
    and not in DRAM, ``n_in_hbm`` in HBM, too. ``groups``: of a hybrid namespace, those of which the block's part is
    missing, not the block itself.
    ``cleared_ago_s``: since the namespace was cleared last, with ``n_cleared`` blocks in it.
    """

    found: Explanation
    n_hit: int
    partial_tokens: int
    n_in_dram: int
    n_on_nvme: int
    block: int
    reason: Reason
    departure: Departure | None = None
    groups: tuple[int, ...] = ()
    missing: Counter[Reason] = field(default_factory=Counter)
    cleared_ago_s: float | None = None
    n_cleared: int = 0
    n_in_hbm: int = 0
    namespaces: list[NearNamespace] = field(default_factory=list)
    roots: list[NearRoot] = field(default_factory=list)


class Explainer:
    """Over one store. Called on its thread only."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._admin = Administration(store)

    def explain(self, prompt: Prompt) -> Explained:
        """What can be told at once: all but the namespaces and roots that come near. Changes nothing."""
        store, index = self._store, self._store.index
        found, hit = index.explain(prompt.root_key, prompt.path), store.hit(prompt)
        in_dram = index.resident(hit.ids, DRAM)
        n_in_dram = len(in_dram) if in_dram.all() else int(in_dram.argmin())
        told = Explained(
            found, len(hit.ids), hit.partial_tokens,
            min(n_in_dram, store.hybrid_in_dram(prompt)) if prompt.namespace.parts else n_in_dram,
            int(np.count_nonzero(~in_dram)), len(hit.ids), State.STORED,
        )  # fmt: skip
        told.n_in_hbm = int(np.count_nonzero(index.resident(hit.ids, HBM))) if store.hbm is not None else 0
        cleared = store.last_clears.get(prompt.namespace.ordinal)
        if cleared is not None:
            told.cleared_ago_s, told.n_cleared = store.clock.now_s() - cleared.at_s, cleared.n_blocks
        path = prompt.path
        is_whole = told.n_hit == path.n_full_rows and path.tail_tokens == told.partial_tokens
        if not is_whole and not (prompt.namespace.parts and self._lacks_parts(prompt, told)):
            self._account(prompt, told)
        return told

    def look_around(self, prompt: Prompt, told: Explained, *, other_salts: bool = False) -> Iterator[None]:
        """Add what comes near where nothing of the prompt can be used; each step is short.

        ``other_salts``: roots with another salt than the prompt's, too. That is for operators: whoever asks learns what
        other users of the tenant have asked.
        """
        if told.n_hit or told.partial_tokens or told.reason is State.STORED:
            return
        yield from self._look_at_roots(prompt, told, other_salts=other_salts)
        yield from self._look_at_namespaces(prompt, told)

    # Blocks --------------------------------------------------------------------------------------

    def _account(self, prompt: Prompt, told: Explained) -> None:
        """What became of each block behind the hit."""
        index, path = self._store.index, prompt.path
        first, end = told.n_hit, min(path.n_rows, told.n_hit + LOOKED_AT_MAX)
        parent_key = index.table.key[told.found.known[first - 1]].tobytes() if first else prompt.root_key
        departures = index.history.of(path.chain(parent_key, first, end))
        known = told.found.known[first:end].astype(np.intp)
        has_copy, is_over = index.table.residency[known] != 0, self._is_over(known)
        being_written_end = written_end(self._store.reservations, prompt, first)
        for i, departure in enumerate(departures):
            reason: Reason = Left.CORRUPT if i < len(known) else State.NEVER_STORED
            how = None
            if i < len(known) and has_copy[i]:
                reason = Left.EXPIRED if is_over[i] else State.UNREACHABLE
            elif first + i < being_written_end:
                reason = State.BEING_WRITTEN
            elif departure is not None:
                reason, how = departure.left, departure
            told.missing[reason] += 1
            if i == 0:
                told.reason, told.departure = reason, how

    def _is_over(self, known: NDArray[np.intp]) -> NDArray[np.bool_]:
        hints = self._store.index.hints
        if not hints.has_ttl:
            return np.zeros(len(known), np.bool_)
        return hints.is_over(known, self._store.clock.now_s())

    def _lacks_parts(self, prompt: Prompt, told: Explained) -> bool:
        """Whether it is parts of blocks that end the hit; says which are missing."""
        index, opened = self._store.index, prompt.namespace
        path = told.found.match.ids.astype(np.intp)
        over = np.flatnonzero(self._is_over(path))
        path = path[: int(over[0])] if len(over) else path
        lacking: list[int] = []
        for part, rule in zip(opened.parts[1:], opened.rules, strict=True):
            first = max(len(path) - rule.window_blocks, 0)
            there = index.parts.is_there(path[first:], rule.number)
            if there.all():
                continue
            if not lacking:
                told.block = first + int(there.argmin())
                key = part_key(index.table.key[path[told.block]].tobytes(), rule.number)
                (departure,) = index.history.of(np.frombuffer(key, np.uint8).reshape(1, -1))
                told.departure = departure
                told.reason = State.NEVER_STORED if departure is None else departure.left
                if written_end(self._store.reservations, prompt, told.block, rule.number):
                    told.departure, told.reason = None, State.BEING_WRITTEN
                told.missing[told.reason] = int(np.count_nonzero(~there))
            lacking += part.groups
        told.groups = tuple(lacking)
        return bool(lacking)

    # What comes near -----------------------------------------------------------------------------

    def _look_at_roots(self, prompt: Prompt, told: Explained, *, other_salts: bool) -> Iterator[None]:
        """Other LoRA identities, and salts, of the namespace, as far as somebody has asked with them lately."""
        near: list[NearRoot] = []
        for (salt, lora), root_key in prompt.namespace.roots.items():
            if salt != prompt.root[0] and not other_salts:
                continue
            n_matching = len(self._store.index.match(root_key, prompt.path).ids)
            if n_matching:
                near.append(NearRoot(salt != prompt.root[0], lora != prompt.root[1], lora, n_matching))
            yield
        near.sort(key=lambda each: (each.salt_differs + each.lora_differs, -each.n_matching))
        told.roots = near[:NEAR_MAX]

    def _look_at_namespaces(self, prompt: Prompt, told: Explained) -> Iterator[None]:
        """Other namespaces of the tenant with the same kind of row, of the same rank."""
        mine, known = prompt.namespace.namespace, list[KnownNamespace]()
        yield from self._admin.namespaces(NamespaceFilter(), mine.tenant, known)
        near: list[NearNamespace] = []
        for each in known:
            if each.namespace is None or each.namespace == mine or not _may_be_meant(mine, each.namespace):
                continue
            n_matching = self._n_matching(prompt, each)
            if n_matching or each.namespace.model == mine.model:
                near.append(NearNamespace(each, mine.differences(each.namespace), n_matching, 0))
            yield
        near.sort(key=lambda each: (each.n_matching == 0, len(each.differences), -each.n_matching))
        holdings: list[Holdings] = []
        yield from self._admin.census([each.known for each in near], holdings)
        told.namespaces = [
            replace(each, n_blocks=holds.n_blocks) for each, holds in zip(near, holdings, strict=True) if holds.n_blocks
        ][:NEAR_MAX]

    def _n_matching(self, prompt: Prompt, known: KnownNamespace) -> int:
        """How many blocks of the prompt another namespace has, below the same salt and LoRA identity."""
        opened, path = known.opened, prompt.path
        if opened is None:
            return 0
        space = opened.namespace
        if space.row_kind is RowKind.TOKENS and space.spec.block_tokens != path.block_tokens:
            if path.has_extras:
                return 0  # what covers which tokens is known by block only
            path = RowPath.from_tokens(path.data, space.spec.block_tokens)
        root_key = Root(*prompt.root).key(opened.stored[0].digest)
        return len(self._store.index.match(root_key, path).ids)


def _may_be_meant(mine: Namespace, other: Namespace) -> bool:
    """Whether a prompt of one namespace could be one of the other too: the same kind of row, of the same rank."""
    kinds = [(each.row_kind, each.hash_bytes, each.shard.tp_rank, each.shard.pp_rank) for each in (mine, other)]
    return kinds[0] == kinds[1]
