"""This store, with one client.

Option ``connect``: a daemon's address, as ``kvstore.Client`` takes it, and ``pids`` its process; without it the store
is embedded, with ``dram_bytes``. With ``nvme`` a put also waits until the blocks are durable, and a get is only good if
every block came from NVMe.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import kvstore
from kvstore import embedded
from kvstore.bench.bandwidth_copy import BLOCK_TOKENS
from kvstore.client import Client
from kvstore.types import KVSpec, Namespace

if TYPE_CHECKING:
    from kvstore.bench.peers.driver import Batch, Blocks, Setup

_TIMEOUT_S = 30.0


class Own:
    """A client of a daemon, or an embedded store."""

    def __init__(self, setup: Setup) -> None:
        options = setup.options
        self.version = f"kvstore {kvstore.__version__}"
        self._pids: list[int] = options.get("pids", [])
        self._nvme: bool = options.get("nvme", False)
        self._client: Client = (
            Client(options["connect"], timeout_s=_TIMEOUT_S)
            if "connect" in options
            else embedded.open(dram=options["dram_bytes"], timeout_s=_TIMEOUT_S)
        )
        spec = KVSpec.opaque(BLOCK_TOKENS, setup.block_bytes)
        self._space = self._client.open(Namespace("bench:peers", spec))

    def put(self, batch: Batch, blocks: Blocks) -> int:
        done = self._space.put(batch.tokens, blocks, durable_within_s=_TIMEOUT_S if self._nvme else None)
        _none_missed(done.reason)
        return done.n_durable if self._nvme else done.n_stored

    def get(self, batch: Batch, out: Blocks) -> int:
        if not self._nvme:
            got = self._space.get_into(batch.tokens, out)
            _none_missed(got.reason)
            return got.n_blocks
        with self._space.lease(batch.tokens, wait=_TIMEOUT_S) as lease:
            return min(lease.copy_into(out), lease.n_nvme)

    def lookup(self, batch: Batch) -> int:
        return self._space.match(batch.tokens).n_blocks

    def drop(self, batch: Batch) -> None:
        """It evicts by itself, within a put."""

    def pids(self) -> list[int]:
        return self._pids

    def close(self) -> None:
        self._client.close()


def _none_missed(reason: str) -> None:
    """For an engine that is a miss; here it is the end of the measurement."""
    if reason:
        raise RuntimeError(reason)


def open_system(setup: Setup) -> Own:
    return Own(setup)
