"""The one table of all settings: what each is called in a file, the environment and on the command line.

Options of commands, the example file and the reference in docs/OPERATIONS.md are made from it. Defaults and rules
are those of the options' own classes.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from typing import Any

from kvstore.config.daemon import (
    GENERATED_TOKENS,
    ISOLATIONS,
    POLICY_CLOCKS,
    RECOVERY_MODES,
    WRITE_POLICIES,
    DaemonConfig,
)
from kvstore.config.kinds import (
    ADDRESS,
    COUNT,
    MICROSECONDS,
    NODE,
    PATH,
    SECONDS,
    SIZE,
    SWITCH,
    TABLE,
    TEXT,
    Kind,
    choice,
)
from kvstore.config.logs import LOG_FORMATS
from kvstore.config.paths import SOCKET_VARIABLE, runtime_socket_path
from kvstore.config.tenants import SHARES

ENVIRONMENT_PREFIX = "KVSTORE_"


def _defaults(options: type[Any], prefix: str = "") -> dict[str, Any]:
    """The defaults of every field, those of nested options by dotted names."""
    found: dict[str, Any] = {}
    for each in fields(options):
        if each.default is not MISSING:
            found[prefix + each.name] = each.default
        elif each.default_factory is not MISSING:
            found |= _defaults(type(each.default_factory()), f"{prefix}{each.name}.")
    return found


_DEFAULTS = _defaults(DaemonConfig)


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting. ``field`` is where it goes in ``DaemonConfig``; ``unset`` says what its default stands for."""

    section: str
    key: str
    field: str
    kind: Kind
    flag: str
    help: str
    unset: str = ""

    @property
    def name(self) -> str:
        """As in a TOML file with dotted keys."""
        return f"{self.section}.{self.key}"

    @property
    def variable(self) -> str:
        """The environment variable. Clients know the socket's by the same short name."""
        if self.field == "socket_path":
            return SOCKET_VARIABLE
        return f"{ENVIRONMENT_PREFIX}{self.section}_{self.key}".upper()

    @property
    def default(self) -> Any:
        """The value in force if nobody says anything."""
        return runtime_socket_path() if self.field == "socket_path" else _DEFAULTS[self.field]

    @property
    def default_words(self) -> str:
        """The same for people."""
        return self.unset or self.kind.write(self.default).strip('"')


SECTIONS: dict[str, str] = {
    "daemon": "The daemon and its clients.",
    "dram": "The tier in host memory.",
    "hbm": "Copies in the memory of a GPU, above that tier; there are some if it has a device and a capacity.",
    "nvme": "The tier below it; there is one if it has a directory and a capacity.",
    "leases": "How long leases and reservations live.",
    "tenants": "Who gets how much of the tiers, where several tenants share them.",
    "pins": "How much pins may hold, and how long.",
    "holder": "A process that keeps DRAM for a daemon started again.",
    "grpc": "A gRPC server for clients of other machines and languages.",
    "metrics": "An HTTP server for /metrics, /health and /ready.",
    "log": "What goes to standard error.",
}

SETTINGS: tuple[Setting, ...] = (
    Setting("daemon", "socket", "socket_path", PATH, "--socket", "Unix socket of the daemon.",
            "in the user's run-time directory"),
    Setting("daemon", "policy", "policy", TEXT, "--policy", "Eviction policy."),
    Setting("daemon", "policy_clock", "policy_clock", choice(POLICY_CLOCKS), "--policy-clock",
            "Where policies take the time from; client = the times that requests carry (trace replays)."),
    Setting("daemon", "max_clients", "max_clients", COUNT, "--max-clients",
            "Most clients at a time on the Unix socket, and as many over gRPC."),
    Setting("daemon", "heartbeat", "heartbeat_s", SECONDS, "--heartbeat",
            "Clients must be heard of this often; three in a row may be missed."),
    Setting("daemon", "hello_timeout", "hello_s", SECONDS, "--hello-timeout",
            "A connection that has not said who it is by then is closed."),
    Setting("daemon", "poll", "poll_us", MICROSECONDS, "--poll-us",
            "Stay awake so long between the requests of a burst; 0 = sleep at once. A bare number is in microseconds."),
    Setting("daemon", "generated_tokens", "generated_tokens", choice(GENERATED_TOKENS), "--generated-tokens",
            "Blocks that hold tokens said to be generated: store them, or never."),
    Setting("daemon", "explain_history_blocks", "explain_history_blocks", COUNT, "--explain-history-blocks",
            "Remember why so many blocks that left are gone, for `kvstore explain`: 31 bytes each; 0 = none."),
    Setting("dram", "capacity", "dram_bytes", SIZE, "--dram", "Capacity of the DRAM tier."),
    Setting("dram", "region", "region_bytes", SIZE, "--region-bytes", "Size of a shared memory region.",
            "fits the tier"),
    Setting("dram", "prefault", "prefault", SWITCH, "--prefault", "Fill the tier's pages ahead of use."),
    Setting("dram", "numa_node", "numa_node", NODE, "--numa-node",
            "NUMA node to take the tier's memory from, if there are several; auto = near the GPUs, off = any."),
    Setting("dram", "isolation", "isolation", choice(ISOLATIONS), "--isolation",
            "Whose blocks a client can't write: those of any other client, or of other tenants only, for some GPUs."),
    Setting("hbm", "device", "hbm.device", TEXT, "--hbm-device",
            "Device of an HBM tier: cuda:0, or simulated, in ordinary memory.", "none"),
    Setting("hbm", "capacity", "hbm.capacity_bytes", SIZE, "--hbm", "Capacity of the HBM tier.", "none"),
    Setting("hbm", "promote_hits", "hbm.promote_hits", COUNT, "--hbm-promote-hits",
            "At which access by a client that reads HBM a block gets a copy there."),
    Setting("nvme", "dir", "nvme_dir", PATH, "--nvme-dir",
            "Directory of an NVMe tier of its own; made if missing. What is in it is found again after a restart."),
    Setting("nvme", "capacity", "nvme_bytes", SIZE, "--nvme", "Capacity of the NVMe tier, e.g. 500GiB.", "none"),
    Setting("nvme", "policy", "nvme_policy", TEXT, "--nvme-policy", "Eviction policy of the NVMe tier.",
            "that of DRAM"),
    Setting("nvme", "write_policy", "write_policy", choice(WRITE_POLICIES), "--write-policy",
            "Write blocks to NVMe once they are stored; when DRAM needs their room; or at their n-th access."),
    Setting("nvme", "selective_hits", "selective_hits", COUNT, "--selective-hits",
            "At which access the write policy selective writes."),
    Setting("nvme", "recovery", "recovery", choice(RECOVERY_MODES), "--recovery",
            "At the start: begin empty; trust the catalog; or read and verify every block."),
    Setting("nvme", "write_behind", "write_behind_bytes", SIZE, "--write-behind",
            "So much may wait in DRAM to be written; beyond it writes are skipped and counted.",
            "a quarter of DRAM, at most 1GiB"),
    Setting("nvme", "io_timeout", "io_timeout_s", SECONDS, "--io-timeout",
            "A read or write that takes longer counts as failed for those who wait."),
    Setting("nvme", "drain", "drain_s", SECONDS, "--drain",
            "How long to go on writing what waits when the daemon is stopped."),
    Setting("leases", "default", "lease_s_default", SECONDS, "--lease-default",
            "Life of a lease, if the client asks for none."),
    Setting("leases", "max", "lease_s_max", SECONDS, "--lease-max", "Longest life of a lease."),
    Setting("tenants", "shares", "tenants.shares", choice(SHARES), "--tenant-shares",
            "A tenant that has more than its share of a tier gives up blocks before others do; or the policy decides."),
    Setting("tenants", "weights", "tenants.weights", TABLE, "--tenant-weights",
            "Parts of tenants in a tier, a=2,b=1; * = all others. Of a tenant that is not named 1.", "1 each"),
    Setting("tenants", "dram_min", "tenants.dram_min", TABLE, "--tenant-dram-min",
            "DRAM that a tenant keeps whatever others want, a=4GiB,b=1GiB.", "none"),
    Setting("tenants", "dram_max", "tenants.dram_max", TABLE, "--tenant-dram-max",
            "Most DRAM of a tenant, a=4GiB,*=1GiB.", "none"),
    Setting("tenants", "nvme_min", "tenants.nvme_min", TABLE, "--tenant-nvme-min",
            "NVMe that a tenant keeps whatever others want.", "none"),
    Setting("tenants", "nvme_max", "tenants.nvme_max", TABLE, "--tenant-nvme-max", "Most NVMe of a tenant.", "none"),
    Setting("pins", "dram", "pins.dram_bytes", SIZE, "--pin-dram",
            "So much of DRAM all pins together may hold; 0 = a quarter of it.", "a quarter of DRAM"),
    Setting("pins", "tenant", "pins.tenant_bytes", SIZE, "--pin-tenant",
            "So much of that a tenant may pin; 0 = its share by weight.", "its share by weight"),
    Setting("pins", "default", "pins.default_s", SECONDS, "--pin-default",
            "Life of a pin, if the client asks for none."),
    Setting("pins", "max", "pins.max_s", SECONDS, "--pin-max", "Longest life of a pin."),
    Setting("holder", "socket", "holder_path", PATH, "--holder",
            "Unix socket of a small process, started if there is none, that keeps DRAM for a daemon started again."),
    Setting("holder", "grace", "holder_grace_s", SECONDS, "--holder-grace",
            "How long it keeps that, and lives, without a daemon."),
    Setting("grpc", "listen", "grpc.listen", ADDRESS, "--grpc-listen",
            "Serve gRPC on unix:/path, or on host:port with TLS and tokens."),
    Setting("grpc", "tls_cert", "grpc.tls_cert", PATH, "--grpc-tls-cert", "Certificate chain of the server, PEM."),
    Setting("grpc", "tls_key", "grpc.tls_key", PATH, "--grpc-tls-key", "Its private key, PEM."),
    Setting("grpc", "client_ca", "grpc.client_ca", PATH, "--grpc-client-ca",
            "Clients must have a certificate signed by one of these, PEM."),
    Setting("grpc", "token_file", "grpc.token_file", PATH, "--grpc-token-file",
            "Tokens of clients, one a line, each with the tenant it is bound to if any; readable by its owner only."),
    Setting("grpc", "message_max", "grpc.message_bytes_max", SIZE, "--grpc-message-max", "Largest message."),
    Setting("grpc", "deadline_max", "grpc.deadline_s_max", SECONDS, "--grpc-deadline-max",
            "Longest a call may take, also one without a deadline of its own."),
    Setting("grpc", "calls_max", "grpc.calls_max", COUNT, "--grpc-calls-max", "Most calls at a time."),
    Setting("grpc", "calls_per_token", "grpc.calls_per_token", COUNT, "--grpc-calls-per-token",
            "Most calls at a time with one token; 0 = half of all.", "half of calls_max"),
    Setting("metrics", "listen", "metrics.listen", ADDRESS, "--metrics-listen",
            "Serve /metrics, /health and /ready over HTTP on host:port."),
    Setting("metrics", "allow_remote", "metrics.allow_remote", SWITCH, "--metrics-allow-remote",
            "Let it be an address that other machines reach, without TLS or a token."),
    Setting("metrics", "stall", "metrics.stall_s", SECONDS, "--metrics-stall",
            "The daemon is unhealthy if its loop was not seen for so long."),
    Setting("log", "level", "log.level", TEXT, "--log-level",
            "debug, info, warning or error; single loggers after a comma: info,kvstore.nvme=debug."),
    Setting("log", "format", "log.format", choice(LOG_FORMATS), "--log-format",
            "Lines for people, or a JSON object a line."),
    Setting("log", "slow", "log.slow_s", SECONDS, "--log-slow",
            "Log requests that take longer, waiting for blocks or room included; 0 = none."),
    Setting("log", "repeats", "log.repeats_max", COUNT, "--log-repeats",
            "So many messages of a kind are logged in a while; the others are counted."),
    Setting("log", "repeats_window", "log.repeats_s", SECONDS, "--log-repeats-window", "How long that while is."),
)  # fmt: skip

BY_NAME = {setting.name: setting for setting in SETTINGS}
BY_FIELD = {setting.field: setting for setting in SETTINGS}
BY_VARIABLE = {setting.variable: setting for setting in SETTINGS}
