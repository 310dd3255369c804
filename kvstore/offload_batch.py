"""A batch of blocks on their way from DRAM to NVMe."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvstore.compression.frame import FrameLayout, FrameRow
from kvstore.native import row_addresses
from kvstore.prefix_index.block_table import Ids
from kvstore.tiers.nvme.jobs import WriteJob


@dataclass(slots=True)
class Part:
    """Frames of one namespace in a batch."""

    layout: FrameLayout
    number: int
    ids: Ids
    slots: NDArray[np.int64]
    keys: NDArray[np.uint8]
    parents: NDArray[np.uint8]
    firsts: NDArray[np.bool_]
    rows: list[FrameRow]
    log_seqs: NDArray[np.int64]
    headers: NDArray[np.uint8]
    payloads: NDArray[np.uint64]

    def encode(self) -> None:
        """Fill in the headers; reads the payloads to checksum them. Blocks, for the bulk without Python's lock."""
        self.layout.encode_headers(
            self.keys, self.parents, self.rows, self.log_seqs, self.payloads, self.firsts, self.headers
        )

    def buffers(self) -> list[tuple[tuple[int, int], ...]]:
        """Memory of each frame: header, payload in its DRAM slot."""
        header_bytes = self.layout.header_bytes
        payload_bytes = self.layout.frame_bytes - header_bytes
        heads, payloads = row_addresses(self.headers).tolist(), self.payloads.tolist()
        return [((h, header_bytes), (p, payload_bytes)) for h, p in zip(heads, payloads, strict=True)]


@dataclass(slots=True, eq=False)
class Writing:
    """A batch on its way. ``run`` is the worker's part."""

    parts: list[Part]
    job: WriteJob
    since_s: float
    n_bytes: int
    written: bool = False
    naming: bool = False
    late: bool = False
    ids: Ids = field(init=False)
    slots: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        self.ids = np.concatenate([part.ids for part in self.parts])
        self.slots = np.concatenate([part.slots for part in self.parts])

    def run(self) -> None:
        """Checksum and write; blocks. For a worker thread."""
        for part in self.parts:
            part.encode()
        self.job.write()
