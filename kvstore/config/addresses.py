"""Addresses that the daemon can listen on."""

from __future__ import annotations

import ipaddress

from kvstore.errors import ConfigError

UNIX_PREFIX = "unix:"
IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


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


def share_an_address(one: str, other: str) -> bool:
    """Whether two hosts have an address in common to listen on, as far as that is seen without looking names up."""
    if one.lower() == other.lower():
        return True
    pairs = [(mine, theirs) for mine in _addresses(one) for theirs in _addresses(other)]
    return any(mine == theirs or _includes(mine, theirs) or _includes(theirs, mine) for mine, theirs in pairs)


def _includes(every: IPAddress, single: IPAddress) -> bool:
    """Whether the first stands for all addresses, the other among them; that of IPv6 stands for those of IPv4 too."""
    return every.is_unspecified and every.version in (6, single.version)


def _addresses(host: str) -> tuple[IPAddress, ...]:
    if host.lower() == "localhost":
        return ipaddress.IPv4Address("127.0.0.1"), ipaddress.IPv6Address("::1")
    try:
        return (ipaddress.ip_address(host),)
    except ValueError:
        return ()
