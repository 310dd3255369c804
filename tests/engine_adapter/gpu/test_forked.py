"""A child that a program with a mover forks: nothing hangs there, and nothing of the parent's ends."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import faulthandler, os
import numpy as np
from kvstore.engine_adapter.gpu.choice import Route
from kvstore.engine_adapter.gpu.events import AfterEvents
from kvstore.engine_adapter.gpu.mover import DeviceMover
from kvstore.errors import DeviceError
from tests.engine_adapter.gpu.scene import far, one, region, scene

with scene() as made:
    values = np.arange(1 << 16, dtype=np.uint16).view(np.uint8)
    mapping = made.registered(region(len(values), values))
    span = np.array([mapping.address], np.uint64), np.array([len(values)], np.uint64)
    reader, mover, after = made.reader(Route.DIRECT), DeviceMover(made.device), AfterEvents(made.device)
    there, stream, event = made.device.malloc(len(values)), made.device.stream(), made.device.event()
    made.device.fill(there, 1, 4096, stream)
    made.device.record(event, stream)
    moves = reader.begin()
    moves.copy(one(there, mapping.address, len(values)))
    {locked}
    pid = os.fork()
    if not pid:
        faulthandler.dump_traceback_later(10, exit=True)
        try:
            made.pinned.use_all(*span, far())
            os._exit(1)
        except DeviceError as error:
            assert "forked child" in str(error)
        assert made.pinned.use(*span).mapped.tolist() == [0]
        made.pinned.mapped(region(4096))
        made.pinned.leaving(mapping)
        made.pinned.let_go()
        assert "forked child" in moves.finish()
        reader.close(); mover.close(); after.close(); made.pinned.close(); made.device.close()
        os._exit(7)
    {unlocked}
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 7, status
    assert moves.finish() == ""
    assert (made.download(there, len(values)) == values).all()
    assert made.pinned.use(*span).whole
    mover.close()
"""


HOLD = """
    import threading
    held, go = threading.Event(), threading.Event()
    def hold():
        with made.pinned._state:
            held.set()
            go.wait()
    threading.Thread(target=hold).start()
    held.wait()
    after._running = True
"""
LET_GO = """
    go.set()
    after._running = False
"""


@pytest.mark.parametrize("busy", [False, True])
def test_nothing_hangs_in_a_forked_child(busy: bool) -> None:
    """Also where a thread that the child has not got is in the middle of something."""
    script = SCRIPT.replace("    {locked}\n", HOLD if busy else "").replace("    {unlocked}\n", LET_GO if busy else "")
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
