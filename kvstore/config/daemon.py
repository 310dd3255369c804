"""``DaemonConfig``: everything ``kvstored`` can be told, and the rules that its values obey."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from pathlib import Path

from kvstore.config.apart import check_apart
from kvstore.config.checked import check_types
from kvstore.config.hbm import HbmOptions
from kvstore.config.listeners import GrpcOptions, MetricsOptions
from kvstore.config.logs import LogOptions
from kvstore.config.paths import check_socket_path
from kvstore.config.pins import PinOptions
from kvstore.config.tenants import TenantOptions
from kvstore.config.units import GIB, MIB, PAGE_BYTES, format_size
from kvstore.errors import ConfigError

DEFAULT_POLICY = "hazard"
WRITE_POLICIES = ("through", "back", "selective")
RECOVERY_MODES = ("none", "normal", "strict")
POLICY_CLOCKS = ("system", "client")
GENERATED_TOKENS = ("store", "skip")
NUMA_WORDS = ("auto", "off")
ISOLATIONS = ("client", "tenant")
NUMA_NODES_MAX = 1024
EXPLAIN_HISTORY_BLOCKS_MAX = 1 << 20
"""To look through more would keep other requests waiting."""

_NVME_ONLY = {
    "nvme_policy": "--nvme-policy",
    "write_policy": "--write-policy",
    "selective_hits": "--selective-hits",
    "recovery": "--recovery",
    "write_behind_bytes": "--write-behind",
    "io_timeout_s": "--io-timeout",
    "drain_s": "--drain",
}
"""Settings that mean nothing without an NVMe tier, and their options."""


@dataclass(frozen=True, slots=True)
class DaemonConfig:
    """Everything ``kvstored`` can be told. Raises ConfigError for values that can't work.

    Without a ``socket_path`` (None) nothing listens: clients are those of this process, which are handed in.
    ``policy_clock`` is ``"system"``, or ``"client"`` to let requests carry the time that policies see
    (replays of traces). ``poll_us`` is how long the daemon stays awake between the requests of a burst.
    ``generated_tokens`` is ``"store"``, or ``"skip"`` to store no block that holds one, whoever asks for it.
    ``explain_history_blocks`` is how many blocks that left are remembered, with the reason: 31 bytes each, 0 = none.

    ``numa_node`` is the node that DRAM is taken from, in digits; ``"auto"``: that near all GPUs, ``"off"``: any.
    ``isolation`` says who can't write what others stored: any other ``"client"``, as the kernel keeps memory sealed, or
    only those of another ``"tenant"``. That is for GPUs that can't register memory which is mapped read-only.

    With ``nvme_dir`` there is an NVMe tier of ``nvme_bytes`` there, evicted from by ``nvme_policy`` ("": as DRAM is, by
    ``policy``). ``write_policy`` says when a block is
    written to it: with its commit (``"through"``), when DRAM needs its room (``"back"``), or with its access
    number ``selective_hits`` (``"selective"``); at most ``write_behind_bytes`` wait for that, 0 = a size that
    fits the DRAM tier. An I/O that is not done after ``io_timeout_s`` counts as failed for those who wait.
    ``drain_s`` is how long a daemon that is stopped goes on writing what waits. Without ``nvme_dir`` all of these
    stay at their defaults.

    With ``holder_path`` the memory is kept by a process behind that socket when the daemon ends, for
    ``holder_grace_s``; the next daemon takes it over.

    ``grpc``, ``metrics``, ``log``, ``tenants``, ``pins`` and ``hbm`` are options of their own. The ConfigError of a
    value names the fields that it comes from in ``settings``, those of ``grpc`` and the like as ``grpc.listen``.
    """

    socket_path: Path | None
    dram_bytes: int = 1 * GIB
    region_bytes: int = 0
    prefault: bool = True
    numa_node: str = "auto"
    isolation: str = "client"
    policy: str = DEFAULT_POLICY
    policy_clock: str = "system"
    lease_s_default: float = 30.0
    lease_s_max: float = 600.0
    heartbeat_s: float = 10.0
    hello_s: float = 5.0
    max_clients: int = 1024
    poll_us: float = 200.0
    generated_tokens: str = "store"
    explain_history_blocks: int = 1 << 18
    nvme_dir: Path | None = None
    nvme_bytes: int = 0
    nvme_policy: str = ""
    write_policy: str = "through"
    selective_hits: int = 2
    recovery: str = "normal"
    write_behind_bytes: int = 0
    io_timeout_s: float = 10.0
    drain_s: float = 5.0
    holder_path: Path | None = None
    holder_grace_s: float = 60.0
    grpc: GrpcOptions = field(default_factory=GrpcOptions)
    metrics: MetricsOptions = field(default_factory=MetricsOptions)
    log: LogOptions = field(default_factory=LogOptions)
    tenants: TenantOptions = field(default_factory=TenantOptions)
    pins: PinOptions = field(default_factory=PinOptions)
    hbm: HbmOptions = field(default_factory=HbmOptions)

    def __post_init__(self) -> None:
        check_types(self)
        if self.socket_path is not None:
            check_socket_path(self.socket_path, "socket_path")
        self._check_dram()
        self._check_numa()
        if self.isolation not in ISOLATIONS:
            raise ConfigError(f"--isolation is {self.isolation!r}; known are {', '.join(ISOLATIONS)}", ("isolation",))
        if self.generated_tokens not in GENERATED_TOKENS:
            raise ConfigError(
                f"--generated-tokens is {self.generated_tokens!r}; known are {', '.join(GENERATED_TOKENS)}",
                ("generated_tokens",),
            )
        if self.policy_clock not in POLICY_CLOCKS:
            raise ConfigError(
                f"--policy-clock is {self.policy_clock!r}; known are {', '.join(POLICY_CLOCKS)}", ("policy_clock",)
            )
        for name, option in (
            ("lease_s_default", "--lease-default"),
            ("lease_s_max", "--lease-max"),
            ("heartbeat_s", "--heartbeat"),
            ("hello_s", "--hello-timeout"),
        ):
            value = getattr(self, name)
            if not 0.01 <= value <= 86400:
                raise ConfigError(f"{option} is {value!r}; it must be from 0.01 to 86400 seconds", (name,))
        if self.lease_s_default > self.lease_s_max:
            raise ConfigError(
                f"--lease-default {self.lease_s_default} is above --lease-max {self.lease_s_max}",
                ("lease_s_default", "lease_s_max"),
            )
        if not 0 <= self.poll_us <= 10_000:
            raise ConfigError(
                f"--poll-us is {self.poll_us!r}; it must be from 0 (never) to 10000 microseconds", ("poll_us",)
            )
        if not 1 <= self.max_clients <= 65536:
            raise ConfigError(f"--max-clients is {self.max_clients}; it must be from 1 to 65536", ("max_clients",))
        if not 0 <= self.explain_history_blocks <= EXPLAIN_HISTORY_BLOCKS_MAX:
            raise ConfigError(
                f"--explain-history-blocks is {self.explain_history_blocks}; it must be from 0 (off) to "
                f"{EXPLAIN_HISTORY_BLOCKS_MAX} blocks",
                ("explain_history_blocks",),
            )
        self._check_nvme()
        self.tenants.check_fits(self.dram_bytes, self.nvme_bytes)
        self.pins.check_fits(self.dram_bytes)
        self._check_holder()
        if self.hbm.device and self.socket_path is None:
            raise ConfigError(
                "--hbm-device serves other processes only, and without --socket there are none: leave it out",
                ("hbm.device", "socket_path"),
            )
        check_apart(self.socket_path, self.holder_path, self.grpc, self.metrics)

    def _check_dram(self) -> None:
        if self.dram_bytes < MIB:
            raise ConfigError(
                f"a DRAM tier of {self.dram_bytes} bytes is too small: give --dram at least 1MiB", ("dram_bytes",)
            )
        physical_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if self.dram_bytes > physical_bytes:
            raise ConfigError(
                f"a DRAM tier of {format_size(self.dram_bytes)} "
                f"does not fit this machine's {format_size(physical_bytes)}: lower --dram",
                ("dram_bytes",),
            )
        if self.hbm.is_simulated and self.dram_bytes + self.hbm.capacity_bytes > physical_bytes:
            raise ConfigError(
                f"a simulated device is made of this machine's memory, and {format_size(self.hbm.capacity_bytes)} of "
                f"it beside {format_size(self.dram_bytes)} DRAM don't fit {format_size(physical_bytes)}: lower --hbm",
                ("hbm.capacity_bytes", "dram_bytes"),
            )
        if self.region_bytes and not MIB <= self.region_bytes <= 4 * GIB:
            raise ConfigError(
                f"--region-bytes is {self.region_bytes}; give 1MiB to 4GiB, or 0 for a size that fits the tier",
                ("region_bytes",),
            )
        if self.region_bytes > self.dram_bytes:
            raise ConfigError(
                f"--region-bytes is {self.region_bytes}, more than the tier's {self.dram_bytes}: lower it",
                ("region_bytes", "dram_bytes"),
            )

    def _check_numa(self) -> None:
        number = self.numa_node
        if number not in NUMA_WORDS and not (number.isascii() and number.isdecimal() and int(number) < NUMA_NODES_MAX):
            raise ConfigError(
                f"--numa-node is {number!r:.40}; give {', '.join(NUMA_WORDS)} or a node from 0 to {NUMA_NODES_MAX - 1}",
                ("numa_node",),
            )

    def _check_holder(self) -> None:
        if self.holder_path is not None:
            check_socket_path(self.holder_path.absolute(), "holder_path")
            if self.socket_path is None:
                raise ConfigError(
                    "--holder keeps memory for the next daemon behind the same --socket: there is none, leave it out",
                    ("holder_path", "socket_path"),
                )
        if not 0 < self.holder_grace_s <= 86400:
            raise ConfigError(
                f"--holder-grace is {self.holder_grace_s!r}; it must be more than 0 and at most 86400 seconds",
                ("holder_grace_s",),
            )

    def _check_nvme(self) -> None:
        if (self.nvme_dir is None) != (self.nvme_bytes == 0):
            raise ConfigError(
                "an NVMe tier needs both a directory and a capacity: give --nvme-dir and --nvme",
                ("nvme_dir", "nvme_bytes"),
            )
        if self.nvme_dir == Path():
            raise ConfigError("--nvme-dir is empty or '.': give it a directory of its own", ("nvme_dir",))
        if self.nvme_dir is not None and "\0" in str(self.nvme_dir):
            raise ConfigError(
                f"--nvme-dir {str(self.nvme_dir)!r} names no directory: give it a path of its own", ("nvme_dir",)
            )
        if self.nvme_bytes and self.nvme_bytes < MIB:
            raise ConfigError(
                f"an NVMe tier of {self.nvme_bytes} bytes is too small: give --nvme at least 1MiB", ("nvme_bytes",)
            )
        for name, known in (("write_policy", WRITE_POLICIES), ("recovery", RECOVERY_MODES)):
            value = getattr(self, name)
            if value not in known:
                raise ConfigError(f"{_NVME_ONLY[name]} is {value!r}; known are {', '.join(known)}", (name,))
        if not 1 <= self.selective_hits <= 255:
            raise ConfigError(
                f"--selective-hits is {self.selective_hits}; it must be from 1 to 255 accesses", ("selective_hits",)
            )
        if not 0 <= self.write_behind_bytes <= self.dram_bytes:
            raise ConfigError(
                f"--write-behind is {format_size(self.write_behind_bytes)}; what waits to be written lies in DRAM: "
                f"give 0 to the {format_size(self.dram_bytes)} of --dram",
                ("write_behind_bytes", "dram_bytes"),
            )
        if not 0.01 <= self.io_timeout_s <= 86400:
            raise ConfigError(
                f"--io-timeout is {self.io_timeout_s!r}; it must be from 0.01 to 86400 seconds", ("io_timeout_s",)
            )
        if not 0 <= self.drain_s <= 3600:
            raise ConfigError(f"--drain is {self.drain_s!r}; it must be from 0 to 3600 seconds", ("drain_s",))
        self._check_effect()

    def _check_effect(self) -> None:
        """What would be without effect is a mistake of whoever asked for it."""
        given = {each.name for each in fields(self) if getattr(self, each.name) != each.default}
        if self.nvme_dir is None and (idle := [name for name in _NVME_ONLY if name in given]):
            raise ConfigError(
                f"{_NVME_ONLY[idle[0]]} needs --nvme-dir and --nvme: without an NVMe tier it has no effect", (idle[0],)
            )
        if "selective_hits" in given and self.write_policy != "selective":
            raise ConfigError(
                f"--selective-hits needs --write-policy selective: with {self.write_policy} it has no effect",
                ("selective_hits", "write_policy"),
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
