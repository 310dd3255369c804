"""Settings of a store inside the program, and how wrong ones are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.config import DaemonConfig, PinOptions, TenantOptions
from kvstore.embedded import config_of
from kvstore.errors import BadInputError, ConfigError
from tests.embedded.scene import NAMESPACE, NVME, SMALL, InUse


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"dram": "plenty"}, "^dram is 'plenty'; it must be a size such as"),
        ({"dram": True}, "^dram is True; it must be a size such as"),
        ({"dram": None}, "^dram is None; it must be a size such as"),
        ({"dram": "1KiB"}, "too small: give dram at least 1MiB$"),
        ({"path": ".", "nvme": "lots"}, "^nvme is 'lots'; it must be a size such as"),
        ({"path": 7}, "^path is 7; give the path of a directory"),
        ({"path": b"kv"}, "^path is b'kv'; give the path of a directory"),
        ({"timeout_s": "soon"}, "^timeout_s is 'soon'; it must be a duration such as"),
        ({"timeout_s": None}, "^timeout_s is None; it must be a duration such as"),
        ({"region_bytes": "4 parsec"}, "^region_bytes is '4 parsec'; it must be a size such as"),
        ({"region_bytes": 4.5}, "^region_bytes is 4.5; it must be a whole number$"),
        ({"lease_s_default": [3]}, r"^lease_s_default is \[3\]; it must be a duration such as"),
        ({"lease_s_default": "2h"}, r"^lease_s_default 7200\.0 is above lease_s_max 600\.0$"),
        ({"poll_us": "a"}, "^poll_us is 'a'; it must be a duration such as"),
        ({"selective_hits": "2"}, "^selective_hits is '2'; it must be a whole number"),
        ({"prefault": "yes"}, "^prefault is 'yes'; it must be True or False$"),
        ({"prefault": 1}, "^prefault is 1; it must be True or False$"),
        ({"policy": 3}, "^policy is 3; it must be a text$"),
        ({"path": "x", "nvme": "1GiB", "write_policy": "sideways"}, "^write_policy is 'sideways'; known are"),
        ({"write_behind_bytes": 1 << 20}, "^write_behind_bytes needs path and nvme: without an NVMe tier"),
        ({"path": "no/such/folder/kv", "nvme": "64MiB"}, r"can't be used for path: No such file"),
        ({"nvme": "1GiB"}, "there is no path"),
        ({"path": ".", "nvme": "0"}, "nvme is '0'"),
        ({"colour": "red"}, "no setting 'colour'; known are"),
        ({"dram_bytes": 1 << 20}, "give dram"),
        ({"socket_path": "x"}, "give path"),
        ({"holder_path": "x"}, "kvstored"),
        ({"hbm": "1GiB"}, "hbm is a setting of kvstored"),
        ({"write_policy": "back"}, "without an NVMe tier"),
        ({"policy": "fortune"}, "fortune"),
    ],
)
def test_settings_that_can_not_work_are_named(arguments: dict[str, Any], words: str) -> None:
    before = InUse()
    with pytest.raises(ConfigError, match=words):
        kvstore.open(**arguments)
    before.check()


def test_stores_and_handles_say_what_they_are(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "kv", **NVME) as store:
        assert repr(store) == f"<Embedded of {tmp_path / 'kv'} (embedded), tenant 'default', healthy>"
        assert repr(store.open(NAMESPACE)) == (
            f"<NamespaceHandle of model 'model', tenant 'default', digest {NAMESPACE.digest().hex()}, "
            f"16 tokens a block, at {tmp_path / 'kv'} (embedded)>"
        )
    assert repr(store).endswith(", closed>")


def test_sizes_and_durations_may_be_text() -> None:
    config = config_of(
        None, "64MiB", None, region_bytes="4MiB", lease_s_default="90s", lease_s_max="5m", poll_us="1ms", hello_s=2
    )
    assert (config.dram_bytes, config.region_bytes) == (64 << 20, 4 << 20)
    assert (config.lease_s_default, config.lease_s_max, config.poll_us, config.hello_s) == (90.0, 300.0, 1000.0, 2.0)
    with kvstore.open(**SMALL, timeout_s="2500ms") as store:
        assert store.timeout_s == 2.5


@pytest.mark.parametrize("timeout_s", ["1s", None, True, float("nan"), 0])
def test_a_clients_timeout_is_a_number_of_seconds(timeout_s: Any) -> None:
    with pytest.raises(BadInputError, match=f"timeout_s is {timeout_s!r}; it must be a (positive )?number of seconds"):
        kvstore.Client(timeout_s=timeout_s, required=False)


def test_memory_that_nobody_could_take_over_is_not_given_to_a_holder() -> None:
    with pytest.raises(ConfigError, match="leave it out"):
        DaemonConfig(socket_path=None, holder_path=Path("holder.sock"))


def test_settings_of_the_daemon_are_taken(tmp_path: Path) -> None:
    config = config_of(tmp_path / "kv", "1.5GiB", "2GB", policy="arc", write_policy="selective", selective_hits=3)
    assert (config.dram_bytes, config.nvme_bytes) == (3 << 29, 2 * 10**9)
    assert (config.policy, config.selective_hits, config.socket_path) == ("arc", 3, None)


def test_groups_of_settings_are_given_as_what_they_are() -> None:
    pins = PinOptions(dram_bytes=1 << 20, default_s=5.0)
    with kvstore.open(dram="4MiB", pins=pins, tenants=TenantOptions()) as store:
        assert store.stats()["pin_room_bytes"] == 1 << 20
    wrong: dict[str, Any] = {"pins": 3}
    with pytest.raises(ConfigError, match=r"pins is 3; it must be PinOptions"):
        kvstore.open(dram="4MiB", **wrong)
