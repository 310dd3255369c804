"""The holder as a process: what it keeps, for whom, and for how long."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore import holder
from kvstore.errors import ConfigError, UnavailableError
from kvstore.takeover import link as link_module
from kvstore.takeover.link import Entry, HolderLink, end_holder

WaitUntil = Callable[[Callable[[], bool], str], None]


def claim(path: Path, owner: str = "me", grace_s: float = 30.0, start: bool = True) -> tuple[HolderLink, list[Entry]]:
    return HolderLink.claim(path, owner, grace_s, start=start)


def close(entries: list[Entry]) -> None:
    for entry in entries:
        entry.close()


def pid_of(path: Path) -> int:
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as sock:
        sock.connect(str(path))
        return int.from_bytes(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)[:4], sys.byteorder)


def n_kept(pid: int) -> int:
    """Descriptors of the file of these tests that a process has."""
    links = [str(fd.readlink()) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()]
    return sum("memfd:kept" in link for link in links)


@pytest.fixture
def file() -> Iterator[int]:
    fd = os.memfd_create("kept")
    os.write(fd, b"precious")
    yield fd
    os.close(fd)


def test_it_keeps_descriptors_and_texts_over_the_end_of_a_daemon(holder_path: Path, file: int) -> None:
    first, entries = claim(holder_path)
    assert entries == []
    first.put("g1", [Entry("a", "text", file), Entry("b", ""), Entry("ä", "ö")])
    first.switch("g1")
    first.close()
    second, entries = claim(holder_path)
    assert [entry[:2] for entry in entries] == [("a", "text"), ("b", ""), ("ä", "ö")]
    assert [entry.fd >= 0 for entry in entries] == [True, False, False]
    assert os.pread(entries[0].fd, 100, 0) == b"precious"
    assert os.fstat(entries[0].fd).st_ino == os.fstat(file).st_ino
    assert not os.get_inheritable(entries[0].fd)
    close(entries)
    second.close()


def test_what_was_not_switched_to_is_gone_with_its_daemon(holder_path: Path, file: int) -> None:
    first, _ = claim(holder_path)
    first.put("g1", [Entry("old", "", file)])
    first.switch("g1")
    first.close()
    second, entries = claim(holder_path)
    close(entries)
    second.put("g2", [Entry("new", "", file)] * 1)
    assert second.sync() == {"g1": 1, "g2": 1}
    second.close()
    third, entries = claim(holder_path)
    assert [entry.key for entry in entries] == ["old"]
    assert third.sync() == {"g1": 1}
    close(entries)
    third.close()


def test_a_switch_drops_everything_else_and_its_descriptors(holder_path: Path, file: int) -> None:
    link, _ = claim(holder_path)
    link.put("g1", [Entry(f"k{i}", "", file) for i in range(200)])
    assert link.sync() == {"g1": 200}
    pid = pid_of(holder_path)
    assert n_kept(pid) == 200
    link.put("g2", [Entry("only", "", file)])
    link.put("g2", [Entry("only", "again", file), Entry("more", "", file)])
    link.drop("g2", ["more", "unknown"])
    link.drop("g7", ["only"])
    link.switch("g2")
    assert link.sync() == {"g2": 1}
    assert n_kept(pid) == 1
    link.close()


def test_many_entries_come_back_whole(holder_path: Path, file: int) -> None:
    link, _ = claim(holder_path)
    sent = [Entry(f"key/{i}", "x" * (i % 700), file if i % 3 else -1) for i in range(1000)]
    link.put("g", sent)
    link.switch("g")
    link.close()
    link, entries = claim(holder_path)
    assert [(e.key, e.text, e.fd >= 0) for e in entries] == [(e.key, e.text, e.fd >= 0) for e in sent]
    close(entries)
    link.close()


def test_one_daemon_at_a_time_and_the_same_one(holder_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = claim(holder_path)
    monkeypatch.setattr(link_module, "CLAIM_S", 0.3)
    with pytest.raises(UnavailableError, match="another daemon now"):
        claim(holder_path)
    monkeypatch.undo()
    first.put("g", [Entry("a", "")])
    first.switch("g")
    first.close()
    with pytest.raises(ConfigError, match="the daemon at me: choose another --holder"):
        claim(holder_path, "somebody else")
    again, entries = claim(holder_path)
    assert [entry.key for entry in entries] == ["a"]
    again.drop("g", ["a"])
    again.sync()
    again.close()
    other, _ = claim(holder_path, "somebody else")  # nothing of anybody's is kept
    other.close()


def test_all_that_a_daemon_sent_before_it_died_counts(holder_path: Path, file: int) -> None:
    """The holder is stopped meanwhile: the packets lie in its socket when the daemon is gone already."""
    link, _ = claim(holder_path)
    pid = pid_of(holder_path)
    os.kill(pid, signal.SIGSTOP)
    try:
        link.put("g", [Entry(f"k{i}", "", file) for i in range(100)])
        link.switch("g")
        link.drop("g", ["k0"])
        link.close()
    finally:
        os.kill(pid, signal.SIGCONT)
    link, entries = claim(holder_path)
    assert [entry.key for entry in entries] == [f"k{i}" for i in range(1, 100)]
    close(entries)
    link.close()


def test_a_holder_that_hangs_costs_a_moment(holder_path: Path) -> None:
    link, _ = claim(holder_path)
    pid = pid_of(holder_path)
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(UnavailableError, match="takes nothing"):
            link.put("g", [Entry(f"k{i}", "x" * 1000) for i in range(10_000)])
    finally:
        os.kill(pid, signal.SIGCONT)
    link.close()


def test_it_ends_when_told_or_when_nobody_comes(holder_path: Path, wait_until: WaitUntil) -> None:
    link, _ = claim(holder_path)
    link.end()
    wait_until(lambda: not holder_path.exists(), "it ends when told")
    link.close()
    link, _ = claim(holder_path, grace_s=0.2)
    pid = pid_of(holder_path)
    assert link.sync() == {}
    link.close()
    wait_until(lambda: not holder_path.exists(), "it ends after its time of grace")
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), "its process is gone")
    with pytest.raises(UnavailableError, match="no descriptor holder"):
        claim(holder_path, start=False)
    with pytest.raises(UnavailableError, match="no descriptor holder"):
        end_holder(holder_path)


def test_it_is_nobodys_child_and_small(holder_path: Path) -> None:
    link, _ = claim(holder_path)
    pid = pid_of(holder_path)
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    assert int(status["PPid"]) != os.getpid()
    assert os.getsid(pid) == pid
    assert int(status["VmRSS"].split()[0]) < 20_000
    maps = Path(f"/proc/{pid}/maps").read_text()
    assert "numpy" not in maps
    assert "protobuf" not in maps
    assert holder_path.stat().st_mode & 0o777 == 0o600
    link.close()


def test_a_second_holder_on_the_path_gives_way(holder_path: Path) -> None:
    link, _ = claim(holder_path)
    command = [sys.executable, "-I", "-S", holder.__file__, str(holder_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 1
    assert "another holder" in done.stderr
    assert link.sync() == {}
    link.close()


def test_a_path_where_none_can_be_is_said(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="can't listen"):
        claim(tmp_path / "missing" / "h")


def test_a_killed_holder_is_replaced(holder_path: Path) -> None:
    link, _ = claim(holder_path)
    link.put("g", [Entry("a", "")])
    link.switch("g")
    link.sync()
    os.kill(pid_of(holder_path), signal.SIGKILL)
    with pytest.raises(UnavailableError):
        link.sync()
    link.close()
    link, entries = claim(holder_path)
    assert entries == []
    link.close()


# -- garbage ----------------------------------------------------------------------------------------


def raw(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(10)
    sock.connect(str(path))
    return sock


@pytest.mark.parametrize(
    "packet",
    [
        b"\xff\xfe",
        b"[1]",
        b"{}",
        b'{"op":"fly"}',
        b'{"op":"put","generation":"g","entries":[["k","",true]]}',
        b'{"op":"put","generation":"g"}',
        b'{"op":"put","generation":"g","entries":[["k"]]}',
        b'{"op":"switch","generation":"g"}',
        b'{"op":"drop","generation":"g","keys":["a"]}',
        b"[" * 60_000,
        b'{"op":"claim"}',
    ],
)
def test_strangers_change_nothing(holder_path: Path, packet: bytes, file: int) -> None:
    link, _ = claim(holder_path)
    link.put("g", [Entry("a", "", file)])
    link.switch("g")
    pid = pid_of(holder_path)
    with raw(holder_path) as stranger:
        socket.send_fds(stranger, [packet], [file] if packet.startswith(b"{}") else [])
        assert stranger.recv(100) == b"", "the connection is closed"
    assert link.sync() == {"g": 1}
    assert n_kept(pid) == 1
    link.close()


@pytest.mark.parametrize("packet", [b"\xff", b'{"op":"put","generation":"g","entries":[["b","",true]]}'])
def test_a_daemon_that_talks_nonsense_leaves_nothing(holder_path: Path, packet: bytes, file: int) -> None:
    """What it meant to say is not known, so that what it said before can't be believed."""
    link, _ = claim(holder_path)
    link.put("g", [Entry("a", "", file)])
    link.switch("g")
    link._sock.send(packet)
    with pytest.raises(UnavailableError):
        link.sync()
    link.close()
    link, entries = claim(holder_path)
    assert entries == []
    link.close()


def test_too_many_connections_are_refused_and_the_daemon_is_served(holder_path: Path) -> None:
    link, _ = claim(holder_path)
    with contextlib.ExitStack() as stack:
        many = [stack.enter_context(raw(holder_path)) for _ in range(holder.CONNECTIONS_MAX)]
        assert many[-1].recv(10) == b""
        assert link.sync() == {}
    link.close()


class Impostor:
    """Something else behind the socket."""

    def __init__(self, path: Path, reply: bytes | None) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.bind(str(path))
        self.sock.listen()
        self.child = os.fork()
        if self.child == 0:
            connection, _ = self.sock.accept()
            connection.recv(10_000)
            if reply is not None:
                connection.send(reply)
            signal.pause()
            os._exit(0)

    def close(self) -> None:
        os.kill(self.child, signal.SIGKILL)
        os.waitpid(self.child, 0)
        self.sock.close()


@pytest.mark.parametrize(
    "reply",
    [None, b"hello", b"{}", b'{"entries":1}', b'{"entries":[["k","",true]]}', json.dumps({"claimed": "x"}).encode()],
)
def test_an_impostor_makes_a_clear_error_in_time(
    holder_path: Path, reply: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "CLAIM_S", 0.5)
    impostor = Impostor(holder_path, reply)
    try:
        with pytest.raises(UnavailableError, match=r"no descriptor holder|not in time"):
            claim(holder_path)
    finally:
        impostor.close()
        holder_path.unlink()


def test_a_stream_socket_at_the_path_is_no_holder(holder_path: Path) -> None:
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as other:
        other.bind(str(holder_path))
        other.listen()
        with pytest.raises(UnavailableError, match="no descriptor holder"):
            claim(holder_path)
    holder_path.unlink()


def test_messages_are_read_as_they_are_sent() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    message: dict[str, Any] = {"op": "x", "list": [1, "ü"]}
    holder.send(ours, message, [0, 1])
    received = holder.receive(theirs)
    assert received is not None
    assert received[0] == message
    assert len(received[1]) == 2
    holder.close_all(received[1])
    ours.close()
    assert holder.receive(theirs) is None
    theirs.close()
