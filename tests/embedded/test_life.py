"""A store inside the program: opened, used and closed without a trace.

That it answers as a daemon does is the business of tests/client, which run over it too.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore import Client, Embedded, Namespace
from kvstore.errors import BadInputError, EndedError, UnavailableError
from tests.embedded.scene import BLOCK_BYTES, NAMESPACE, NVME, SMALL, WAIT_S, content, holds, prompt, run_program


@pytest.mark.usefixtures("nothing_left")
def test_it_is_a_client_with_a_store(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "kv", **NVME) as store:
        assert isinstance(store, Embedded)
        assert isinstance(store, Client)
        cache = store.open(NAMESPACE)
        assert cache.put(prompt(4), content(4)).n_stored == 4
        assert holds(cache, 4)
        assert store.healthy
        assert store.stats()["sessions"] == 1


@pytest.mark.usefixtures("nothing_left")
def test_it_is_opened_and_closed_many_times_without_a_trace(tmp_path: Path) -> None:
    for turn in range(20):
        with kvstore.open(tmp_path / "kv", **NVME) as store, store.client() as other:
            cache = store.open(NAMESPACE)
            cache.put(prompt(4, turn), content(4, turn))
            assert holds(other.open(NAMESPACE), 4, turn)


@pytest.mark.usefixtures("nothing_left")
def test_many_are_open_at_once(tmp_path: Path) -> None:
    stores = [kvstore.open(tmp_path / str(number), **NVME) for number in range(8)]
    for seed, store in enumerate(stores):
        store.open(NAMESPACE).put(prompt(2, seed), content(2, seed))
    for seed, store in enumerate(stores):
        cache = store.open(NAMESPACE)
        assert holds(cache, 2, seed)
        assert cache.match(prompt(2, (seed + 1) % 8)).n_blocks == 0
    for store in stores:
        store.close()


@pytest.mark.usefixtures("nothing_left")
def test_leases_and_reservations_end_with_it() -> None:
    store = kvstore.open(**SMALL)
    cache = store.open(NAMESPACE)
    cache.put(prompt(4), content(4))
    lease, slots = cache.lease(prompt(4)), cache.reserve(prompt(2, 9), n_blocks=2)
    assert len(lease) == 4
    assert len(slots) == 2
    store.close()
    assert not lease.valid
    with pytest.raises(EndedError):
        lease.view(0)
    assert slots.commit() == (0, 0)
    lease.release()


@pytest.mark.usefixtures("nothing_left")
def test_an_array_outlives_it() -> None:
    with kvstore.open(**SMALL) as store:
        cache = store.open(NAMESPACE)
        cache.put(prompt(4), content(4))
        with cache.lease(prompt(4)) as lease:
            view = lease[3]
    np.testing.assert_array_equal(view, content(4)[3])
    del view, lease


@pytest.mark.usefixtures("nothing_left")
def test_afterwards_everything_is_a_miss_at_once(tmp_path: Path) -> None:
    store = kvstore.open(tmp_path / "kv", **NVME, timeout_s=3600.0)
    cache, theirs = store.open(NAMESPACE), store.client(timeout_s=3600.0).open(NAMESPACE)
    store.close()
    store.close()
    for each in (cache, theirs):
        assert each.match(prompt(1)).reason == "the client is closed"
        assert each.put(prompt(1), content(1)).n_skipped == 1
        assert not each.lease(prompt(1))
    with pytest.raises(UnavailableError, match="closed"):
        store.stats()
    with pytest.raises(UnavailableError, match="closed"):
        store.client()
    with pytest.raises(UnavailableError, match=r"<Embedded of .* closed>: nothing can be opened with it any more"):
        store.open(NAMESPACE)


@pytest.mark.usefixtures("nothing_left")
def test_an_exception_inside_closes_it(tmp_path: Path) -> None:
    def fail() -> None:
        with kvstore.open(tmp_path / "kv", **NVME) as store:
            opened.append(store)
            store.open(NAMESPACE).put(prompt(1), content(1))
            raise ZeroDivisionError

    opened: list[Embedded] = []
    with pytest.raises(ZeroDivisionError):
        fail()
    assert not opened.pop().healthy
    kvstore.open(tmp_path / "kv", **NVME).close()


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("arguments", [{"tenant": ""}, {"timeout_s": 0.0}])
def test_one_that_can_not_be_opened_leaves_nothing(tmp_path: Path, arguments: dict[str, Any]) -> None:
    with pytest.raises(BadInputError):
        kvstore.open(tmp_path / "kv", **NVME, **arguments)
    kvstore.open(tmp_path / "kv", **NVME).close()


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
@pytest.mark.filterwarnings("ignore:Exception ignored in. <socket:pytest.PytestUnraisableExceptionWarning")
def test_one_that_is_forgotten_ends_once_nothing_uses_it(
    tmp_path: Path, wait_until: Callable[[Callable[[], bool], str], None]
) -> None:
    before = set(threading.enumerate())
    cache = kvstore.open(tmp_path / "kv", **NVME).open(NAMESPACE)
    gc.collect()
    assert cache.put(prompt(2), content(2)).n_stored == 2
    assert holds(cache, 2)
    del cache

    def has_ended() -> bool:
        gc.collect()
        return not set(threading.enumerate()) - before

    wait_until(has_ended, "its threads end")
    with kvstore.open(tmp_path / "kv", **NVME) as store:
        assert holds(store.open(NAMESPACE), 2)


@pytest.mark.usefixtures("nothing_left")
def test_tenants_share_nothing() -> None:
    with kvstore.open(**SMALL, tenant="a") as store, store.client(tenant="b") as other:
        assert (store.tenant, other.tenant) == ("a", "b")
        theirs = Namespace("model", NAMESPACE.spec, tenant="b")
        mine = store.open(Namespace("model", NAMESPACE.spec, tenant="a"))
        mine.put(prompt(3), content(3))
        assert other.open(theirs).match(prompt(3)).n_tokens == 0
        with pytest.raises(BadInputError, match="tenant"):
            store.open(theirs)
        with store.client() as same, mine.lease(prompt(3)) as lease:
            assert same.tenant == "a"
            with same.attach(lease.id, BLOCK_BYTES) as again:
                np.testing.assert_array_equal(again[2], content(3)[2])
            with pytest.raises(EndedError):
                other.attach(lease.id, BLOCK_BYTES)


@pytest.mark.usefixtures("nothing_left")
def test_what_memory_has_no_room_for_comes_from_disk(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "kv", dram="4MiB", nvme="64MiB", prefault=False, drain_s=60.0) as store:
        cache = store.open(NAMESPACE)
        for seed in range(32):
            assert cache.put(prompt(32, seed), content(32, seed), durable_within_s=WAIT_S).n_durable == 32
        assert float(store.stats()["dram_used_bytes"]) <= 4 << 20
        for seed in range(32):
            out = np.zeros((32, BLOCK_BYTES), np.uint8)
            assert cache.get_into(prompt(32, seed), out, wait=WAIT_S).n_blocks == 32
            np.testing.assert_array_equal(out, content(32, seed))


@pytest.mark.parametrize("ending", ["store.close()\nassert not store._inside.thread.alive", "print('not closed')"])
def test_a_disk_that_hangs_keeps_no_program_from_ending(tmp_path: Path, ending: str) -> None:
    body = (
        "from pathlib import Path\n"
        "from kvstore.embedded import Embedded, config_of\n"
        "from kvstore.tiers.nvme.direct import DirectFiles\n"
        "from kvstore.tiers.nvme.faults import FaultyFiles\n"
        "path = Path(sys.argv[1])\n"
        "files = FaultyFiles(DirectFiles(path))\n"
        "store = Embedded(config_of(path, '8MiB', '64MiB', prefault=False, drain_s=0.2), files=files)\n"
        "stuck = files.stick('write', times=None)\n"
        "assert store.open(space).put(tokens, blocks).n_stored == 4\n"
        "assert stuck.reached.wait(20)\n"
    )
    (tmp_path / "kv").mkdir()
    done = run_program(body + ending, str(tmp_path / "kv"))
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("the disk did not finish within 0.2 s")
