"""What makes a daemon unhealthy, unready or degraded."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.http.health import degradations, health, readiness
from kvstore.http.source import Phase, Pulse, Snapshot

WELL = Snapshot({"blocks": 1.0}, {"nvme_health": "ok"})


@pytest.mark.parametrize(
    ("phase", "seen_s_ago", "status"),
    [
        (Phase.SERVING, 0.1, 200),
        (Phase.SERVING, 5.1, 503),
        (Phase.DRAINING, 0.1, 200),
        (Phase.DRAINING, 5.1, 503),
        (Phase.STARTING, 500.0, 200),  # reads its catalog
    ],
)
def test_a_daemon_is_healthy_while_its_loop_goes_round(phase: Phase, seen_s_ago: float, status: int) -> None:
    verdict = health(Pulse(phase, seen_s_ago, 5.0))
    assert verdict.status == status
    assert verdict.body["status"] == ("ok" if status == 200 else "stuck")
    assert verdict.body["phase"] == phase.value


@pytest.mark.parametrize(
    ("pulse", "snapshot", "status", "word"),
    [
        (Pulse(Phase.SERVING, 0.1, 5.0), WELL, 200, "ok"),
        (Pulse(Phase.STARTING, 0.1, 5.0), WELL, 503, "starting"),
        (Pulse(Phase.DRAINING, 0.1, 5.0), WELL, 503, "draining"),
        (Pulse(Phase.SERVING, 5.1, 5.0), WELL, 503, "stuck"),
        (Pulse(Phase.SERVING, 0.1, 5.0), None, 503, "stuck"),
        (Pulse(Phase.SERVING, 0.1, 5.0), Snapshot({}, {"nvme_health": "full"}), 200, "degraded"),
    ],
)
def test_a_daemon_is_ready_while_it_serves(pulse: Pulse, snapshot: Snapshot | None, status: int, word: str) -> None:
    verdict = readiness(pulse, snapshot)
    assert (verdict.status, verdict.body["status"], verdict.body["ready"]) == (status, word, status == 200)
    assert bool(verdict.body["reasons"]) == (word != "ok")


@pytest.mark.parametrize(
    ("numbers", "texts", "says"),
    [
        ({}, {"nvme_health": "failing"}, "NVMe is failing"),
        ({"offload_suspended": 1.0}, {"nvme_health": "ok"}, "writing to NVMe pauses"),
        ({"onboard_stuck": 1.0}, {}, "has not returned"),
        ({}, {"dram_memory_failure": "no memory"}, "no memory"),
        ({"jobs_failed": 2.0}, {}, "2 jobs ended"),
    ],
)
def test_each_degradation_has_its_reason(numbers: Any, texts: Any, says: str) -> None:
    (reason,) = degradations(Snapshot(numbers, texts))
    assert says in reason


def test_a_daemon_without_nvme_is_not_degraded_by_that() -> None:
    verdict = readiness(
        Pulse(Phase.SERVING, 0.0, 5.0), Snapshot({"offload_suspended": 0.0}, {"dram_memory_failure": ""})
    )
    assert verdict.body == {"ready": True, "status": "ok", "nvme": "none", "reasons": []}
