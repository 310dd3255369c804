"""Tenants and pins: what their options refuse, and how tables are written in each layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvstore.config import DaemonConfig, PinOptions, TenantOptions
from kvstore.config.file import read_document
from kvstore.config.layers import layered
from kvstore.errors import ConfigError

MIB = 1 << 20


@pytest.mark.parametrize(
    ("options", "settings", "says"),
    [
        ({"shares": "equal"}, ("tenants.shares",), r"--tenant-shares is 'equal'; known are fair, none"),
        ({"weights": "a"}, ("tenants.weights",), r"--tenant-weights has 'a'; write tenant=value"),
        ({"weights": "=3"}, ("tenants.weights",), r"has '=3'; write tenant=value"),
        ({"weights": "a=1, a=2"}, ("tenants.weights",), r"names tenant 'a' twice"),
        ({"weights": "a=0"}, ("tenants.weights",), r"tenant 'a': '0' is no weight; give a number from 0.001 to"),
        ({"weights": "a=nan"}, ("tenants.weights",), r"'nan' is no weight"),
        ({"weights": "a=heavy"}, ("tenants.weights",), r"'heavy' is no weight"),
        ({"dram_max": "a=lots"}, ("tenants.dram_max",), r"--tenant-dram-max, tenant 'a': 'lots' is not a size"),
        (
            {"dram_min": "a=2MiB", "dram_max": "*=1MiB"},
            ("tenants.dram_min", "tenants.dram_max"),
            r"tenant 'a' is to have 2.0 MiB of dram at least and 1.0 MiB at most",
        ),
        ({"shares": "none", "weights": "a=1"}, ("tenants.weights", "tenants.shares"), r"needs --tenant-shares fair"),
        ({"weights": 3}, ("tenants.weights",), r"must be a text"),
    ],
)
def test_what_tenants_can_not_have(options: dict[str, Any], settings: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as raised:
        TenantOptions(**options)
    assert raised.value.settings == settings


@pytest.mark.parametrize(
    ("options", "settings", "says"),
    [
        ({"dram_bytes": -1}, ("pins.dram_bytes",), r"--pin-dram is -1"),
        ({"tenant_bytes": -1}, ("pins.tenant_bytes",), r"--pin-tenant is -1"),
        ({"max_s": float("inf")}, ("pins.max_s",), r"--pin-max is inf; it must be from 0.01 to 2592000 seconds"),
        ({"default_s": 0.0}, ("pins.default_s",), r"--pin-default is 0.0"),
        ({"default_s": 60.0, "max_s": 30.0}, ("pins.default_s", "pins.max_s"), r"60.0 is above --pin-max 30.0"),
    ],
)
def test_what_pins_can_not_have(options: dict[str, Any], settings: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as raised:
        PinOptions(**options)
    assert raised.value.settings == settings


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tenants": TenantOptions(dram_min="a=5MiB, b=4MiB")}, r"promises 9.0 MiB of a tier that has 8.0 MiB"),
        ({"tenants": TenantOptions(nvme_max="a=5MiB")}, r"--tenant-nvme-max needs --nvme-dir"),
        ({"pins": PinOptions(dram_bytes=9 * MIB)}, r"--pin-dram is 9.0 MiB, more than the 8.0 MiB of --dram"),
        ({"pins": PinOptions(tenant_bytes=3 * MIB)}, r"--pin-tenant is 3.0 MiB, more than the 2.0 MiB that all pins"),
    ],
)
def test_what_does_not_fit_the_tiers(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        DaemonConfig(Path("/tmp/d.sock"), dram_bytes=8 * MIB, **options)  # noqa: S108 - never made


def test_a_table_is_the_same_in_a_file_a_variable_and_a_flag(tmp_path: Path) -> None:
    path = tmp_path / "k.toml"
    path.write_text('[tenants]\nweights = {search = 3, "batch" = 0.5}\ndram_max = {"*" = "1GiB"}\n')
    of_file = layered(read_document(path), {}, {}).config.tenants
    assert of_file.weight_of() == {"search": 3.0, "batch": 0.5}
    assert of_file.most("dram") == {"*": 1 << 30}
    written = {"KVSTORE_TENANTS_WEIGHTS": "search=3, batch=0.5", "KVSTORE_TENANTS_DRAM_MAX": "*=1GiB"}
    of_variables = layered(None, written, {}).config.tenants
    of_flags = layered(None, {}, {"tenants.weights": "search=3,batch=0.5", "tenants.dram_max": "*=1GiB"}).config.tenants
    for options in (of_variables, of_flags):
        assert (options.weight_of(), options.most("dram")) == (of_file.weight_of(), of_file.most("dram"))
    path.write_text("[tenants]\nweights = [1, 2]\n")
    with pytest.raises(ConfigError, match=r"weights is .*; it must be a table"):
        layered(read_document(path), {}, {})
