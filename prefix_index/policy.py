"""What an eviction policy is: it gives every block a rank, and the evictable leaf of lowest rank goes first."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.hints import Hints
from kvstore.prefix_index.block_table import DRAM, At, BlockTable

_UNTIMED: AbstractContextManager[None] = nullcontext()


@dataclass(frozen=True, slots=True)
class Use:
    """The request that uses blocks, as policies see it.

    ``now_s``: policy time, which never comes from a clock of the policy's own.
    ``n_tokens``: of its prompt, 0 if unknown; ``output_tokens``: what it generated, 0 if unknown.
    ``namespace``, ``tenant``: the caller's numbers; ``block_tokens``: tokens of a block, 0 if unknown.
    ``category``: the caller's class, 0..255.
    ``is_again``: this use of these blocks was counted already, by the lookup that came before the insertion.
    ``attention_doubling_tokens``: of the model, see ``kvstore.recompute``; 0 if unknown.
    """

    now_s: float = 0.0
    n_tokens: int = 0
    output_tokens: int = 0
    hints: Hints | None = None
    namespace: int = 0
    tenant: int = 0
    block_tokens: int = 0
    category: int = 0
    is_again: bool = False
    attention_doubling_tokens: float = 0.0


class Newcomers(NamedTuple):
    """Blocks that are not stored yet, in path order."""

    keys: NDArray[np.uint8]
    """[n, 16]"""
    parent: int
    """The block before the first, NO_PARENT without one."""
    use: Use


class EvictionPolicy(ABC):
    """Orders the blocks of one or several tiers by vectors over their ids; keeps no object per block.

    Ranks may be anything but NaN. The one in force stands in ``table.ranks(tier)``: ``accessed``, ``inserted``,
    ``entered`` and ``demoted`` write it there (``set_ranks``) for the ids of the call, and the evictors take those
    up at once. Ranks that change at other times (a formula over time, ranks of unrelated blocks) come into force
    when ``rank`` is next asked, for each snapshot that an evictor takes of all evictable leaves. A policy that wants
    them in force now raises ``version``: a new snapshot looks at the whole table, so do it once per many evictions.

    Ranks only choose among leaves that nobody uses: that a prompt loses its tail first is not the policy's business.
    The same calls give the same ranks: no clock, no random numbers without a seed; of equal blocks the older first.
    """

    name: str
    version = 0
    moves = False
    """Whether ranks change with time: a snapshot then asks for those of all blocks of the tier, so that a block which
    becomes a leaf later has one of the same moment."""
    reprieves = False
    """Whether ``reprieve`` is to be asked."""
    weighs = False
    """Whether newcomers may be worth less than what would have to go for them: see ``weigh``."""
    margin = 0.0
    """By how much newcomers must rank below what is in a tier to be kept out of it: see ``admission``."""
    table: BlockTable
    tiers: tuple[int, ...] = ()

    def attach(self, table: BlockTable, tiers: Sequence[int] = (DRAM,)) -> None:
        """Called once, before anything else. ``tiers``: whose order it gives."""
        self.table, self.tiers = table, tuple(tiers)

    def of(self, tier: int) -> EvictionPolicy:  # noqa: ARG002 - one policy gives the order of all its tiers
        """The policy that gives this tier's order."""
        return self

    def set_ranks(self, ids: At, ranks: NDArray[np.float64] | float) -> None:
        """Put ranks in force in all its tiers."""
        for tier in self.tiers:
            self.table.ranks(tier)[ids] = ranks

    @abstractmethod
    def accessed(self, ids: At, use: Use) -> float:
        """A request uses blocks of a path, first block first. Returns their lowest new rank, or -inf."""

    @abstractmethod
    def inserted(self, ids: At, use: Use) -> None:
        """These blocks are new, in path order; their access is part of being inserted."""

    def weigh(self, newcomers: Newcomers) -> NDArray[np.float64]:
        """The ranks that these blocks would have in DRAM if they were inserted now; float64 [n]. Changes nothing.

        Where room is made before blocks are inserted this makes them candidates too, as if it were made afterwards."""
        return np.full(len(newcomers.keys), np.inf)

    def declined(self, newcomers: Newcomers, n_entering: int) -> None:  # noqa: B027
        """Only the first ``n_entering`` of these blocks will be inserted next, the others would have had to go at
        once. It is an access to those, too."""

    @abstractmethod
    def demoted(self, ids: At) -> None:
        """These blocks are to go before all others, until they are accessed again; their order is as of a path."""

    def entered(self, ids: At, tier: int) -> None:  # noqa: B027 - a hook, as the next ones
        """Blocks have got a copy in a tier, in path order; of new ones ``inserted`` tells first."""

    def left(self, ids: At, tier: int) -> None:  # noqa: B027
        """Blocks have lost their copy in a tier, first gone first; those without any other may leave the table next."""

    def ended(self, ids: At, use: Use) -> None:  # noqa: B027
        """What became of a request is known: ``use`` has its ``output_tokens``. ``ids``: the blocks of its prompt."""

    def evicted(self, ids: At) -> None:  # noqa: B027
        """These blocks are about to leave the table."""

    def reprieve(self, block: int, tier: int) -> At | None:  # noqa: ARG002 - nothing is reprieved
        """Asked of the block that goes next, if ``reprieves``: None, or after giving it another rank instead the ids,
        its own among them, that have new ranks. It must come to an end: some block goes."""
        return None

    def spares(self, ids: At, tier: int) -> NDArray[np.bool_]:  # noqa: ARG002 - nothing is spared
        """Which of these blocks, that would go one after the other, ``reprieve`` should be asked of; bool [n]."""
        return np.zeros(len(ids), np.bool_)

    def rank(self, ids: At, tier: int) -> NDArray[np.float64]:
        """Lower goes first. Changes nothing; the evictor writes the answer to ``table.ranks(tier)``."""
        return self.table.ranks(tier)[ids]

    def frozen(self, tier: int) -> Callable[[At], NDArray[np.float64]] | None:  # noqa: ARG002 - it has none
        """``rank`` as it is now, to be asked later for blocks of which no other rank has been put in force since; None
        if there is only ``rank``. With one, an evictor of many blocks ranks only those that may get their turn."""
        return None

    def timed(self) -> AbstractContextManager[None]:
        """To be inside of while working for this policy outside of its calls: see ``policy_time``."""
        return _UNTIMED

    def close(self) -> None:  # noqa: B027
        """Nobody asks any more: ends what it has running beside. Idempotent; may block for some milliseconds."""

    def admits(self, ids: At, use: Use, tier: int) -> NDArray[np.bool_]:  # noqa: ARG002 - all are welcome
        """Which of a request's blocks are worth writing to a tier below DRAM; for bool [n]. Changes nothing."""
        return np.ones(len(ids), np.bool_)
