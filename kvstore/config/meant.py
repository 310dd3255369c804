"""What was meant by a name that no setting has: a slip of the pen, an option's name, another word for the same."""

from __future__ import annotations

import difflib
import re
from functools import cache

from kvstore.config.file import CONFIG_VARIABLE
from kvstore.config.settings import BY_NAME, BY_VARIABLE, ENVIRONMENT_PREFIX, SECTIONS, SETTINGS, Setting

_OF_A_SERVICE_LINK = re.compile(r"KVSTORE(_\w+)?_(SERVICE_(HOST|PORT)(_\w+)?|PORT(_\w+)?)")
"""What Kubernetes sets in every pod beside a service that is called kvstore."""

_OTHER_WORDS = {
    **dict.fromkeys(("size", "bytes", "memory", "limit", "capacity_bytes"), ("capacity",)),
    **dict.fromkeys(("directory", "path", "folder", "file"), ("dir", "socket")),
    **dict.fromkeys(("address", "addr", "bind", "host", "port"), ("listen",)),
    **dict.fromkeys(("ttl", "timeout"), ("default", "io_timeout", "grace")),
    **dict.fromkeys(("cert", "certificate"), ("tls_cert",)),
    **dict.fromkeys(("key", "private_key"), ("tls_key",)),
    **dict.fromkeys(("token", "tokens"), ("token_file",)),
    "eviction": ("policy",),
    "eviction_policy": ("policy",),
    "verbosity": ("level",),
}
"""Other words for keys; of several the first that a section has counts."""


def variable_meant(variable: str) -> str:
    """The variable of the setting that this one was meant for; "" for what seems to be somebody else's."""
    if _OF_A_SERVICE_LINK.fullmatch(variable) or variable == CONFIG_VARIABLE:
        return ""
    rest = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
    if setting := _by_other_names().get(rest):
        return setting.variable
    section = next((each for each in SECTIONS if rest.startswith(f"{each}_")), None)
    if section is None:
        return nearest(variable, [*BY_VARIABLE, CONFIG_VARIABLE], 0.85)
    if key := _other_word(section, rest.removeprefix(f"{section}_")):
        return BY_NAME[f"{section}.{key}"].variable
    return nearest(variable, [*BY_VARIABLE, CONFIG_VARIABLE], 0.0)


def section_hint(name: str) -> str:
    """What to write for a section that there is not, or for a setting that stands outside of all."""
    if close := nearest(name, list(SECTIONS)):
        return f"did you mean [{close}]?"
    setting = _by_other_names().get(name.lower().replace("-", "_"))
    setting = setting or next((each for each in SETTINGS if each.key == name), None)
    if setting is not None:
        return f"did you mean {setting.name}?"
    return "known are " + ", ".join(f"[{known}]" for known in SECTIONS)


def key_hint(section: str, key: str) -> str:
    """What to write for a key that a section doesn't have."""
    mine = [setting.key for setting in SETTINGS if setting.section == section]
    if close := _other_word(section, key) or nearest(key, mine):
        return f"did you mean {close!r}?"
    if elsewhere := [setting.name for setting in SETTINGS if setting.key == key]:
        return f"did you mean {elsewhere[0]}?"
    return "it has " + ", ".join(mine)


def nearest(word: str, known: list[str], cutoff: float = 0.5) -> str:
    """The most similar of the known words; "" if none is similar enough."""
    return next(iter(difflib.get_close_matches(word, known, n=1, cutoff=cutoff)), "")


def _other_word(section: str, word: str) -> str:
    return next((key for key in _OTHER_WORDS.get(word.lower(), ()) if f"{section}.{key}" in BY_NAME), "")


@cache
def _by_other_names() -> dict[str, Setting]:
    """Settings by the names of their options, fields and places; the first of each section by that of the section."""
    first = {section: next(each for each in SETTINGS if each.section == section) for section in SECTIONS}
    names = {name.replace(".", "_"): setting for setting in SETTINGS for name in (setting.name, setting.field)}
    return first | names | {setting.flag.removeprefix("--").replace("-", "_"): setting for setting in SETTINGS}
