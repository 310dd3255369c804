"""HBM between processes: a daemon with the simulated device, and clients that open its memory by their handles."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any, Self

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.bench.replay_hbm import HbmReader
from kvstore.cli.daemon_process import own_daemon
from kvstore.client import Client, NamespaceHandle
from kvstore.client.lease import Lease
from kvstore.config import MIB
from kvstore.device import open_device
from kvstore.device.simulated import SimulatedDevice
from kvstore.errors import BadInputError, DeviceError, EndedError
from kvstore.types import KVSpec, Namespace
from tests.server.children import child

BLOCK_BYTES = 16384
BLOCK_TOKENS = 16
TTL_S = 0.3
HBM = ("--dram", "8MiB", "--no-prefault", "--policy", "lru", "--hbm-device", "simulated", "--hbm", "1MiB")


def prompt(seed: int, n_blocks: int = 4) -> NDArray[np.uint32]:
    return np.random.default_rng(seed).integers(0, 1 << 20, n_blocks * BLOCK_TOKENS, dtype=np.uint32)


def content(seed: int, n_blocks: int = 4) -> NDArray[np.uint8]:
    return np.random.default_rng(~seed & 0xFFFF).integers(0, 256, (n_blocks, BLOCK_BYTES), dtype=np.uint8)


class Engine:
    """A client with a device of its own, as an engine has one. A context manager."""

    def __init__(self, path: str, tenant: str = "default", timeout_s: float = 10.0) -> None:
        with ExitStack() as opened:
            self.reader = opened.enter_context(HbmReader("simulated", BLOCK_BYTES))
            self.client = opened.enter_context(Client(path, tenant, timeout_s))
            self.reader.serve(self.client)
            self.namespace: NamespaceHandle = self.client.open(
                Namespace("m", KVSpec.opaque(BLOCK_TOKENS, BLOCK_BYTES), tenant=tenant)
            )
            self._opened = opened.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def lease(self, seed: int, n_blocks: int = 4, ttl_s: float | None = None) -> Lease:
        return self.namespace.lease(prompt(seed, n_blocks), hbm=True, ttl_s=ttl_s)

    def bytes_of(self, lease: Lease) -> dict[int, bytes]:
        """The leased blocks that are in HBM."""
        return {at: row.tobytes() for at, row in self.reader.read(lease, len(lease))}

    def stat(self, name: str) -> float:
        value = self.client.stats()[name]
        assert isinstance(value, float)
        return value

    def promote(self, seed: int, wait_until: Any, n_blocks: int = 4) -> None:
        """Store a prompt and use it until all of it is in HBM."""
        self.namespace.put(prompt(seed, n_blocks), content(seed, n_blocks))
        self.lease(seed, n_blocks).release()

        def is_there() -> bool:
            with self.lease(seed, n_blocks) as lease:
                return len(lease.hbm) == n_blocks

        wait_until(is_there, "its copies are in HBM")


@pytest.fixture
def path() -> Iterator[str]:
    with own_daemon(HBM) as socket_path:
        yield str(socket_path)


@pytest.fixture
def engine(path: str) -> Iterator[Engine]:
    with Engine(path) as made:
        yield made


def churn(engine: Engine, first_seed: int, n_prompts: int) -> None:
    """Push other blocks through HBM; every one that is found must read back."""
    for seed in range(first_seed, first_seed + n_prompts):
        engine.namespace.put(prompt(seed), content(seed))
        for _ in range(3):
            with engine.lease(seed) as lease:
                for at, found in engine.bytes_of(lease).items():
                    assert found == content(seed)[at].tobytes()


def test_blocks_that_are_used_again_are_read_from_hbm(engine: Engine, wait_until: Any) -> None:
    engine.promote(1, wait_until)
    with engine.lease(1) as lease:
        assert lease.hbm.at.tolist() == [0, 1, 2, 3]
        assert engine.bytes_of(lease) == {at: content(1)[at].tobytes() for at in range(4)}
        np.testing.assert_array_equal(lease[2], content(1)[2])  # in DRAM, too
        assert lease.unchanged()
    assert engine.stat("hit_blocks_hbm") >= 4
    overlap = engine.namespace.overlap(prompt(1))
    assert overlap.n_hbm_tokens == overlap.n_tokens == 4 * BLOCK_TOKENS
    assert engine.namespace.inspect(prompt(1)).in_hbm.all()


def stopped_reader(path: str, pipe: Connection) -> None:
    with Engine(path) as engine:
        lease = engine.lease(1, ttl_s=TTL_S)
        addresses = lease.hbm.addresses.copy()
        pipe.send((len(lease.hbm), engine.bytes_of(lease)))
        pipe.recv()
        # Its right is over, but this process does not care and reads on.
        device, rows = engine.reader._device, engine.reader._host
        n = len(addresses)
        into = np.uint64(rows.address) + np.arange(n, dtype=np.uint64) * np.uint64(BLOCK_BYTES)
        device.copy_batch(into, addresses, np.full(n, BLOCK_BYTES, np.uint64), engine.reader._stream)
        device.sync_stream(engine.reader._stream)
        pipe.send((rows.array[: n * BLOCK_BYTES].tobytes(), lease.valid, lease.hbm.unchanged()))
        pipe.recv()
        lease.release()
        pipe.send("released")
        pipe.recv()


def test_a_stopped_readers_slots_in_hbm_are_not_reused(path: str, engine: Engine, wait_until: Any) -> None:
    engine.promote(1, wait_until)
    with child(stopped_reader, path) as (process, pipe):
        n, before = pipe.recv()
        assert n == 4
        os.kill(process.pid, signal.SIGSTOP)
        wait_until(lambda: engine.stat("leases_ended_unacknowledged") == 1, "the lease's right ends")
        churn(engine, 100, 40)
        assert engine.stat("hbm_evicted_blocks") > 64
        os.kill(process.pid, signal.SIGCONT)
        pipe.send("go")
        seen, valid, unchanged = pipe.recv()
        assert seen == b"".join(before[at] for at in range(4)) == content(1).tobytes()
        assert not valid
        assert unchanged
        pipe.send("release")
        assert pipe.recv() == "released"
        wait_until(lambda: engine.stat("leases_ended_unacknowledged") == 0, "the end is acknowledged")
        pipe.send("end")
    churn(engine, 200, 40)
    with engine.lease(1) as lease:
        assert not len(lease.hbm)


def dying_reader(path: str, pipe: Connection) -> None:
    with Engine(path) as engine:
        lease = engine.lease(1)
        pipe.send(len(lease.hbm))
        os.kill(os.getpid(), signal.SIGKILL)


def test_what_a_dead_reader_held_comes_back(path: str, engine: Engine, wait_until: Any) -> None:
    engine.promote(1, wait_until)
    with child(dying_reader, path) as (_, pipe):
        assert pipe.recv() == 4
    wait_until(lambda: engine.stat("leases") == 0, "the dead client's lease is over")
    churn(engine, 100, 40)
    with engine.lease(1) as lease:
        assert not len(lease.hbm)


def test_a_region_is_closed_when_another_tenant_needs_it(path: str, engine: Engine, wait_until: Any) -> None:
    """The first has all of HBM open; what it must give up it closes, and only then is that memory another's."""
    for seed in range(16):
        engine.promote(seed, wait_until)
    assert engine.stat("hbm_free_bytes") == 0
    with Engine(path, tenant="other") as other:
        wait_until(lambda: _gets_in(other), "the other tenant has copies in HBM")
        assert other.stat("hbm_retired_mapped_bytes") == 0
    churn(engine, 500, 10)


def _gets_in(other: Engine) -> bool:
    other.namespace.put(prompt(900), content(900))
    with other.lease(900) as lease:
        found = other.bytes_of(lease)
        assert all(each == content(900)[at].tobytes() for at, each in found.items())
        return len(found) == 4


def test_another_daemon_starts_with_empty_hbm(wait_until: Any) -> None:
    with own_daemon(HBM) as socket_path, Engine(str(socket_path)) as engine:
        engine.promote(1, wait_until)
        lease = engine.lease(1)
        assert len(lease.hbm) == 4
        own = engine.client
        assert own.healthy
    with pytest.raises(EndedError):
        lease[0]
    with own_daemon(HBM) as socket_path, Engine(str(socket_path)) as engine:
        assert engine.stat("hbm_blocks") == 0
        engine.promote(1, wait_until)
        with engine.lease(1) as lease:
            assert engine.bytes_of(lease) == {at: content(1)[at].tobytes() for at in range(4)}


def test_a_client_that_can_not_open_it_reads_dram(
    engine: Engine, wait_until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise DeviceError("peer access is not supported")

    with monkeypatch.context() as patch:
        patch.setattr(SimulatedDevice, "ipc_open", refuse)
        engine.namespace.put(prompt(1), content(1))
        engine.lease(1).release()
        wait_until(lambda: engine.stat("hbm_blocks") == 4, "its copies are in HBM")
        with engine.lease(1) as lease:
            assert len(lease) == 4
            assert not len(lease.hbm)
            np.testing.assert_array_equal(lease[3], content(1)[3])
    assert "peer access is not supported" in engine.client.hbm_failure
    with engine.lease(1) as lease:
        assert not len(lease.hbm)


def test_hbm_of_another_device_is_refused(path: str) -> None:
    device = open_device("simulated:1", total_bytes=MIB)
    with Client(path) as client, pytest.raises(BadInputError, match=r"simulated-0.*simulated-1"):
        client.use_hbm(device)
    device.close()


def test_without_an_hbm_tier_there_is_nothing_to_use(client: Client) -> None:
    device = open_device("simulated", total_bytes=MIB)
    with pytest.raises(BadInputError, match="--hbm-device"):
        client.use_hbm(device)
    namespace = client.open(Namespace("m", KVSpec.opaque(BLOCK_TOKENS, BLOCK_BYTES)))
    namespace.put(prompt(1), content(1))
    with pytest.raises(BadInputError, match="call use_hbm first"):
        namespace.lease(prompt(1), hbm=True)
    with namespace.lease(prompt(1)) as lease:
        assert len(lease) == 4
        assert not len(lease.hbm)
    device.close()


def test_what_is_no_device_is_said(path: str) -> None:
    with Client(path) as client, pytest.raises(BadInputError, match="'cuda:0' is no device: give an open one"):
        client.use_hbm("cuda:0")  # type: ignore[arg-type]
