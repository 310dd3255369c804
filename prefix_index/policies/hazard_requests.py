"""What the default policy knows of the requests under way, and how it reads one from a ``Use``."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvstore.prefix_index.block_table import At
from kvstore.prefix_index.policies.hazard_features import N_VALUES, RequestFacts, log2_value
from kvstore.prefix_index.policy import Use

_KINDS_MOST = N_VALUES - 2
_OTHER_KIND = N_VALUES - 1

K = TypeVar("K")
V = TypeVar("V")


@dataclass(slots=True)
class Opened:
    """A request that has used what was found of its prompt, and may store the rest.

    ``ids``: the blocks that were found, so many (``counts``) of each of ``runs``. ``unbroken``: LRU would have found
    them all.
    """

    number: int
    facts: RequestFacts
    ids: At
    runs: list[int]
    counts: list[int]
    unbroken: bool


@dataclass(slots=True)
class Entering:
    """Runs whose first ``n_left`` blocks are about to be inserted; what becomes of the others is known."""

    runs: list[int]
    counts: list[int]
    n_left: int


class Recent(OrderedDict[K, V], Generic[K, V]):
    """A mapping of bounded size that lets go of what was added first."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def keep(self, key: K, value: V) -> V | None:
        """Add it; returns what had to go for it."""
        replaced = self.pop(key, None)
        self[key] = value
        return self.popitem(last=False)[1] if len(self) > self._most else replaced


class Kinds:
    """Numbers for the kinds of requests, by what callers say they are: the first ones have their own, later ones
    share one."""

    def __init__(self) -> None:
        self._numbers: dict[str | int, int] = {}

    def of(self, use: Use) -> int:
        """The value of TYPE; 0 where nothing is said."""
        said = (use.hints.request_type if use.hints is not None else "") or use.category
        if not said:
            return 0
        number = self._numbers.get(said)
        if number is None:
            if len(self._numbers) >= _KINDS_MOST:
                return _OTHER_KIND
            number = self._numbers[said] = len(self._numbers) + 1
        return number


def reuse_value(use: Use) -> int:
    """The value of REUSE; 0 where nothing is said."""
    expected = use.hints.expected_reuse if use.hints is not None else 0.0
    return log2_value(8 * expected) if expected > 0 else 0


def priority(use: Use) -> float:
    """What was said, from -100 to 100."""
    return float(use.hints.priority) if use.hints is not None else 0.0


def hinted_turn(use: Use) -> int:
    """The turn that was said, 0 where none was."""
    return use.hints.turn if use.hints is not None else 0
