"""What the daemon logs, and how."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.config.checked import check_types
from kvstore.errors import ConfigError

LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
ROOT_LOGGER = ""
LOGGERS = (
    "kvstore", "kvstore.server", "kvstore.server.grpc", "kvstore.store", "kvstore.dram", "kvstore.nvme",
    "kvstore.takeover", "kvstore.http", "asyncio", "py.warnings",
)  # fmt: skip
"""Loggers that a level can be given to."""

_OTHER_WORDS = {"warn": "warning", "verbose": "debug", "trace": "debug", "critical": "error", "fatal": "error"}


@dataclass(frozen=True, slots=True)
class LogOptions:
    """The log. Raises ConfigError.

    ``level`` is a level, followed by others for single loggers and what is below them:
    ``info,kvstore.nvme=debug``. A request that keeps a client longer than ``slow_s`` is logged, 0 = none.
    Of the same message at most ``repeats_max`` are logged in ``repeats_s``; then the number of the others.
    """

    level: str = "info"
    format: str = "text"
    slow_s: float = 1.0
    repeats_max: int = 10
    repeats_s: float = 60.0

    def __post_init__(self) -> None:
        check_types(self, "log.")
        self.levels()
        if self.format not in LOG_FORMATS:
            raise ConfigError(f"--log-format is {self.format!r}; known are {', '.join(LOG_FORMATS)}", ("log.format",))
        if not 0 <= self.slow_s <= 86400:
            raise ConfigError(
                f"--log-slow is {self.slow_s!r}; it must be from 0 (none) to 86400 seconds", ("log.slow_s",)
            )
        if not 1 <= self.repeats_max <= 1_000_000:
            raise ConfigError(
                f"--log-repeats is {self.repeats_max}; it must be from 1 to 1000000", ("log.repeats_max",)
            )
        if not 0.1 <= self.repeats_s <= 86400:
            raise ConfigError(
                f"--log-repeats-window is {self.repeats_s!r}; it must be from 0.1 to 86400 seconds", ("log.repeats_s",)
            )

    def levels(self) -> dict[str, str]:
        """The level of each logger that is named, the root's under the empty name."""
        found: dict[str, str] = {}
        for part in self.level.split(","):
            name, equals, level = part.strip().rpartition("=")
            if level.lower() not in LOG_LEVELS:
                other = _OTHER_WORDS.get(level.lower())
                hint = f"did you mean {other}? " if other else ""
                raise self._wrong(f"{level!r:.80} is no level; {hint}known are {', '.join(LOG_LEVELS)}")
            if equals and name not in LOGGERS:
                raise self._wrong(f"there is no logger {name!r:.80}; known are {', '.join(LOGGERS)}")
            if name in found:
                raise self._wrong(f"{name or 'the level of all loggers'} is given twice; leave one out")
            found[name] = level.lower()
        found.setdefault(ROOT_LOGGER, "info")
        return found

    def _wrong(self, why: str) -> ConfigError:
        example = "a level for all, then others for single loggers, as in info,kvstore.nvme=debug"
        return ConfigError(f"--log-level is {self.level!r:.120}: {why}. Give {example}", ("log.level",))
