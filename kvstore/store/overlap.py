"""What of a prompt is stored where, and how long loading it would take: what routers ask every replica's store.

A pure question, unlike a lease: nothing is held, loaded or moved, and to policies it is no use of the blocks, as of the
replicas that are asked one will be used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.load_time import LoadTime
from kvstore.onboard import Part
from kvstore.prefix_index.block_table import DRAM, HBM
from kvstore.store.family import Families, FamilyPrompt
from kvstore.store.namespaces import OpenNamespace, Stored
from kvstore.store.requests import Prompt

Blocks = NDArray[np.intp]

COPIES_APART_S = 0.05
"""Of the copies that clients tell of, one of a namespace in so long is looked at: it takes longer than a lease."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """Tokens of a prompt that are stored: ``n_dram_tokens`` in DRAM and ``n_nvme_tokens`` on NVMe only, together
    ``n_tokens``; ``n_loading_tokens`` of the latter are on their way to DRAM already. ``n_hbm_tokens`` of all have a
    copy in HBM, too.

    In a hybrid namespace its full and MLA groups say where a token is; of a shard family a token is in DRAM if every
    shard has it there. ``load_s`` is how long it is expected to take, in seconds from asking for a lease, until all is
    in DRAM and copied to its reader by one thread (by each rank of a family its own shard); infinite while the disk is
    stuck. ``load_error`` is a factor, 1.0 or more: of late, what was loaded took typically so many times as long as
    expected, or as short.
    """

    n_tokens: int
    n_dram_tokens: int
    n_nvme_tokens: int
    n_loading_tokens: int
    load_s: float
    load_error: float
    n_hbm_tokens: int = 0


class _Loading(NamedTuple):
    """What one reader would get: all blocks and parts of blocks of a hit, by their number in the block table."""

    copy_times: tuple[LoadTime, LoadTime]
    n_bytes: int
    parts: Sequence[Part]


class Overlaps(Families):
    """See ``Store``."""

    def overlap(self, prompt: Prompt | FamilyPrompt) -> Overlap:
        """How much of a prompt is stored where. Pure: changes nothing, pins nothing. Takes about as long as a match."""
        self.counters.add("matches")
        if isinstance(prompt, FamilyPrompt):
            hit = self._family_reach(prompt, 0)
            loads = [
                _loading(shard.namespace, [(shard.namespace.stored[0], ids)])
                for shard, ids in zip(prompt.shards, hit.ids, strict=True)
            ]
            return self._overlap(hit.ids, hit.partial_tokens, prompt.block_tokens, loads)
        opened = prompt.namespace
        others: list[tuple[Stored, Blocks]] = []
        if opened.parts:
            reach = self._hybrid_reach(prompt)
            blocks, partial_tokens = reach.held, reach.partial_tokens
            others = [(opened.stored[span.number], span.ids) for span in reach.spans]
        else:
            plain = self._reach(prompt, 0, 0)
            blocks, partial_tokens = plain.ids, plain.partial_tokens
        loading = _loading(opened, [(opened.stored[0], blocks), *others])
        return self._overlap(blocks[None], partial_tokens, opened.namespace.spec.block_tokens, [loading])

    def note_copy(self, opened: OpenNamespace, n_bytes: int, took_s: float, *, after_read: bool = False) -> None:
        """A client says how long it took to copy so much out of slots. One that lies misleads its own tenant.

        ``after_read``: some of it was read from NVMe for that, which ``took_s`` does not count.
        """
        now_s = self.clock.now_s()
        if now_s >= opened.copies_from_s:
            opened.copies_from_s = now_s + COPIES_APART_S
            opened.copy_times[after_read].observe(n_bytes, took_s)

    def _overlap(self, blocks: Blocks, partial_tokens: int, block_tokens: int, loads: Sequence[_Loading]) -> Overlap:
        """``blocks`` [shards, blocks] of the prompt; with ``partial_tokens`` the last one matches in so many."""
        n = blocks.shape[1]
        not_in_last = block_tokens - partial_tokens if partial_tokens else 0
        n_tokens = n_dram = n * block_tokens - not_in_last
        n_loading = n_hbm = 0
        missing = self._missing(loads) if self.hierarchy is not None and n else []
        copies = [(load.copy_times[bool(missing)], load.n_bytes) for load in loads]
        times = [max((copy.expected_s(n_bytes), copy.error) for copy, n_bytes in copies)]

        def tokens_at(there: NDArray[np.bool_]) -> int:
            in_all = np.all(there, axis=0)
            return int(np.count_nonzero(in_all)) * block_tokens - (not_in_last if in_all[-1] else 0)

        if self.hbm is not None and n:
            n_hbm = tokens_at(self.index.resident(blocks, HBM))
        if self.hierarchy is not None and missing:
            onboarder = self.hierarchy.onboarder
            here = self.index.resident(blocks, DRAM)
            n_dram = tokens_at(here)
            n_loading = tokens_at(here | onboarder.are_under_way(blocks)) - n_dram
            times.append(onboarder.expected(missing))
        load_s = sum(took_s for took_s, _ in times)
        log_error = sum(took_s * math.log(error) for took_s, error in times if took_s < math.inf)
        error = math.exp(log_error / load_s) if load_s else 1.0
        return Overlap(n_tokens, n_dram, n_tokens - n_dram, n_loading, load_s, error, n_hbm)

    def _missing(self, loads: Sequence[_Loading]) -> list[Part]:
        """What of these is not in DRAM."""
        return [
            Part(part.namespace, part.read_ids[~here])
            for load in loads
            for part in load.parts
            if not (here := self.index.resident(part.read_ids, DRAM)).all()
        ]


def _loading(opened: OpenNamespace, wanted: Sequence[tuple[Stored, Blocks]]) -> _Loading:
    n_bytes = sum(len(ids) * stored.block_bytes for stored, ids in wanted)
    return _Loading(opened.copy_times, n_bytes, [Part(stored.ordinal, ids) for stored, ids in wanted])
