"""The end of what a thread may be copying: nothing is free before the last chunk is done, nothing begins after."""

from __future__ import annotations

import threading

import pytest

from kvstore.errors import EndedError
from kvstore.server.uses import Use


def test_what_nobody_is_at_ends_at_once() -> None:
    use, told = Use("lease 3"), []
    with use:
        pass
    assert use.end(lambda: told.append(1))
    assert told == []
    with pytest.raises(EndedError, match="lease 3 has ended"), use:
        pass


def test_the_last_chunk_tells() -> None:
    use, told = Use("lease 3"), []
    with use:
        with use:
            assert not use.end(lambda: told.append(threading.get_ident()))
        assert told == []
        with pytest.raises(EndedError), use:
            pass
    assert told == [threading.get_ident()]


def test_many_threads_and_one_end() -> None:
    use = Use("reservation 4")
    inside, busy, free = [0], threading.Event(), threading.Event()
    wrong: list[str] = []
    started = threading.Barrier(9)

    def work() -> None:
        started.wait(20)
        while True:
            try:
                with use:
                    if free.is_set():
                        wrong.append("a chunk after the end")
                    inside[0] += 1
                    if inside[0] == 1000:
                        busy.set()
            except EndedError:
                return

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    started.wait(20)
    busy.wait(5)  # the more the better, not a condition
    if use.end(free.set):
        free.set()
    for thread in threads:
        thread.join(20)
    assert free.is_set()
    assert wrong == []
