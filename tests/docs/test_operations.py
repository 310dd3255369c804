"""docs/OPERATIONS.md names every number that a daemon gives."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kvstore
from kvstore.cli.status import hit_ratios
from kvstore.client import Client
from kvstore.config import MIB, HbmOptions

ROOT = Path(__file__).parents[2]
PACKAGE = Path(kvstore.__file__).parent
RAISED = re.compile(r"""\b_?(?:counters\.)?add\(\s*"([a-z_]+)"[,)]""")


def documented() -> set[str]:
    table = (ROOT / "docs" / "OPERATIONS.md").read_text().partition("## Numbers")[2]
    lines = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    return {name for line in lines for name in re.findall(r"`([a-z_]+)`", line)}


def raised() -> set[str]:
    """Counters by the places that raise them: many are absent from a daemon that has seen no trouble."""
    names = set()
    folders = ("", "store", "server", "server/grpc", "tiers/nvme")
    for path in (path for folder in folders for path in (PACKAGE / folder).glob("*.py")):
        prefix = "nvme_" if path.parent.name == "nvme" else ""
        names |= {prefix + name for name in RAISED.findall(path.read_text())}
    return names


def test_every_number_is_explained_and_none_that_does_not_exist(
    start_daemon: Callable[..., Any], nvme: dict[str, Any]
) -> None:
    daemon = start_daemon(**nvme, hbm=HbmOptions("simulated", MIB))
    with Client(daemon.config.socket_path, timeout_s=5.0) as client:
        given = set(client.stats())
    ratios = set(hit_ratios({"lookup_blocks": 1.0, "nvme_health": "ok", "hbm_device": "any"}))
    known = given | raised() | ratios
    assert {"lookup_blocks", "offload_skipped_blocks", "nvme_moved_frames"} <= known
    assert documented() == known
