"""Memory of a tenant that its clients may map writable: for GPUs that register nothing that is mapped read-only."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest

from kvstore.client import Client
from kvstore.device.simulated import SimulatedDevice
from kvstore.engine_adapter.counters import SharedCounters
from kvstore.engine_adapter.gpu.pinned_regions import PinnedRegions
from kvstore.errors import ConfigError, DeviceError, KVStoreError
from kvstore.native import Mapping
from kvstore.tiers import memfd
from kvstore.types import KVSpec, Namespace

BLOCK_BYTES = 8192
TOKENS = np.arange(32)
SPEC = KVSpec.opaque(16, BLOCK_BYTES)
Start = Callable[..., Any]


@contextmanager
def writer_and_reader(daemon: Any) -> Iterator[tuple[Any, Any]]:
    """Handles of two clients of one tenant; the first has stored two blocks."""
    with ExitStack() as stack:
        clients = [stack.enter_context(Client(daemon.config.socket_path, timeout_s=5.0)) for _ in range(2)]
        writer, reader = (each.open(Namespace("m", SPEC)) for each in clients)
        blocks = np.random.default_rng(1).integers(0, 256, (2, BLOCK_BYTES), dtype=np.uint8)
        assert writer.put(TOKENS, blocks).n_stored == 2
        yield clients[1], reader


def register(client: Client, lease: Any) -> int:
    """How many blocks a device reads in place that can't register read-only memory. Raises DeviceError if none."""
    device = SimulatedDevice(can_register_read_only=False)
    pinned = PinnedRegions(device, SharedCounters())
    client.watch_mappings(pinned)
    try:
        sizes = np.full(len(lease.addresses), BLOCK_BYTES, np.uint64)
        with pinned.use_all(lease.addresses, sizes, time.monotonic() + 10.0) as use:
            return int((use.mapped > 0).sum())
    finally:
        client.unwatch_mappings(pinned)
        pinned.close()
        device.close()


def test_a_gpu_that_registers_nothing_read_only_reads_in_place(start_daemon: Start) -> None:
    with writer_and_reader(start_daemon(isolation="tenant")) as (client, reader), reader.lease(TOKENS) as lease:
        assert register(client, lease) == 2
        with pytest.raises(ValueError, match="read-only"):
            lease[0][0] = 1  # of Python's arrays none is writable
        assert not lease[0].flags.writeable


def test_unless_told_so_memory_is_sealed(start_daemon: Start) -> None:
    with (
        writer_and_reader(start_daemon()) as (client, reader),
        reader.lease(TOKENS) as lease,
        pytest.raises(DeviceError, match="mapped read-only"),
    ):
        register(client, lease)


@pytest.mark.parametrize("isolation", ["client", "tenant"])
def test_what_the_kernel_allows(start_daemon: Start, isolation: str) -> None:
    daemon = start_daemon(isolation=isolation)
    with writer_and_reader(daemon) as (client, reader), reader.lease(TOKENS):

        def kernel(of: Any) -> tuple[list[bool], list[bool]]:
            regions = list(of.store.dram.regions.values())
            return [memfd.is_read_only(region.fd) for region in regions], [can_write(region) for region in regions]

        def can_write(region: Any) -> bool:
            try:
                return Mapping(region.fd, region.size_bytes, writable=True).writable
            except PermissionError:
                return False

        sealed, writable = daemon.call(kernel)
        assert sealed == [isolation == "client"] * len(sealed)
        assert writable == [isolation == "tenant"] * len(sealed)
        assert len(sealed) > 0
        assert client.stats()["dram_isolation"] == isolation


def test_another_tenant_never_gets_the_descriptor(start_daemon: Start) -> None:
    daemon = start_daemon(isolation="tenant")
    with writer_and_reader(daemon):
        ids = daemon.call(lambda of: list(of.store.dram.regions))
        with Client(daemon.config.socket_path, tenant="other", timeout_s=5.0) as other:
            other.open(Namespace("m", SPEC, tenant="other"))
            with pytest.raises(KVStoreError, match="not there"):
                other._session.mappings(ids, writable=False)


def test_another_word_is_refused(start_daemon: Start) -> None:
    with pytest.raises(ConfigError, match="known are client, tenant"):
        start_daemon(isolation="none")
