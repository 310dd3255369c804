"""The descriptor holder: a small process that keeps a daemon's descriptors while no daemon is there.

    python -I -S holder.py SOCKET [--grace SECONDS] [--foreground]

It knows nothing of what it keeps: entries of a key, a short text and perhaps a descriptor, in generations.
One daemon at a time claims it, gets the entries of the current generation, puts its own into a generation
of its own and then switches to that one, in one step. When the daemon's connection ends the holder waits
for the next one, and ends after ``--grace`` seconds without; so does the memory that nobody maps then.

It listens on a Unix socket of mode 0600 and talks to its own user only. One packet is one message, a JSON
object; descriptors travel with it in the order of the entries that have one:

    claim   owner            -> packets {"entries": [[key, text, has_descriptor], ...]}, then {"claimed": owner};
                                or {"refused": "busy"}, or {"refused": "owner", "owner": the other}
    put     generation, entries       the same key again replaces the entry
    drop    generation, keys
    switch  generation                it is the current one; all others are dropped
    sync                     -> {"synced": {generation: number of entries}}
    end                               drop everything and end

Standard library only, and it imports nothing of this package: started as a script it takes few megabytes
and outlives any upgrade of what is around it. (systemd's descriptor store can take its place: names instead
of keys, the texts in a memory file of their own.)
"""

from __future__ import annotations

import argparse
import array
import contextlib
import fcntl
import json
import os
import resource
import selectors
import signal
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Any

PACKET_BYTES_MAX = 1 << 16
DESCRIPTORS_MAX = 64
"""Most descriptors in one packet."""
GRACE_S = 60.0
CONNECTIONS_MAX = 16
LISTENS = "the holder listens\n"
REPLY_S = 5.0
"""A daemon that does not take what it asked for within this time is cut off."""


def receive(sock: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """One message and its descriptors, which the caller owns; None at the end of the connection.

    Raises ValueError for anything that is no whole message (its descriptors are closed then), OSError.
    """
    space = socket.CMSG_SPACE(DESCRIPTORS_MAX * array.array("i").itemsize)
    data, control, flags, _ = sock.recvmsg(PACKET_BYTES_MAX, space, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, payload in control:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    try:
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise ValueError("a packet is too long, or a descriptor limit is reached")
        if not data and not fds:
            return None
        message = json.loads(data)
        if not isinstance(message, dict):
            raise ValueError("a packet is no JSON object")
    except (ValueError, RecursionError) as error:
        close_all(fds)
        raise ValueError(str(error)) from None
    return message, list(fds)


def send(sock: socket.socket, message: dict[str, Any], fds: list[int] | None = None) -> None:
    """One message. Raises OSError; blocks for the socket's timeout at most."""
    socket.send_fds(sock, [json.dumps(message, separators=(",", ":")).encode()], fds or [])


def close_all(fds: Any) -> None:
    """Close descriptors."""
    for fd in fds:
        os.close(fd)


class Generation:
    """Entries by key: a text and a descriptor, -1 for none. Owns the descriptors."""

    def __init__(self) -> None:
        self.entries: dict[str, tuple[str, int]] = {}

    def put(self, key: str, text: str, fd: int) -> None:
        self.drop(key)
        self.entries[key] = (text, fd)

    def drop(self, key: str) -> None:
        _, fd = self.entries.pop(key, ("", -1))
        if fd >= 0:
            os.close(fd)

    def clear(self) -> None:
        for key in list(self.entries):
            self.drop(key)


class Holder:
    """See the module. ``run`` returns when it is told to end, or when no daemon came for ``grace_s``."""

    def __init__(self, path: Path, grace_s: float) -> None:
        """Binds the socket. Raises OSError, BlockingIOError if another holder has it."""
        self._path = path
        self._grace_s = grace_s
        self._lock_fd = os.open(
            path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
        fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with contextlib.suppress(FileNotFoundError):
            path.unlink()  # the lock is ours: whoever made it is gone
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        old_mask = os.umask(0o177)
        try:
            self._listening.bind(os.fspath(path))
        finally:
            os.umask(old_mask)
        self._listening.listen(CONNECTIONS_MAX)
        self._listening.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listening, selectors.EVENT_READ)
        self._generations: dict[str, Generation] = {}
        self._current = ""
        self._owner = ""
        self._daemon: socket.socket | None = None
        self._connections: set[socket.socket] = set()
        self._ended = False
        self._ends_at_s = time.monotonic() + grace_s

    def run(self) -> None:
        try:
            while not self._ended:
                left_s = None if self._daemon is not None else self._ends_at_s - time.monotonic()
                if left_s is not None and left_s <= 0:
                    break
                self._turn(left_s)
        finally:
            self._path.unlink(missing_ok=True)

    def _turn(self, left_s: float | None) -> None:
        for key, _ in self._selector.select(left_s):
            if key.fileobj is self._listening:
                self._accept()
            elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._connections:
                self._take(key.fileobj)

    def _accept(self) -> None:
        try:
            sock, _ = self._listening.accept()
        except OSError:
            return
        _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid not in (os.getuid(), 0) or len(self._connections) >= CONNECTIONS_MAX:
            sock.close()
            return
        sock.setblocking(False)
        self._connections.add(sock)
        self._selector.register(sock, selectors.EVENT_READ)

    def _take(self, sock: socket.socket) -> None:
        """One message of a connection."""
        try:
            received = receive(sock)
            if received is not None:
                self._act(sock, *received)
                return
        except BlockingIOError:
            return
        except (ValueError, KeyError, TypeError):
            # What a daemon meant to say is lost: what it has put is not the whole truth any more.
            if sock is self._daemon:
                self._forget_everything()
        except OSError:
            pass
        self._close(sock)

    def _close(self, sock: socket.socket) -> None:
        if sock in self._connections:
            self._connections.discard(sock)
            self._selector.unregister(sock)
            sock.close()
        if sock is self._daemon:
            self._daemon = None
            self._ends_at_s = time.monotonic() + self._grace_s

    def _act(self, sock: socket.socket, message: dict[str, Any], fds: list[int]) -> None:
        try:
            op = message["op"]
            if op == "put":
                self._put(sock, str(message["generation"]), message["entries"], fds)
        finally:
            close_all(fds)
        if op == "claim":
            self._claim(sock, str(message["owner"]))
        elif op == "sync":
            send(sock, {"synced": {name: len(each.entries) for name, each in self._generations.items()}})
        elif op == "end":
            self._forget_everything()
            self._ended = True
        elif op in ("drop", "switch"):
            self._must_be_daemon(sock)
            if op == "switch":
                self._keep_only(str(message["generation"]))
            elif (generation := self._generations.get(str(message["generation"]))) is not None:
                for key in message["keys"]:
                    generation.drop(str(key))
        elif op != "put":
            raise ValueError(f"unknown op {op!r}")

    def _must_be_daemon(self, sock: socket.socket) -> None:
        if sock is not self._daemon:
            raise ValueError("claim first")

    def _put(self, sock: socket.socket, name: str, entries: list[Any], fds: list[int]) -> None:
        """Takes its descriptors out of ``fds``."""
        self._must_be_daemon(sock)
        if sum(bool(has_fd) for _, _, has_fd in entries) != len(fds):
            raise ValueError("more or fewer descriptors than entries that have one")
        generation = self._generations.setdefault(name, Generation())
        for key, text, has_fd in entries:
            generation.put(str(key), str(text), fds.pop(0) if has_fd else -1)

    def _claim(self, sock: socket.socket, owner: str) -> None:
        if self._ended:
            raise ValueError("it was told to end")
        if self._daemon not in (None, sock):
            # Of one that is dead, all that it said, up to its end, is worked on first: ask again.
            send(sock, {"refused": "busy"})
            return
        current = self._generations.get(self._current)
        if self._owner and self._owner != owner and current is not None and current.entries:
            send(sock, {"refused": "owner", "owner": self._owner})
            return
        self._daemon, self._owner = sock, owner
        self._keep_only(self._current)
        sock.settimeout(REPLY_S)
        entries = list(current.entries.items()) if current is not None else []
        for start in range(0, len(entries), DESCRIPTORS_MAX):
            part = entries[start : start + DESCRIPTORS_MAX]
            listed = [[key, text, fd >= 0] for key, (text, fd) in part]
            send(sock, {"entries": listed}, [fd for _, (_, fd) in part if fd >= 0])
        send(sock, {"claimed": owner})
        sock.setblocking(False)

    def _keep_only(self, current: str) -> None:
        for name, generation in list(self._generations.items()):
            if name != current:
                generation.clear()
                del self._generations[name]
        self._current = current

    def _forget_everything(self) -> None:
        self._keep_only("")
        self._generations.pop("", Generation()).clear()


def detach(path: Path, grace_s: float) -> int:
    """Run a holder in a process of its own, of no session but its own; returns once it listens, or can't."""
    ready, child_end = os.pipe()
    if os.fork():
        os.close(child_end)
        said = os.read(ready, 4096).decode(errors="replace")
        if said != LISTENS:
            print(said or "the holder ended at once", file=sys.stderr)  # noqa: T201
        return 0 if said == LISTENS else 1
    os.close(ready)
    os.setsid()
    os.chdir("/")
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)
    code = serve(path, grace_s, child_end)
    os._exit(code)


def serve(path: Path, grace_s: float, told_fd: int) -> int:
    """Run a holder here. What became of the socket is written to ``told_fd``, which is then closed."""
    # Two descriptors of each region at the moment of a switch.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    holder, says = None, LISTENS
    try:
        holder = Holder(path, grace_s)
    except BlockingIOError:
        says = f"another holder has {path}"
    except OSError as error:
        says = f"the holder can't listen on {path}: {error}"
    os.write(told_fd, says.encode())
    os.close(told_fd)
    if holder is None:
        return 1
    holder.run()
    return 0


def main() -> int:
    """The command line; returns once the holder listens, or with ``--foreground`` when it has ended."""
    parser = argparse.ArgumentParser(prog="kvstore-holder", description="Keeps a kvstore daemon's descriptors.")
    parser.add_argument("socket", type=Path)
    parser.add_argument("--grace", type=float, default=GRACE_S, help="seconds to wait for the next daemon")
    parser.add_argument("--foreground", action="store_true", help="don't detach (for a service manager)")
    options = parser.parse_args()
    if options.foreground:
        return serve(options.socket.absolute(), options.grace, os.dup(2))
    return detach(options.socket.absolute(), options.grace)


if __name__ == "__main__":
    sys.exit(main())
