"""Metrics, health and readiness of a real daemon over real HTTP: at every stage of its life, and while it hangs."""

from __future__ import annotations

import errno
import http.client
import json
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvstore.client import Client
from kvstore.config import DaemonConfig, GrpcOptions, LogOptions, MetricsOptions
from kvstore.errors import ConfigError, EndedError, InUseError
from kvstore.http import server as http_server
from kvstore.tiers.nvme.direct import DirectFiles
from kvstore.tiers.nvme.faults import FaultyFiles
from kvstore.types import KVSpec, Namespace
from tests.conftest import DaemonThread

MIB = 1 << 20
N, BLOCK_TOKENS, BLOCK_BYTES = 4, 16, 16384
NAMESPACE = Namespace("m", KVSpec.opaque(BLOCK_TOKENS, BLOCK_BYTES))
TOKENS = np.arange(N * BLOCK_TOKENS, dtype=np.uint32)
BLOCKS = np.random.default_rng(0).integers(0, 256, (N, BLOCK_BYTES), dtype=np.uint8)
ON = MetricsOptions("127.0.0.1:0")
WAIT_S = 20.0


def get(port: int, path: str, method: str = "GET", **headers: str) -> tuple[int, bytes, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read(), answer.getheader("Content-Type") or ""
    finally:
        connection.close()


def told(port: int, path: str) -> tuple[int, dict[str, Any]]:
    status, body, content_type = get(port, path)
    assert content_type == "application/json"
    loaded: dict[str, Any] = json.loads(body)
    return status, loaded


def metrics(port: int) -> dict[tuple[str, tuple[str, ...]], float]:
    """Samples by name and the values of their labels, in the order of the labels' names."""
    status, body, content_type = get(port, "/metrics")
    assert status == 200
    assert content_type.startswith("text/plain")
    return {
        (sample.name, tuple(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }


def port_of(daemon: DaemonThread) -> int:
    assert daemon.daemon.monitor.http is not None
    return daemon.daemon.monitor.http.port


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def http_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "kvstore-http"]


@contextmanager
def stuck_loop(daemon: DaemonThread) -> Iterator[None]:
    """The daemon's loop stands still inside."""
    entered, leave = threading.Event(), threading.Event()

    def stand_still() -> None:
        entered.set()
        leave.wait(WAIT_S)

    daemon._loop.call_soon_threadsafe(stand_still)
    assert entered.wait(WAIT_S)
    try:
        yield
    finally:
        leave.set()


def test_traffic_shows_in_the_metrics(start_daemon: Callable[..., DaemonThread]) -> None:
    daemon = start_daemon(metrics=ON)
    port = port_of(daemon)
    with Client(daemon.config.socket_path, timeout_s=WAIT_S) as client:
        namespace = client.open(NAMESPACE)
        namespace.put(TOKENS, BLOCKS)
        with namespace.lease(np.append(TOKENS, TOKENS)) as lease:
            assert lease.n_blocks == N
        seen = metrics(port)
    assert seen["kvstore_committed_blocks_total", ()] == N
    assert seen["kvstore_hit_blocks_total", ("dram",)] == N
    assert seen["kvstore_miss_blocks_total", ("not_found",)] >= N
    assert seen["kvstore_saved_bytes_total", ()] == N * BLOCK_BYTES
    assert seen["kvstore_tier_used_bytes", ("dram",)] >= N * BLOCK_BYTES
    assert seen["kvstore_claims", ("lease",)] in (0, 1)
    assert seen["kvstore_sessions", ("live",)] == 1
    assert seen["kvstore_request_seconds_count", ("lease",)] >= 1
    assert 0 < seen["kvstore_request_seconds_sum", ("lease",)] < WAIT_S
    assert seen["kvstore_request_seconds_bucket", ("+Inf", "commit")] == 1
    assert seen["kvstore_loop_lag_seconds_count", ()] >= 0
    assert seen["kvstore_phase", ("serving",)] == 1
    assert seen["kvstore_snapshot_fresh", ()] == 1
    assert not [name for name, _ in seen if name.startswith("kvstore_nvme")]


def test_failed_requests_are_counted(start_daemon: Callable[..., DaemonThread]) -> None:
    daemon = start_daemon(metrics=ON)
    with Client(daemon.config.socket_path, timeout_s=WAIT_S) as client, pytest.raises(EndedError):
        client.attach(12345, block_bytes=BLOCK_BYTES)
    assert metrics(port_of(daemon))["kvstore_requests_failed_total", ("attach_lease",)] == 1


def test_calls_over_grpc_are_counted_with_the_others(start_daemon: Callable[..., DaemonThread], tmp_path: Path) -> None:
    pytest.importorskip("grpc")
    listen = tmp_path / "grpc.sock"
    daemon = start_daemon(metrics=ON, grpc=GrpcOptions(f"unix:{listen}"))
    with Client(f"grpc+unix:{listen}", timeout_s=WAIT_S) as client:
        client.open(NAMESPACE).put(TOKENS, BLOCKS)
        seen = metrics(port_of(daemon))
    assert seen["kvstore_request_seconds_count", ("commit",)] == 1
    assert seen["kvstore_sessions", ("live",)] == 1


def test_waiting_for_nvme_is_told_apart(start_daemon: Callable[..., DaemonThread], nvme: dict[str, Any]) -> None:
    first = start_daemon(**nvme)
    with Client(first.config.socket_path, timeout_s=WAIT_S) as client:
        assert client.open(NAMESPACE).put(TOKENS, BLOCKS, durable_within_s=WAIT_S).n_durable == N
    first.stop()
    files = FaultyFiles(DirectFiles(nvme["nvme_dir"]))
    daemon = start_daemon(files=files, metrics=ON, **nvme)
    stuck = files.stick("read")  # so that it must wait
    with Client(daemon.config.socket_path, timeout_s=WAIT_S) as client:
        namespace = client.open(NAMESPACE)
        taken: list[int] = []

        def take() -> None:
            with namespace.lease(TOKENS, wait=WAIT_S) as lease:
                taken.append(lease.n_blocks)

        waiting = threading.Thread(target=take)
        waiting.start()
        assert stuck.reached.wait(WAIT_S)
        assert metrics(port_of(daemon))["kvstore_onboard_waiting_blocks", ()] == N
        stuck.release()
        waiting.join(WAIT_S)
    assert taken == [N]
    seen = metrics(port_of(daemon))
    assert seen["kvstore_request_wait_seconds_count", ("lease",)] == 1
    assert seen["kvstore_hit_blocks_total", ("nvme",)] == N
    assert seen["kvstore_nvme_health", ("ok",)] == 1
    assert seen["kvstore_onboarded_bytes_total", ()] == N * BLOCK_BYTES


def test_a_daemon_that_serves_is_healthy_and_ready(start_daemon: Callable[..., DaemonThread]) -> None:
    port = port_of(start_daemon(metrics=ON))
    status, body = told(port, "/health")
    assert (status, body["status"], body["phase"]) == (200, "ok", "serving")
    assert told(port, "/ready") == (200, {"ready": True, "status": "ok", "nvme": "none", "reasons": []})


def test_a_loop_that_stands_still_is_told_from_outside(
    start_daemon: Callable[..., DaemonThread], wait_until: Any
) -> None:
    daemon = start_daemon(metrics=MetricsOptions("127.0.0.1:0", stall_s=0.3))
    port = port_of(daemon)
    before = metrics(port)
    with stuck_loop(daemon):
        wait_until(lambda: told(port, "/health")[0] == 503, "the loop is found stuck")
        assert told(port, "/health")[1]["status"] == "stuck"
        status, body = told(port, "/ready")
        assert (status, body["ready"], body["status"]) == (503, False, "stuck")
        seen = metrics(port)
        assert seen["kvstore_snapshot_fresh", ()] == 0
        assert seen["kvstore_loop_seen_seconds", ()] > 0.3
        # The numbers of the scrape before, not none.
        assert seen["kvstore_uptime_seconds", ()] == before["kvstore_uptime_seconds", ()]
    wait_until(lambda: told(port, "/health")[0] == 200, "the loop goes round again")
    assert told(port, "/ready")[0] == 200
    assert metrics(port)["kvstore_snapshot_fresh", ()] == 1


def test_while_it_starts_it_is_healthy_but_not_ready(
    config: DaemonConfig, start_daemon: Callable[..., DaemonThread], nvme: dict[str, Any]
) -> None:
    start_daemon(**nvme).stop()  # makes the directory
    files = FaultyFiles(DirectFiles(nvme["nvme_dir"]))
    slow = files.stick("names", times=None)
    port = free_port()
    started: list[DaemonThread] = []
    starting = threading.Thread(
        target=lambda: started.append(start_daemon(files=files, metrics=MetricsOptions(f"127.0.0.1:{port}"), **nvme))
    )
    starting.start()
    try:
        assert slow.reached.wait(WAIT_S), "the directory was not looked at"
        status, body = told(port, "/ready")
        assert (status, body["status"]) == (503, "starting")
        status, body = told(port, "/health")
        assert (status, body["phase"]) == (200, "starting")
        assert metrics(port)["kvstore_phase", ("starting",)] == 1
    finally:
        slow.release()
        starting.join(WAIT_S)
    assert told(port, "/ready")[0] == 200
    assert len(started) == 1


def test_while_it_drains_it_is_not_ready(start_daemon: Callable[..., DaemonThread], nvme: dict[str, Any]) -> None:
    start_daemon(**nvme).stop()
    files = FaultyFiles(DirectFiles(nvme["nvme_dir"]))
    daemon = start_daemon(files=files, metrics=ON, drain_s=600.0, **nvme)
    port = port_of(daemon)
    stuck = files.stick("write", times=None)
    with Client(daemon.config.socket_path, timeout_s=WAIT_S) as client:
        client.open(NAMESPACE).put(TOKENS, BLOCKS)
        assert stuck.reached.wait(WAIT_S)
    stopping = threading.Thread(target=daemon.stop)
    stopping.start()
    try:
        while daemon.daemon.monitor.pulse().phase.value != "draining":
            assert stopping.is_alive()
        status, body = told(port, "/ready")
        assert (status, body["ready"], body["status"]) == (503, False, "draining")
        assert told(port, "/health")[0] == 200
        assert metrics(port)["kvstore_offload_pending_blocks", ()] == N
    finally:
        stuck.release()
        stopping.join(WAIT_S)
    with pytest.raises(ConnectionRefusedError):
        get(port, "/ready")
    assert not http_threads()


def test_a_full_disk_is_a_degradation_with_its_reason(
    start_daemon: Callable[..., DaemonThread], nvme: dict[str, Any], wait_until: Any
) -> None:
    start_daemon(**nvme).stop()
    files = FaultyFiles(DirectFiles(nvme["nvme_dir"]))
    daemon = start_daemon(files=files, metrics=ON, drain_s=0.2, **nvme)
    port = port_of(daemon)
    files.fail("write", errno.ENOSPC, times=None)
    with Client(daemon.config.socket_path, timeout_s=WAIT_S) as client:
        client.open(NAMESPACE).put(TOKENS, BLOCKS)
        wait_until(lambda: told(port, "/ready")[1]["status"] == "degraded", "the disk is found full")
    status, body = told(port, "/ready")
    assert (status, body["ready"], body["nvme"]) == (200, True, "full")
    assert "NVMe is full" in body["reasons"][0]
    assert metrics(port)["kvstore_nvme_health", ("full",)] == 1


def test_other_paths_and_methods(start_daemon: Callable[..., DaemonThread]) -> None:
    port = port_of(start_daemon(metrics=ON))
    assert get(port, "/")[0] == 404
    assert get(port, "/metrics?x=1")[0] == 200
    assert get(port, "/health", "HEAD")[:2] == (200, b"")
    assert get(port, "/health", "POST")[0] == 501
    assert get(port, "/metrics", Accept="application/openmetrics-text; version=1.0.0")[1].endswith(b"# EOF\n")


def test_without_it_nothing_listens(daemon: DaemonThread) -> None:
    assert daemon.daemon.monitor.http is None
    assert not http_threads()


def test_an_address_that_is_taken_stops_the_start(start_daemon: Callable[..., DaemonThread], tmp_path: Path) -> None:
    port = port_of(start_daemon(metrics=ON))
    with pytest.raises(InUseError, match=f"127.0.0.1:{port}: Address already in use; .*--metrics-listen") as error:
        start_daemon(socket_path=tmp_path / "e.sock", metrics=MetricsOptions(f"127.0.0.1:{port}"))
    assert error.value.settings == ("metrics.listen",)
    assert not (tmp_path / "e.sock").exists()
    assert len(http_threads()) == 1


def test_a_start_that_fails_leaves_nothing_listening(start_daemon: Callable[..., DaemonThread], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--nvme-dir"):
        start_daemon(metrics=ON, nvme_dir=tmp_path / "a" / "b" / "c", nvme_bytes=64 * MIB)
    assert not http_threads()


def test_idle_connections_keep_nobody_out_and_are_ended(
    start_daemon: Callable[..., DaemonThread], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has sent nothing, and one that sends a byte now and then: each loses its place to one that comes."""
    monkeypatch.setattr(http_server._Handler, "timeout", 600.0)
    port = port_of(start_daemon(metrics=ON))
    with ExitStack() as stack:
        idle = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), WAIT_S))
            for _ in range(http_server.REQUESTS_MAX)
        ]
        idle[0].sendall(b"GET /health HT")
        idle[1].sendall(b"GET /health HTTP/1.1\r\nHost:")
        for path in ("/health", "/ready", "/metrics"):
            refill = stack.enter_context(socket.create_connection(("127.0.0.1", port), WAIT_S))
            assert get(port, path)[0] == 200
            idle.append(refill)
        assert [each.recv(100) for each in idle[:4]] == [b""] * 4, "the oldest went"
        monkeypatch.setattr(http_server, "REQUEST_S_MAX", 0.0)
        for each in idle:
            assert each.recv(100) == b""
        monkeypatch.setattr(http_server, "REQUEST_S_MAX", WAIT_S)
        assert get(port, "/health")[0] == 200


@pytest.mark.parametrize("safe_s", [WAIT_S, -1.0])
def test_who_has_asked_keeps_its_place_for_a_while(
    start_daemon: Callable[..., DaemonThread], monkeypatch: pytest.MonkeyPatch, wait_until: Any, safe_s: float
) -> None:
    monkeypatch.setattr(http_server, "SNAPSHOT_S_MAX", WAIT_S)
    monkeypatch.setattr(http_server, "REQUEST_S_SAFE", safe_s)
    daemon = start_daemon(metrics=MetricsOptions("127.0.0.1:0", stall_s=3600.0))
    assert daemon.daemon.monitor.http is not None
    port, server = port_of(daemon), daemon.daemon.monitor.http._server
    with ExitStack() as stack:
        with stuck_loop(daemon):
            asking = [
                stack.enter_context(socket.create_connection(("127.0.0.1", port), WAIT_S))
                for _ in range(http_server.REQUESTS_MAX)
            ]
            for each in asking:
                each.sendall(b"GET /ready HTTP/1.0\r\n\r\n")
            wait_until(lambda: len(server._asked) == len(asking), "all requests are there")
            if safe_s > 0:
                with pytest.raises(ConnectionError):
                    get(port, "/health")
            else:
                assert get(port, "/health")[0] == 200
        n_answered = sum(each.recv(12) == b"HTTP/1.0 200" for each in asking)
        assert n_answered == len(asking) - (safe_s < 0)


def test_slow_requests_are_logged(start_daemon: Callable[..., DaemonThread], caplog: pytest.LogCaptureFixture) -> None:
    daemon = start_daemon(log=LogOptions(slow_s=1e-9))
    with (
        caplog.at_level(logging.WARNING, "kvstore.server"),
        Client(daemon.config.socket_path, timeout_s=WAIT_S, name="slow one") as client,
    ):
        namespace = client.open(NAMESPACE)
        namespace.put(TOKENS, BLOCKS)
        with namespace.lease(TOKENS):
            pass
        client.stats()
    told_of = [vars(record)["fields"] for record in caplog.records if vars(record).get("event") == "slow_request"]
    by_method = {fields["method"]: fields for fields in told_of}
    stats, lease = by_method["stats"], by_method["lease"]
    assert (stats["client"], stats["waited"]) == ("slow one", False)
    assert stats["took_s"] > 0
    assert "lease_id" not in stats
    assert lease["lease_id"] > 0
    assert lease["n_blocks"] == N
