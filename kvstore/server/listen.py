"""Binding the Unix socket: one daemon a path, stale files cleaned up, nobody else's business readable."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from kvstore.errors import ConfigError, SocketInUseError

BACKLOG = 128


class SocketPlace:
    """The path of a Unix socket, taken. A lock file beside it is held as long as this object lives: whoever holds it
    may replace a stale socket file, so that two daemons starting at once can't take the path from each other.

    Raises SocketInUseError if another daemon has it, ConfigError if the place can't be used; ``option`` is how
    messages call it. Blocks only for file system calls.
    """

    def __init__(self, path: Path, option: str = "--socket") -> None:
        self.path = path
        self._option = option
        self._must_be_free_or_a_socket()
        _prepare_folder(path.parent, option)
        self._lock_fd = _lock(path.with_name(path.name + ".lock"), path, option)

    @contextlib.contextmanager
    def binding(self) -> Iterator[None]:
        """``with``: make the socket now. What is left of an earlier one is gone, and nobody else may connect."""
        self._must_be_free_or_a_socket()
        self._unlink()
        # Created with mode 0600 from the start: a chmod afterwards would leave a moment for others.
        old_mask = os.umask(0o177)
        try:
            yield
        finally:
            os.umask(old_mask)

    def close(self) -> None:
        """Remove the socket file and give up the lock: another daemon may have the path. Idempotent."""
        if self._lock_fd < 0:
            return
        self._unlink()
        os.close(self._lock_fd)
        self._lock_fd = -1

    def _unlink(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            # The lock is ours, so whoever made this socket is gone.
            self.path.unlink()

    def _must_be_free_or_a_socket(self) -> None:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if not stat.S_ISSOCK(self.path.lstat().st_mode):
                raise ConfigError(f"{self.path} exists and is not a socket: choose another {self._option} or remove it")


class ListeningSocket(SocketPlace):
    """A bound, listening, non-blocking Unix socket of mode 0600 in its place; raises as that does."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            self.sock = self._bind()
        except BaseException:
            os.close(self._lock_fd)
            raise

    def _bind(self) -> socket.socket:
        with self.binding():
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
            try:
                sock.bind(os.fspath(self.path))
                sock.listen(BACKLOG)
            except OSError as error:
                sock.close()
                raise ConfigError(f"can't listen on {self.path}: {error.strerror}; choose another --socket") from error
        return sock

    def refuse(self) -> None:
        """Stop listening and remove the socket file: who connects from now on is told so at once. Idempotent."""
        if self._lock_fd < 0 or self.sock.fileno() < 0:
            return
        self.sock.close()
        self._unlink()

    def close(self) -> None:
        """``refuse``, and give up the place. Idempotent."""
        self.refuse()
        super().close()


def _prepare_folder(folder: Path, option: str) -> None:
    try:
        # One level only: a longer path that is missing is more likely a mistake than a wish.
        folder.mkdir(mode=0o700, exist_ok=True)
        facts = folder.stat()
    except OSError as error:
        raise ConfigError(
            f"the socket's folder {folder} can't be used: {error.strerror}; choose another {option}"
        ) from error
    if not stat.S_ISDIR(facts.st_mode):
        raise ConfigError(f"the socket's folder {folder} is not a folder; choose another {option}")
    if facts.st_uid not in (os.getuid(), 0):
        raise ConfigError(
            f"the socket's folder {folder} belongs to user {facts.st_uid}, "
            f"who could replace the socket: choose another {option}"
        )


def _lock(lock_path: Path, socket_path: Path, option: str) -> int:
    try:
        fd = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise ConfigError(
            f"the lock file {lock_path} can't be opened: {error.strerror}; choose another {option}"
        ) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        owner = os.read(fd, 32).decode("ascii", "replace").strip() or "unknown"
        os.close(fd)
        raise SocketInUseError(
            f"a daemon (pid {owner}) already serves {socket_path}: use it, stop it, or choose another {option}"
        ) from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd
