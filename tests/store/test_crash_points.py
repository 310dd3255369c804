"""The power goes at every sync point of a workload: no wrong byte, no broken prefix, no lost durable block.

``make crash-long`` does it for more seeds and every write policy: KVSTORE_CRASH_SEEDS, KVSTORE_CRASH_OPERATIONS.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvstore.offload import WritePolicy
from kvstore.tiers.nvme.crash import MODES
from tests.store.crash_workload import CrashWorkload, read_names_here

OPERATIONS = int(os.environ.get("KVSTORE_CRASH_OPERATIONS", "500"))
N_SEEDS = int(os.environ.get("KVSTORE_CRASH_SEEDS", "1"))
IS_LONG = N_SEEDS > 1


@pytest.mark.slow
@pytest.mark.timeout(120 + OPERATIONS)
@pytest.mark.parametrize("seed", range(N_SEEDS))
@pytest.mark.parametrize("policy", list(WritePolicy) if IS_LONG else [WritePolicy.THROUGH])
def test_a_power_cut_at_any_point_loses_nothing_that_was_durable(
    policy: WritePolicy, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not IS_LONG:
        monkeypatch.setattr("kvstore.tiers.nvme.opening.read_names", read_names_here)
    workload = CrashWorkload(tmp_path, policy, seed, MODES)
    workload.run(OPERATIONS)
    workload.close()
    least = OPERATIONS // (4 if policy is WritePolicy.THROUGH else 40)
    assert all(workload.counts_by_mode[mode] > least for mode in MODES)
    assert workload.counts_by_mode["different states"] > least
