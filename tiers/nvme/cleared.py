"""Which frames must not come back: those of namespaces that were cleared, if the catalog is ever rebuilt from segments.

Dead frames stay where they are until their segment is used again, and a rebuilt catalog would name them. So a clearing
leaves a mark: frames of the namespace in incarnations up to this one don't count. It seals the segments that are open
then, so that what is stored later lies in later ones. The marks lie in a small file of their own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvstore.tiers.nvme.files import Files
from kvstore.tiers.nvme.health import means_full
from kvstore.tiers.nvme.jobs import Failure
from kvstore.tiers.nvme.superblock import CLEARED

MARKS_MAX = 256
"""Namespaces with a mark of their own; with more of them one mark goes for all namespaces there are."""
_EVERYTHING = (1 << 63) - 1


@dataclass(slots=True)
class Marks:
    """Up to which ``log_seq`` frames don't count, by the digest of their namespace, and of all namespaces."""

    by_digest: dict[bytes, int] = field(default_factory=dict)
    of_all: int = -1

    def add(self, digests: Iterable[bytes], log_seq: int) -> None:
        """Frames of these namespaces that lie in incarnations up to this one don't count."""
        for digest in digests:
            self.by_digest[digest] = max(self.by_digest.get(digest, -1), log_seq)
        if len(self.by_digest) > MARKS_MAX:
            self.of_all = max(self.of_all, *self.by_digest.values())
            self.by_digest.clear()

    def fit(self, oldest_log_seq: int, newest_log_seq: int) -> None:
        """Forget marks of incarnations that are all gone, and of some that never were."""
        kept = {digest: min(seq, newest_log_seq) for digest, seq in self.by_digest.items() if seq >= oldest_log_seq}
        self.by_digest = kept
        self.of_all = min(self.of_all, newest_log_seq) if self.of_all >= oldest_log_seq else -1

    def excludes(self, log_seq: int, digests: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Which frames of one incarnation, by the digests of their namespaces (uint8 [n, 16]), don't count."""
        out = np.full(len(digests), log_seq <= self.of_all)
        for digest, seq in self.by_digest.items():
            if log_seq <= seq:
                out |= (digests == np.frombuffer(digest, np.uint8)).all(axis=1)
        return out

    def to_bytes(self) -> bytes:
        """As the file has it."""
        marks = [[digest.hex(), seq] for digest, seq in sorted(self.by_digest.items())]
        return json.dumps({"all": self.of_all, "namespaces": marks}).encode()


def read_marks(files: Files) -> Marks:
    """What the file says. If it is damaged no frame at all counts: which ones do not is unknown."""
    if CLEARED not in files.names():
        return Marks()
    try:
        plain = json.loads(files.read_small(CLEARED))
        marks = Marks({bytes.fromhex(digest): int(seq) for digest, seq in plain["namespaces"]}, int(plain["all"]))
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return Marks(of_all=_EVERYTHING)
    return marks if all(len(digest) == 16 for digest in marks.by_digest) else Marks(of_all=_EVERYTHING)


def open_marks(files: Files, log_seqs: Sequence[int]) -> Marks:
    """The marks of a directory whose segments are in these incarnations; a file that was damaged is made anew."""
    marks = read_marks(files)
    damaged = marks.of_all == _EVERYTHING
    marks.fit(min(log_seqs, default=0), max(log_seqs, default=-1))
    if damaged:
        with suppress(OSError):  # it is so at the next start then
            files.write_small(CLEARED, marks.to_bytes())
    return marks


@dataclass(slots=True, eq=False)
class MarkJob:
    """Marks on their way to the disk. ``run`` once, on the thread that writes names, then ``finish_mark``."""

    files: Files
    data: bytes
    failure: Failure | None = None

    def run(self) -> None:
        """Make them durable; blocks, never raises."""
        try:
            self.files.write_small(CLEARED, self.data)
        except OSError as error:
            self.failure = Failure(means_full(error.errno or 0), f"{error.strerror or error} ({CLEARED})")
