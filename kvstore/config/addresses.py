"""Addresses that the daemon can listen on."""

from __future__ import annotations

import ipaddress

from kvstore.errors import ConfigError

UNIX_PREFIX = "unix:"


def split_tcp(listen: str, option: str, *settings: str) -> tuple[str, int]:
    """Host and port of ``host:port`` or ``[v6]:port``; port 0 lets the kernel choose. Raises ConfigError."""
    host, colon, port = listen.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    name = host[1:-1] if bracketed else host
    well_formed = colon and name and (bracketed or ":" not in name) and port.isascii() and port.isdigit()
    if not well_formed or int(port) > 65535 or any(each.isspace() for each in name):
        raise ConfigError(
            f"{option} is {listen!r:.120}; give host:port, for example 127.0.0.1:9090 or [::1]:9090", settings
        )
    return name, int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens there. A name other than localhost may resolve to anything."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
