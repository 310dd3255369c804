"""Settings of the daemon: their units, their limits, and where they come from.

What everything takes is ``DaemonConfig``, a value that can't be wrong. Where its values come from (a file, the
environment, flags) is the business of ``settings`` and ``layers``; only commands import the latter.
"""

from kvstore.config.daemon import DEFAULT_POLICY, RECOVERY_MODES, WRITE_POLICIES, DaemonConfig
from kvstore.config.hbm import HbmOptions
from kvstore.config.listeners import GrpcOptions, MetricsOptions
from kvstore.config.logs import LogOptions
from kvstore.config.paths import UNIX_PATH_BYTES_MAX, check_socket_path, default_address, default_socket_path
from kvstore.config.pins import PinOptions
from kvstore.config.tenants import TenantOptions
from kvstore.config.units import GIB, MIB, PAGE_BYTES, format_size, parse_size

__all__ = [
    "DEFAULT_POLICY",
    "GIB",
    "MIB",
    "PAGE_BYTES",
    "RECOVERY_MODES",
    "UNIX_PATH_BYTES_MAX",
    "WRITE_POLICIES",
    "DaemonConfig",
    "GrpcOptions",
    "HbmOptions",
    "LogOptions",
    "MetricsOptions",
    "PinOptions",
    "TenantOptions",
    "check_socket_path",
    "default_address",
    "default_socket_path",
    "format_size",
    "parse_size",
]
