"""Everything at once: clients of two tenants on threads of their own, both tiers under pressure, a disk that fails at
random. Only bytes that were stored come back, what was acknowledged as durable is there after a restart, and in the
end nothing is held."""

from __future__ import annotations

import errno
import random
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.client import Client
from kvstore.tiers.nvme.direct import DirectFiles
from kvstore.tiers.nvme.faults import FaultyFiles
from kvstore.types import KVSpec, Namespace

BLOCK_BYTES, BLOCK_TOKENS, N = 16384, 16, 8
N_PROMPTS, N_OPERATIONS = 60, 120
TENANTS = ("a", "a", "b")


def tokens(number: int) -> NDArray[np.uint32]:
    """Prompts that share their first blocks with some others."""
    head = np.random.default_rng(number // 4).integers(0, 1 << 20, 3 * BLOCK_TOKENS, dtype=np.uint32)
    tail = np.random.default_rng(1000 + number).integers(0, 1 << 20, (N - 3) * BLOCK_TOKENS, dtype=np.uint32)
    return np.concatenate([head, tail])


@cache
def content(tenant: str, number: int) -> NDArray[np.uint8]:
    """Bytes that only the tenant and the tokens up to a block's end decide."""
    blocks = []
    for row in range(N):
        seed = [ord(tenant), *tokens(number)[: (row + 1) * BLOCK_TOKENS].tolist()]
        blocks.append(np.random.default_rng(seed).integers(0, 256, BLOCK_BYTES, dtype=np.uint8))
    return np.stack(blocks)


class Engine(threading.Thread):
    """A client that looks up, computes what is missing and stores it. ``wrong`` says what must not have happened."""

    def __init__(self, path: Any, tenant: str, seed: int) -> None:
        super().__init__()
        self.tenant = tenant
        self.wrong: list[str] = []
        self.durable: dict[int, int] = {}
        self.n_hits = 0
        self._path = path
        self._dice = random.Random(seed)

    def run(self) -> None:
        try:
            with Client(self._path, tenant=self.tenant, timeout_s=20.0) as client:
                ns = client.open(Namespace("m", KVSpec.opaque(BLOCK_TOKENS, BLOCK_BYTES), tenant=self.tenant))
                for _ in range(N_OPERATIONS):
                    self._one(ns, self._dice.randrange(N_PROMPTS))
        except Exception as error:
            self.wrong.append(f"{type(error).__name__}: {error}")

    def _one(self, ns: Any, number: int) -> None:
        dice, out = self._dice, np.zeros((N, BLOCK_BYTES), np.uint8)
        expected = content(self.tenant, number)
        if dice.random() < 0.2:
            ns.prefetch(tokens(number))
        if dice.random() < 0.1:
            ns.lease(tokens(number), wait=0.01).release()
        n = ns.get_into(tokens(number), out, wait=dice.choice(["best_effort", 0.05, 2.0])).n_blocks
        self.n_hits += n
        if not (out[:n] == expected[:n]).all():
            self.wrong.append(f"prompt {number}: {n} blocks came back with other bytes")
        if n < N:
            within_s = dice.choice([None, None, 1.0])
            stored = ns.put(tokens(number)[: N * BLOCK_TOKENS], expected, durable_within_s=within_s)
            if within_s:
                self.durable[number] = max(self.durable.get(number, 0), stored.n_durable)


class Trouble(threading.Thread):
    """Orders faults until ``over`` is set."""

    def __init__(self, files: FaultyFiles, operations: tuple[str, ...]) -> None:
        super().__init__()
        self.over = threading.Event()
        self._files = files
        self._operations = operations

    def run(self) -> None:
        dice, files = random.Random(7), self._files
        orders: dict[str, list[Callable[[], Any]]] = {
            "read": [
                lambda: files.fail("read", errno.EIO, times=dice.choice([1, 20])),
                lambda: files.shorten("read", times=3),
                lambda: files.flip("read", times=dice.choice([1, 4])),
                lambda: files.delay("read", lambda: self.over.wait(0.02), times=5),
            ],
            "write": [
                lambda: files.fail("write", dice.choice([errno.EIO, errno.ENOSPC]), times=2),
                lambda: files.shorten("write", times=2),
                lambda: files.fail("sync", errno.EIO),
                lambda: files.hold(times=4),
                lambda: files.delay("write", lambda: self.over.wait(0.02), times=5),
            ],
        }
        while not self.over.wait(0.02):
            if dice.random() < 0.3:
                files.release_all()
            dice.choice(orders[dice.choice(self._operations)])()


@pytest.mark.parametrize("operations", [("write",), ("read", "write")], ids=["writes fail", "reads and writes fail"])
def test_engines_on_a_failing_disk(
    start_daemon: Callable[..., Any],
    nvme: dict[str, Any],
    wait_until: Callable[[Callable[[], bool], str], None],
    operations: tuple[str, ...],
) -> None:
    nvme["nvme_dir"].mkdir()
    files = FaultyFiles(DirectFiles(nvme["nvme_dir"]))
    daemon = start_daemon(files=files, dram_bytes=4 << 20, **nvme)
    trouble = Trouble(files, operations)
    engines = [Engine(daemon.config.socket_path, tenant, seed) for seed, tenant in enumerate(TENANTS)]
    for thread in (trouble, *engines):
        thread.start()
    for engine in engines:
        engine.join(100)
        assert not engine.is_alive()
    trouble.over.set()
    trouble.join()
    files.release_all()
    assert [engine.wrong for engine in engines] == [[], [], []]
    assert min(engine.n_hits for engine in engines) > 0
    assert sum(files.counts.values()) > 5

    def at_rest(it: Any) -> bool:
        hierarchy = it.store.hierarchy
        return bool(hierarchy.offloader.idle and not it.store.index.table.refs.any())

    wait_until(lambda: bool(daemon.call(at_rest)), "nothing is held and nothing is under way")
    daemon.call(lambda it: it.store.check())
    assert daemon.call(lambda it: it.store.dram.stats()["reserved_bytes"]) == 0
    daemon.stop()

    daemon = start_daemon(dram_bytes=4 << 20, **nvme)
    out = np.zeros((N, BLOCK_BYTES), np.uint8)
    for engine in engines:
        with Client(daemon.config.socket_path, tenant=engine.tenant, timeout_s=20.0) as client:
            ns = client.open(Namespace("m", KVSpec.opaque(BLOCK_TOKENS, BLOCK_BYTES), tenant=engine.tenant))
            for number in range(N_PROMPTS):
                n = ns.get_into(tokens(number), out).n_blocks
                assert (out[:n] == content(engine.tenant, number)[:n]).all()
                if "read" not in operations:  # else a copy may have been given up since
                    assert n >= engine.durable.get(number, 0)
    assert sum(sum(engine.durable.values()) for engine in engines) > 0
