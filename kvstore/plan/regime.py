"""How KV in host memory is used best by a GPU: read where it lies, brought into the GPU's memory, or computed again.

The time of each is estimated from measured rates and the shortest is recommended, unless a fact forbids it. What the
papers say holds where the figures say so: reading in place wins on chip-to-chip links (DirectKV) and, over PCIe, where
every byte is read once or the GPU has no room; which staged way wins depends on the size of contiguous pieces (Strata's
kernel for small ones, the copy engine for large ones).
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from enum import StrEnum

from kvstore.config import format_size
from kvstore.errors import BadInputError
from kvstore.plan.calibration import Calibration
from kvstore.plan.links import GpuLink
from kvstore.plan.prefill import Prefill
from kvstore.plan.ways import MAPPED, STAGED, Direction, Way

MARGIN = 0.15
"""A choice is kept until another would take less than 1 - MARGIN of its time."""
KINDS_KEPT = 1024
READS_IN_PLACE_MAX = 1.0
"""Over a link much slower than the GPU's memory no byte is read in place more often, if there is a way around."""


class Action(StrEnum):
    """What is to be done with stored KV."""

    ZERO_COPY = "zero-copy"
    STAGED = "staged"
    RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True)
class Facts:
    """What is possible here. ``gpu_gb_per_s``: how fast kernels read the GPU's own memory, 0 if unknown."""

    coherent: bool = False
    """The link is a chip-to-chip one, of which kernels read at nearly its rate, over and over."""
    can_map: bool = True
    """Host memory can be given addresses for kernels."""
    cannot_map_reason: str = ""
    gpu_gb_per_s: float = 0.0
    notes: tuple[str, ...] = ()
    """What else may matter to who reads reasons, as that others share the link."""

    @classmethod
    def of(
        cls, link: GpuLink | None, *, can_map: bool = True, cannot_map_reason: str = "", gpu_gb_per_s: float = 0.0
    ) -> Facts:
        """Of a GPU as NVML tells; one that is not told of is taken for one behind PCIe."""
        if link is None:
            return cls(False, can_map, cannot_map_reason, gpu_gb_per_s)
        return cls(bool(link.c2c), can_map, cannot_map_reason, gpu_gb_per_s, link.notes)


@dataclass(frozen=True, slots=True)
class Case:
    """A use of stored KV: ``total_bytes`` in contiguous pieces of ``piece_bytes``, each byte read by kernels
    ``reads_per_byte`` times while it stays (decode: once a step). ``room_bytes``: what the GPU's memory has for it.

    With ``tokens`` and ``start`` (how many positions it is, from which on) it can be compared with computing them.
    """

    total_bytes: int
    piece_bytes: int
    reads_per_byte: float = 1.0
    room_bytes: float = math.inf
    tokens: int = 0
    start: int = 0

    def __post_init__(self) -> None:
        if self.total_bytes < 0 or self.piece_bytes < 1:
            raise BadInputError(f"{self.total_bytes} bytes in pieces of {self.piece_bytes} are no transfer")
        if not 0 <= self.reads_per_byte < math.inf or self.room_bytes < 0 or self.tokens < 0 or self.start < 0:
            raise BadInputError(f"{self}: reads, room, tokens and start can't be negative or without end")


@dataclass(frozen=True, slots=True)
class Option:
    """One thing that could be done. ``excluded``: why not, or empty."""

    action: Action
    way: Way | None
    expected_s: float
    excluded: str = ""

    @property
    def name(self) -> str:
        """Such as ``staged by batch``."""
        return f"{self.action} by {self.way}" if self.action is Action.STAGED else str(self.action)


@dataclass(frozen=True, slots=True)
class Recommendation:
    """What to do, why, and what else there was. ``option`` is None where nothing can be done."""

    option: Option | None
    reasons: tuple[str, ...]
    options: tuple[Option, ...]


class Advisor:
    """Recommends for cases, and keeps to what it said until something else is clearly better. For any thread."""

    def __init__(self, calibration: Calibration, facts: Facts, prefill: Prefill | None = None) -> None:
        self.calibration = calibration
        self.facts = facts
        self.prefill = prefill
        self._lock = threading.Lock()
        self._said: OrderedDict[Hashable, tuple[Action, Way | None]] = OrderedDict()

    def recommend(self, case: Case, kind: Hashable = None) -> Recommendation:
        """For a case. Cases of the same ``kind`` (by default: of about the same pieces, amount and reads) are kept to
        one choice while it is at most ``MARGIN`` worse than the best."""
        options = self.options(case)
        possible = [option for option in options if not option.excluded]
        if not possible:
            return Recommendation(None, tuple(f"{each.name}: {each.excluded}" for each in options), options)
        best = min(possible, key=lambda option: option.expected_s)
        chosen, kept = self._keep(kind if kind is not None else _kind(case), best, possible)
        return Recommendation(chosen, tuple(self._reasons(case, chosen, best, options, kept)), options)

    def options(self, case: Case) -> tuple[Option, ...]:
        """Everything that could be done, with the time it is expected to take and what forbids it."""
        n_pieces = case.total_bytes / case.piece_bytes
        own_reads_s = self._own_reads_s(case)
        staged = [
            Option(
                Action.STAGED, way, self._link_s(way, case, n_pieces) + own_reads_s, self._excluded_staged(way, case)
            )
            for way in STAGED
        ]
        once_s = self._link_s(Way.ZERO_COPY, case, n_pieces)
        in_place_s = once_s if math.isinf(once_s) else once_s * case.reads_per_byte
        compute_s, no_compute = self._recompute(case)
        in_place = Option(Action.ZERO_COPY, Way.ZERO_COPY, in_place_s, self._excluded_in_place(case, staged))
        return (*staged, in_place, Option(Action.RECOMPUTE, None, compute_s + own_reads_s, no_compute))

    def _link_s(self, way: Way, case: Case, n_pieces: float) -> float:
        return self.calibration.expected_s(Direction.LOAD, way, case.piece_bytes, n_pieces)

    def _own_reads_s(self, case: Case) -> float:
        """What kernels take to read bytes in the GPU's memory."""
        rate = self.facts.gpu_gb_per_s * 1e9
        return case.total_bytes * case.reads_per_byte / rate if rate > 0 else 0.0

    def _unusable(self, way: Way) -> str:
        if way in MAPPED and not self.facts.can_map:
            return self.facts.cannot_map_reason or "host memory can't be mapped for kernels"
        if not self.calibration.knows(Direction.LOAD, way):
            return self.calibration.table.absent.get((Direction.LOAD, way), "not measured")
        return ""

    def _excluded_staged(self, way: Way, case: Case) -> str:
        return _no_room(case) or self._unusable(way)

    def _excluded_in_place(self, case: Case, staged: list[Option]) -> str:
        if unusable := self._unusable(Way.ZERO_COPY):
            return unusable
        around = any(not option.excluded for option in staged)
        if around and not self.facts.coherent and case.reads_per_byte > READS_IN_PLACE_MAX:
            return f"each byte is read {case.reads_per_byte:g} times, and would cross the link as often"
        return ""

    def _recompute(self, case: Case) -> tuple[float, str]:
        if self.prefill is None:
            return math.inf, "the engine's prefill rate is unknown"
        if not case.tokens:
            return math.inf, "which tokens it is was not said"
        return self.prefill.expected_s(case.start, case.start + case.tokens), _no_room(case)

    def _keep(self, kind: Hashable, best: Option, possible: list[Option]) -> tuple[Option, bool]:
        """What was said for the kind before, if that is still about as good; whether it was kept against the best."""
        with self._lock:
            said = self._said.pop(kind, None)
            former = next((each for each in possible if (each.action, each.way) == said), None)
            keep = former is not None and former.expected_s * (1 - MARGIN) <= best.expected_s
            chosen = former if former is not None and keep else best
            self._said[kind] = chosen.action, chosen.way
            if len(self._said) > KINDS_KEPT:
                self._said.popitem(last=False)
        return chosen, chosen is not best

    def _reasons(self, case: Case, chosen: Option, best: Option, options: tuple[Option, ...], kept: bool) -> list[str]:
        words = [f"{chosen.name}: {_time(chosen.expected_s)} for {format_size(case.total_bytes)}"]
        if chosen.way is not None:
            rate = self.calibration.rate(Direction.LOAD, chosen.way, case.piece_bytes)
            words[0] += f", pieces of {format_size(case.piece_bytes)} over the link at {rate:.3g} GB/s"
            reads = f"each byte {case.reads_per_byte:g} times"
            if chosen.action is Action.ZERO_COPY and case.reads_per_byte > 1:
                words[0] += f", {reads}"
            elif (own_reads_s := self._own_reads_s(case)) > 0:
                words[0] += f"; {_time(own_reads_s)} of it to read {reads} on the device"
        if kept:
            words.append(f"{best.name} would take {_time(best.expected_s)}: not enough better to change")
        others = sorted((each for each in options if each is not chosen), key=lambda each: each.expected_s)
        for other in others:
            if other.excluded:
                words.append(f"not {other.name}: {other.excluded}")
            elif other is not best or not kept:
                words.append(f"not {other.name}: {_time(other.expected_s)}")
        if chosen.action is not Action.RECOMPUTE:
            if slow := self.calibration.contention(Direction.LOAD):
                words.append(slow.reason)
            words += self.facts.notes
        return words


def _kind(case: Case) -> Hashable:
    """Cases alike: by powers of two of the piece, of the amount and of the reads, and whether there is room."""
    reads = round(math.log2(case.reads_per_byte)) if case.reads_per_byte > 0 else None
    return (
        case.piece_bytes.bit_length(), case.total_bytes.bit_length(), reads,
        case.room_bytes >= case.total_bytes, case.tokens.bit_length(), case.start.bit_length(),
    )  # fmt: skip


def _no_room(case: Case) -> str:
    if case.room_bytes >= case.total_bytes:
        return ""
    return f"the GPU's memory has room for {format_size(case.room_bytes)}, not for {format_size(case.total_bytes)}"


def _time(seconds: float) -> str:
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
