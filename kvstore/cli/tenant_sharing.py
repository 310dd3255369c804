"""How tenants share the daemon that a command starts: the daemon's own settings for that, as options."""

from __future__ import annotations

from typing import Any

from kvstore.cli.settings import Command, parameter_of, setting_option
from kvstore.config.settings import SETTINGS
from kvstore.config.tenants import EVERYBODY, table_names
from kvstore.errors import BadInputError

_SHARING = tuple(setting for setting in SETTINGS if setting.section == "tenants")


def tenant_sharing_options(command: Command) -> Command:
    """Shares, guaranteed sizes and quotas as options; see ``sharing_arguments`` for what to do with them."""
    for setting in reversed(_SHARING):
        command = setting_option(setting)(command)
    return command


def sharing_arguments(options: dict[str, Any], n_tenants: int) -> list[str]:
    """Takes those options out of a command's, and gives the arguments of ``kvstore serve`` that say the same.

    Raises BadInputError for a table that names another tenant than t1, t2, ... up to ``n_tenants``, ConfigError for
    one that can't be read.
    """
    given = {setting: options.pop(parameter_of(setting), None) for setting in _SHARING}
    tenants = {f"t{number}" for number in range(1, n_tenants + 1)} | {EVERYBODY}
    for setting, value in given.items():
        if value is None or setting.field == "tenants.shares":
            continue
        if unknown := table_names(value, setting.key) - tenants:
            raise BadInputError(
                f"{setting.flag} names tenant {min(unknown)!r}; --tenants {n_tenants} has "
                f"{'t1 only' if n_tenants == 1 else f't1 to t{n_tenants}'}, and * for all that are not named"
            )
    return [word for setting, value in given.items() if value is not None for word in (setting.flag, str(value))]
