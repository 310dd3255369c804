"""How a replay client reads blocks in HBM: as an engine does, through a device of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kvstore.client import Client, Lease
from kvstore.device import PinnedBuffer, open_device
from kvstore.errors import EndedError

BUFFER_BYTES = 8 << 20


class HbmReader:
    """Reads leased blocks from HBM to memory of its own on the device, and from there to the host. A context manager,
    to be left after the client is closed."""

    def __init__(self, device: str, block_bytes: int) -> None:
        """``device``: the daemon's, by name. Raises DeviceError, BadInputError if it can't be had."""
        self._block_bytes = block_bytes
        self._n_rows = max(BUFFER_BYTES // block_bytes, 1)
        with ExitStack() as opened:
            options = {"total_bytes": 4 * BUFFER_BYTES + block_bytes} if device.startswith("simulated") else {}
            self._device = open_device(device, **options)
            opened.callback(self._device.close)
            self._pages = self._device.malloc(self._n_rows * block_bytes)
            self._host = PinnedBuffer(self._device, self._n_rows * block_bytes)
            self._rows = self._host.array.reshape(self._n_rows, block_bytes)
            self._stream = self._device.stream()
            opened.pop_all()

    def serve(self, client: Client) -> None:
        """Let this client's leases be read. Raises BadInputError if its daemon uses another device."""
        client.use_hbm(self._device)

    def read(self, lease: Lease, n_blocks: int) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        """Of the first ``n_blocks`` of a lease those in HBM: which one, and its bytes, which stay until the next.

        Raises EndedError if the lease ended before its bytes were here.
        """
        hbm = lease.hbm
        mine = hbm.at < n_blocks
        at, sources = hbm.at[mine], hbm.addresses[mine]
        for first in range(0, len(at), self._n_rows):
            part = slice(first, first + self._n_rows)
            n = len(at[part])
            pages = np.uint64(self._pages) + np.arange(n, dtype=np.uint64) * np.uint64(self._block_bytes)
            self._device.copy_batch(pages, sources[part], np.full(n, self._block_bytes, np.uint64), self._stream)
            self._device.copy(self._host.address, self._pages, n * self._block_bytes, self._stream)
            self._device.sync_stream(self._stream)
            if not lease.unchanged():
                raise EndedError("the lease ended while its blocks were copied from HBM")
            yield from zip(at[part].tolist(), self._rows, strict=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._host.close()
        self._device.close()
