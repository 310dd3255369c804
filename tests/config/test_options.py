"""The options beside the tiers: what they refuse, and the fields their errors name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvstore.config import DaemonConfig, GrpcOptions, LogOptions, MetricsOptions
from kvstore.errors import ConfigError

PEM = Path("x.pem")


@pytest.mark.parametrize("listen", ["127.0.0.1:50051", "[::1]:50051", "0.0.0.0:50051", "localhost:0"])
def test_grpc_over_tcp_needs_tls_and_tokens_on_loopback_too(listen: str) -> None:
    with pytest.raises(ConfigError, match=r"give also --grpc-tls-cert, --grpc-tls-key, --grpc-token-file; or .* unix:"):
        GrpcOptions(listen)
    with pytest.raises(ConfigError, match="give also --grpc-token-file;"):
        GrpcOptions(listen, PEM, PEM)
    with pytest.raises(ConfigError, match="give also --grpc-tls-cert, --grpc-tls-key;"):
        GrpcOptions(listen, token_file=PEM)
    assert GrpcOptions(listen, PEM, PEM, token_file=PEM).enabled


def test_grpc_on_a_unix_socket_needs_neither() -> None:
    assert GrpcOptions("unix:/run/kv/grpc.sock").enabled
    assert not GrpcOptions().enabled


@pytest.mark.parametrize(
    ("options", "settings", "says"),
    [
        ({"listen": "unix:"}, ("grpc.listen",), "names no file"),
        ({"listen": "unix:/" + "x" * 107}, ("grpc.listen",), "longer than the 107 bytes"),
        ({"listen": "nonsense"}, ("grpc.listen",), "give host:port"),
        ({"tls_cert": PEM}, ("grpc.tls_cert", "grpc.tls_key"), "a TLS certificate and no key"),
        ({"tls_key": PEM}, ("grpc.tls_cert", "grpc.tls_key"), "a TLS key and no certificate"),
        ({"client_ca": PEM}, ("grpc.client_ca",), "needs TLS"),
        ({"message_bytes_max": 1000}, ("grpc.message_bytes_max",), "1000 B; it must be from 64KiB"),
        ({"deadline_s_max": float("nan")}, ("grpc.deadline_s_max",), "--grpc-deadline-max is nan"),
        ({"calls_max": 0}, ("grpc.calls_max",), "--grpc-calls-max is 0"),
    ],
)
def test_grpc_options_that_cant_work_are_refused(options: Any, settings: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as told:
        GrpcOptions(**options)
    assert told.value.settings == settings


def test_metrics_stay_on_this_machine_unless_told_otherwise() -> None:
    with pytest.raises(ConfigError, match="--metrics-allow-remote") as told:
        MetricsOptions("0.0.0.0:9090")
    assert told.value.settings == ("metrics.listen", "metrics.allow_remote")
    assert MetricsOptions("0.0.0.0:9090", allow_remote=True).enabled
    assert MetricsOptions("[::1]:9090").enabled
    assert not MetricsOptions().enabled
    for stall_s in (0.0, float("nan"), 1e9):
        with pytest.raises(ConfigError, match="--metrics-stall is"):
            MetricsOptions(stall_s=stall_s)


def test_log_levels_are_one_for_all_and_others_by_name() -> None:
    assert LogOptions().levels() == {"": "info"}
    assert LogOptions("WARNING").levels() == {"": "warning"}
    assert LogOptions("kvstore.nvme=debug").levels() == {"": "info", "kvstore.nvme": "debug"}
    assert LogOptions("error, kvstore.nvme=debug,kvstore.store=info").levels() == {
        "": "error", "kvstore.nvme": "debug", "kvstore.store": "info",
    }  # fmt: skip


@pytest.mark.parametrize("level", ["", "loud", "info,", "info,debug", "=debug", "a=", "a=loud", "a=info,a=debug"])
def test_what_is_no_level_is_refused(level: str) -> None:
    with pytest.raises(ConfigError, match=r"--log-level is .* known are debug, info, warning, error"):
        LogOptions(level)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"format": "xml"}, "--log-format is 'xml'; known are text, json"),
        ({"slow_s": -1.0}, "--log-slow is -1.0"),
        ({"repeats_max": 0}, "--log-repeats is 0"),
        ({"repeats_s": 0.0}, "--log-repeats-window is 0.0"),
    ],
)
def test_log_options_that_cant_work_are_refused(options: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        LogOptions(**options)


def test_an_error_names_the_fields_it_is_about() -> None:
    with pytest.raises(ConfigError) as told:
        DaemonConfig(Path("d.sock"), lease_s_default=9.0, lease_s_max=8.0)
    assert told.value.settings == ("lease_s_default", "lease_s_max")
