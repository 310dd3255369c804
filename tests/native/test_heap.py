"""Memory of freed messages is used again."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

CODE = """
import resource, sys
from kvstore.native.heap import keep_freed_messages
if sys.argv[1] == "kept":
    keep_freed_messages()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def messages():
    for held in [b"x" * (2 << 20) for _ in range(4)]:
        pass
for _ in range(4):
    messages()
before = faults()
for _ in range(32):
    messages()
print(faults() - before)
"""


def faults(how: str) -> int:
    done = subprocess.run([sys.executable, "-c", CODE, how], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the allocator of another C library")
def test_messages_do_not_page_in_what_those_before_had() -> None:
    assert faults("kept") < 32 * 512 < faults("as it is")
