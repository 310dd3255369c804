"""Defaults < file < environment < flags, and what is said of mistakes in each."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from kvstore.config import MIB, DaemonConfig
from kvstore.config.example import example_toml, in_force, reference_markdown
from kvstore.config.file import Document, default_places, file_in_force, read_document, socket_of
from kvstore.config.layers import Layered, layered
from kvstore.config.settings import BY_FIELD, BY_NAME, SECTIONS, SETTINGS
from kvstore.errors import ConfigError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write_file(text: str, name: str = "kvstore.toml") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write_file


def document(path: Path) -> Document:
    return read_document(path)


def origin(found: Layered, name: str) -> tuple[Any, str, str]:
    each = next(each for each in found.origins if each.setting.name == name)
    return each.value, each.layer, each.where


def test_the_table_has_every_field_once() -> None:
    wanted = set()
    for each in fields(DaemonConfig):
        nested = getattr(DaemonConfig(Path("d.sock")), each.name)
        wanted |= {f"{each.name}.{inner.name}" for inner in fields(nested)} if is_dataclass(nested) else {each.name}
    assert set(BY_FIELD) == wanted
    assert len(SETTINGS) == len(wanted) == len(BY_NAME)
    for what in ("name", "flag", "variable"):
        assert len({getattr(setting, what) for setting in SETTINGS}) == len(SETTINGS), what
    assert [setting.section for setting in SETTINGS] == sorted(
        (setting.section for setting in SETTINGS), key=list(SECTIONS).index
    )


def test_without_any_layer_everything_is_as_the_classes_say() -> None:
    found = layered(None, {}, {})
    assert found.config == DaemonConfig(found.config.socket_path)
    assert {each.layer for each in found.origins} == {"default"}


def test_each_layer_beats_those_below_it(write: Any) -> None:
    path = write(
        '[dram]\ncapacity = "8MiB"\nprefault = false\n[leases]\ndefault = "1m"\nmax = "2h"\n[daemon]\nmax_clients = 7\n'
    )
    found = layered(
        document(path),
        {"KVSTORE_LEASES_DEFAULT": "90s", "KVSTORE_DAEMON_MAX_CLIENTS": "8", "PATH": "/bin", "KVSTORE_NVME_DIR": ""},
        {"daemon.max_clients": "9"},
    )
    config = found.config
    assert (config.dram_bytes, config.prefault, config.lease_s_default, config.lease_s_max) == (
        8 * MIB,
        False,
        90,
        7200,
    )
    assert origin(found, "daemon.max_clients") == (9, "flag", "--max-clients")
    assert origin(found, "leases.default") == (90.0, "env", "$KVSTORE_LEASES_DEFAULT")
    assert origin(found, "dram.capacity") == (8 * MIB, "file", f"{path}, line 2")
    assert origin(found, "nvme.dir") == (None, "default", "default")
    assert found.file == path


def test_a_higher_layer_can_take_back_what_a_lower_one_sets(write: Any) -> None:
    path = write('[nvme]\ndir = "/mnt/kv"\ncapacity = "1GiB"\n[metrics]\nlisten = "127.0.0.1:9090"\n')
    found = layered(document(path), {"KVSTORE_METRICS_LISTEN": "none"}, {"nvme.dir": "none", "nvme.capacity": "0"})
    assert found.config.nvme_dir is None
    assert not found.config.metrics.enabled


def test_relative_paths_in_a_file_count_from_its_folder(
    write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    write('[daemon]\nsocket = "d.sock"\n[nvme]\ndir = "data/kv"\ncapacity = "1GiB"\n[grpc]\nlisten = "unix:g.sock"\n')
    found = layered(document(Path("../kvstore.toml")), {}, {})
    assert found.config.socket_path is not None
    assert found.config.nvme_dir is not None
    assert found.config.nvme_dir.is_absolute()
    assert found.config.nvme_dir.resolve() == tmp_path / "data" / "kv"
    assert found.config.socket_path.resolve() == tmp_path / "d.sock"
    assert Path(found.config.grpc.listen.removeprefix("unix:")).resolve() == tmp_path / "g.sock"
    assert socket_of(document(Path("../kvstore.toml"))) == found.config.socket_path
    nearer = layered(document(Path("../kvstore.toml")), {"KVSTORE_NVME_DIR": "mine"}, {"daemon.socket": "e.sock"})
    assert (nearer.config.nvme_dir, nearer.config.socket_path) == (Path("mine"), Path("e.sock"))
    with pytest.raises(ConfigError, match=r"--nvme-dir is empty or '\.'"):
        layered(document(write('[nvme]\ndir = ""\ncapacity = "1GiB"')), {}, {})


def test_every_mistake_in_a_file_is_told_with_its_line_and_the_way_out(write: Any) -> None:
    path = write(
        '[dram]\ncapcity = "1GiB"\nprefault = "yes"\n[nvme]\nwrite_policy = "sideways"\nio_timeout = "5 parsec"\n'
        '[leases]\ncapacity = 4\nzzz = 1\n[drm]\nx = 1\n[daemon]\nmax_clients = "7"\nsocket = 3\nheartbeat = true\n'
    )
    with pytest.raises(ConfigError) as told:
        layered(document(path), {}, {})
    lines = str(told.value).splitlines()
    for line, words in (
        (2, "[dram] has no 'capcity'; did you mean 'capacity'?"),
        (3, "dram.prefault is 'yes'; it must be true or false"),
        (5, "nvme.write_policy is 'sideways'; it must be one of through, back, selective"),
        (6, "nvme.io_timeout is '5 parsec'; it must be a duration such as"),
        (8, "[leases] has no 'capacity'; did you mean dram.capacity?"),
        (9, "[leases] has no 'zzz'; it has default, max"),
        (10, "there is no section [drm]; did you mean [dram]?"),
        (13, "daemon.max_clients is '7'; it must be a whole number"),
        (14, "daemon.socket is 3; it must be a path in quotes"),
        (15, "daemon.heartbeat is True; it must be a duration such as"),
    ):
        assert any(each.startswith(f"{path}, line {line}: {words}") for each in lines), (words, lines)
    assert len(lines) == 10


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[nvme]\ndirectory = "/n"', r"line 2: \[nvme\] has no 'directory'; did you mean 'dir'\?"),
        ('[nvme]\npath = "/n"', r"did you mean 'dir'\?"),
        ('[dram]\nsize = "1GiB"', r"\[dram\] has no 'size'; did you mean 'capacity'\?"),
        ("[daemon]\npath = 's'", r"did you mean 'socket'\?"),
        ("max_clients = 3", r"no section \[max_clients\]; did you mean daemon\.max_clients\?"),
        ("write-policy = 'back'", r"did you mean nvme\.write_policy\?"),
    ],
)
def test_other_words_for_a_setting_lead_to_it(write: Any, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        layered(document(write(text)), {}, {})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("dram.capacity =", "is not TOML: .*; `kvstore config --example` prints a file that is"),
        ('[dram]\ncapacity = "1GiB"\n[dram]\n', "is not TOML"),
        ("dram = 3", "line 1: dram is 3; it must be a section, \\[dram\\]"),
        ("\udcff", "is not TOML"),
    ],
)
def test_what_is_no_file_of_settings_is_refused(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "k.toml"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError, match=says):
        layered(document(path), {}, {})


def test_a_file_that_is_too_long_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "k.toml"
    path.write_bytes(b"#" * ((1 << 20) + 1))
    with pytest.raises(ConfigError, match="more than 1048576 bytes"):
        document(path)


def test_rules_are_those_of_the_configuration_and_say_where_a_value_is_from(write: Any) -> None:
    path = write('# mine\nleases.max = "5s"\n')
    with pytest.raises(
        ConfigError, match=r"--lease-default 30\.0 is above --lease-max 5\.0; leases\.max = \"5s\" is from "
    ):
        layered(document(path), {}, {})
    with pytest.raises(ConfigError) as told:
        layered(document(path), {"KVSTORE_LEASES_DEFAULT": "6s"}, {})
    assert f'leases.max = "5s" is from {path}, line 2' in str(told.value)
    assert 'leases.default = "6s" is from $KVSTORE_LEASES_DEFAULT' in str(told.value)
    with pytest.raises(ConfigError) as told:
        layered(None, {}, {"leases.max": "5s"})
    assert str(told.value) == "--lease-default 30.0 is above --lease-max 5.0"


def test_what_fails_later_says_where_its_values_are_from_too(write: Any) -> None:
    path = write('[nvme]\ndir = "/mnt/kv"\ncapacity = "1GiB"\n')
    found = layered(document(path), {}, {})
    with pytest.raises(ConfigError, match=r"no disk; nvme\.dir = \"/mnt/kv\" is from .*, line 2$"), found.blamed():
        raise ConfigError("no disk", ("nvme_dir",))
    with pytest.raises(ConfigError, match=r"^other$"), found.blamed():
        raise ConfigError("other")


def test_a_check_of_others_counts_as_a_rule() -> None:
    def refuse(config: DaemonConfig) -> None:
        raise ConfigError(f"policy is {config.policy!r}", ("policy",))

    with pytest.raises(ConfigError, match=r"policy is 'mru'; daemon.policy = \"mru\" is from \$KVSTORE_DAEMON_POLICY"):
        layered(None, {"KVSTORE_DAEMON_POLICY": "mru"}, {}, refuse)


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"KVSTORE_DRAM_CAPCITY": "3"}, r"\$KVSTORE_DRAM_CAPCITY is no setting; did you mean \$KVSTORE_DRAM_CAPACITY"),
        ({"KVSTORE_DARM_CAPACITY": "3"}, r"did you mean \$KVSTORE_DRAM_CAPACITY"),
        ({"KVSTORE_GRPC_ZZZ": "3"}, r"\$KVSTORE_GRPC_ZZZ is no setting; did you mean \$KVSTORE_"),
        ({"KVSTORE_SOCKTE": "3"}, r"did you mean \$KVSTORE_SOCKET"),
        ({"KVSTORE_DRAM": "2GiB"}, r"\$KVSTORE_DRAM is no setting; did you mean \$KVSTORE_DRAM_CAPACITY\?"),
        ({"KVSTORE_NVME": "2GiB"}, r"did you mean \$KVSTORE_NVME_CAPACITY\?"),
        ({"KVSTORE_DAEMON_SOCKET": "/s"}, r"did you mean \$KVSTORE_SOCKET\?"),
        ({"KVSTORE_METRICS": "1"}, r"did you mean \$KVSTORE_METRICS_LISTEN\?"),
        ({"KVSTORE_LOG": "debug"}, r"did you mean \$KVSTORE_LOG_LEVEL\?"),
        ({"KVSTORE_MAX_CLIENTS": "3"}, r"did you mean \$KVSTORE_DAEMON_MAX_CLIENTS\?"),
        ({"KVSTORE_WRITE_POLICY": "back"}, r"did you mean \$KVSTORE_NVME_WRITE_POLICY\?"),
        ({"KVSTORE_POLL_US": "3"}, r"did you mean \$KVSTORE_DAEMON_POLL\?"),
        ({"KVSTORE_DRAM_BYTES": "3"}, r"did you mean \$KVSTORE_DRAM_CAPACITY\?"),
        ({"KVSTORE_DRAM_SIZE": "3"}, r"did you mean \$KVSTORE_DRAM_CAPACITY\?"),
        ({"KVSTORE_NVME_PATH": "/n"}, r"did you mean \$KVSTORE_NVME_DIR\?"),
        ({"KVSTORE_NVME_DIRECTORY": "/n"}, r"did you mean \$KVSTORE_NVME_DIR\?"),
        ({"KVSTORE_DRAM_CAPACITY": "lots"}, r"\$KVSTORE_DRAM_CAPACITY: dram.capacity is 'lots'; it must be a size"),
        ({"KVSTORE_DAEMON_MAX_CLIENTS": "many"}, "it must be a whole number"),
        ({"KVSTORE_DRAM_PREFAULT": "perhaps"}, "it must be true or false"),
    ],
)
def test_variables_that_were_meant_as_settings_are_checked(environment: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        layered(None, environment, {})


@pytest.mark.parametrize(
    "name",
    ["KVSTORE_NATIVE", "KVSTORE_CRASH_SEEDS", "KVSTORE_SERVICE_HOST", "KVSTORE_SERVICE_PORT", "KVSTORE_PORT",
     "KVSTORE_PORT_9090_TCP_ADDR", "KVSTORE_GRPC_SERVICE_HOST", "KVSTORE_METRICS_PORT_9090_TCP", "KVSTORE_CONFIG"],
)  # fmt: skip
def test_variables_of_others_are_left_alone(name: str) -> None:
    assert layered(None, {name: "1"}, {}).config == layered(None, {}, {}).config


def test_switches_are_words_in_variables() -> None:
    for word, value in (("0", False), ("false", False), ("off", False), ("no", False), ("on", True), ("TRUE", True)):
        assert layered(None, {"KVSTORE_DRAM_PREFAULT": word}, {}).config.prefault is value


def test_one_file_counts_the_most_special_one(write: Any, tmp_path: Path) -> None:
    named, mine, system = (write(f"daemon.max_clients = {n}", f"{n}.toml") for n in (1, 2, 3))
    places = (mine, system)

    def read(name: Path | None, environment: dict[str, str], places: tuple[Path, ...]) -> Path | None:
        found = file_in_force(name, environment, places)
        return found.path if found is not None else None

    assert read(named, {"KVSTORE_CONFIG": str(mine)}, places) == named
    assert read(None, {"KVSTORE_CONFIG": str(system)}, places) == system
    assert read(None, {}, places) == mine
    assert read(None, {}, (tmp_path / "missing", system)) == system
    assert read(None, {}, (tmp_path / "missing",)) is None
    assert read(None, {"KVSTORE_CONFIG": ""}, places) is None


def test_a_place_that_is_closed_to_this_user_is_no_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As a service has it whose homes are hidden; tests may run as root, who can look everywhere."""

    def closed(self: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "exists", closed)
    assert file_in_force(None, {}, (tmp_path / "k.toml",)) is None


def test_a_file_that_was_named_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be read: No such file"):
        file_in_force(tmp_path / "missing", {}, ())
    with pytest.raises(ConfigError, match=r"named by \$KVSTORE_CONFIG\) can't be read: Is a directory"):
        file_in_force(None, {"KVSTORE_CONFIG": str(tmp_path)}, ())


def test_a_file_says_where_the_daemon_is_to_be_found(write: Any) -> None:
    assert socket_of(None) is None
    for text, found in (
        ('[daemon]\nsocket = "/run/d.sock"', Path("/run/d.sock")),
        ("daemon = 3", None), ("[daemon]\nsocket = 3", None), ('[daemon]\nsocket = "none"', None), ("", None),
    ):  # fmt: skip
        assert socket_of(document(write(text))) == found


def test_files_are_looked_for_in_the_users_place_then_the_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/u")
    assert default_places({})[0] == Path("/home/u/.config/kvstore/kvstore.toml")
    assert default_places({"XDG_CONFIG_HOME": "/x"})[0] == Path("/x/kvstore/kvstore.toml")
    assert default_places({})[1] == Path("/etc/kvstore/kvstore.toml")


def test_the_example_is_whole_and_says_the_defaults(write: Any) -> None:
    text = example_toml()
    assert layered(document(write(text)), {}, {}).config == layered(None, {}, {}).config
    live = "\n".join(
        line.removeprefix("# ") if line.startswith("# ") and " = " in line else line for line in text.splitlines()
    )
    tables = tomllib.loads(live)
    assert {f"{section}.{key}" for section, keys in tables.items() for key in keys} == set(BY_NAME)
    found = layered(document(write(live)), {}, {})
    assert found.config == layered(None, {}, {}).config
    assert {each.layer for each in found.origins} == {"file"}
    assert all(", line " in each.where for each in found.origins)


def test_a_line_in_a_long_text_is_no_setting(write: Any) -> None:
    path = write('[daemon]\npolicy = """\nmax_clients = 5\n"""\nmax_clients = 6\n')
    assert document(path).lines == {"daemon": 1, "daemon.max_clients": 5}


def test_what_is_in_force_can_be_told_as_json(write: Any) -> None:
    rows = {row["name"]: row for row in in_force(layered(document(write('[leases]\ndefault = "250ms"')), {}, {}))}
    assert rows["leases.default"]["value"] == 0.25
    assert rows["leases.default"]["written"] == "250ms"
    assert rows["leases.default"]["layer"] == "file"
    assert rows["nvme.dir"]["value"] is None


@pytest.mark.parametrize(
    ("flags", "name", "effective"),
    [
        ({}, "dram.region", "64MiB (fits the tier)"),
        ({"dram.capacity": "64MiB"}, "dram.region", "4MiB (fits the tier)"),
        ({"dram.region": "8MiB"}, "dram.region", "8MiB"),
        ({}, "nvme.capacity", "none"),
        ({}, "nvme.write_behind", "none"),
        (
            {"dram.capacity": "64MiB", "nvme.dir": "/n", "nvme.capacity": "1GiB"},
            "nvme.write_behind",
            "16MiB (a quarter of DRAM, at most 1GiB)",
        ),
        ({"log.slow": "0"}, "log.slow", "none"),
        ({"nvme.dir": "/n", "nvme.capacity": "1GiB", "nvme.drain": "0"}, "nvme.drain", "0s"),
        ({}, "leases.max", "10m"),
    ],
)
def test_a_value_that_stands_for_another_one_is_shown_as_what_it_comes_to(
    flags: dict[str, str], name: str, effective: str
) -> None:
    rows = {row["name"]: row for row in in_force(layered(None, {}, flags))}
    assert rows[name]["effective"] == effective


def test_the_reference_in_the_documents_is_the_table() -> None:
    assert reference_markdown() in (ROOT / "docs" / "OPERATIONS.md").read_text()


@pytest.mark.parametrize(
    ("imported", "spared"),
    [
        ("kvstore.client, kvstore.config", ["pydantic", "prometheus_client", "kvstore.config.layers"]),
        ("kvstore.cli.status", ["pydantic", "prometheus_client", "kvstore.server.daemon"]),
        ("kvstore.cli.serve", ["prometheus_client", "http.server", "grpc"]),  # without metrics and gRPC
    ],
)
def test_who_does_not_need_it_does_not_pay_for_it(imported: str, spared: list[str]) -> None:
    program = f"import sys, {imported}; print([name for name in {spared!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
