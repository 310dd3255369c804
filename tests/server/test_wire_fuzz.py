"""A daemon as a process against malformed frames; `make fuzz` sends 100,000."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvstore.cli.daemon_process import own_process
from kvstore.client import Client
from tests.server.odd_messages import NAMESPACE
from tests.server.wire_fuzz import WireFuzz

MIB = 1 << 20
N_FRAMES = int(os.environ.get("KVSTORE_FUZZ_FRAMES", "3000"))


@pytest.mark.parametrize("tiers", ["dram", "dram and nvme"])
def test_every_frame_is_answered_or_ends_the_connection(tmp_path: Path, tiers: str) -> None:
    nvme = ["--nvme-dir", str(tmp_path / "nvme"), "--nvme", "64MiB"] if "nvme" in tiers else []
    with own_process(["--dram", "16MiB", "--no-prefault", *nvme], tmp_path / "d.sock") as daemon:
        fuzz = WireFuzz(daemon.socket_path, seed=len(tiers))
        early_bytes, late_bytes = fuzz.run(N_FRAMES, daemon.pid)
        assert sum(fuzz.outcomes.values()) == N_FRAMES
        assert min(fuzz.outcomes["answered"], fuzz.outcomes["closed"], fuzz.outcomes["heard"]) > N_FRAMES // 100
        assert late_bytes - early_bytes < 32 * MIB, f"grew from {early_bytes} to {late_bytes} bytes"
        with Client(daemon.socket_path, timeout_s=10.0) as client:
            assert client.open(NAMESPACE).match([1, 2, 3, 4]).reason == ""
            stats = client.stats()
            assert (stats["sessions"], stats["leases"], stats["reservations"]) == (1, 0, 0)
            assert stats["jobs_failed"] == 0
