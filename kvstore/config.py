"""Settings of the daemon, their units and their limits."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, fields
from fractions import Fraction
from pathlib import Path

from kvstore.errors import ConfigError

PAGE_BYTES = 4096
MIB = 1 << 20
GIB = 1 << 30

_UNITS = {
    "": 1, "b": 1,
    "k": 1 << 10, "kib": 1 << 10, "kb": 1000,
    "m": 1 << 20, "mib": 1 << 20, "mb": 1000**2,
    "g": 1 << 30, "gib": 1 << 30, "gb": 1000**3,
    "t": 1 << 40, "tib": 1 << 40, "tb": 1000**4,
}  # fmt: skip
_SIZE = re.compile(r"\s*([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([a-z]*)\s*", re.IGNORECASE)

WRITE_POLICIES = ("through", "back", "selective")
RECOVERY_MODES = ("none", "normal", "strict")

_NVME_ONLY = {
    "write_policy": "--write-policy",
    "selective_hits": "--selective-hits",
    "recovery": "--recovery",
    "write_behind_bytes": "--write-behind",
    "io_timeout_s": "--io-timeout",
    "drain_s": "--drain",
}
"""Settings that mean nothing without an NVMe tier, and their options."""

UNIX_PATH_BYTES_MAX = 107
"""Longest path of a Unix socket on Linux, without its final zero byte."""


def parse_size(text: str | int) -> int:
    """Bytes of a size such as ``64KiB``, ``1.5GiB``, ``2GB`` or ``4096``; raises ConfigError."""
    match = _SIZE.fullmatch(str(text))
    unit = match and match[2].lower()
    if match is None or unit not in _UNITS:
        raise ConfigError(f"{text!r:.80} is not a size; write for example 4096, 64KiB, 1.5GiB or 2GB")
    return int(Fraction(match[1]) * _UNITS[unit])


def format_size(size_bytes: float) -> str:
    """A size for people, in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size_bytes) < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"


def default_socket_path() -> Path:
    """``$KVSTORE_SOCKET``, else a path in the user's own run-time directory."""
    named = os.environ.get("KVSTORE_SOCKET")
    if named:
        return Path(named)
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    base = Path(runtime) / "kvstore" if runtime else Path(f"/tmp/kvstore-{os.getuid()}")  # noqa: S108 - made 0700, owner checked
    return base / "kvstored.sock"


def check_socket_path(path: Path) -> None:
    """Raises ConfigError for a path that no Unix socket can have."""
    if path == Path() or "\0" in str(path):
        raise ConfigError(f"the socket path {str(path)!r} names no file: give --socket a path")
    if len(os.fsencode(path)) > UNIX_PATH_BYTES_MAX:
        raise ConfigError(
            f"the socket path {str(path)!r} is longer than the {UNIX_PATH_BYTES_MAX} bytes Linux allows: "
            "choose a shorter one (--socket, TMPDIR or $KVSTORE_SOCKET)"
        )


@dataclass(frozen=True, slots=True)
class DaemonConfig:
    """Everything ``kvstored`` can be told. Raises ConfigError for values that can't work.

    ``policy_clock`` is ``"system"``, or ``"client"`` to let requests carry the time that policies see
    (replays of traces). ``poll_us`` is how long the daemon stays awake between the requests of a burst.

    With ``nvme_dir`` there is an NVMe tier of ``nvme_bytes`` there. ``write_policy`` says when a block is
    written to it: with its commit (``"through"``), when DRAM needs its room (``"back"``), or with its access
    number ``selective_hits`` (``"selective"``); at most ``write_behind_bytes`` wait for that, 0 = a size that
    fits the DRAM tier. An I/O that is not done after ``io_timeout_s`` counts as failed for those who wait.
    ``drain_s`` is how long a daemon that is stopped goes on writing what waits. Without ``nvme_dir`` all of these
    stay at their defaults.

    With ``holder_path`` the memory is kept by a process behind that socket when the daemon ends, for
    ``holder_grace_s``; the next daemon takes it over.
    """

    socket_path: Path
    dram_bytes: int = 1 * GIB
    region_bytes: int = 0
    prefault: bool = True
    policy: str = "lru"
    policy_clock: str = "system"
    lease_s_default: float = 30.0
    lease_s_max: float = 600.0
    heartbeat_s: float = 10.0
    hello_s: float = 5.0
    max_clients: int = 1024
    poll_us: float = 200.0
    nvme_dir: Path | None = None
    nvme_bytes: int = 0
    write_policy: str = "through"
    selective_hits: int = 2
    recovery: str = "normal"
    write_behind_bytes: int = 0
    io_timeout_s: float = 10.0
    drain_s: float = 5.0
    holder_path: Path | None = None
    holder_grace_s: float = 60.0

    def __post_init__(self) -> None:
        check_socket_path(self.socket_path)
        if self.dram_bytes < MIB:
            raise ConfigError(f"a DRAM tier of {self.dram_bytes} bytes is too small: give --dram at least 1MiB")
        physical_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if self.dram_bytes > physical_bytes:
            raise ConfigError(
                f"a DRAM tier of {format_size(self.dram_bytes)} "
                f"does not fit this machine's {format_size(physical_bytes)}: lower --dram"
            )
        if self.region_bytes and not MIB <= self.region_bytes <= 4 * GIB:
            raise ConfigError(
                f"--region-bytes is {self.region_bytes}; give 1MiB to 4GiB, or 0 for a size that fits the tier"
            )
        if self.region_bytes > self.dram_bytes:
            raise ConfigError(
                f"--region-bytes is {self.region_bytes}, more than the tier's {self.dram_bytes}: lower it"
            )
        if self.policy_clock not in ("system", "client"):
            raise ConfigError(f"policy_clock is {self.policy_clock!r}; known are system, client")
        seconds = (
            ("lease_s_default", "--lease-default"),
            ("lease_s_max", "--lease-max"),
            ("heartbeat_s", "--heartbeat"),
        )
        for name, option in (*seconds, ("hello_s", "hello_s")):
            value = getattr(self, name)
            if not 0.01 <= value <= 86400:
                raise ConfigError(f"{option} is {value!r}; it must be from 0.01 to 86400 seconds")
        if self.lease_s_default > self.lease_s_max:
            raise ConfigError(f"--lease-default {self.lease_s_default} is above --lease-max {self.lease_s_max}")
        if not 0 <= self.poll_us <= 10_000:
            raise ConfigError(f"--poll-us is {self.poll_us!r}; it must be from 0 (never) to 10000 microseconds")
        if not 1 <= self.max_clients <= 65536:
            raise ConfigError(f"--max-clients is {self.max_clients}; it must be from 1 to 65536")
        self._check_nvme()
        self._check_holder()

    def _check_holder(self) -> None:
        if self.holder_path is not None:
            check_socket_path(self.holder_path.absolute())
        if not 0 < self.holder_grace_s <= 86400:
            raise ConfigError(
                f"--holder-grace is {self.holder_grace_s!r}; it must be more than 0 and at most 86400 seconds"
            )

    def _check_nvme(self) -> None:
        if (self.nvme_dir is None) != (self.nvme_bytes == 0):
            raise ConfigError("an NVMe tier needs both a directory and a capacity: give --nvme-dir and --nvme")
        if self.nvme_dir == Path():
            raise ConfigError("--nvme-dir is empty or '.': give it a directory of its own")
        if self.nvme_dir is not None and "\0" in str(self.nvme_dir):
            raise ConfigError(f"--nvme-dir {str(self.nvme_dir)!r} names no directory: give it a path of its own")
        if self.nvme_bytes and self.nvme_bytes < MIB:
            raise ConfigError(f"an NVMe tier of {self.nvme_bytes} bytes is too small: give --nvme at least 1MiB")
        for name, value, known in (
            ("--write-policy", self.write_policy, WRITE_POLICIES),
            ("--recovery", self.recovery, RECOVERY_MODES),
        ):
            if value not in known:
                raise ConfigError(f"{name} is {value!r}; known are {', '.join(known)}")
        if not 1 <= self.selective_hits <= 255:
            raise ConfigError(f"--selective-hits is {self.selective_hits}; it must be from 1 to 255 accesses")
        if not 0 <= self.write_behind_bytes <= self.dram_bytes:
            raise ConfigError(
                f"--write-behind is {format_size(self.write_behind_bytes)}; what waits to be written lies in DRAM: "
                f"give 0 to the {format_size(self.dram_bytes)} of --dram"
            )
        if not 0.01 <= self.io_timeout_s <= 86400:
            raise ConfigError(f"--io-timeout is {self.io_timeout_s!r}; it must be from 0.01 to 86400 seconds")
        if not 0 <= self.drain_s <= 3600:
            raise ConfigError(f"--drain is {self.drain_s!r}; it must be from 0 to 3600 seconds")
        self._check_effect()

    def _check_effect(self) -> None:
        """What would be without effect is a mistake of whoever asked for it."""
        given = {each.name for each in fields(self) if getattr(self, each.name) != each.default}
        if self.nvme_dir is None and (idle := [option for name, option in _NVME_ONLY.items() if name in given]):
            raise ConfigError(f"{idle[0]} needs --nvme-dir and --nvme: without an NVMe tier it has no effect")
        if "selective_hits" in given and self.write_policy != "selective":
            raise ConfigError(
                f"--selective-hits needs --write-policy selective: with {self.write_policy} it has no effect"
            )

    @property
    def write_behind_bytes_effective(self) -> int:
        """Bytes that may wait to be written: as configured, else a quarter of the DRAM tier, 1 GiB at most."""
        return self.write_behind_bytes or min(self.dram_bytes // 4, GIB)

    @property
    def starter_bytes(self) -> int:
        """The size of a client's first region: a sixteenth of the others, so that many small ones fit."""
        return max(64 * PAGE_BYTES, self.region_bytes_effective // 16 // PAGE_BYTES * PAGE_BYTES)

    @property
    def region_bytes_effective(self) -> int:
        """The region size in use: as configured, else 64 MiB or a sixteenth of a small tier."""
        if self.region_bytes:
            return self.region_bytes // PAGE_BYTES * PAGE_BYTES
        # Whole huge pages.
        return max(2 * MIB, min(64 * MIB, self.dram_bytes // 16 // (2 * MIB) * 2 * MIB))
