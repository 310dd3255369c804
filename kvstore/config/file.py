"""The TOML file of settings: which one counts, what it says, and in which line."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvstore.config.kinds import NONE
from kvstore.errors import ConfigError

FILE_BYTES_MAX = 1 << 20
CONFIG_VARIABLE = "KVSTORE_CONFIG"

_HEADER = re.compile(r"\s*\[\s*([A-Za-z0-9_\"'-]+)\s*\]\s*(#.*)?")
_KEY = re.compile(r"\s*([A-Za-z0-9_-]+)\s*(?:\.\s*([A-Za-z0-9_-]+)\s*)?=")


@dataclass(frozen=True, slots=True)
class Document:
    """A file that is TOML. ``tables`` is what it says, ``lines`` where, by dotted names."""

    path: Path
    tables: dict[str, Any]
    lines: dict[str, int] = field(default_factory=dict)

    def place_of(self, name: str) -> str:
        """A place in words; of the file only where the line is not known."""
        line = self.lines.get(name)
        return str(self.path) if line is None else f"{self.path}, line {line}"

    def beside(self, path: Path) -> Path:
        """A path that stands in it: a relative one counts from the folder of the file. An empty one stays so."""
        return path if path == Path() else self.path.absolute().parent / path


def read_document(path: Path, named_by: str = "") -> Document:
    """Read a file. Raises ConfigError if it can't be read or is not TOML; ``named_by`` is who asked for it."""
    named = f" (named by {named_by})" if named_by else ""
    try:
        with path.open("rb") as file:
            raw = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(
            f"the configuration file {path}{named} can't be read: {error.strerror}; name another with --config"
        ) from error
    if len(raw) > FILE_BYTES_MAX:
        raise ConfigError(f"{path}{named} has more than {FILE_BYTES_MAX} bytes: that is no configuration file")
    try:
        text = raw.decode()
        tables = tomllib.loads(text)
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(
            f"{path}{named} is not TOML: {error}; `kvstore config --example` prints a file that is"
        ) from error
    return Document(path, tables, _lines(text, tables))


def file_in_force(named: Path | None, environment: Mapping[str, str], places: tuple[Path, ...]) -> Document | None:
    """The one file that counts: the one named, else that of ``$KVSTORE_CONFIG``, else the first there is of ``places``.

    An empty variable says that none counts. Raises ConfigError for one that is named and can't be read.
    """
    if named is not None:
        return read_document(named)
    if CONFIG_VARIABLE in environment:
        value = environment[CONFIG_VARIABLE]
        return read_document(Path(value), f"${CONFIG_VARIABLE}") if value else None
    return next((read_document(place) for place in places if _is_there(place)), None)


def socket_of(document: Document | None) -> Path | None:
    """The daemon's socket as a file has it, for commands that look for the daemon; whether it can be is not checked."""
    if document is None:
        return None
    section = document.tables.get("daemon")
    named = section.get("socket") if isinstance(section, dict) else None
    return document.beside(Path(named)) if isinstance(named, str) and named not in ("", NONE) else None


def _is_there(place: Path) -> bool:
    """Whether there is such a file. One in a folder that is closed to this user (as of a service) is not."""
    try:
        return place.exists()
    except PermissionError:
        return False


def default_places(environment: Mapping[str, str]) -> tuple[Path, ...]:
    """Where a file is looked for: the user's own, then the system's."""
    system = Path("/etc/kvstore/kvstore.toml")
    try:
        home = Path(environment.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    except RuntimeError:  # a user without a home
        return (system,)
    return (home / "kvstore" / "kvstore.toml", system)


def _lines(text: str, tables: dict[str, Any]) -> dict[str, int]:
    """The lines of sections and keys, as far as they are written one a line.

    tomllib does not tell them. A line counts only if, on its own, it says what the whole file says, so that nothing
    in a text of several lines is taken for a setting.
    """
    found: dict[str, int] = {}
    section = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.fullmatch(line):
            section = header[1].strip("\"'")
            found.setdefault(section, number)
        elif key := _KEY.match(line):
            names = [name for name in (section, key[1], key[2]) if name]
            if _value(line, names[1:] if section else names) == _at(tables, names) is not None:
                found.setdefault(".".join(names), number)
    return found


def _value(line: str, names: list[str]) -> Any:
    try:
        return _at(tomllib.loads(line), names)
    except tomllib.TOMLDecodeError:
        return None


def _at(tables: Any, names: list[str]) -> Any:
    for name in names:
        if not isinstance(tables, dict) or name not in tables:
            return None
        tables = tables[name]
    return tables
