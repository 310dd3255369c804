"""A daemon as a process against malformed gRPC calls; `make fuzz` makes 100,000."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.cli.daemon_process import own_process
from kvstore.client import Client
from tests.server.grpc.grpc_fuzz import MESSAGE_BYTES_MAX, TOKEN_FILE, GrpcFuzz
from tests.server.odd_messages import NAMESPACE

MIB = 1 << 20
N_CALLS = int(os.environ.get("KVSTORE_FUZZ_FRAMES", "3000"))
HELD = ("leases", "reservations", "pins", "grpc_sessions", "dram_reserved_bytes", "dram_quarantined_bytes")


@pytest.mark.parametrize("tiers", ["dram", "dram and nvme"])
def test_every_call_ends_and_leaves_nothing_behind(tmp_path: Path, tiers: str, wait_until: Callable[..., None]) -> None:
    target = f"unix:{tmp_path / 'grpc.sock'}"
    tokens = tmp_path / "tokens"
    tokens.touch(mode=0o600)
    tokens.write_text(TOKEN_FILE)
    nvme = ["--nvme-dir", str(tmp_path / "nvme"), "--nvme", "64MiB"] if "nvme" in tiers else []
    grpc = ["--grpc-listen", target, "--grpc-token-file", str(tokens), "--grpc-message-max", str(MESSAGE_BYTES_MAX)]
    arguments = ["--dram", "16MiB", "--no-prefault", *nvme, *grpc]
    with own_process(arguments, tmp_path / "d.sock") as daemon, Client(daemon.socket_path, timeout_s=10.0) as client:
        fuzz = GrpcFuzz(target, seed=len(tiers))
        early_bytes, late_bytes = fuzz.run(N_CALLS, daemon.pid)
        by_status: Counter[str] = Counter()
        for (_, status), n_calls in fuzz.outcomes.items():
            by_status[status] += n_calls
        assert by_status.total() == N_CALLS
        assert {"OK", "INVALID_ARGUMENT", "UNAUTHENTICATED", "ABORTED", "NOT_FOUND"} <= by_status.keys()
        assert late_bytes - early_bytes < 32 * MIB, f"grew from {early_bytes} to {late_bytes} bytes"
        wait_until(lambda: all(client.stats()[name] == 0 for name in HELD), f"none is left of {HELD}")
        stats: Any = client.stats()
        assert (stats["sessions"], stats["jobs_failed"]) == (1, 0)
        assert stats["grpc_written_bytes"] > 0
        assert stats["grpc_read_bytes"] > 0
        assert client.open(NAMESPACE).match([1, 2, 3, 4]).reason == ""
