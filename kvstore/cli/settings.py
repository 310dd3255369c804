"""The daemon's settings on the command line: an option for each, and all layers put together."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from kvstore.config import DaemonConfig
from kvstore.config.file import default_places, file_in_force
from kvstore.config.layers import Layered, layered
from kvstore.config.settings import SETTINGS, Setting
from kvstore.errors import ConfigError
from kvstore.prefix_index.policies import POLICIES, make_tier_policies

Command = TypeVar("Command", bound=Callable[..., Any])


class SettingType(click.ParamType[Any]):
    """A setting's value as it was typed. The layers check it, as they do for files and variables."""

    def __init__(self, setting: Setting) -> None:
        self.name = setting.kind.metavar
        self._choices = sorted(POLICIES) if setting.field in ("policy", "nvme_policy") else setting.kind.choices

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:  # noqa: ARG002 - click's interface
        return f"[{'|'.join(self._choices)}]" if self._choices else self.name

    def shell_complete(
        self,
        ctx: click.Context,  # noqa: ARG002 - click's interface
        param: click.Parameter,  # noqa: ARG002 - click's interface
        incomplete: str,
    ) -> list[CompletionItem]:
        return [CompletionItem(each) for each in self._choices if each.startswith(incomplete)]


def setting_options(command: Command) -> Command:
    """All settings as options, and ``--config``; the command gets ``file`` and, by names of settings, ``flags``.

    What is not given is not there: an option has no default of its own.
    """
    for setting in reversed(SETTINGS):
        command = setting_option(setting)(command)
    return click.option(
        "--config",
        "file",
        type=click.Path(path_type=Path, dir_okay=False),
        help="TOML file of settings.  [default: $KVSTORE_CONFIG, ~/.config/kvstore/kvstore.toml, "
        "/etc/kvstore/kvstore.toml; the first there is]",
    )(command)


def load_settings(file: Path | None, options: dict[str, Any]) -> Layered:
    """What is in force. ``options`` is what click gave for ``setting_options``. Raises ConfigError."""
    flags = {setting.name: value for setting in SETTINGS if (value := options.get(parameter_of(setting))) is not None}
    document = file_in_force(file, os.environ, default_places(os.environ))
    return layered(document, os.environ, flags, check_for_serving)


def check_for_serving(config: DaemonConfig) -> None:
    """Raises ConfigError for an eviction policy that there is not, and for a daemon that nobody could find."""
    make_tier_policies(config.policy, config.nvme_policy)
    if config.socket_path is None:
        raise ConfigError("without a socket nobody here finds the daemon: give --socket a path", ("socket_path",))


def parameter_of(setting: Setting) -> str:
    """The name of its option in a command."""
    return f"{setting.section}_{setting.key}"


def setting_option(setting: Setting) -> Callable[[Command], Command]:
    """One of ``setting_options``."""
    name, words = parameter_of(setting), f"  [default: {setting.default_words}]"
    if setting.kind.type is bool:
        both = f"{setting.flag}/--no-{setting.flag.removeprefix('--')}"
        return click.option(both, name, default=None, help=setting.help + words)
    return click.option(setting.flag, name, type=SettingType(setting), help=setting.help + words)
