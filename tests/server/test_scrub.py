"""A running daemon checks what it holds: everything once, bad frames go, contradictions are told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvstore.client import Client
from kvstore.errors import DeniedError
from kvstore.store import scrub
from kvstore.types import KVSpec, Namespace
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.framing import Method
from tests.tiers.segment_files import frames_of

BLOCK_BYTES = 8192
NAMESPACE = Namespace(model="m", spec=KVSpec.opaque(4, BLOCK_BYTES))
DaemonFactory = Callable[..., Any]


def tokens(n_blocks: int, tag: int = 0) -> list[int]:
    return [tag * 1000 + i for i in range(4 * n_blocks)]


def fill(client: Client, n_prompts: int, n_blocks: int = 5) -> None:
    handle = client.open(NAMESPACE)
    rng = np.random.default_rng(3)
    for tag in range(n_prompts):
        blocks = rng.integers(0, 256, (n_blocks, BLOCK_BYTES), np.uint8)
        assert handle.put(tokens(n_blocks, tag), blocks, durable_within_s=10.0).n_durable == n_blocks


@pytest.fixture
def two_tiers(start_daemon: DaemonFactory, nvme: dict[str, Any]) -> Any:
    return start_daemon(**nvme)


@pytest.fixture
def client(two_tiers: Any) -> Any:
    with Client(two_tiers.config.socket_path, timeout_s=5.0) as connected:
        yield connected


def test_everything_is_checked_once_slice_by_slice(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrub, "BYTES_MAX", 40_000)
    fill(client, 6)
    steps: list[tuple[int, int]] = []
    found = client.verify(progress=lambda done, total: steps.append((done, total)))
    assert found.ok
    assert (found.n_blocks, found.n_frames) == (30, 30)
    assert found.n_bytes >= 30 * BLOCK_BYTES
    assert len(steps) > 5
    assert steps[-1][0] == steps[-1][1]
    assert client.stats()["scrubbed_frames"] == 30
    assert client.verify(frames=False).n_frames == 0


def test_a_daemon_without_nvme_checks_its_tables(daemon: Any) -> None:
    with Client(daemon.config.socket_path, timeout_s=5.0) as client:
        assert client.verify().ok
        client.open(NAMESPACE).put(tokens(3), np.zeros((3, BLOCK_BYTES), np.uint8))
        found = client.verify()
    assert found.ok
    assert (found.n_blocks, found.n_frames) == (3, 0)


@pytest.mark.parametrize("place", ["header", "payload", "another frame"])
def test_a_bad_frame_is_found_counted_and_never_served(two_tiers: Any, client: Client, place: str) -> None:
    fill(client, 3)
    handle = client.open(NAMESPACE)
    key, other = (handle.inspect(tokens(5, tag)).keys[2].tobytes() for tag in (1, 2))
    (frame,) = frames_of(two_tiers.config.nvme_dir, key)
    if place == "another frame":
        (stranger,) = frames_of(two_tiers.config.nvme_dir, other)
        with frame.path.open("r+b") as file, stranger.path.open("rb") as source:
            source.seek(stranger.offset)
            file.seek(frame.offset)
            file.write(source.read(frame.frame_bytes))
    else:
        frame.flip(50 if place == "header" else frame.payload_offset + 7)
    found = client.verify()
    assert not found.ok
    assert (found.n_frames, found.n_corrupt, found.n_unreadable, found.problems) == (15, 1, 0, [])
    assert client.stats()["scrub_corrupt_blocks"] == 1
    seen = handle.inspect(tokens(5, 1))
    assert seen.on_nvme.tolist() == [True, True, False, True, True]
    assert seen.in_dram.all()  # what DRAM has is good
    assert client.verify().ok
    two_tiers.call(lambda daemon: daemon.store.check())


def test_blocks_of_namespaces_that_nobody_opened_are_checked_too(
    start_daemon: DaemonFactory, nvme: dict[str, Any]
) -> None:
    first = start_daemon(**nvme)
    with Client(first.config.socket_path, timeout_s=5.0) as client:
        fill(client, 2)
        key = client.open(NAMESPACE).inspect(tokens(5)).keys[4].tobytes()
    first.stop()
    second = start_daemon(**nvme)
    with Client(second.config.socket_path, timeout_s=5.0) as client:
        assert (client.verify().n_frames, client.verify().n_corrupt) == (10, 0)
        frames_of(second.config.nvme_dir, key)[0].flip(5000)
        assert client.verify().n_corrupt == 1
        assert client.open(NAMESPACE).match(tokens(5)).n_blocks == 4


def corrupt(what: str) -> Callable[[Any], Callable[[], None]]:
    """Make the tables of a daemon wrong; what it returns puts them right again."""

    def on_loop(daemon: Any) -> Callable[[], None]:
        table = daemon.store.index.table
        block = int(table.alive()[2])
        column, value = {
            "key": (table.key, 0),
            "slot": (table.slot, int(table.slot[table.alive()[3]])),
            "nvme": (table.nvme_slot, int(table.nvme_slot[table.alive()[3]])),
            "refs": (table.refs, -1),
            "state": (table.state, 77),
            "place": (table.node, table.node[table.alive()[7]]),
            "residency": (table.residency, 0),
        }[what]
        before = column[block].copy() if what == "key" else column[block]
        column[block] = value

        def repair() -> None:
            column[block] = before

        return repair

    return on_loop


@pytest.mark.parametrize("what", ["key", "slot", "nvme", "refs", "state", "place", "residency"])
def test_tables_that_contradict_each_other_are_told(two_tiers: Any, client: Client, what: str) -> None:
    fill(client, 2)
    repair = two_tiers.call(corrupt(what))
    found = client.verify(frames=False)
    two_tiers.call(lambda _: repair())
    assert found.problems
    assert not found.ok
    assert float(client.stats()["scrub_contradictions"]) >= len(found.problems)
    assert client.verify(frames=False).ok


def test_only_the_daemon_s_own_socket_may_ask(daemon: Any) -> None:
    def on_loop(running: Any) -> None:
        session = running.sessions.open_remote("t", "far away", 0.0)
        try:
            running._handlers.by_method[Method.VERIFY](session, pb.VerifyRequest())
        finally:
            running.sessions.forget(session)

    with pytest.raises(DeniedError, match="on its machine"):
        daemon.call(on_loop)
