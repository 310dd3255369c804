"""Case 9: the NVMe tier has 100 MB and 1 GB is written through it. The directory, catalog and all, is never above."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable

import numpy as np
import pytest

from kvstore.offload import WritePolicy
from kvstore.store.hierarchy import WriteBehind
from tests.cases.scenes import READER, WRITER
from tests.store.two_tier import Settings, Sizes, TwoTierRig
from tests.tiers.segment_files import directory_bytes

MB = 1_000_000
MIB = 1 << 20
CAP_BYTES, WRITTEN_BYTES = 100 * MB, 1000 * MB


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("block_bytes", [256 << 10])
def test_ten_times_the_capacity_never_exceeds_it(block_bytes: int, make_store: Callable[..., TwoTierRig]) -> None:
    sizes = Sizes(16 * MIB, 4 * MIB, 4 * MIB, nvme_bytes=CAP_BYTES, segment_bytes=0)
    rig = make_store(Settings(sizes, WriteBehind(WritePolicy.THROUGH, queue_bytes_max=16 * MIB)))
    namespace = rig.namespace(block_bytes)
    n_rows = 8
    most = Watch(rig)
    digests: dict[int, list[bytes]] = {}
    rng = np.random.default_rng(9)
    n_prompts = -(-WRITTEN_BYTES // (n_rows * block_bytes))
    for tag in range(n_prompts):
        prompt = rig.rows(n_rows, tag=tag, namespace=namespace)
        reservation = rig.reserve(WRITER, prompt)
        assert len(reservation.slots) == n_rows
        rig.map_regions(WRITER, reservation.slots, writable=True)
        digests[tag] = []
        for slot in reservation.slots.tolist():
            view = rig.dram.view(slot)
            view[:] = np.frombuffer(rng.bytes(block_bytes), np.uint8)
            digests[tag].append(hashlib.blake2b(view.tobytes()).digest())
        rig.store.commit(WRITER, reservation.id)
        for _ in rig.jobs.each():
            assert directory_bytes(rig.directory) <= CAP_BYTES
        rig.store.tick()
    rig.settle()
    assert most.end() <= CAP_BYTES
    assert rig.stat("offloaded_bytes") >= WRITTEN_BYTES
    assert rig.stat("offload_skipped_blocks") == rig.stat("offload_failed_blocks") == 0
    assert rig.stat("nvme_used_bytes") > 0.6 * CAP_BYTES

    # What is left are the newest prompts, with their bytes.
    n_left = 0
    for tag, expected in digests.items():
        prompt = rig.rows(n_rows, tag=tag, namespace=namespace)
        lease = rig.read(READER, prompt)
        content = rig.bytes_at(rig.slots_of(lease), block_bytes)
        assert [hashlib.blake2b(each).digest() for each in content] == expected[: len(content)]
        n_left += len(content)
        rig.store.release(READER, lease.id)
    assert n_left * block_bytes > 0.6 * CAP_BYTES
    assert directory_bytes(rig.directory) <= CAP_BYTES


class Watch:
    """Looks at the directory all the time, from a thread of its own."""

    def __init__(self, rig: TwoTierRig) -> None:
        self._directory = rig.directory
        self._most = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def _look(self) -> None:
        while not self._over.wait(0.001):
            self._most = max(self._most, directory_bytes(self._directory))

    def end(self) -> int:
        self._over.set()
        self._thread.join()
        return self._most
