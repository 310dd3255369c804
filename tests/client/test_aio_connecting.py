"""An asyncio client that is given up while it connects."""

from __future__ import annotations

import asyncio
import socket
import threading
from pathlib import Path

import pytest

from kvstore import AsyncClient


def test_a_cancelled_connect_leaves_no_thread(tmp_path: Path) -> None:
    path = tmp_path / "silent.sock"
    before = set(threading.enumerate())

    async def connect() -> None:
        async with AsyncClient(path, timeout_s=1.0):
            pytest.fail("nobody answers there")

    async def main() -> None:
        loop = asyncio.get_running_loop()
        dialled = asyncio.Event()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
            listening.bind(str(path))
            listening.listen()
            loop.add_reader(listening, dialled.set)
            connecting = asyncio.create_task(connect())
            await dialled.wait()
            loop.remove_reader(listening)
            connecting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await connecting

    asyncio.run(main())
    left = [
        thread.name for thread in threading.enumerate() if thread not in before and thread.name.startswith("kvstore")
    ]
    assert not left
