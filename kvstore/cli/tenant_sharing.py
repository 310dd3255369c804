"""How tenants share the daemon that a command starts: the daemon's own settings for that, as options."""

from __future__ import annotations

from typing import Any

from kvstore.cli.settings import Command, parameter_of, setting_option
from kvstore.config.settings import SETTINGS

_SHARING = tuple(setting for setting in SETTINGS if setting.section == "tenants")


def tenant_sharing_options(command: Command) -> Command:
    """Shares, guaranteed sizes and quotas as options; see ``sharing_arguments`` for what to do with them."""
    for setting in reversed(_SHARING):
        command = setting_option(setting)(command)
    return command


def sharing_arguments(options: dict[str, Any]) -> list[str]:
    """Takes those options out of a command's, and gives the arguments of ``kvstore serve`` that say the same."""
    given = [(setting.flag, options.pop(parameter_of(setting), None)) for setting in _SHARING]
    return [word for flag, value in given if value is not None for word in (flag, str(value))]
