"""A daemon's keeper with a real holder: whatever packet or store was the last, the next daemon finds the truth."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.errors import ConfigError
from kvstore.takeover import keeper as keeper_module
from kvstore.takeover import link as link_module
from kvstore.takeover.blocks import open_keeper
from kvstore.takeover.link import HolderLink
from kvstore.tiers.directory import SlotDirectory

PAGE = 4096
Lives = Callable[..., Any]
LifeOf = Callable[..., Any]
WaitUntil = Callable[[Callable[[], bool], str], None]


@pytest.fixture
def life_of(lives: Lives, holder_path: Path) -> LifeOf:
    """``life_of(name, **settings)``: a life that claims the holder and takes over what is there."""

    def begin(name: str, **settings: Any) -> Any:
        keeper, estate = open_keeper(holder_path, "me", 30.0, name)
        return lives(estate, keeper=keeper, **settings)

    return begin


def holder_pid(path: Path) -> int:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.connect(str(path))
        return int.from_bytes(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)[:4], sys.byteorder)


def test_a_daemon_that_goes_is_succeeded_again_and_again(life_of: LifeOf) -> None:
    life = life_of("0")
    life.put(life.client(1), list(range(20)))
    for turn in range(1, 4):
        life.keeper.leave()
        life = life_of(str(turn))
        assert life.found(list(range(20))) == 20
        assert life.keeper.linked


def test_what_happens_is_kept_at_once(life_of: LifeOf, holder_path: Path) -> None:
    life = life_of("0")
    writer, reader = life.client(1), life.client(2)
    region_id = int(life.put(writer, list(range(3)))[0]) >> 20
    life.map(reader, region_id)
    kept = life.keeper._link.sync()["0.0"]
    assert kept == len(life.keeper._entries) == 1 + 2 + 1 + 2  # directory, sessions, region, mappings
    life.tier.remove_mapper(region_id, reader)
    life.keeper.session_gone(reader)
    assert life.keeper._link.sync()["0.0"] == kept - 2


def test_the_holder_of_another_daemon_is_a_mistake_to_be_told(life_of: LifeOf, holder_path: Path) -> None:
    life = life_of("0")
    life.put(life.client(1), [1])
    life.keeper.leave()
    with pytest.raises(ConfigError, match="choose another --holder"):
        open_keeper(holder_path, "somebody else", 30.0, "1")


def test_without_a_holder_it_starts_cold_and_goes_on(lives: Lives, tmp_path: Path, caplog: Any) -> None:
    keeper, estate = open_keeper(tmp_path / "no" / "such" / "place", "me", 30.0, "0")
    assert estate is None
    assert "cold" in caplog.text
    life = lives(keeper=keeper)
    life.put(life.client(1), list(range(5)))
    assert life.found(list(range(5))) == 5
    assert not keeper.linked


def test_garbage_at_the_holder_is_dropped(life_of: LifeOf, holder_path: Path, caplog: Any) -> None:
    link, _ = HolderLink.claim(holder_path, "me", 30.0, start=True)
    link.put("x", [link_module.Entry("directory", "{}"), link_module.Entry("region/1", "[]")])
    link.switch("x")
    link.close()
    life = life_of("0")
    assert life.n_adopted == 0
    assert "cold" in caplog.text
    assert set(life.keeper._link.sync()) == {"0.0"}


def test_a_holder_that_is_lost_makes_the_next_start_cold_and_is_found_again(
    life_of: LifeOf, holder_path: Path, wait_until: WaitUntil
) -> None:
    life = life_of("0")
    life.put(life.client(1), list(range(5)))
    os.kill(holder_pid(holder_path), signal.SIGKILL)
    wait_until(lambda: _lost(life), "the loss is noticed")
    assert not life.tier.labelling.valid
    life.put(1, list(range(50, 60)))

    def linked() -> bool:
        life.keeper.tick(life.index, bytes, keeper_module.RETRY_S + 1)
        return bool(life.keeper.linked)

    wait_until(linked, "another holder has it all")
    assert life.tier.labelling.valid
    life.keeper.leave()
    after = life_of("1")
    assert (after.found(list(range(5))), after.found(list(range(50, 60)))) == (5, 10)


def _lost(life: Any) -> bool:
    life.keeper.session_opened(9, bytes(16), "a", "", os.getpid(), life.pidfds[1])
    life.keeper.session_gone(9)
    return not life.keeper.linked


def test_a_holder_that_hangs_is_let_go_and_what_it_has_is_not_believed(
    life_of: LifeOf, holder_path: Path, lives: Lives
) -> None:
    life = life_of("0")
    life.put(life.client(1), list(range(5)))
    pid = holder_pid(holder_path)
    os.kill(pid, signal.SIGSTOP)
    try:
        for i in range(100_000):
            life.keeper.region_mapped(1, 1000 + i)
            if not life.keeper.linked:
                break
    finally:
        os.kill(pid, signal.SIGCONT)
    assert not life.keeper.linked
    for i in range(100_000):
        life.keeper._entries.pop(f"map/1/{1000 + i}", None)
    life.keeper.leave()
    after = life_of("1")
    assert after.n_adopted == 0
    assert after.keeper.linked


def test_memory_is_free_only_when_the_holder_has_let_go_of_it_too(life_of: LifeOf, holder_path: Path) -> None:
    """Or the capacity would be exceeded by what it still keeps."""
    life = life_of("0", capacity_bytes=256 * PAGE)
    writer, pid = life.client(1), holder_pid(holder_path)
    given_back: list[int] = []
    give_back = life.tier._source.give_back

    def watched(size_bytes: int) -> None:
        kept = [str(fd.readlink()) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()]
        given_back.append(sum("memfd:kvstore-region" in link for link in kept) - len(life.tier.regions))
        give_back(size_bytes)

    life.tier._source.give_back = watched
    for turn in range(3):
        life.put(writer, list(range(1000 * turn, 1000 * turn + 250)))
        life.evict(250)
        for region_id in life.tier.retire_empty((2, "a", PAGE)):
            if turn:  # in the first round they are mapped until the last moment
                life.tier.remove_mapper(region_id, writer)
            else:
                life.tier.drop_client(writer)
        life.mapped.clear()
    assert len(given_back) > 30
    # A region that goes at once is not among the tier's any more, and not in the holder either.
    assert max(given_back) <= 0


def test_a_holder_that_hangs_at_a_retirement_costs_a_moment(life_of: LifeOf, holder_path: Path) -> None:
    life = life_of("0")
    life.put(life.client(1), list(range(20)))
    pid = holder_pid(holder_path)
    life.evict(20)
    os.kill(pid, signal.SIGSTOP)
    try:
        start_s = time.monotonic()
        assert life.tier.retire_empty((2, "a", PAGE))
        assert time.monotonic() - start_s < 10 * link_module.SEND_S
    finally:
        os.kill(pid, signal.SIGCONT)
    assert not life.keeper.linked
    assert not life.tier.labelling.valid


def test_told_to_end_nothing_is_left(life_of: LifeOf, holder_path: Path, wait_until: WaitUntil) -> None:
    life = life_of("0")
    life.put(life.client(1), list(range(5)))
    life.keeper.end()
    wait_until(lambda: not holder_path.exists(), "the holder ends")


def test_a_daemon_that_dies_before_it_serves_leaves_all_as_it_was(life_of: LifeOf) -> None:
    life = life_of("0")
    life.put(life.client(1), list(range(20)))
    life.keeper.leave()
    half = life_of("1", serve=False)
    half.keeper._link.put("1.0", list(half.keeper._entries.values()))
    half.keeper.leave()
    after = life_of("2")
    assert after.found(list(range(20))) == 20


# -- killed at any step -----------------------------------------------------------------------------


class Steps:
    """Counts packets and stores of the slot directory; ends the process at step ``n``, before it is made."""

    def __init__(self, n: int) -> None:
        self.left = n

    def __call__(self) -> None:
        if self.left == 0:
            os._exit(9)
        self.left -= 1

    def install(self) -> None:
        for owner, name in (
            (HolderLink, "_send"), (SlotDirectory, "publish"), (SlotDirectory, "forget"), (SlotDirectory, "note_ranks"),
        ):  # fmt: skip
            setattr(owner, name, self._before(getattr(owner, name)))

    def _before(self, function: Any) -> Any:
        def stepped(*args: Any) -> Any:
            self()
            result = function(*args)
            self()
            return result

        return stepped


def live_on(life: Any, tell: Callable[..., None]) -> None:
    """A daemon's doings. ``tell`` says what a client has been told, or has done."""
    writers = [life.client(number, os.pidfd_open(os.getppid())) for number in (1, 2)]
    for writer in writers:
        life.tier.settle(writer)
    tell("clients", 2)
    rng = np.random.default_rng(5)
    for turn in range(14):
        writer = writers[turn % 2]
        tokens = [100 * int(rng.integers(0, 6)) + i for i in range(int(rng.integers(1, 7)))]
        if life.tier.free_slots(writer, "a", PAGE) < len(tokens):
            tell("evicting")
            life.evict(12)
            for region_id in life.tier.retire_empty((writer, "a", PAGE)):
                for client in writers:
                    life.tier.remove_mapper(region_id, client)
            continue
        slots = life.put(writer, tokens)
        for region_id in np.unique(slots >> 20).tolist():
            life.map(writers[1 - turn % 2], region_id)
            tell("mapped", region_id)
        tell("stored", *tokens)
        life.keeper.tick(life.index, bytes, 0.0)


N_STEPS_MAX = 400


@pytest.mark.slow
@pytest.mark.parametrize("begin", ["cold", "warm"])
def test_killed_at_any_step_the_next_one_finds_the_truth(
    holder_path: Path, lives: Lives, life_class: Any, begin: str
) -> None:
    """Every block that is found has its bytes; all that was told is found; whoever maps something is known."""
    n_found = 0
    for step in range(0, N_STEPS_MAX, 2):
        before: list[list[int]] = []
        if begin == "warm":
            keeper, _ = open_keeper(holder_path, "me", 30.0, f"{step}.before")
            first = lives(keeper=keeper)
            before = [[900, 901, 902], [950]]
            first.client(1)
            for tokens in before:
                first.put(1, tokens)
            keeper.leave()
        told, died = run_and_kill(holder_path, step, life_class)
        keeper, estate = open_keeper(holder_path, "me", 30.0, f"{step}.after")
        life = lives(estate, keeper=keeper)
        stored = [tokens for what, *tokens in told if what == "stored"]
        evicting = any(what == "evicting" for what, *_ in told)
        for tokens in [*before, *stored]:
            n = life.found(tokens)  # compares the bytes
            assert evicting or n == len(tokens), (step, tokens, n)
            n_found += n
        for what, *numbers in told:
            if what == "mapped" and numbers[0] in life.tier.regions:
                assert life.tier.region(numbers[0]).mappers >= {1, 2}, (step, numbers)
        assert life.tier.stats()["used_bytes"] <= life.tier.capacity_bytes
        keeper.end()
        if not died:
            break
    else:
        pytest.fail(f"more than {N_STEPS_MAX} steps")
    assert n_found > 500


def run_and_kill(holder_path: Path, step: int, life_class: Any) -> tuple[list[Any], bool]:
    """What a child told before it ended at that step, and whether it came that far."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            run_child(holder_path, step, life_class, theirs)
        finally:
            os._exit(1)
    os.close(theirs)
    with os.fdopen(ours) as pipe:
        told = [json.loads(line) for line in pipe]
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 9), f"the child ended with {code}"
    return told, code == 9


def run_child(holder_path: Path, step: int, life_class: Any, pipe: int) -> None:
    Steps(step).install()
    keeper, estate = open_keeper(holder_path, "me", 30.0, f"{step}.child")

    def tell(*words: Any) -> None:
        os.write(pipe, (json.dumps(words) + "\n").encode())

    live_on(life_class(estate, keeper=keeper), tell)
    os._exit(0)
