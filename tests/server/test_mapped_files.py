"""What the kernel says of a process's mappings, and where its word is no proof."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from kvstore.native import Mapping
from kvstore.server.mapped_files import mapped_inodes
from kvstore.tiers import memfd

MAPPED = """
import mmap, os, sys
fd = os.memfd_create("theirs"); os.ftruncate(fd, 4096); memory = mmap.mmap(fd, 4096)
print(os.fstat(fd).st_ino, flush=True)
sys.stdin.readline()
memory.close()
print("unmapped", flush=True)
sys.stdin.readline()
"""

WITHOUT_ITS_FIRST_THREAD = """
import ctypes, mmap, os, sys, threading
fd = os.memfd_create("theirs"); os.ftruncate(fd, 4096); memory = mmap.mmap(fd, 4096)
threading.Thread(target=lambda: os.read(0, 1)).start()
print("on", flush=True)
ctypes.CDLL(None).syscall(60, 0)
"""


@contextlib.contextmanager
def child(code: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    pidfd = os.pidfd_open(process.pid)
    try:
        yield process, pidfd
    finally:
        os.close(pidfd)
        process.kill()
        process.communicate()


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def _go_on(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")


def test_a_mapping_shows_as_long_as_it_is_there() -> None:
    with child(MAPPED) as (process, pidfd):
        inode = int(_line(process))
        seen = mapped_inodes(pidfd)
        assert seen is not None
        assert inode in seen
        _go_on(process)
        assert _line(process) == "unmapped"
        seen = mapped_inodes(pidfd)
        assert seen is not None, "it lives, and has mapped its program at least"
        assert seen
        assert inode not in seen


def test_a_mapping_of_this_process_shows_although_its_descriptor_is_closed() -> None:
    fd = memfd.create("kvstore-test", memfd.PAGE_BYTES)
    mapping, inode = Mapping(fd, memfd.PAGE_BYTES, writable=False), os.fstat(fd).st_ino
    os.close(fd)
    pidfd = os.pidfd_open(os.getpid())
    try:
        assert inode in (mapped_inodes(pidfd) or ())
        del mapping
        assert inode not in (mapped_inodes(pidfd) or (inode,))
    finally:
        os.close(pidfd)


def test_of_one_that_has_ended_nothing_is_known() -> None:
    with child(MAPPED) as (process, pidfd):
        _line(process)
        process.kill()
        process.wait()
        assert mapped_inodes(pidfd) is None


def test_one_whose_first_thread_has_ended_shows_no_mappings_but_may_have_some() -> None:
    with child(WITHOUT_ITS_FIRST_THREAD) as (process, pidfd):
        assert _line(process) == "on"
        while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            pass
        assert mapped_inodes(pidfd) is None


def test_a_descriptor_of_no_process_tells_nothing() -> None:
    with Path(os.devnull).open() as file:
        assert mapped_inodes(file.fileno()) is None
