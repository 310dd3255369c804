"""From live frames to memory: makes read jobs and takes their results in. One thread only."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvstore.metrics import Counters
from kvstore.tiers.nvme.files import Extent, Files
from kvstore.tiers.nvme.jobs import ReadJob, ReadPart
from kvstore.tiers.nvme.layout import PAGE_BYTES, Int64s
from kvstore.tiers.nvme.ledger import Ledger
from kvstore.tiers.nvme.table import FrameState


class Reader:
    """Segments under read are counted as such: they stay as they are until the job is finished."""

    def __init__(self, ledger: Ledger, files: Files, counters: Counters) -> None:
        self._ledger = ledger
        self._files = files
        self._counters = counters

    def begin(
        self,
        slots: Int64s,
        header_addresses: NDArray[np.uint64],
        payload_addresses: NDArray[np.uint64],
        header_bytes: ArrayLike,
        payload_padded_bytes: ArrayLike,
    ) -> ReadJob:
        """See ``NvmeTier.begin_read``."""
        table = self._ledger.table
        rows = slots & 0xFFFFFFFF
        heads = np.broadcast_to(np.asarray(header_bytes, np.int64), rows.shape)
        rests = np.broadcast_to(np.asarray(payload_padded_bytes, np.int64), rows.shape)
        fits = table.current(slots)
        fits[fits] = table.state[rows[fits]] == FrameState.LIVE
        fits[fits] = table.pages[rows[fits]].astype(np.int64) * PAGE_BYTES >= (heads + rests)[fits]
        places = np.flatnonzero(fits).astype(np.int64)
        at_header = list(zip(header_addresses.tolist(), heads.tolist(), strict=True))
        at_payload = list(zip(payload_addresses.tolist(), rests.tolist(), strict=True))
        parts = []
        for segment, among in self._ledger.by_segment(rows[places]):
            segment.count(readers=1)
            mine = places[among]
            offsets = table.page[rows[mine]].astype(np.int64) * PAGE_BYTES
            extents = [
                Extent(offset, (at_header[at], at_payload[at]))
                for offset, at in zip(offsets.tolist(), mine.tolist(), strict=True)
            ]
            parts.append(ReadPart(segment.number, segment.file.handle, mine, extents))
        return ReadJob(self._files, parts, np.zeros(len(slots), np.bool_))

    def finish(self, job: ReadJob) -> NDArray[np.bool_]:
        """See ``NvmeTier.finish_read``."""
        for part in job.parts:
            self._ledger.segments.all[part.number].count(readers=-1)
        self._ledger.settle()
        n_arrived = int(job.arrived.sum())
        self._counters.add("read_frames", n_arrived)
        self._counters.add("failed_reads", sum(len(part.frames) for part in job.parts) - n_arrived)
        return job.arrived
