"""Where the daemon's settings come from: defaults < one file < environment < flags.

Nothing is half applied: a wrong layer is refused as a whole, with every mistake in it, where it stands and the way
out. What is in force is checked by ``DaemonConfig`` alone; its complaints are told with where the values came from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model

from kvstore.config.addresses import UNIX_PREFIX
from kvstore.config.daemon import DaemonConfig
from kvstore.config.file import Document
from kvstore.config.kinds import ADDRESS, PATH
from kvstore.config.meant import key_hint, section_hint, variable_meant
from kvstore.config.settings import (
    BY_FIELD,
    BY_NAME,
    BY_VARIABLE,
    ENVIRONMENT_PREFIX,
    SECTIONS,
    SETTINGS,
    Setting,
)
from kvstore.errors import ConfigError

DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Origin:
    """One value in force: ``layer`` is default, file, env or flag; ``where`` a place in words."""

    setting: Setting
    value: Any
    layer: str
    where: str


@dataclass(frozen=True, slots=True)
class Layered:
    """A configuration, and for each setting where it comes from. ``file`` is the one that was read, if any."""

    config: DaemonConfig
    origins: tuple[Origin, ...]
    file: Path | None

    @contextmanager
    def blamed(self) -> Iterator[None]:
        """Adds to a ConfigError where the values that it is about come from."""
        with _blamed({origin.setting.field: origin for origin in self.origins}):
            yield


def layered(
    file: Document | None,
    environment: Mapping[str, str],
    flags: Mapping[str, Any],
    check: Callable[[DaemonConfig], None] = lambda _: None,
) -> Layered:
    """The configuration in force. ``flags`` are values of command line options by the names of settings.

    ``check`` raises ConfigError for what only others can judge. Raises ConfigError.
    """
    in_force = {setting.name: Origin(setting, setting.default, DEFAULT, DEFAULT) for setting in SETTINGS}
    layers: list[tuple[str, dict[str, Any], Callable[[str], str], bool]] = []
    if file is not None:
        layers.append(("file", file.tables, file.place_of, True))
    layers.append(("env", _of_environment(environment), lambda name: f"${BY_NAME[name].variable}", False))
    layers.append(("flag", _nested(flags), lambda name: BY_NAME[name].flag, False))
    for layer, tables, place_of, strict in layers:
        for name, value in _checked(tables, place_of, strict).items():
            if file is not None and layer == "file":
                value = _from_folder_of(file, BY_NAME[name], value)
            in_force[name] = Origin(BY_NAME[name], value, layer, place_of(name))
    origins = {origin.setting.field: origin for origin in in_force.values()}
    with _blamed(origins):
        config = _config({field: origin.value for field, origin in origins.items()})
        check(config)
    return Layered(config, tuple(in_force.values()), file.path if file is not None else None)


def _from_folder_of(file: Document, setting: Setting, value: Any) -> Any:
    """A setting's value; a path in it, also that of a Unix socket as an address, counts from the file's folder."""
    if setting.kind is PATH and value is not None:
        return file.beside(value)
    if setting.kind is ADDRESS and value.startswith(UNIX_PREFIX) and value != UNIX_PREFIX:
        return f"{UNIX_PREFIX}{file.beside(Path(value.removeprefix(UNIX_PREFIX)))}"
    return value


@contextmanager
def _blamed(origins: Mapping[str, Origin]) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        about = [origins[field] for field in error.settings if field in origins]
        told = [
            f"{origin.setting.name} = {origin.setting.kind.write(origin.value)} is from {origin.where}"
            for origin in about
            if origin.layer in ("file", "env")
        ]
        if not told:
            raise
        raise type(error)("; ".join([str(error), *told]), error.settings) from error


def _config(values: Mapping[str, Any]) -> DaemonConfig:
    """Options in their own classes, then all of them together; each raises ConfigError for what can't be."""
    plain = {field: value for field, value in values.items() if "." not in field}
    for name, default in _nested_defaults().items():
        own = {field.partition(".")[2]: value for field, value in values.items() if field.startswith(f"{name}.")}
        plain[name] = type(default)(**own)
    return DaemonConfig(**plain)


@cache
def _nested_defaults() -> dict[str, Any]:
    example = DaemonConfig(BY_FIELD["socket_path"].default)
    return {field.partition(".")[0]: getattr(example, field.partition(".")[0]) for field in BY_FIELD if "." in field}


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    tables: dict[str, Any] = {}
    for name, value in flat.items():
        section, _, key = name.partition(".")
        tables.setdefault(section, {})[key] = value
    return tables


# The environment --------------------------------------------------------------------------------


def _of_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """Its settings; an empty variable counts as not set. Raises ConfigError for one that was meant to be a setting."""
    found = {}
    for variable, value in environment.items():
        if setting := BY_VARIABLE.get(variable):
            if value:
                found[setting.name] = value
        elif variable.startswith(ENVIRONMENT_PREFIX) and (meant := variable_meant(variable)):
            raise ConfigError(f"${variable} is no setting; did you mean ${meant}? `kvstore config --show` has all")
    return _nested(found)


# One layer --------------------------------------------------------------------------------------


@cache
def _layer_model() -> type[BaseModel]:
    """What a layer may hold, for pydantic: sections with the settings of the table, all of them optional."""
    closed = ConfigDict(extra="forbid")
    sections: dict[str, Any] = {}
    for section in SECTIONS:
        keys: dict[str, Any] = {}
        for setting in SETTINGS:
            if setting.section == section:
                # A name of its own, as some keys are attributes of every model.
                kind: Any = setting.kind.type
                read = BeforeValidator(setting.kind.read)
                keys[f"{setting.key}_"] = (Annotated[kind, read, Field(alias=setting.key)], None)
        sections[section] = (create_model(section, __config__=closed, **keys), None)
    return create_model("Layer", __config__=closed, **sections)


def _checked(tables: Mapping[str, Any], place_of: Callable[[str], str], strict: bool) -> dict[str, Any]:
    """The values of one layer by the names of settings. Raises ConfigError that tells of every mistake in it."""
    try:
        layer = _layer_model().model_validate(dict(tables), strict=strict)
    except ValidationError as error:
        told = [_told(each, place_of) for each in error.errors(include_url=False)]
        raise ConfigError("\n".join(dict.fromkeys(told))) from None
    found = layer.model_dump(by_alias=True, exclude_unset=True)
    return {f"{section}.{key}": value for section, keys in found.items() for key, value in keys.items()}


def _told(error: Any, place_of: Callable[[str], str]) -> str:
    section, *rest = (str(part) for part in error["loc"])
    name = f"{section}.{rest[0]}" if rest else section
    place = place_of(name)
    if not rest and section in SECTIONS:
        return f"{place}: {section} is {error['input']!r:.80}; it must be a section, [{section}]"
    if not rest:
        return f"{place}: there is no section [{section}]; {section_hint(section)}"
    setting = BY_NAME.get(name)
    if setting is None:
        return f"{place}: [{section}] has no {rest[0]!r}; {key_hint(section, rest[0])}"
    shown = setting.flag if place == setting.flag else f"{place}: {name}"
    return f"{shown} is {error['input']!r:.120}; it must be {setting.kind.expects}"
