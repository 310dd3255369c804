"""A daemon's connection to its descriptor holder; see ``kvstore/holder.py`` for what is said on it."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from kvstore import holder
from kvstore.config import check_socket_path
from kvstore.errors import ConfigError, UnavailableError

CLAIM_S = 5.0
"""Time for the whole of a claim: starting a holder, and getting what it keeps."""
SEND_S = 0.5
"""A holder that takes nothing for so long is lost."""
_RETRY_S = 0.02
_BUSY, _ENDED = "busy", "it closed the connection"
_PACKET_BYTES = holder.PACKET_BYTES_MAX // 2


class Entry(NamedTuple):
    """One thing kept. ``fd`` is -1 for none."""

    key: str
    text: str
    fd: int = -1

    def close(self) -> None:
        """Close the descriptor, if it has one."""
        if self.fd >= 0:
            os.close(self.fd)


class HolderLink:
    """The claim on a holder. Every method raises UnavailableError when the holder is lost; then close it."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    @classmethod
    def claim(cls, path: Path, owner: str, grace_s: float, *, start: bool) -> tuple[HolderLink, list[Entry]]:
        """Claim the holder at a socket, started if there is none and ``start``; and what it keeps.

        The caller owns the link and the descriptors. Blocks for ``CLAIM_S`` at most. Raises UnavailableError
        if there is no holder that answers as one, ConfigError if it keeps the memory of another daemon.
        """
        check_socket_path(path)
        deadline_s = time.monotonic() + CLAIM_S
        while True:
            sock = _connect(path, grace_s, deadline_s, start)
            entries: list[Entry] = []
            try:
                refused = _claim(sock, owner, deadline_s, entries)
                if refused is None:
                    sock.settimeout(SEND_S)
                    return cls(sock), entries
            except BaseException:
                holder.close_all(entry.fd for entry in entries if entry.fd >= 0)
                sock.close()
                raise
            sock.close()
            if refused not in (_BUSY, _ENDED) or time.monotonic() + _RETRY_S > deadline_s:
                raise _refusal(path, refused)
            time.sleep(_RETRY_S)  # the end of the daemon before may not have reached it; or it is ending itself

    def put(self, generation: str, entries: Iterable[Entry]) -> None:
        """Keep these too; descriptors stay the caller's. They are safe once this returns."""
        part: list[Entry] = []
        n_bytes = n_fds = 0
        for entry in entries:
            more_bytes, more_fds = len(entry.key) + 2 * len(entry.text) + 32, int(entry.fd >= 0)
            if part and (n_bytes + more_bytes > _PACKET_BYTES or n_fds + more_fds > holder.DESCRIPTORS_MAX):
                self._put(generation, part)
                part, n_bytes, n_fds = [], 0, 0
            part.append(entry)
            n_bytes, n_fds = n_bytes + more_bytes, n_fds + more_fds
        if part:
            self._put(generation, part)

    def drop(self, generation: str, keys: list[str]) -> None:
        """Keep these no longer."""
        for start in range(0, len(keys), 512):
            self._send({"op": "drop", "generation": generation, "keys": keys[start : start + 512]})

    def switch(self, generation: str) -> None:
        """What was put into this generation is what a next daemon gets; nothing else is kept."""
        self._send({"op": "switch", "generation": generation})

    def sync(self, timeout_s: float = CLAIM_S) -> dict[str, int]:
        """Wait until the holder has worked on all that was sent; entries per generation."""
        self._send({"op": "sync"})
        try:
            synced = _receive(self._sock, time.monotonic() + timeout_s)[0]["synced"]
            self._sock.settimeout(SEND_S)
            return {str(name): int(n) for name, n in synced.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UnavailableError(f"the descriptor holder does not answer: {error}") from error

    def end(self) -> None:
        """Tell the holder to drop everything and end."""
        self._send({"op": "end"})

    def close(self) -> None:
        """Let go; the holder keeps what it has for its time of grace. Idempotent."""
        self._sock.close()

    def _put(self, generation: str, entries: list[Entry]) -> None:
        listed = [[key, text, fd >= 0] for key, text, fd in entries]
        fds = [fd for _, _, fd in entries if fd >= 0]
        self._send({"op": "put", "generation": generation, "entries": listed}, fds)

    def _send(self, message: dict[str, Any], fds: list[int] | None = None) -> None:
        try:
            holder.send(self._sock, message, fds)
        except OSError as error:
            raise UnavailableError(f"the descriptor holder takes nothing any more: {error}") from error


def end_holder(path: Path) -> None:
    """Tell the holder at a socket to end, daemon or not. Raises UnavailableError if none answers there."""
    sock = _connect(path, 0.0, time.monotonic() + CLAIM_S, start=False)
    with contextlib.closing(HolderLink(sock)) as link:
        link.end()


def _connect(path: Path, grace_s: float, deadline_s: float, start: bool) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        sock.settimeout(max(deadline_s - time.monotonic(), 0.01))
        try:
            sock.connect(os.fspath(path))
        except (FileNotFoundError, ConnectionRefusedError):
            if not start:
                raise
            _start(path, grace_s, deadline_s)
            sock.connect(os.fspath(path))
        _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid not in (os.getuid(), 0):
            raise PermissionError(f"it belongs to user {uid}")
    except OSError as error:
        sock.close()
        raise UnavailableError(f"no descriptor holder can be used at {path}: {error}") from error
    except BaseException:
        sock.close()
        raise
    return sock


def _start(path: Path, grace_s: float, deadline_s: float) -> None:
    """Run a holder; it listens when this returns."""
    command = [sys.executable, "-I", "-S", holder.__file__, os.fspath(path), "--grace", str(grace_s)]
    try:
        done = subprocess.run(  # noqa: S603 - our own interpreter and script
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=max(deadline_s - time.monotonic(), 0.01),
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise UnavailableError(f"the descriptor holder for {path} does not start in time") from error
    if done.returncode:
        raise UnavailableError(done.stderr.decode(errors="replace").strip() or f"no holder could be started at {path}")


def _claim(sock: socket.socket, owner: str, deadline_s: float, entries: list[Entry]) -> str | None:
    """Appends what the holder keeps; None, or why it refuses. Raises UnavailableError."""
    try:
        holder.send(sock, {"op": "claim", "owner": owner})
        while True:
            message, fds = _receive(sock, deadline_s)
            try:
                if "refused" in message:
                    return str(message.get("owner", message["refused"]))
                if message.get("claimed") == owner:
                    return None
                for key, text, has_fd in message["entries"]:
                    entries.append(Entry(str(key), str(text), fds.pop(0) if has_fd else -1))
            finally:
                holder.close_all(fds)
    except ConnectionError:
        holder.close_all(entry.fd for entry in entries if entry.fd >= 0)
        entries.clear()
        return _ENDED
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise UnavailableError(f"what answers there is no descriptor holder, or not in time: {error}") from error


def _receive(sock: socket.socket, deadline_s: float) -> tuple[dict[str, Any], list[int]]:
    sock.settimeout(max(deadline_s - time.monotonic(), 0.01))
    received = holder.receive(sock)
    if received is None:
        raise ConnectionResetError("it closed the connection")
    return received


def _refusal(path: Path, refused: str) -> ConfigError | UnavailableError:
    if refused == _BUSY:
        return UnavailableError(f"the descriptor holder at {path} serves another daemon now")
    if refused == _ENDED:
        return UnavailableError(f"what listens at {path} is no descriptor holder: it closes every connection")
    return ConfigError(
        f"the descriptor holder at {path} keeps the memory of the daemon at {refused}: choose another --holder"
    )
