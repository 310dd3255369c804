"""What a run side by side brings: samples, medians with their bounds, ratios between systems."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.bench.bandwidth_row import bootstrap_interval
from kvstore.bench.peers.catalog import Entry, Tier


@dataclass(frozen=True, slots=True)
class Sample:
    """One operation: seconds on the clock, processor seconds of the client and its servers, blocks with wrong bytes."""

    seconds: float
    cpu_s: float
    wrong: int = 0


@dataclass(frozen=True, slots=True)
class Figure:
    """A median and its 95% bounds (bootstrap)."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: NDArray[np.float64]) -> Figure:
        """Of float64 [n]."""
        return cls(float(np.median(values)), *bootstrap_interval(values))

    def to_dict(self) -> dict[str, float]:
        """JSON-able."""
        return {"median": self.median, "low": self.low, "high": self.high}


@dataclass(frozen=True, slots=True)
class Cell:
    """All samples of one operation of one entry at one block size, in the order of the rounds."""

    name: str
    operation: str
    block_bytes: int
    n_blocks: int
    samples: tuple[Sample, ...]

    @property
    def seconds(self) -> NDArray[np.float64]:
        """float64 [rounds]."""
        return np.array([sample.seconds for sample in self.samples])

    @property
    def cpu_seconds(self) -> NDArray[np.float64]:
        """float64 [rounds]."""
        return np.array([sample.cpu_s for sample in self.samples])

    @property
    def gb_per_s(self) -> Figure:
        """Of the blocks' bytes; without meaning for a lookup, which moves none."""
        return Figure.of(self.block_bytes * self.n_blocks / self.seconds / 1e9)

    @property
    def us(self) -> Figure:
        """Microseconds of a call."""
        return Figure.of(self.seconds * 1e6)

    @property
    def cpu_us(self) -> float:
        """Processor time of a call, client and servers, median."""
        return float(np.median(self.cpu_seconds)) * 1e6

    @property
    def wrong(self) -> int:
        """Blocks that came with other bytes than were stored."""
        return sum(sample.wrong for sample in self.samples)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "name": self.name,
            "operation": self.operation,
            "block_bytes": self.block_bytes,
            "n_blocks": self.n_blocks,
            "us": self.us.to_dict(),
            "gb_per_s": None if self.operation == "lookup" else self.gb_per_s.to_dict(),
            "cpu_us": self.cpu_us,
            "wrong_blocks": self.wrong,
            "samples_us": [round(sample.seconds * 1e6, 2) for sample in self.samples],
            "samples_cpu_us": [round(sample.cpu_s * 1e6, 2) for sample in self.samples],
        }


@dataclass(frozen=True, slots=True)
class Skipped:
    """An entry that was not measured: at one block size, or (None) at all."""

    name: str
    block_bytes: int | None
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {"name": self.name, "block_bytes": self.block_bytes, "reason": self.reason}


@dataclass(frozen=True, slots=True)
class Comparison:
    """How many times as long ``other`` takes as ``own``: the median of the rounds' ratios. Above 1 ``own`` is ahead."""

    own: str
    other: str
    operation: str
    block_bytes: int
    ratio: Figure
    cpu_ratio: Figure
    """The same of processor time, which other work on the machine bends less."""

    @property
    def verdict(self) -> str:
        """``ahead`` or ``behind`` where the bounds say so, else ``level``."""
        return "ahead" if self.ratio.low > 1 else "behind" if self.ratio.high < 1 else "level"

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "own": self.own,
            "other": self.other,
            "operation": self.operation,
            "block_bytes": self.block_bytes,
            "ratio": self.ratio.to_dict(),
            "cpu_ratio": self.cpu_ratio.to_dict(),
            "verdict": self.verdict,
        }


@dataclass(frozen=True, slots=True)
class PeersReport:
    """Everything one run measured."""

    entries: tuple[Entry, ...]
    cells: tuple[Cell, ...]
    versions: dict[str, str]
    skipped: tuple[Skipped, ...]
    rounds: int
    batch_bytes: int

    @property
    def wrong_blocks(self) -> dict[str, int]:
        """By entry, blocks that came with other bytes; only those that had any."""
        counts: dict[str, int] = {}
        for cell in self.cells:
            if cell.wrong:
                counts[cell.name] = counts.get(cell.name, 0) + cell.wrong
        return counts

    def cell(self, name: str, operation: str, block_bytes: int) -> Cell | None:
        """None if it was not measured."""
        wanted = (name, operation, block_bytes)
        return next((c for c in self.cells if (c.name, c.operation, c.block_bytes) == wanted), None)

    def measured(self, tier: Tier) -> list[Entry]:
        """Entries of a tier of which anything was measured."""
        names = {cell.name for cell in self.cells}
        return [entry for entry in self.entries if entry.tier == tier and entry.name in names]

    @property
    def block_sizes(self) -> list[int]:
        """Those that were measured."""
        return sorted({cell.block_bytes for cell in self.cells})

    def comparisons(self) -> list[Comparison]:
        """Each way of this store with the limit and the peers of its tier, round by round."""
        found = []
        by_name = {entry.name: entry for entry in self.entries}
        for own in self.cells:
            entry = by_name[own.name]
            if entry.role != "own":
                continue
            for other in self.cells:
                against = by_name[other.name]
                same = (other.operation, other.block_bytes) == (own.operation, own.block_bytes)
                if same and against.tier == entry.tier and against.role != "own":
                    ratio = Figure.of(other.seconds / own.seconds)
                    cpu_ratio = Figure.of(other.cpu_seconds / np.maximum(own.cpu_seconds, 1e-9))
                    found.append(Comparison(own.name, other.name, own.operation, own.block_bytes, ratio, cpu_ratio))
        return found

    def to_dict(self) -> dict[str, Any]:
        """One JSON-able object."""
        return {
            "mode": "peers",
            "rounds": self.rounds,
            "batch_bytes": self.batch_bytes,
            "systems": [
                {"name": e.name, "title": e.title, "tier": e.tier, "role": e.role, "version": self.versions.get(e.name)}
                for e in self.entries
            ],
            "cells": [cell.to_dict() for cell in self.cells],
            "comparisons": [each.to_dict() for each in self.comparisons()],
            "skipped": [each.to_dict() for each in self.skipped],
            "wrong_blocks": self.wrong_blocks,
        }
