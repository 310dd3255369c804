"""Namespaces, inspection, claims and clearing, through a real daemon and its client."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvstore.client import Client
from kvstore.client.watching import BlockEvent
from kvstore.errors import BadInputError, DeniedError
from kvstore.hybrid import parts_of
from kvstore.types import ExtraKey, GroupKind, KVGroup, KVSpec, Namespace, Shard
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.framing import Method

BLOCK_TOKENS, BLOCK_BYTES = 4, 4096


def namespace(model: str = "m", revision: str = "", tenant: str = "default") -> Namespace:
    return Namespace(model=model, revision=revision, spec=KVSpec.opaque(BLOCK_TOKENS, BLOCK_BYTES), tenant=tenant)


def tokens(n_blocks: int, tag: int = 0) -> list[int]:
    return [tag * 1000 + i for i in range(n_blocks * BLOCK_TOKENS)]


def blocks(n: int, fill: int = 7) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.full((n, BLOCK_BYTES), fill, np.uint8)


@pytest.fixture(params=["dram", "nvme"])
def two_tiers(request: pytest.FixtureRequest, start_daemon: Callable[..., Any], nvme: dict[str, Any]) -> Any:
    """A daemon, with and without NVMe."""
    return start_daemon(**(nvme if request.param == "nvme" else {}))


@pytest.fixture
def client(two_tiers: Any) -> Iterator[Client]:
    with Client(two_tiers.config.socket_path, timeout_s=5.0) as connected:
        yield connected


def on_nvme(two_tiers: Any) -> bool:
    return two_tiers.config.nvme_dir is not None


def test_namespaces_say_what_they_hold(two_tiers: Any, client: Client) -> None:
    assert client.namespaces() == []
    a, b = client.open(namespace("a", "r1"), "first"), client.open(namespace("b"))
    a.put(tokens(3), blocks(3))
    b.put(tokens(2), blocks(2))
    if on_nvme(two_tiers):
        a.persist(tokens(3), 5.0)
    with a.lease(tokens(3)):
        found = {info.namespace.model: info for info in client.namespaces() if info.namespace is not None}
    assert found.keys() == {"a", "b"}
    assert found["a"].namespace == namespace("a", "r1")
    assert (found["a"].names, found["b"].names) == (("first",), ())
    assert (found["a"].n_blocks, found["a"].n_dram_blocks, found["a"].dram_bytes) == (3, 3, 3 * BLOCK_BYTES)
    assert found["a"].n_nvme_blocks == (3 if on_nvme(two_tiers) else 0)
    assert (found["a"].n_pinned_blocks, found["a"].n_lookups, found["a"].n_hit_blocks) == (3, 1, 3)
    assert found["a"].idle_s is not None
    assert found["a"].idle_s < 60
    assert (found["b"].n_blocks, found["b"].n_lookups, found["b"].idle_s) == (2, 0, None)
    assert [info.digest for info in client.namespaces(name="first")] == [a.namespace.digest()]
    assert [info.digest for info in client.namespaces(model="a", revision="r2")] == []
    assert [info.digest for info in client.namespaces(digest_prefix=b.namespace.digest().hex()[:7].upper())] == [
        b.namespace.digest()
    ]


def test_each_tenant_sees_its_own_namespaces_and_the_local_socket_all_of_them_if_it_says_so(two_tiers: Any) -> None:
    path = two_tiers.config.socket_path
    with Client(path, timeout_s=5.0) as mine, Client(path, tenant="other", timeout_s=5.0) as theirs:
        mine.open(namespace()).put(tokens(1), blocks(1))
        theirs.open(namespace(tenant="other")).put(tokens(1), blocks(1))
        assert [info.namespace for info in mine.namespaces()] == [namespace()]
        assert [info.namespace for info in theirs.namespaces()] == [namespace(tenant="other")]
        assert len(mine.namespaces(all_tenants=True)) == 2
        assert {session.tenant for session in mine.claims().sessions} == {"default"}
        assert {session.tenant for session in mine.claims(all_tenants=True).sessions} == {"default", "other"}
        assert mine.clear(everything=True).n_blocks == 1
        assert theirs.open(namespace(tenant="other")).match(tokens(1)).n_blocks == 1
        assert mine.clear(everything=True, all_tenants=True).n_blocks == 1
        assert theirs.open(namespace(tenant="other")).match(tokens(1)).n_blocks == 0


def test_cleared_blocks_are_misses_at_once_and_can_be_stored_anew(two_tiers: Any, client: Client) -> None:
    ns, other = client.open(namespace("a")), client.open(namespace("b"))
    ns.put(tokens(4), blocks(4, 1))
    other.put(tokens(4), blocks(4, 2))
    if on_nvme(two_tiers):
        assert ns.persist(tokens(4), 5.0).n_durable == 4
    counted = client.clear(model="a", dry_run=True)
    assert (counted.n_blocks, ns.match(tokens(4)).n_blocks) == (4, 4)
    cleared = client.clear(model="a")
    assert [(each.digest, each.n_blocks, each.n_dram_blocks) for each in cleared.namespaces] == [
        (ns.namespace.digest(), 4, 4)
    ]
    assert cleared.durable
    assert cleared.n_left_blocks == 0
    assert ns.match(tokens(4)).n_blocks == 0
    assert other.match(tokens(4)).n_blocks == 4
    assert ns.put(tokens(4), blocks(4, 3)).n_stored == 4
    out = blocks(4, 0)
    assert ns.get_into(tokens(4), out).n_blocks == 4
    assert (out == 3).all()
    two_tiers.call(lambda daemon: daemon.store.check())


def test_a_lease_outlives_the_clearing_and_its_blocks_go_with_it(
    two_tiers: Any, client: Client, wait_until: Callable[..., None]
) -> None:
    ns = client.open(namespace())
    ns.put(tokens(3), blocks(3, 5))
    lease = ns.lease(tokens(3))
    cleared = client.clear(everything=True)
    assert (cleared.n_left_blocks, cleared.durable) == (3, True)
    assert not ns.lease(tokens(3))
    assert ns.put(tokens(3), blocks(3, 6)).n_stored == 3
    assert all((np.asarray(lease[i]) == 5).all() for i in range(3))
    lease.release()
    del lease
    wait_until(lambda: client.stats()["hidden_blocks"] == 0, "the last blocks go")
    assert client.stats()["blocks"] == 3
    two_tiers.call(lambda daemon: daemon.store.check())


def test_what_is_being_written_at_the_time_of_a_clearing_does_not_come_to_be_found(
    client: Client, wait_until: Callable[..., None]
) -> None:
    ns = client.open(namespace())
    with ns.reserve(tokens(2), n_blocks=2) as reservation:
        reservation.fill(blocks(2), 1)
        assert client.clear(everything=True).n_ended_reservations == 1
        assert reservation.commit() == (0, 0)
    assert ns.match(tokens(2)).n_blocks == 0
    wait_until(lambda: client.stats()["dram_reserved_bytes"] == 0, "the slots are free")
    assert client.stats()["dram_quarantined_bytes"] == 0


def test_cleared_blocks_do_not_come_back_with_the_next_daemon(
    start_daemon: Callable[..., Any], nvme: dict[str, Any]
) -> None:
    first = start_daemon(**nvme)
    with Client(first.config.socket_path, timeout_s=5.0) as client:
        ns, other = client.open(namespace("a")), client.open(namespace("b"))
        for each in (ns, other):
            each.put(tokens(3), blocks(3), durable_within_s=5.0)
        lease = ns.lease(tokens(3))
        assert client.clear(model="a").durable
        assert len(lease) == 3
    first.stop()
    second = start_daemon(**nvme)
    with Client(second.config.socket_path, timeout_s=5.0) as client:
        unopened = client.namespaces()
        assert [(info.namespace, info.is_open, info.n_blocks) for info in unopened if info.n_blocks] == [
            (namespace("b"), False, 3)
        ]
        assert client.open(namespace("a")).match(tokens(3)).n_blocks == 0
        assert client.clear(model="b").n_blocks == 3
        assert client.open(namespace("b")).match(tokens(3)).n_blocks == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "everything"),
        ({"model": "m", "everything": True}, "everything"),
        ({"revision": "r"}, "of which model"),
        ({"digest_prefix": "xyz"}, "hexadecimal"),
        ({"digest_prefix": "0" * 33}, "32 hexadecimal"),
        ({"name": 3}, "text"),
        ({"everything": True, "wait_s": -1}, "wait_s"),
    ],
)
def test_a_clearing_that_was_not_meant_is_refused(client: Client, arguments: dict[str, Any], words: str) -> None:
    client.open(namespace()).put(tokens(1), blocks(1))
    with pytest.raises(BadInputError, match=words):
        client.clear(**arguments)
    assert client.open(namespace()).match(tokens(1)).n_blocks == 1


def test_a_prompt_is_told_block_by_block_and_why_it_goes_no_further(two_tiers: Any, client: Client) -> None:
    ns = client.open(namespace())
    assert ns.inspect(tokens(2)).ends == "nothing is stored for this namespace, salt and LoRA"
    ns.put(tokens(3), blocks(3))
    if on_nvme(two_tiers):
        assert ns.persist(tokens(3), 5.0).n_durable == 3
    seen = ns.inspect(tokens(3))
    assert (seen.n_rows, seen.n_blocks, seen.ends) == (3, 3, "the whole prompt is stored")
    assert seen.in_dram.all()
    assert seen.on_nvme.all() == on_nvme(two_tiers)
    assert (seen.size_bytes == BLOCK_BYTES).all()
    assert len(seen.hits) == (3 if on_nvme(two_tiers) else 0)
    assert len({key.tobytes() for key in seen.keys}) == 3
    longer = ns.inspect([*tokens(3), 1, 2, 3, 4])
    assert (longer.n_rows, longer.n_blocks, longer.differs_at_token) == (4, 3, None)
    assert longer.ends == "nothing is stored behind block 2"
    other = tokens(3)
    other[9] = 77
    differs = ns.inspect(other)
    assert (differs.n_blocks, differs.partial_tokens, differs.differs_at_token) == (2, 1, 9)
    assert differs.ends == "the stored block that comes closest to block 2 has another token at 9 (9, here 77)"
    assert len(differs.keys) == 3
    assert len(ns.inspect(tokens(3), first_block=2).keys) == 1
    assert ns.inspect(tokens(2, tag=5)).ends == (
        "what is stored for this namespace, salt and LoRA has another token at 0 (here 5000)"
    )
    assert ns.inspect([*tokens(1), *tokens(1, tag=5)]).ends == (
        "what is stored behind block 0 has another token at 4 (here 5000)"
    )
    image = ns.inspect(tokens(3), extras=[ExtraKey(4, 4, b"image")])
    assert (image.n_blocks, image.differs_at_token) == (1, 4)
    assert image.ends.endswith("or another image or sound there")


def test_of_a_hybrid_prompt_it_is_told_which_group_a_hit_lacks(two_tiers: Any, client: Client) -> None:
    groups = (
        KVGroup(layers=1, kv_heads=1, head_dim=32, dtype="float16"),
        KVGroup(layers=1, kv_heads=1, head_dim=32, dtype="float16", kind=GroupKind.SLIDING, window_tokens=8),
        KVGroup(layers=1, dtype="uint8", layout="opaque", page_bytes=4096, kind=GroupKind.STATE),
    )
    spec = KVSpec(BLOCK_TOKENS, groups)
    handle = client.open_hybrid(Namespace(model="h", spec=spec))
    rows = np.ones((8, BLOCK_TOKENS * 32 * 4), np.uint8)
    state = np.ones((1, parts_of(spec)[2].block_bytes), np.uint8)
    assert handle.put(tokens(8), {0: rows, 1: (2, rows[2:]), 2: (7, state)}).n_skipped == 0
    by_group = (
        "; blocks that a hit may have by what is stored of each group: "
        "group 0 (full) {}, group 1 (sliding) {}, group 2 (state) {}"
    )
    assert handle.inspect(tokens(8)).ends == "the whole prompt is stored" + by_group.format(8, 8, 8)
    shorter = handle.inspect(tokens(7))
    assert (shorter.n_blocks, handle.match(tokens(7)).n_blocks) == (7, 0)
    assert shorter.ends == (
        "every block of the prompt is stored, but a hit has 0 blocks only, for want of group 2 (state)"
        + by_group.format(7, 7, 0)
    )
    longer = handle.inspect(tokens(9))
    assert longer.ends == "nothing is stored behind block 7" + by_group.format(8, 8, 8)
    assert handle.inspect(tokens(2)).ends.startswith(
        "every block of the prompt is stored, but a hit has 0 blocks only, for want of group 1 (sliding) and group 2"
    )


def test_leases_and_pins_are_listed_with_their_owners(client: Client) -> None:
    ns = client.open(namespace())
    ns.put(tokens(3), blocks(3))
    pinned = ns.pin(tokens(2), ttl_s=20)
    with ns.lease(tokens(3)) as lease:
        seen = client.claims()
    (session,) = seen.sessions
    assert session.live
    assert {(claim.kind, claim.n_blocks) for claim in seen.claims} == {("lease", 3), ("pin", 2)}
    assert {claim.id for claim in seen.claims} == {lease.id, pinned.id}
    assert all(claim.session_ids == (session.id,) and 0 < claim.left_s <= 30 for claim in seen.claims)
    assert not seen.truncated


def test_a_session_of_another_host_may_not_ask_for_all_tenants(daemon: Any) -> None:
    def ask(method: Method, request: Any) -> str:
        def on_loop(running: Any) -> str:
            session = running.sessions.open_remote("t", "far away", 0.0)
            try:
                running._handlers.by_method[method](session, request)
            except DeniedError as error:
                return str(error)
            finally:
                running.sessions.forget(session)
            return "answered"

        return str(daemon.call(on_loop))

    assert "on its machine" in ask(Method.NAMESPACES, pb.NamespacesRequest(all_tenants=True))
    assert "on its machine" in ask(Method.CLEAR, pb.ClearRequest(all_tenants=True, everything=True))
    assert "on its machine" in ask(Method.CLAIMS, pb.ClaimsRequest(all_tenants=True))
    assert ask(Method.CLAIMS, pb.ClaimsRequest()) == "answered"
    assert "on its machine" in ask(Method.EXPLAIN, pb.ExplainRequest(other_salts=True))


def test_a_hybrid_namespace_is_cleared_with_all_its_parts(two_tiers: Any, client: Client) -> None:
    groups = (
        KVGroup(layers=1, kv_heads=1, head_dim=32, dtype="float16"),
        KVGroup(layers=1, kv_heads=1, head_dim=32, dtype="float16", kind=GroupKind.SLIDING, window_tokens=8),
    )
    hybrid = Namespace(model="h", spec=KVSpec(BLOCK_TOKENS, groups))
    handle = client.open_hybrid(hybrid)
    data = np.ones((3, BLOCK_TOKENS * 32 * 4), np.uint8)
    assert handle.put(tokens(3), {0: data, 1: data}).n_skipped == 0
    if on_nvme(two_tiers):
        assert handle.persist(tokens(3), 5.0).n_durable == 3
    (info,) = client.namespaces()
    assert (info.namespace, info.n_blocks) == (hybrid, 3)
    assert info.dram_bytes == 2 * data.nbytes
    watch = client.watch()
    cleared = client.clear(model="h")
    assert (cleared.n_blocks, cleared.durable, cleared.n_left_blocks) == (3, True, 0)
    assert handle.match(tokens(3)).n_blocks == 0
    gone = [event for event in watch.poll(1.0) if isinstance(event, BlockEvent)]
    assert {event.namespace for event in gone} == {hybrid.digest()}
    stats = client.stats()
    assert (stats["blocks"], stats["block_parts"], stats["hidden_blocks"], stats["dram_used_bytes"]) == (0, 0, 0, 0)
    two_tiers.call(lambda daemon: daemon.store.check())
    assert handle.put(tokens(3), {0: data, 1: data}).n_skipped == 0
    assert handle.match(tokens(3)).n_blocks == 3


def test_namespaces_of_one_shard(client: Client) -> None:
    ranks = [replace(namespace(), shard=Shard(tp, 2, pp, 2)) for tp in (0, 1) for pp in (0, 1)]
    for rank in ranks:
        client.open(rank).put(tokens(1), blocks(1))

    def found(**ranks: Any) -> set[Shard]:
        return {info.namespace.shard for info in client.namespaces(**ranks) if info.namespace is not None}

    assert found(tp_rank=1) == {Shard(1, 2, 0, 2), Shard(1, 2, 1, 2)}
    assert found(tp_rank=0, pp_rank=1) == {Shard(0, 2, 1, 2)}
    assert found(tp_rank=2) == set()
    assert len(client.clear(pp_rank=0).namespaces) == 2
    assert [info.n_blocks for info in client.namespaces(pp_rank=1)] == [1, 1]


def test_latencies_by_method(client: Client) -> None:
    handle = client.open(namespace())
    for _ in range(3):
        handle.match(tokens(1))
    by_method = {each.method: each.distribution for each in client.latencies() if not each.waited}
    assert by_method["match"].n == 3
    assert 0 < by_method["match"].quantile(0.5) <= by_method["match"].quantile(0.99) < 20
    assert by_method["match"].since(by_method["match"]).n == 0
