"""A store inside the program: opened and closed without a trace, opened again with all its blocks.

That it answers as a daemon does is the business of tests/client, which run over it too.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import kvstore
from kvstore import Client, Embedded, KVSpec, Namespace, NamespaceHandle
from kvstore.config import DaemonConfig
from kvstore.embedded import config_of
from kvstore.errors import BadInputError, ConfigError, EndedError, UnavailableError

WAIT_S = 20.0
BLOCK_TOKENS, BLOCK_BYTES = 16, 8192
NAMESPACE = Namespace("model", KVSpec.opaque(BLOCK_TOKENS, BLOCK_BYTES))
SMALL: dict[str, Any] = {"dram": "8MiB", "prefault": False}
NVME = {**SMALL, "nvme": "64MiB"}


def prompt(n_blocks: int, seed: int = 0) -> NDArray[np.uint32]:
    return np.random.default_rng(seed).integers(0, 50_000, n_blocks * BLOCK_TOKENS, dtype=np.uint32)


def content(n_blocks: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed + 1000).integers(0, 256, (n_blocks, BLOCK_BYTES), dtype=np.uint8)


def holds(cache: NamespaceHandle, n_blocks: int, seed: int = 0) -> bool:
    out = np.zeros((n_blocks, BLOCK_BYTES), np.uint8)
    got = cache.get_into(prompt(n_blocks, seed), out)
    return got.n_blocks == n_blocks and bool((out == content(n_blocks, seed)).all())


def store_memory(pid: int | str) -> set[int]:
    """Inodes of stores' memory that a process has open or mapped."""
    found = {
        fd.stat().st_ino
        for fd in Path(f"/proc/{pid}/fd").iterdir()
        if fd.is_symlink() and "memfd:kvstore" in str(fd.readlink())
    }
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return found | {int(line.split()[4]) for line in lines if "memfd:kvstore" in line}


def descriptors(pid: int | str = "self") -> Counter[str]:
    """What a process has open, by what it leads to; numbers of sockets and the like left out."""
    found: Counter[str] = Counter()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found[str(fd.readlink()).partition(":[")[0]] += 1
        except FileNotFoundError:
            continue
    return found


class InUse:
    """Threads, descriptors and mapped memory of stores in this process."""

    def __init__(self) -> None:
        gc.collect()
        self.threads = set(threading.enumerate())
        self.descriptors = descriptors()
        self.n_mappings = Path("/proc/self/maps").read_text().count("memfd:kvstore")

    def check(self) -> None:
        """Nothing has come since. (What went may have been an earlier test's.)"""
        now = InUse()
        assert not now.threads - self.threads
        assert not now.descriptors - self.descriptors
        assert now.n_mappings <= self.n_mappings


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Nothing that the test opened is there at its end: no thread, no descriptor, no mapping."""
    before = InUse()
    yield
    before.check()


def run_program(body: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A program of its own that starts with the names of this module at hand."""
    start = (
        "import os, signal, sys, threading\nimport numpy as np\nimport kvstore\n"
        "from kvstore import KVSpec, Namespace\n"
        f"space = Namespace('model', KVSpec.opaque({BLOCK_TOKENS}, {BLOCK_BYTES}))\n"
        f"settings = dict(dram='8MiB', nvme='64MiB', prefault=False)\n"
        f"tokens, blocks = np.arange({4 * BLOCK_TOKENS}), np.full((4, {BLOCK_BYTES}), 7, np.uint8)\n"
    )
    return subprocess.run(
        [sys.executable, "-c", start + body, *arguments], capture_output=True, text=True, timeout=60, check=False
    )


# One life ----------------------------------------------------------------------------------------


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


# The next life -----------------------------------------------------------------------------------


def test_all_that_was_put_is_found_again(tmp_path: Path, start_daemon: Callable[..., Any]) -> None:
    path = tmp_path / "kv"
    with kvstore.open(path, **NVME) as store:
        for seed in range(20):
            assert store.open(NAMESPACE).put(prompt(8, seed), content(8, seed)).n_stored == 8
    with kvstore.open(path, **NVME) as store:
        assert all(holds(store.open(NAMESPACE), 8, seed) for seed in range(20))
    daemon = start_daemon(nvme_dir=path, nvme_bytes=64 << 20)
    with Client(daemon.config.socket_path, timeout_s=WAIT_S) as client:
        assert all(holds(client.open(NAMESPACE), 8, seed) for seed in range(20))


def test_its_default_capacity_is_never_below_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kv"
    with kvstore.open(path, **NVME) as store:
        for seed in range(80):
            done = store.open(NAMESPACE).put(prompt(32, seed), content(32, seed), durable_within_s=WAIT_S)
            assert done.n_durable == 32
    monkeypatch.setattr("kvstore.embedded.NVME_BYTES_DEFAULT", 28 << 20)
    assert config_of(tmp_path / "another", "8MiB", None).nvme_bytes == 28 << 20
    with kvstore.open(path, **SMALL) as store:
        assert store.stats()["recovered_blocks"] == 80 * 32
        assert holds(store.open(NAMESPACE), 32, 0)


def test_a_second_one_in_the_same_directory_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    with kvstore.open(path, **NVME) as store:
        assert store.open(NAMESPACE).put(prompt(4), content(4), durable_within_s=WAIT_S).n_durable == 4
        before = InUse()
        with pytest.raises(ConfigError, match=r"kv' is in use"):
            kvstore.open(path, **NVME)
        done = run_program("kvstore.open(sys.argv[1], **settings)", str(path))
        assert done.returncode == 1
        assert "InUseError" in done.stderr
        assert "in use" in done.stderr
        before.check()
        assert holds(store.open(NAMESPACE), 4)


@pytest.mark.parametrize(
    "ending", ["", "raise SystemExit(0)", "store = None", "threading.Thread(target=sys.exit).start()"]
)
def test_a_program_that_ends_without_closing_loses_nothing(tmp_path: Path, ending: str) -> None:
    body = (
        "store = kvstore.open(sys.argv[1], **settings)\n"
        "cache = store.open(space)\n"
        "assert cache.put(tokens, blocks).n_stored == 4\n"
        "lease = cache.lease(tokens)\nview = lease[0]\n"
    )
    done = run_program(body + ending, str(tmp_path / "kv"))
    assert (done.returncode, done.stderr) == (0, "")
    with kvstore.open(tmp_path / "kv", **NVME) as store:
        assert store.stats()["recovered_blocks"] == 4


def test_what_was_acknowledged_as_durable_outlives_a_kill(tmp_path: Path) -> None:
    body = (
        "cache = kvstore.open(sys.argv[1], **settings).open(space)\n"
        "assert cache.put(tokens, blocks, durable_within_s=30.0).n_durable == 4\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert run_program(body, str(tmp_path / "kv")).returncode == -signal.SIGKILL
    with kvstore.open(tmp_path / "kv", **NVME) as store:
        out = np.zeros((4, BLOCK_BYTES), np.uint8)
        assert store.open(NAMESPACE).get_into(np.arange(4 * BLOCK_TOKENS), out).n_blocks == 4
        assert (out == 7).all()


# Among other things in the program ---------------------------------------------------------------


@pytest.mark.usefixtures("nothing_left")
def test_it_works_under_a_running_loop() -> None:
    async def main() -> None:
        with kvstore.open(**SMALL) as store:
            cache = store.open(NAMESPACE)
            assert (await asyncio.to_thread(cache.put, prompt(2), content(2))).n_stored == 2
            assert holds(cache, 2)

    asyncio.run(main())


@pytest.mark.usefixtures("nothing_left")
def test_it_may_be_opened_used_and_closed_on_different_threads() -> None:
    with ThreadPoolExecutor(4) as pool:
        store = pool.submit(kvstore.open, **SMALL).result(WAIT_S)
        cache = store.open(NAMESPACE)
        for seed, future in [(seed, pool.submit(cache.put, prompt(4, seed), content(4, seed))) for seed in range(16)]:
            assert future.result(WAIT_S).n_stored == 4, seed
        assert all(pool.map(lambda seed: holds(cache, 4, seed), range(16)))
        pool.submit(store.close).result(WAIT_S)


def test_signals_and_limits_stay_as_they_are() -> None:
    def state() -> Any:
        handlers = [signal.getsignal(number) for number in signal.valid_signals()]
        return handlers, gc.get_threshold(), gc.get_freeze_count(), signal.set_wakeup_fd(-1)

    before = state()
    with kvstore.open(**SMALL) as store:
        store.open(NAMESPACE).put(prompt(1), content(1))
        assert state() == before
    assert state() == before


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_misses_at_once_and_takes_nothing_along(tmp_path: Path) -> None:
    """Nor does it keep the parent from closing: memory goes back and the directory is free while the child lives."""
    told, go = os.pipe(), os.pipe()
    before = store_memory("self")  # of other tests' stores that something still holds
    store = kvstore.open(tmp_path / "kv", **NVME, timeout_s=WAIT_S)
    cache = store.open(NAMESPACE)
    cache.put(prompt(4), content(4))
    lease, theirs = cache.lease(prompt(4)), store.client(timeout_s=3600.0).open(NAMESPACE)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            missed = cache.match(prompt(4))
            fine = missed.n_blocks == 0 and "embedded" in missed.reason and not lease.valid
            fine = fine and cache.put(prompt(1), content(1)).n_skipped == 1
            try:
                store.client()
            except UnavailableError as error:
                fine = fine and "forked child" in str(error)
            store.close()
            os.write(told[1], b"y" if fine else b"n")
            os.close(go[1])
            os.read(go[0], 1)
            code = 0
        finally:
            os._exit(code)
    try:
        os.close(go[0])
        assert os.read(told[0], 1) == b"y"
        assert lease.valid
        np.testing.assert_array_equal(lease[0], content(4)[0])
        assert cache.put(prompt(4, 1), content(4, 1)).n_stored == 4
        assert store_memory("self") - before
        assert not store_memory(pid) - before
        assert store._inside.thread.stop()
        assert theirs.match(prompt(4)).n_blocks == 0, "it hears of the end of the connection, which is not the child's"
        store.close()
        with kvstore.open(tmp_path / "kv", **NVME) as again:
            assert holds(again.open(NAMESPACE), 4, 1)
    finally:
        os.close(go[1])
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        os.close(told[0])
        os.close(told[1])


def test_a_child_of_a_killed_parent_does_not_keep_its_directory(tmp_path: Path) -> None:
    body = (
        "store = kvstore.open(sys.argv[1], **settings)\n"
        "assert store.open(space).put(tokens, blocks, durable_within_s=30.0).n_durable == 4\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    for fd in (0, 1, 2):\n"
        "        os.close(fd)\n"
        "    signal.pause()\n"
        "print(child, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = run_program("import warnings\nwarnings.simplefilter('ignore')\n" + body, str(tmp_path / "kv"))
    child = int(done.stdout)
    try:
        with kvstore.open(tmp_path / "kv", **NVME) as store:
            assert store.stats()["recovered_blocks"] == 4
    finally:
        os.kill(child, signal.SIGKILL)


# Settings ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"dram": "plenty"}, "^dram is 'plenty'; it must be a size such as"),
        ({"dram": True}, "^dram is True; it must be a size such as"),
        ({"dram": None}, "^dram is None; it must be a size such as"),
        ({"dram": "1KiB"}, "too small: give dram at least 1MiB$"),
        ({"path": ".", "nvme": "lots"}, "^nvme is 'lots'; it must be a size such as"),
        ({"path": 7}, "^path is 7; give the path of a directory"),
        ({"path": b"kv"}, "^path is b'kv'; give the path of a directory"),
        ({"timeout_s": "soon"}, "^timeout_s is 'soon'; it must be a duration such as"),
        ({"timeout_s": None}, "^timeout_s is None; it must be a duration such as"),
        ({"region_bytes": "4 parsec"}, "^region_bytes is '4 parsec'; it must be a size such as"),
        ({"region_bytes": 4.5}, "^region_bytes is 4.5; it must be a whole number$"),
        ({"lease_s_default": [3]}, r"^lease_s_default is \[3\]; it must be a duration such as"),
        ({"lease_s_default": "2h"}, r"^lease_s_default 7200\.0 is above lease_s_max 600\.0$"),
        ({"poll_us": "a"}, "^poll_us is 'a'; it must be a duration such as"),
        ({"selective_hits": "2"}, "^selective_hits is '2'; it must be a whole number"),
        ({"prefault": "yes"}, "^prefault is 'yes'; it must be True or False$"),
        ({"prefault": 1}, "^prefault is 1; it must be True or False$"),
        ({"policy": 3}, "^policy is 3; it must be a text$"),
        ({"path": "x", "nvme": "1GiB", "write_policy": "sideways"}, "^write_policy is 'sideways'; known are"),
        ({"write_behind_bytes": 1 << 20}, "^write_behind_bytes needs path and nvme: without an NVMe tier"),
        ({"path": "no/such/folder/kv", "nvme": "64MiB"}, r"can't be used for path: No such file"),
        ({"nvme": "1GiB"}, "there is no path"),
        ({"path": ".", "nvme": "0"}, "nvme is '0'"),
        ({"colour": "red"}, "no setting 'colour'; known are"),
        ({"dram_bytes": 1 << 20}, "give dram"),
        ({"socket_path": "x"}, "give path"),
        ({"holder_path": "x"}, "kvstored"),
        ({"write_policy": "back"}, "without an NVMe tier"),
        ({"policy": "fortune"}, "fortune"),
    ],
)
def test_settings_that_can_not_work_are_named(arguments: dict[str, Any], words: str) -> None:
    before = InUse()
    with pytest.raises(ConfigError, match=words):
        kvstore.open(**arguments)
    before.check()


def test_stores_and_handles_say_what_they_are(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "kv", **NVME) as store:
        assert repr(store) == f"<Embedded of {tmp_path / 'kv'} (embedded), tenant 'default', healthy>"
        assert repr(store.open(NAMESPACE)) == (
            f"<NamespaceHandle of model 'model', tenant 'default', digest {NAMESPACE.digest().hex()}, "
            f"16 tokens a block, at {tmp_path / 'kv'} (embedded)>"
        )
    assert repr(store).endswith(", closed>")


def test_sizes_and_durations_may_be_text() -> None:
    config = config_of(
        None, "64MiB", None, region_bytes="4MiB", lease_s_default="90s", lease_s_max="5m", poll_us="1ms", hello_s=2
    )
    assert (config.dram_bytes, config.region_bytes) == (64 << 20, 4 << 20)
    assert (config.lease_s_default, config.lease_s_max, config.poll_us, config.hello_s) == (90.0, 300.0, 1000.0, 2.0)
    with kvstore.open(**SMALL, timeout_s="2500ms") as store:
        assert store.timeout_s == 2.5


@pytest.mark.parametrize("timeout_s", ["1s", None, True, float("nan"), 0])
def test_a_clients_timeout_is_a_number_of_seconds(timeout_s: Any) -> None:
    with pytest.raises(BadInputError, match=f"timeout_s is {timeout_s!r}; it must be a (positive )?number of seconds"):
        kvstore.Client(timeout_s=timeout_s, required=False)


def test_memory_that_nobody_could_take_over_is_not_given_to_a_holder() -> None:
    with pytest.raises(ConfigError, match="leave it out"):
        DaemonConfig(socket_path=None, holder_path=Path("holder.sock"))


def test_settings_of_the_daemon_are_taken(tmp_path: Path) -> None:
    config = config_of(tmp_path / "kv", "1.5GiB", "2GB", policy="arc", write_policy="selective", selective_hits=3)
    assert (config.dram_bytes, config.nvme_bytes) == (3 << 29, 2 * 10**9)
    assert (config.policy, config.selective_hits, config.socket_path) == ("arc", 3, None)
