"""The settings as text: an example file, a reference in Markdown, and what is in force with where it came from."""

from __future__ import annotations

from typing import Any

from kvstore.config.daemon import DaemonConfig
from kvstore.config.kinds import NONE, SIZE
from kvstore.config.layers import Layered, Origin
from kvstore.config.settings import SECTIONS, SETTINGS

_FILE_HEADER = """\
# Settings of kvstored. Every line that begins with "# " and a name shows a default: take the "# " away to change it.
# Sizes: bytes, or with a unit as in "64KiB", "1.5GiB", "2GB". Durations: seconds, or with a unit as in "250ms", "5m".
# "none" takes back a path or an address that would be set otherwise. A relative path counts from this file's folder.
"""


def example_toml() -> str:
    """A complete file in which every setting stands with its default, commented out."""
    lines = [_FILE_HEADER]
    for section, title in SECTIONS.items():
        lines.append(f"[{section}]\n# {title}\n")
        for setting in SETTINGS:
            if setting.section == section:
                unset = f" Default: {setting.unset}." if setting.unset else ""
                lines.append(f"## {setting.help}{unset}\n## {setting.flag}, ${setting.variable}")
                lines.append(f"# {setting.key} = {setting.kind.write(setting.default)}\n")
    return "\n".join(lines)


def reference_markdown() -> str:
    """A table of every setting, for docs/OPERATIONS.md."""
    rows = [
        f"| `{setting.name}` | `{setting.flag}` | {_cell(setting.default_words)} | {_cell(setting.help)} |"
        for setting in SETTINGS
    ]
    return "\n".join(["| in a file | option | default | what it is |", "|---|---|---|---|", *rows])


def in_force(layered: Layered) -> list[dict[str, Any]]:
    """Every setting as it is in force, JSON-able.

    ``written`` is as in a file; ``effective`` says what a value that stands for another one comes to.
    """
    return [
        {
            "name": origin.setting.name,
            "value": _plain(origin.value),
            "written": origin.setting.kind.write(origin.value).strip('"'),
            "effective": _effective(origin, layered.config),
            "layer": origin.layer,
            "from": origin.where,
        }
        for origin in layered.origins
    ]


def _effective(origin: Origin, config: DaemonConfig) -> str:
    setting = origin.setting
    written = setting.kind.write(origin.value).strip('"')
    if origin.value or setting.field not in ("region_bytes", "nvme_bytes", "write_behind_bytes", "log.slow_s"):
        return written
    if setting.field == "region_bytes":
        return _size_and_words(config.region_bytes_effective, setting.unset)
    if setting.field == "write_behind_bytes" and config.nvme_dir is not None:
        return _size_and_words(config.write_behind_bytes_effective, setting.unset)
    return NONE


def _size_and_words(size_bytes: int, words: str) -> str:
    written = SIZE.write(size_bytes).strip('"')
    return f"{written} ({words})"


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
