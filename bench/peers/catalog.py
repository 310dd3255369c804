"""Which systems there are to measure, and what each needs. Everything that is particular to one is in ``systems/``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from kvstore.bench.peers.driver import OPERATIONS
from kvstore.bench.peers.environments import Debian, Environment
from kvstore.errors import BadInputError

Tier = Literal["dram", "disk"]
Role = Literal["own", "peer", "limit"]


@dataclass(frozen=True, slots=True)
class Shape:
    """What is moved at one block size. ``kept`` batches can be asked for at a time."""

    block_bytes: int
    n_blocks: int
    kept: int

    @property
    def batch_bytes(self) -> int:
        """What one operation moves."""
        return self.block_bytes * self.n_blocks

    @property
    def batches(self) -> int:
        """Room for so many in a store that evicts by itself: one that was read is the most recent again, and so stays
        for as many turns as one that was stored."""
        return 2 * self.kept + 2

    @property
    def dram_bytes(self) -> int:
        """Memory for such a store."""
        return self.batches * self.batch_bytes


@dataclass(frozen=True, slots=True)
class Entry:
    """One system as it is measured.

    ``reference``: the way of this store that peers of the tier are compared with. ``daemon``: arguments of a daemon
    that is started for it. ``options``: for its module.
    """

    name: str
    title: str
    tier: Tier
    role: Role
    module: str
    options: Mapping[str, Any] = field(default_factory=dict)
    environment: Environment | None = None
    """None: this program's own."""
    reference: bool = False
    daemon: Callable[[Shape], list[str]] | None = None
    operations: tuple[str, ...] = OPERATIONS
    by_grpc: bool = False
    on_disk: bool = False
    """Its folder, and its daemon's NVMe tier if it has a daemon, lie on the disk that is measured."""


_REDIS = Environment(
    "redis",
    ("numpy", "redis==8.1.0", "hiredis==3.5.0"),
    debian=(
        Debian("redis-server", "redis-server"),
        Debian("redis-tools", "redis-server"),
        Debian("libjemalloc2", "libjemalloc.so.2"),
        Debian("liblzf1", "liblzf.so.1"),
    ),
)
_MOONCAKE = Environment(
    "mooncake",
    ("numpy", "mooncake-transfer-engine-non-cuda==0.3.13.post1"),
    debian=(
        Debian("libibverbs1", "libibverbs.so.1"),
        Debian("librdmacm1", "librdmacm.so.1"),
        Debian("libnuma1", "libnuma.so.1"),
        Debian("libcurl4", "libcurl.so.4"),
        Debian("libnl-3-200", "libnl-3.so.200"),
        Debian("libnl-route-3-200", "libnl-route-3.so.200"),
    ),
)
_LMCACHE = Environment(
    "lmcache",
    ("torch==2.13.0", "setuptools>=77.0.3,<81"),
    bare=("lmcache==0.5.6",),
    # For GPUs, object stores and tests: several GB that nothing here uses.
    left_out=(
        "torch", "cupy-cuda13x", "cuda-python", "cufile-python", "nvtx", "pytest", "setuptools_scm",
        "google-cloud-bigtable", "google-api-core", "awscrt",
    ),
)  # fmt: skip

# Kept batches: in DRAM more than the processor's caches hold; on disk more than our daemon's DRAM holds.
KEPT: Mapping[Tier, int] = {"dram": 4, "disk": 10}
_DISK_DRAM_BATCHES = 4


def _in_dram(shape: Shape) -> list[str]:
    return ["--dram", str(shape.dram_bytes)]


def _on_disk(shape: Shape) -> list[str]:
    return [
        "--dram",
        str(_DISK_DRAM_BATCHES * shape.batch_bytes),
        "--write-behind",
        str(2 * shape.batch_bytes),
        "--drain",
        "0",
    ]


ENTRIES: tuple[Entry, ...] = (
    Entry("copy", "limit: numpy copy; socket echo", "dram", "limit", "memory"),
    Entry("kvstore", "kvstore, Unix socket", "dram", "own", "own", reference=True, daemon=_in_dram),
    Entry("kvstore-embedded", "kvstore, embedded", "dram", "own", "own"),
    Entry("kvstore-grpc", "kvstore, gRPC", "dram", "own", "own", daemon=_in_dram, by_grpc=True),
    Entry("lmcache-process", "LMCache, in process", "dram", "peer", "lmcache_process", environment=_LMCACHE),
    Entry("lmcache-server", "LMCache, server", "dram", "peer", "lmcache_server", environment=_LMCACHE),
    Entry("mooncake-own", "Mooncake, own segment", "dram", "peer", "mooncake_store", {"way": "own"}, _MOONCAKE),
    Entry("mooncake-shm", "Mooncake, shared client", "dram", "peer", "mooncake_store", {"way": "shm"}, _MOONCAKE),
    Entry("redis-raw", "Redis, raw RESP", "dram", "peer", "redis_store", {"way": "raw"}, _REDIS),
    Entry("redis-py", "Redis, redis-py", "dram", "peer", "redis_store", {"way": "redis-py"}, _REDIS),
    Entry("file-cached", "file per block, page cache", "dram", "peer", "files", {"way": "cached"}, on_disk=True),
    Entry("disk", "limit: the disk", "disk", "limit", "disk", operations=("put", "get"), on_disk=True),
    Entry("kvstore-nvme", "kvstore, NVMe", "disk", "own", "own", {"nvme": True}, None, True, _on_disk, on_disk=True),
    Entry("file-durable", "file per block, direct, synced", "disk", "peer", "files", {"way": "durable"}, on_disk=True),
    Entry(
        "file-direct", "file per block, direct, not synced", "disk", "peer", "files", {"way": "direct"}, on_disk=True
    ),
)


def chosen(peers: str | None, tiers: tuple[Tier, ...]) -> tuple[Entry, ...]:
    """The entries of these tiers: all, or limits, this store, and those peers whose names ``peers`` has.

    ``peers``: names separated by commas; a name also stands for all that begin with it and a dash. Raises
    BadInputError for one that stands for nothing.
    """
    entries = [entry for entry in ENTRIES if entry.tier in tiers]
    if peers is None:
        return tuple(entries)
    wanted = [name.strip() for name in peers.split(",") if name.strip()]
    known = {entry.name for entry in ENTRIES if entry.role == "peer"}
    for name in wanted:
        if not any(_stands_for(name, each) for each in known):
            raise BadInputError(f"--peers names {name!r}; known are {', '.join(sorted(known))}")
    return tuple(e for e in entries if e.role != "peer" or any(_stands_for(name, e.name) for name in wanted))


def _stands_for(name: str, entry: str) -> bool:
    return entry == name or entry.startswith(f"{name}-")
