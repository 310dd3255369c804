"""The store inside a program: no daemon process, no socket file.

    with kvstore.open("/data/kv") as store:
        cache = store.open(Namespace("my-model", spec))

The daemon's own code runs on a thread; its clients speak the same frames over a pair of sockets, and read and write
the same shared memory. So everything behaves as with a daemon, but that it ends with the program: what lies in DRAM
only is gone then, and no other process can come to it.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import socket
import weakref
from collections.abc import Iterator
from dataclasses import fields
from numbers import Real
from pathlib import Path
from typing import Any

from kvstore.client import Client
from kvstore.client.session import Session
from kvstore.clock import Clock
from kvstore.config import GIB, DaemonConfig
from kvstore.config.kinds import SECONDS, SIZE, Kind
from kvstore.config.settings import BY_FIELD, SETTINGS
from kvstore.errors import ConfigError, UnavailableError
from kvstore.server.thread import DaemonThread
from kvstore.tiers.nvme.files import Files

TIMEOUT_S = 5.0
"""Longer than a client of a daemon waits: the store gets to work only when the program lets go of Python's lock."""

NVME_BYTES_DEFAULT = 64 * GIB
NVME_SHARE_DEFAULT = 4

_OWN = {"socket_path": "path", "dram_bytes": "dram", "nvme_dir": "path", "nvme_bytes": "nvme"}
"""Settings of the daemon that ``open`` has other names for."""

_NOT_HERE = ("holder_path", "holder_grace_s", "grpc", "metrics", "log", "hbm")
"""Settings that make no sense without a process of its own."""

_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
_ARGUMENTS = {setting.flag: _OWN.get(setting.field, setting.field) for setting in SETTINGS}


class _Inside:
    """The address of an embedded store. While anything keeps it (a client, a namespace), the store goes on."""

    def __init__(self, thread: DaemonThread) -> None:
        self.thread = thread
        self._pid = os.getpid()
        self._ends = weakref.finalize(self, thread.end)
        self._ends.atexit = False  # ``_stop_all`` waits for it
        _insides.add(self)

    def __str__(self) -> str:
        return f"{self.thread.config.nvme_dir or 'memory'} (embedded)"

    @property
    def spins(self) -> bool:
        return False

    def connect(self, timeout_s: float) -> socket.socket:
        """See ``kvstore.client.address.Address``."""
        if os.getpid() != self._pid:
            raise UnavailableError(
                "a forked child can't use the embedded store of its parent: open one of its own there, "
                "or run kvstored for several processes"
            )
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            ours.settimeout(timeout_s)
            self.thread.take(theirs)
        except BaseException:
            ours.close()
            theirs.close()
            raise
        return ours


class Embedded(Client):
    """A store in this process and a client of it; ``close``, or leaving a ``with`` block, ends both.

    Made by ``kvstore.open``. A program that exits without closing gets the same, as long as the disk keeps up.
    """

    def __init__(
        self,
        config: DaemonConfig,
        tenant: str = "default",
        timeout_s: float = TIMEOUT_S,
        *,
        clock: Clock | None = None,
        files: Files | None = None,
    ) -> None:
        """Raises what ``open`` raises. ``clock`` is what leases go by; ``files`` replaces the disk of the NVMe tier."""
        thread = DaemonThread(config, clock, files)
        try:
            self._inside = _Inside(thread)
            self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()  # which outlive clients that are forgotten
            super().__init__(self._inside, tenant, timeout_s)
        except BaseException:
            thread.stop()
            raise

    def client(self, tenant: str | None = None, timeout_s: float | None = None, *, name: str = "") -> Client:
        """One more client of this store, of this or another tenant; closed with the store at the latest.

        Raises UnavailableError once the store is closed.
        """
        tenant = self.tenant if tenant is None else tenant
        return _Guest(self._inside, tenant, self.timeout_s if timeout_s is None else timeout_s, name, self._sessions)

    def close(self) -> None:
        """End all leases and clients, write what waits for the disk, give memory and files back.

        Idempotent. Blocks, for ``drain_s`` and some seconds at most if the disk hangs. Arrays that are still alive
        stay readable, and keep their memory. In a forked child nothing happens to the store.
        """
        for session in list(self._sessions):
            session.close()
        super().close()
        self._inside.thread.stop()


class _Guest(Client):
    """A client whose session is ended by the store."""

    def __init__(
        self, inside: _Inside, tenant: str, timeout_s: float, name: str, sessions: weakref.WeakSet[Session]
    ) -> None:
        super().__init__(inside, tenant, timeout_s, name=name)
        sessions.add(self._session)


def open(  # noqa: A001 - as gzip.open and the like
    path: str | os.PathLike[str] | None = None,
    *,
    dram: str | int = "1GiB",
    nvme: str | int | None = None,
    tenant: str = "default",
    timeout_s: str | float = TIMEOUT_S,
    **settings: Any,
) -> Embedded:
    """A store in this process with ``dram`` bytes of memory and, with a ``path``, an NVMe tier in that directory.

    The directory is made if need be, and its blocks are found again by the next ``open``, or a daemon; it can be
    used by one store at a time. Its capacity ``nvme`` is by default 64 GiB, or a quarter of a smaller file system,
    or what is there already. ``settings`` are further fields of ``kvstore.config.DaemonConfig``. Sizes are bytes or
    text such as ``"16GiB"``, durations numbers or text such as ``"90s"``.

    Blocks for the time it takes to read the catalog there. Raises ConfigError, with the names of arguments, for
    settings that can't work and for a directory that is in use or somebody else's.
    """
    config = config_of(path, dram, nvme, **settings)
    with _named_as_arguments():
        return Embedded(config, tenant, _read("timeout_s", timeout_s, SECONDS))


def config_of(
    path: str | os.PathLike[str] | None, dram: str | int, nvme: str | int | None, **settings: Any
) -> DaemonConfig:
    """The configuration of an embedded store. Raises ConfigError, with the names of arguments."""
    with _named_as_arguments():
        return _config_of(path, dram, nvme, settings)


def _config_of(
    path: str | os.PathLike[str] | None, dram: str | int, nvme: str | int | None, settings: dict[str, Any]
) -> DaemonConfig:
    known = {each.name for each in fields(DaemonConfig)} - _OWN.keys() - set(_NOT_HERE)
    for name in settings:
        if name in _OWN:
            raise ConfigError(f"{name} can't be given to kvstore.open; give {_OWN[name]}", (name,))
        if name in _NOT_HERE:
            raise ConfigError(f"{name} is a setting of kvstored; a store inside a program has no use for it", (name,))
        if name not in known:
            raise ConfigError(f"kvstore.open has no setting {name!r}; known are {', '.join(sorted(known))}", (name,))
    if path is None and nvme is not None:
        raise ConfigError(f"nvme is {nvme!r} but there is no path: name the directory that it is to lie in", ("nvme",))
    # Staying awake would keep Python's lock from whom it waits for.
    given = {"poll_us": 0.0} | {
        name: _read(name, value, BY_FIELD[name].kind) if name in BY_FIELD else value for name, value in settings.items()
    }
    if not isinstance(path, str | os.PathLike | None) or (path is not None and not isinstance(os.fspath(path), str)):
        raise ConfigError(f"path is {path!r:.80}; give the path of a directory, or None for memory only", ("path",))
    nvme_dir = None if path is None else Path(path).absolute()
    nvme_bytes = 0
    if nvme_dir is not None:
        nvme_bytes = _nvme_bytes_default(nvme_dir) if nvme is None else _read("nvme", nvme, SIZE)
        if not nvme_bytes:
            raise ConfigError(f"nvme is {nvme!r}, no room at all: give a size, or leave it out", ("nvme",))
    return DaemonConfig(
        socket_path=None, dram_bytes=_read("dram", dram, SIZE), nvme_dir=nvme_dir, nvme_bytes=nvme_bytes, **given
    )


def _read(name: str, value: Any, kind: Kind) -> Any:
    """An argument's value, which for sizes and durations may be text. Raises ConfigError."""
    try:
        read = kind.read(value)
    except ConfigError:
        read = value
    if kind.type in (int, float) and (isinstance(read, bool | str) or not isinstance(read, Real)):
        raise ConfigError(f"{name} is {value!r:.80}; it must be {kind.expects}", (name,))
    return read


@contextlib.contextmanager
def _named_as_arguments() -> Iterator[None]:
    """Messages name options of ``kvstore serve``; name the arguments instead."""
    try:
        yield
    except ConfigError as error:
        told = _OPTION.sub(lambda found: _ARGUMENTS.get(found[0], found[0]), str(error))
        names = dict.fromkeys(_OWN.get(name, name) for name in error.settings)
        if unnamed := [name for name in names if not re.search(rf"\b{name}\b", told)]:
            told += f" (of kvstore.open: {', '.join(unnamed)})"
        raise type(error)(told, error.settings) from error


def _nvme_bytes_default(directory: Path) -> int:
    """See ``open``; never so little that blocks which are there would have to go."""
    folder = next(each for each in (directory, *directory.parents) if each.exists())
    facts = os.statvfs(folder)
    chosen = min(NVME_BYTES_DEFAULT, facts.f_blocks * facts.f_frsize // NVME_SHARE_DEFAULT)
    present = 0
    with contextlib.suppress(OSError):
        present = sum(entry.stat().st_size for entry in os.scandir(directory) if entry.is_file())
    return max(chosen, present + present // 16)


_insides: weakref.WeakSet[_Inside] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    threads = [inside.thread for inside in _insides]
    for thread in threads:
        thread.end()
    for thread in threads:
        thread.stop()
