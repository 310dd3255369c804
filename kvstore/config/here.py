"""What settings need of this machine, as far as that can be seen without serving: places and files that are there."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from kvstore.config.daemon import DaemonConfig
from kvstore.config.units import format_size
from kvstore.errors import ConfigError
from kvstore.native import numa


def check_here(config: DaemonConfig) -> None:
    """Raises ConfigError for an NVMe tier without a place, a NUMA node, certificates and tokens that are not there."""
    check_numa_node(config.numa_node)
    if config.nvme_dir is not None:
        check_nvme_place(config.nvme_dir, config.nvme_bytes)
    for option, field, path in (
        ("--grpc-tls-cert", "grpc.tls_cert", config.grpc.tls_cert),
        ("--grpc-tls-key", "grpc.tls_key", config.grpc.tls_key),
        ("--grpc-client-ca", "grpc.client_ca", config.grpc.client_ca),
        ("--grpc-token-file", "grpc.token_file", config.grpc.token_file),
    ):
        if path is not None:
            _check_file(path, option, field)


def check_numa_node(numa_node: str) -> None:
    """Raises ConfigError if the machine has nodes, and this one is none of them."""
    nodes = numa.nodes()
    if nodes and numa_node.isdecimal() and int(numa_node) not in nodes:
        raise ConfigError(
            f"--numa-node is {numa_node}; this machine has {', '.join(map(str, nodes))}, or give auto or off",
            ("numa_node",),
        )


def check_nvme_place(directory: Path, capacity_bytes: int) -> None:
    """Raises ConfigError if there is nowhere to make the directory, or no disk of this size below it."""
    folder = directory
    try:
        if not directory.exists():
            # One level is made; a longer path that is missing is more likely a mistake than a wish.
            folder = directory.parent
        if not stat.S_ISDIR(folder.stat().st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        facts = os.statvfs(folder)
    except OSError as error:
        raise ConfigError(
            f"{folder} can't be used for --nvme-dir: {error.strerror}; make it, or name another", ("nvme_dir",)
        ) from error
    disk_bytes = facts.f_blocks * facts.f_frsize
    if capacity_bytes > disk_bytes:
        raise ConfigError(
            f"an NVMe tier of {format_size(capacity_bytes)} does not fit the {format_size(disk_bytes)} "
            f"of the file system of {folder}: lower --nvme or name another --nvme-dir",
            ("nvme_bytes", "nvme_dir"),
        )


def _check_file(path: Path, option: str, field: str) -> None:
    try:
        why = "" if stat.S_ISREG(path.stat().st_mode) else "it is no file"
    except OSError as error:
        why = str(error.strerror)
    if why:
        raise ConfigError(f"{option} {str(path)!r:.200} can't be used: {why}; give the path of a file", (field,))
