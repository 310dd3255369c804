"""The power goes at every sync point of a workload: no wrong byte, no broken prefix, no lost durable block.

``make crash-long`` runs more operations with more seeds: KVSTORE_CRASH_SEEDS and KVSTORE_CRASH_OPERATIONS.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvstore.offload import WritePolicy
from kvstore.tiers.nvme.crash import MODES
from tests.store.crash_workload import CrashWorkload

OPERATIONS = int(os.environ.get("KVSTORE_CRASH_OPERATIONS", "500"))
SEEDS = range(int(os.environ.get("KVSTORE_CRASH_SEEDS", "1")))


@pytest.mark.slow
@pytest.mark.timeout(120 + 60 * OPERATIONS // 100)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("policy", [WritePolicy.THROUGH] if len(SEEDS) == 1 else list(WritePolicy))
def test_a_power_cut_at_any_point_loses_nothing_that_was_durable(
    policy: WritePolicy, seed: int, tmp_path: Path
) -> None:
    workload = CrashWorkload(tmp_path, policy, seed, MODES)
    workload.run(OPERATIONS)
    workload.close()
    assert all(workload.counts_by_mode[mode] > OPERATIONS // 4 for mode in MODES)
