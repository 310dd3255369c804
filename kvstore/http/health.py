"""Whether a daemon is alive, and whether it should be sent requests."""

from __future__ import annotations

from typing import Any, NamedTuple

from kvstore.http.source import Phase, Pulse, Snapshot

OK, UNAVAILABLE = 200, 503


class Verdict(NamedTuple):
    """An HTTP status, and why."""

    status: int
    body: dict[str, Any]


def health(pulse: Pulse) -> Verdict:
    """200 while the loop goes round or the daemon is still starting; 503 means: restart it."""
    body = {
        "status": "stuck" if pulse.stuck else "ok",
        "phase": pulse.phase.value,
        "loop_seen_s_ago": round(pulse.seen_s_ago, 3),
        "stall_s": pulse.stall_s,
    }
    return Verdict(UNAVAILABLE if pulse.stuck else OK, body)


def readiness(pulse: Pulse, snapshot: Snapshot | None) -> Verdict:
    """200 while clients are served, also if only in part ("degraded", with reasons); 503: send none here."""
    if pulse.phase is not Phase.SERVING:
        return _unready(pulse.phase.value, f"the daemon is {pulse.phase.value}")
    if pulse.stuck or snapshot is None:
        return _unready("stuck", f"the daemon's loop was last seen {pulse.seen_s_ago:.1f} s ago")
    reasons = degradations(snapshot)
    nvme = snapshot.texts.get("nvme_health", "none")
    body = {"ready": True, "status": "degraded" if reasons else "ok", "nvme": nvme, "reasons": reasons}
    return Verdict(OK, body)


def degradations(snapshot: Snapshot) -> list[str]:
    """What makes a daemon that serves serve less: in words, nothing if all is well."""
    numbers, texts = snapshot.numbers, snapshot.texts
    found = []
    if (nvme := texts.get("nvme_health", "ok")) != "ok":
        found.append(f"NVMe is {nvme}: what is there is read, nothing new becomes durable")
    elif numbers.get("offload_suspended"):
        found.append("writing to NVMe pauses: nothing new becomes durable")
    if numbers.get("onboard_stuck"):
        found.append("a read from NVMe has not returned in its time: blocks there are misses")
    if failure := texts.get("dram_memory_failure"):
        found.append(f"memory could not be had: {failure}")
    if failure := texts.get("hbm_memory_failure"):
        found.append(f"memory of the GPU could not be had or given back: {failure}")
    if numbers.get("hbm_suspended"):
        found.append("the GPU of the HBM tier failed: for a while nothing is read or copied there")
    if n_failed := numbers.get("jobs_failed"):
        found.append(f"{n_failed:.0f} jobs ended as none may: look into the log")
    return found


def _unready(status: str, reason: str) -> Verdict:
    return Verdict(UNAVAILABLE, {"ready": False, "status": status, "reasons": [reason]})
