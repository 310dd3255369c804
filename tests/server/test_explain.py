"""Why a prompt is no hit, asked of a real daemon: what it says in words, to whom, and what not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvstore.client import Client
from kvstore.clock import ManualClock
from kvstore.config import TenantOptions
from kvstore.errors import BadInputError
from kvstore.hybrid import parts_of
from kvstore.server.explain_words import span
from kvstore.types import ExtraKey, GroupKind, KVGroup, KVSpec, Namespace, Root
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.framing import Method

BLOCK_TOKENS, BLOCK_BYTES = 4, 64 << 10
NAMESPACE = Namespace(model="m", revision="r1", spec=KVSpec.opaque(BLOCK_TOKENS, BLOCK_BYTES))


def tokens(n_blocks: int, tag: int = 0) -> list[int]:
    return [tag * 1000 + i for i in range(n_blocks * BLOCK_TOKENS)]


def blocks(n: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.ones((n, BLOCK_BYTES), np.uint8)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1000.0)


@pytest.fixture
def client(start_daemon: Callable[..., Any], clock: ManualClock) -> Any:
    daemon = start_daemon(clock=clock, policy="lru")
    with Client(daemon.config.socket_path, timeout_s=5.0) as connected:
        connected.daemon = daemon  # type: ignore[attr-defined]
        yield connected


def evict(client: Client, n: int) -> None:
    def drop(daemon: Any) -> None:
        daemon.store.dram.free(daemon.store.index.evict(n).slots)

    client.daemon.call(drop)  # type: ignore[attr-defined]


def test_an_operator_is_told_who_evicted_it_when_and_what_to_do(client: Client, clock: ManualClock) -> None:
    ns = client.open(NAMESPACE)
    ns.put(tokens(5), blocks(5))
    clock.advance(12.0)
    evict(client, 3)
    clock.advance(180.0)
    told = ns.explain(tokens(6))
    assert (told.n_rows, told.n_blocks, told.block, told.reason) == (6, 2, 2, "evicted")
    assert (told.tier, told.policy, told.left_ago_s, told.unused_s, told.unwritten) == ("dram", "lru", 180.0, 12.0, "")
    assert told.missing == {"evicted": 3, "never_stored": 1}
    assert (told.remembered_s, told.forgot) == (192.0, False)
    assert told.lines == (
        "2 of 6 blocks can be used: 2 in DRAM, 0 on NVMe only",
        "block 2 (tokens 8 to 11) was evicted from DRAM by lru 3 min ago, 12 s after its last use",
        "of the 4 missing blocks: 3 evicted, 1 never stored as far as is known",
    )
    assert told.advice == (
        "the tiers are small for how late prompts come back: `kvstore plan` says what more DRAM or NVMe gives",
    )


def test_a_quota_is_not_called_a_full_tier(start_daemon: Callable[..., Any]) -> None:
    daemon = start_daemon(policy="lru", tenants=TenantOptions(dram_max="small=256KiB"))
    with Client(daemon.config.socket_path, "small", timeout_s=5.0) as small:
        ns = small.open(replace(NAMESPACE, tenant="small"))
        assert ns.put(tokens(9), blocks(9)).n_stored == 4
        told = ns.explain(tokens(9))
        assert (told.reason, told.missing) == ("quota", {"quota": 5})
        assert "quota of DRAM (--tenant-dram-max)" in told.lines[1]
        assert "--tenant-dram-max" in told.advice[0]


def test_how_many_missing_blocks_were_looked_at(client: Client) -> None:
    ns = client.open(NAMESPACE)
    assert ns.explain(tokens(300)).lines[-1] == "so it is with all of the first 256 of the 300 missing blocks"
    assert ns.explain(tokens(200)).lines[-1] == "so it is with 199 missing blocks behind it"


def test_a_hit_needs_no_more_words(client: Client) -> None:
    ns = client.open(NAMESPACE)
    ns.put(tokens(3), blocks(3))
    told = ns.explain(tokens(3))
    assert "nothing, if the rest is new or shorter than a block" in ns.explain(tokens(4)).advice[0]
    assert (told.reason, told.block, told.missing, told.left_ago_s) == ("stored", None, {}, None)
    assert (told.lines, told.advice) == (("3 of 3 blocks can be used: 3 in DRAM, 0 on NVMe only",), ())
    assert ns.explain([]).reason == "stored"


def test_another_token_another_image_another_salt_another_revision(client: Client, clock: ManualClock) -> None:
    ns = client.open(NAMESPACE)
    ns.put(tokens(3), blocks(3), extras=[ExtraKey(8, 2, b"cat")])
    ns.put(tokens(2, 5), blocks(2), root=Root("secret", ""))
    clock.advance(10.0)
    other = tokens(3)
    other[5] = 77
    told = ns.explain(other, extras=[ExtraKey(8, 2, b"cat")])
    assert told.lines[1:3] == (
        "block 1 (tokens 4 to 7) was never stored, since the daemon started 10 s ago; what left before is not known",
        "the stored block that comes closest to block 1 has another token at 5 (5, here 77)",
    )
    assert (told.differs_at_token, told.here_token, told.stored_token) == (5, 77, 5)
    assert "put what changes" in told.advice[0]
    told = ns.explain(tokens(3), extras=[ExtraKey(8, 2, b"dog")])
    assert told.content == "other"
    assert "the same tokens are stored with another image or sound behind them" in told.lines
    assert ns.explain(tokens(2, 5)).roots == ()
    told = ns.explain(tokens(2, 5), other_salts=True)
    assert [(root.salt_differs, root.lora_differs, root.n_matching) for root in told.roots] == [(True, False, 2)]
    assert "with another salt 2 blocks of the prompt are stored" in told.lines
    assert "secret" not in repr(told)
    told = client.open(Namespace(model="m", revision="r2", spec=NAMESPACE.spec)).explain(
        tokens(2, 5), root=Root("secret", "")
    )
    assert [(near.differences, near.n_matching) for near in told.namespaces] == [(("revision: 'r2' != 'r1'",), 2)]
    digest = NAMESPACE.digest().hex()[:12]
    assert told.lines[-1] == (f"namespace {digest} has 2 blocks of the prompt (here != there): revision: 'r2' != 'r1'")
    assert told.advice == ("another namespace has it: make the fields equal that differ, if the KV is the same",)


def test_a_cleared_namespace_and_a_history_that_is_too_short(
    start_daemon: Callable[..., Any], clock: ManualClock
) -> None:
    daemon = start_daemon(clock=clock, explain_history_blocks=8)
    with Client(daemon.config.socket_path, timeout_s=5.0) as client:
        ns = client.open(NAMESPACE)
        ns.put(tokens(3), blocks(3))
        client.clear(everything=True)
        clock.advance(7200.0)
        told = ns.explain(tokens(3))
        assert told.lines[1] == "block 0 (tokens 0 to 3) was cleared 2 h ago with its namespace"
        assert (told.cleared_ago_s, told.n_cleared_blocks) == (7200.0, 3)
        assert told.missing == {"cleared": 2, "never_stored": 1}  # a quarter of the room is for clearings
        for tag in range(1, 4):
            ns.put(tokens(4, tag), blocks(4))
        daemon.call(lambda daemon: daemon.store.dram.free(daemon.store.index.evict(9).slots))
        clock.advance(60.0)
        told = ns.explain(tokens(3))
        assert (told.reason, told.remembered_s, told.forgot) == ("never_stored", 60.0, True)
        assert told.lines[1] == (
            "block 0 (tokens 0 to 3) was never stored, or left more than 60 s ago (8 blocks have left since); "
            "the namespace, with 3 blocks, was cleared 2 h ago"
        )


def test_nothing_is_remembered_where_that_is_off_or_before_a_restart(
    start_daemon: Callable[..., Any], nvme: dict[str, Any]
) -> None:
    first = start_daemon(**nvme, write_policy="back", explain_history_blocks=0)
    with Client(first.config.socket_path, timeout_s=5.0) as client:
        ns = client.open(NAMESPACE)
        ns.put(tokens(2), blocks(2), durable_within_s=5.0)
        ns.put(tokens(4), blocks(4))
        first.call(lambda daemon: daemon.store.dram.free(daemon.store.index.evict(4).slots))
        told = ns.explain(tokens(4))
        assert (told.n_blocks, told.n_nvme_blocks, told.n_dram_blocks) == (2, 2, 0)
        assert (told.reason, told.remembered_s) == ("never_stored", None)
        assert "--explain-history-blocks 0" in told.lines[1]
    first.stop()
    second = start_daemon(**nvme)
    with Client(second.config.socket_path, timeout_s=5.0) as client:
        told = client.open(NAMESPACE).explain(tokens(4))
        assert (told.n_blocks, told.reason, told.forgot) == (2, "never_stored", False)
        assert "since the daemon started" in told.lines[1]
        assert "what left before is not known" in told.lines[1]
        assert told.remembered_s is not None
        assert told.remembered_s < 60


def test_of_a_hybrid_namespace_the_group_is_named(client: Client) -> None:
    groups = (
        KVGroup(layers=1, kv_heads=1, head_dim=32, dtype="float16"),
        KVGroup(layers=1, dtype="uint8", layout="opaque", page_bytes=4096, kind=GroupKind.STATE),
    )
    spec = KVSpec(BLOCK_TOKENS, groups)
    handle = client.open_hybrid(Namespace(model="h", spec=spec))
    rows = np.ones((4, BLOCK_TOKENS * 32 * 4), np.uint8)
    state = np.ones((1, parts_of(spec)[1].block_bytes), np.uint8)
    assert handle.put(tokens(4), {0: rows, 1: (1, state)}).n_skipped == 0
    told = handle.explain(tokens(4))
    assert (told.n_blocks, told.block, told.reason, told.groups) == (2, 3, "never_stored", (1,))
    assert told.lines[1].startswith("what group 1 has of block 3 (tokens 12 to 15) was never stored")
    assert told.advice == ("store the parts of these groups with the blocks, as a hit is to end there",)


def test_another_tenant_s_blocks_change_no_answer(start_daemon: Callable[..., Any], clock: ManualClock) -> None:
    daemon = start_daemon(clock=clock)
    path = daemon.config.socket_path
    with Client(path, timeout_s=5.0) as mine, Client(path, tenant="other", timeout_s=5.0) as theirs:
        ns, foreign = mine.open(NAMESPACE), theirs.open(Namespace("m", NAMESPACE.spec, tenant="other", revision="r1"))
        before = [ns.explain(tokens(4, tag)) for tag in (1, 2, 3)]
        foreign.put(tokens(4, 1), blocks(4))
        foreign.put(tokens(4, 2), blocks(4), root=Root("salt", "lora"))
        foreign.put(tokens(4, 3), blocks(4))
        daemon.call(lambda daemon: daemon.store.dram.free(daemon.store.index.evict(5).slots))
        with foreign.reserve(tokens(4, 3), n_blocks=4):
            assert [ns.explain(tokens(4, tag)) for tag in (1, 2, 3)] == before
        assert foreign.explain(tokens(4, 3)).reason != "never_stored"


def test_a_family_can_not_be_asked_as_one(client: Client) -> None:
    client.open(NAMESPACE)
    request = pb.ExplainRequest(prompt=pb.Prompt(shards=NAMESPACE.digest()))
    with pytest.raises(BadInputError, match="name one namespace"):
        client._session.call(Method.EXPLAIN, request, pb.ExplainReply)


def test_spans_for_people() -> None:
    assert [span(s) for s in (0.04, 3.21, 12.3, 119.0, 121.0, 7200.0, 86400.0 * 3)] == [
        "0.0 s", "3.2 s", "12 s", "119 s", "2 min", "2 h", "3 d"
    ]  # fmt: skip
