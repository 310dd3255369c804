"""The options beside the tiers: what they refuse, and the fields their errors name."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.config import DaemonConfig, GrpcOptions, LogOptions, MetricsOptions
from kvstore.config.logs import LOGGERS
from kvstore.errors import ConfigError

ROOT = Path(__file__).parents[2]

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
        (
            {"listen": "unix:/run/kv/g.sock", "tls_cert": PEM, "tls_key": PEM},
            ("grpc.listen", "grpc.tls_cert", "grpc.tls_key"),
            "has no TLS.*: leave out --grpc-tls-cert, --grpc-tls-key",
        ),
        (
            {"listen": "unix:/run/kv/g.sock", "client_ca": PEM},
            ("grpc.listen", "grpc.client_ca"),
            "leave out --grpc-client-ca, or listen on host:port",
        ),
        ({"message_bytes_max": 1000}, ("grpc.message_bytes_max",), "1000 B; it must be from 64KiB"),
        ({"deadline_s_max": float("nan")}, ("grpc.deadline_s_max",), "--grpc-deadline-max is nan"),
        ({"calls_max": 0}, ("grpc.calls_max",), "--grpc-calls-max is 0"),
        (
            {"calls_max": 8, "calls_per_token": 9},
            ("grpc.calls_per_token", "grpc.calls_max"),
            "--grpc-calls-per-token is 9; it must be from 1 to --grpc-calls-max, 8",
        ),
        (
            {"token_file": PEM},
            ("grpc.token_file", "grpc.listen"),
            "--grpc-token-file needs --grpc-listen: .* no effect",
        ),
        ({"tls_cert": PEM, "tls_key": PEM}, ("grpc.tls_cert", "grpc.listen"), "--grpc-tls-cert needs --grpc-listen"),
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


@pytest.mark.parametrize(
    ("level", "says"),
    [
        ("", "'' is no level; known are debug, info, warning, error"),
        ("loud", "'loud' is no level; known are debug, info, warning, error"),
        ("verbose", r"'verbose' is no level; did you mean debug\? known are"),
        ("info,kvstore.nvme=Warn", r"'Warn' is no level; did you mean warning\? known are"),
        ("info,", "'' is no level"),
        ("kvstore.http=", "'' is no level"),
        ("info,debug", "the level of all loggers is given twice"),
        ("kvstore.http=info,kvstore.http=debug", "kvstore.http is given twice"),
        ("=debug", "there is no logger ''; known are kvstore, kvstore.server,"),
        ("info,kvstore.tiers=debug", "there is no logger 'kvstore.tiers'; known are kvstore, kvstore.server,"),
    ],
)
def test_what_is_no_level_is_refused(level: str, says: str) -> None:
    with pytest.raises(ConfigError, match=f"--log-level is .*: {says}.*, as in info,kvstore.nvme=debug") as told:
        LogOptions(level)
    assert told.value.settings == ("log.level",)


def test_every_logger_of_the_daemon_can_be_given_a_level() -> None:
    """Those of engine adapters live in the engine's process, whose log is not ours."""
    package = Path(kvstore.__file__).parent
    named = {
        name
        for folder, _, files in os.walk(package, followlinks=True)
        for path in (Path(folder, file) for file in files if file.endswith(".py"))
        if "engine_adapter" not in path.parts
        for name in re.findall(r"getLogger\(\"(.+?)\"\)", path.read_text())
    }
    assert len(named) > 5
    assert named <= set(LOGGERS)
    assert {name for name in LOGGERS if name.startswith("kvstore.")} <= named
    assert all(f"`{name}`" in (ROOT / "docs" / "OPERATIONS.md").read_text() for name in LOGGERS)


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


@pytest.mark.parametrize(
    ("made", "options", "says", "name"),
    [
        (LogOptions, {"level": 3}, "level is 3; it must be a text", "log.level"),
        (LogOptions, {"slow_s": "1s"}, "slow_s is '1s'; it must be a number", "log.slow_s"),
        (MetricsOptions, {"allow_remote": "yes"}, "allow_remote is 'yes'; it must be True or", "metrics.allow_remote"),
        (GrpcOptions, {"tls_cert": "x.pem"}, "tls_cert is 'x.pem'; it must be a pathlib.Path", "grpc.tls_cert"),
        (GrpcOptions, {"listen": None}, "listen is None; it must be a text", "grpc.listen"),
        (GrpcOptions, {"message_bytes_max": "1MiB"}, "message_bytes_max is '1MiB'; it must", "grpc.message_bytes_max"),
    ],
)
def test_options_of_another_type_are_refused(made: Any, options: Any, says: str, name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{says}") as told:
        made(**options)
    assert told.value.settings == (name,)


def test_an_error_names_the_fields_it_is_about() -> None:
    with pytest.raises(ConfigError) as told:
        DaemonConfig(Path("d.sock"), lease_s_default=9.0, lease_s_max=8.0)
    assert told.value.settings == ("lease_s_default", "lease_s_max")


@pytest.mark.parametrize(
    ("places", "says", "settings"),
    [
        ({"grpc": GrpcOptions("unix:/run/d.sock")}, "--socket and --grpc-listen are", ("socket_path", "grpc.listen")),
        ({"grpc": GrpcOptions("unix:/run/x/../d.sock")}, "--socket and --grpc-listen", ("socket_path", "grpc.listen")),
        ({"holder_path": Path("/run/d.sock")}, "--socket and --holder are both", ("socket_path", "holder_path")),
        (
            {"holder_path": Path("/run/h.sock"), "grpc": GrpcOptions("unix:/run/h.sock")},
            "--holder and --grpc-listen are both '/run/h.sock'", ("holder_path", "grpc.listen"),
        ),
    ],
)  # fmt: skip
def test_each_unix_socket_has_a_path_of_its_own(places: Any, says: str, settings: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=says) as told:
        DaemonConfig(Path("/run/d.sock"), **places)
    assert told.value.settings == settings


def test_relative_paths_of_sockets_count_from_the_working_directory() -> None:
    with pytest.raises(ConfigError, match="--socket and --holder are both"):
        DaemonConfig(Path("d.sock"), holder_path=Path("d.sock").absolute())
    assert DaemonConfig(Path("d.sock"), holder_path=Path("h.sock"), grpc=GrpcOptions("unix:g.sock"))


@pytest.mark.parametrize(
    ("metrics", "grpc", "is_one"),
    [
        ("127.0.0.1:9090", "127.0.0.1:9090", True),
        ("127.0.0.1:9090", "0.0.0.0:9090", True),
        ("127.0.0.1:9090", "[::]:9090", True),
        ("localhost:9090", "[::1]:9090", True),
        ("localhost:9090", "LOCALHOST:9090", True),
        ("127.0.0.1:9090", "127.0.0.1:9091", False),
        ("127.0.0.1:9090", "127.0.0.2:9090", False),
        ("[::1]:9090", "0.0.0.0:9090", False),
        ("127.0.0.1:9090", "elsewhere:9090", False),
        ("127.0.0.1:0", "127.0.0.1:0", False),
    ],
)
def test_metrics_and_grpc_have_ports_of_their_own(metrics: str, grpc: str, *, is_one: bool) -> None:
    both: dict[str, Any] = {
        "metrics": MetricsOptions(metrics), "grpc": GrpcOptions(grpc, PEM, PEM, token_file=PEM),
    }  # fmt: skip
    if not is_one:
        assert DaemonConfig(Path("d.sock"), **both)
        return
    with pytest.raises(ConfigError, match="are both on port 9090") as told:
        DaemonConfig(Path("d.sock"), **both)
    assert told.value.settings == ("metrics.listen", "grpc.listen")
