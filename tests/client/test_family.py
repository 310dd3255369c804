"""Shard families through the client: one question for all ranks, and what each rank's process reads."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.client import Client, FamilyHandle
from kvstore.clock import ManualClock
from kvstore.errors import BadInputError, EndedError
from kvstore.hints import Hints
from kvstore.types import GroupKind, KVGroup, KVSpec, Namespace, Root, RowKind, Shard
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.framing import Method

BLOCK_TOKENS = 16
BLOCK_BYTES = (8192, 12288)
"""Of each of the two ranks."""


def spaces(**more: Any) -> list[Namespace]:
    return [
        Namespace("model", KVSpec.opaque(BLOCK_TOKENS, size), shard=Shard(i, len(BLOCK_BYTES)), **more)
        for i, size in enumerate(BLOCK_BYTES)
    ]


def tokens_of(n_blocks: int, seed: int = 0, extra: int = 0) -> NDArray[np.uint32]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 50_000, n_blocks * BLOCK_TOKENS + extra, dtype=np.uint32)


def blocks_of(n_blocks: int, rank: int, seed: int = 0) -> NDArray[np.uint8]:
    rng = np.random.default_rng((seed, rank))
    return rng.integers(0, 256, (n_blocks, BLOCK_BYTES[rank]), dtype=np.uint8)


def put(family: FamilyHandle, n_blocks: Sequence[int], seed: int = 0, **more: Any) -> NDArray[np.uint32]:
    """Each rank stores so many blocks of one prompt; returns the prompt of the longest."""
    tokens = tokens_of(max(n_blocks), seed)
    for rank, n in enumerate(n_blocks):
        assert family.shards[rank].put(tokens, blocks_of(n, rank, seed), **more).n_stored == n
    return tokens


@pytest.fixture
def family(client: Client) -> FamilyHandle:
    return client.open_family(spaces())


def test_the_smallest_hit_counts_in_one_call(family: FamilyHandle) -> None:
    tokens = put(family, (7, 4))
    found = family.match(tokens)
    assert (found.n_blocks, found.n_tokens, found.partial_tokens, found.n_dram_blocks) == (4, 64, 0, 4)
    assert family.match(tokens[:40]).n_tokens == 40
    assert family.match(tokens_of(7, seed=1)).n_tokens == 0
    assert family.match(tokens, root=Root(salt="s")).n_tokens == 0
    ready = family.prefetch(tokens, max_blocks=3)
    assert (ready.n_blocks, ready.n_ready, ready.n_pending) == (3, 3, 0)


def test_one_lease_gives_every_rank_its_own_blocks(family: FamilyHandle) -> None:
    tokens = put(family, (7, 4))
    with family.lease(tokens, first_block=1) as lease:
        assert (bool(lease), lease.valid) == (True, True)
        assert (lease.first_block, lease.n_blocks, lease.n_tokens) == (1, 4, 64)
        for rank in range(2):
            part = lease.shard(rank)
            assert (part.id, part.first_block, part.n_blocks, len(part)) == (lease.id, 1, 4, 3)
            np.testing.assert_array_equal(np.stack([part[i] for i in range(3)]), blocks_of(7, rank)[1:4])
            out = np.zeros((3, BLOCK_BYTES[rank]), np.uint8)
            assert part.copy_into(out) == 3
            np.testing.assert_array_equal(out, blocks_of(7, rank)[1:4])
        assert lease.shard(Shard(1, 2)).slots.block_bytes == BLOCK_BYTES[1]
        assert lease.renew(100.0)
        assert lease.shard(0).renew(100.0)
    assert not lease.valid
    with pytest.raises(EndedError, match="has ended"):
        lease.shard(0)


@pytest.mark.needs("shared_memory", reason="an array over a copy keeps no block")
def test_a_part_ends_with_the_whole_and_the_whole_goes_on_without_a_part(
    family: FamilyHandle, client: Client, wait_until: Any
) -> None:
    tokens = put(family, (3, 3))
    lease = family.lease(tokens)
    first, second = lease.shard(0), lease.shard(1)
    first.release()
    assert [first.valid, second.valid, lease.valid] == [False, True, True]
    assert client.stats()["leases"] == 1
    view = second[0]
    lease.release()
    assert not second.valid
    with pytest.raises(EndedError):
        second.view(0)
    np.testing.assert_array_equal(view, blocks_of(3, 1)[0])
    assert client.stats()["leases"] == 1, "an array keeps the blocks of every shard"
    del view
    gc.collect()
    wait_until(lambda: client.stats()["leases"] == 0, "the lease is released with its last array")


def test_a_forgotten_lease_over_a_family_gives_its_blocks_back(
    family: FamilyHandle, client: Client, wait_until: Any
) -> None:
    tokens = put(family, (3, 3))
    part = family.lease(tokens).shard(0)
    gc.collect()
    assert client.stats()["leases"] == 1
    np.testing.assert_array_equal(part[2], blocks_of(3, 0)[2])
    del part
    gc.collect()
    wait_until(lambda: client.stats()["leases"] == 0, "the lease is released")


def test_a_miss_of_one_rank_is_a_miss(family: FamilyHandle) -> None:
    tokens = tokens_of(5)
    family.shards[0].put(tokens, blocks_of(5, 0))
    lease = family.lease(tokens)
    assert not lease
    assert (lease.id, lease.n_tokens, lease.reason) == (0, 0, "")
    with pytest.raises(EndedError):
        lease.shard(0)
    assert family.pin(tokens).n_blocks == 0


def test_another_client_reads_one_shard_of_the_lease_or_all(family: FamilyHandle, connect: Any) -> None:
    tokens = put(family, (4, 6))
    lease = family.lease(tokens)
    with connect() as worker, connect() as leader:
        with worker.attach(lease.id, shard=spaces()[1]) as part:
            all_of_it = leader.open_family(spaces()).attach(lease.id)
            lease.release()
            assert (part.n_blocks, part.first_block, len(part)) == (4, 0, 4)
            np.testing.assert_array_equal(part[3], blocks_of(6, 1)[3])
        assert (all_of_it.n_blocks, all_of_it.n_tokens) == (4, 64)
        np.testing.assert_array_equal(all_of_it.shard(0)[0], blocks_of(4, 0)[0])
        all_of_it.release()
        assert leader.stats()["leases"] == 0
        with pytest.raises(EndedError):
            worker.attach(lease.id, shard=spaces()[0])


def test_attaching_says_what_is_missing(family: FamilyHandle, connect: Any) -> None:
    tokens = put(family, (2, 2))
    lease = family.lease(tokens)
    plain = family.shards[0].lease(tokens)
    with connect() as worker:
        with pytest.raises(BadInputError, match="family of 2 shards: say which"):
            worker.attach(lease.id, BLOCK_BYTES[0])
        with pytest.raises(BadInputError, match="not shard"):
            worker.attach(lease.id, shard=Namespace("other", KVSpec.opaque(16, 8192)))
        with pytest.raises(BadInputError, match="is over one namespace"):
            worker.attach(plain.id, shard=spaces()[0])
        for arguments in ({}, {"block_bytes": 8192, "shard": spaces()[0]}):
            with pytest.raises(BadInputError, match="give block_bytes, or"):
                worker.attach(lease.id, **arguments)
        with pytest.raises(BadInputError, match=r"kvstore\.Namespace"):
            worker.attach(lease.id, shard=1)
    for wrong in (2, -1, True, "0", Shard(0, 4)):
        with pytest.raises(BadInputError, match=r"shard is|has no Shard"):
            lease.shard(wrong)  # type: ignore[arg-type]


def test_what_is_no_family_is_refused_by_client_and_daemon(client: Client) -> None:
    first, second = spaces()
    with pytest.raises(BadInputError, match="revision of number 1"):
        client.open_family([first, spaces(revision="2")[1]])
    with pytest.raises(BadInputError, match="a family of 0 shards"):
        client.open_family([])
    sliding = KVGroup(1, 1, 1, kind=GroupKind.SLIDING, window_tokens=32)
    hybrid = [Namespace("m", KVSpec(16, (KVGroup(1, 1, 1), sliding)), shard=Shard(i, 2)) for i in range(2)]
    with pytest.raises(BadInputError, match="hybrid namespaces can't be asked together"):
        client.open_family(hybrid)
    family = client.open_family([first, second])
    family.shards = (family.shards[0], client.open(spaces(revision="2")[1]))
    with pytest.raises(BadInputError, match="revision of number 1"):
        family.match(tokens_of(1))


def test_only_what_finds_takes_a_family(client: Client) -> None:
    digests = client.open_family(spaces()).ensure_open()
    request = pb.ReserveRequest(n_blocks=1)
    request.prompt.rows, request.prompt.shards = tokens_of(1).tobytes(), digests
    with pytest.raises(BadInputError, match="name one namespace"):
        client._session.call(Method.RESERVE, request, pb.ReserveReply)
    wrong = pb.MatchRequest()
    wrong.prompt.shards = digests[:-1]
    with pytest.raises(BadInputError, match="31 bytes"):
        client._session.call(Method.MATCH, wrong, pb.MatchReply)


def test_hints_are_of_every_shard(family: FamilyHandle, client: Client) -> None:
    tokens = put(family, (3, 3), hints=Hints(session_id="s"))
    with family.lease(tokens, hints=Hints(session_id="s", turn=2)) as lease:
        assert lease.n_blocks == 3
    assert [each["turn"] for handle in family.shards for each in handle.inspect(tokens).hints] == [2] * 6
    assert family.end_session("s") == 6


def test_pins_keep_every_shard(family: FamilyHandle) -> None:
    tokens = put(family, (3, 3))
    pinned = family.pin(tokens, ttl_s=600.0)
    assert pinned.n_blocks == 3
    for seed in range(1, 200):  # 60 KiB each, into 8 MiB
        for rank in range(2):
            family.shards[rank].put(tokens_of(3, seed), blocks_of(3, rank, seed))
    assert family.match(tokens).n_blocks == 3
    assert family.unpin(pinned)


def test_families_of_engine_hashes(client: Client) -> None:
    family = client.open_family(spaces(row_kind=RowKind.HASHES, hash_bytes=16))
    hashes = np.random.default_rng(5).integers(0, 256, (4, 16), dtype=np.uint8)
    for rank, n in enumerate((4, 3)):
        family.shards[rank].put(hashes, blocks_of(n, rank))
    found = family.match(hashes)
    assert (found.n_blocks, found.n_tokens) == (3, 48)


def test_two_tiers(serve: Any, nvme: Any, wait_until: Callable[..., None]) -> None:
    with serve(**nvme).connect() as client:
        family = client.open_family(spaces())
        tokens = put(family, (5, 4))
        done = family.persist(tokens, wait_s=10.0)
        assert (done.n_blocks, done.n_durable, done.reason) == (4, 4, "")
        for seed in range(1, 200):
            for rank in range(2):
                family.shards[rank].put(tokens_of(5, seed), blocks_of(5, rank, seed))
        assert family.match(tokens).n_dram_blocks < 4
        with family.lease(tokens, wait=10.0) as lease:
            assert (lease.n_blocks, lease.n_pending) == (4, 0)
            assert lease.n_nvme > 0
            for rank in range(2):
                np.testing.assert_array_equal(lease.shard(rank)[3], blocks_of(5, rank)[3])
        assert family.persist(tokens_of(1, seed=999)).n_blocks == 0


def test_the_lease_ends_in_every_part_at_its_deadline(serve: Any, wait_until: Any) -> None:
    clock = ManualClock(1000.0)
    with serve(clock, heartbeat_s=3600.0).connect() as client:
        family = client.open_family(spaces())
        tokens = put(family, (2, 2))
        lease = family.lease(tokens, ttl_s=500.0)
        part = lease.shard(1)
        clock.advance(501.0)  # the daemon's clock, not the client's: it must be told
        wait_until(lambda: not part.valid, "the daemon has said that the lease has ended")
        assert not lease.valid
        assert part.copy_into(np.zeros((2, BLOCK_BYTES[1]), np.uint8)) == 0


def test_closing_the_client_ends_it_all(connect: Any, client: Client, wait_until: Any) -> None:
    n_before = client.stats()["sessions"]
    other = connect()
    family = other.open_family(spaces())
    lease = family.lease(put(family, (2, 2)))
    part = lease.shard(0)
    other.close()
    assert not lease.valid
    assert not part.valid
    wait_until(lambda: client.stats()["sessions"] == n_before, "the daemon has forgotten the client")


# Two processes ------------------------------------------------------------------------------------


def rank_main(target: str, rank: int, orders: Any, answers: Any) -> None:
    """A rank: puts its own shard's blocks, and reads its own part of leases that the scheduler has taken."""
    with Client(target, timeout_s=10.0) as client:
        mine = spaces()[rank]
        handle = client.open(mine)
        while (order := orders.get()) is not None:
            what, *rest = order
            if what == "put":
                n_blocks, seed = rest
                result = handle.put(tokens_of(n_blocks, seed), blocks_of(n_blocks, rank, seed))
                answers.put(result.n_present + result.n_stored)
            else:
                (lease_id,) = rest
                with client.attach(lease_id, shard=mine) as part:
                    answers.put((np.stack([part[i] for i in range(len(part))]), client._session.session_id))


def regions_of(daemon: Any) -> list[tuple[int | None, set[int]]]:
    """The writer and the mappers of every region."""
    return [(region.writer, set(region.mappers)) for region in daemon.store.dram.regions.values()]


@pytest.mark.needs("processes", reason="ranks are processes of their own")
def test_ranks_in_processes_of_their_own(place: Any, client: Client, daemon: Any) -> None:
    spawn = multiprocessing.get_context("spawn")
    family = client.open_family(spaces())
    queues = [(spawn.Queue(), spawn.Queue()) for _ in BLOCK_BYTES]
    ranks = [
        spawn.Process(target=rank_main, args=(place.target, rank, *queues[rank]), daemon=True) for rank in range(2)
    ]
    for process in ranks:
        process.start()
    try:
        dice, sessions = np.random.default_rng(7), set()
        for seed in range(6):
            n = dice.integers(1, 9, 2).tolist()
            for rank, (orders, _) in enumerate(queues):
                orders.put(("put", n[rank], seed))
            assert [answers.get(timeout=60) for _, answers in queues] == n
            tokens = tokens_of(max(n), seed)
            assert family.match(tokens).n_blocks == min(n)
            with family.lease(tokens) as lease:
                assert lease.n_blocks == min(n)
                for orders, _ in queues:
                    orders.put(("read", lease.id))
                for rank, (_, answers) in enumerate(queues):
                    got, session_id = answers.get(timeout=60)
                    np.testing.assert_array_equal(got, blocks_of(n[rank], rank, seed)[: min(n)])
                    sessions.add(session_id)
        assert len(sessions) == 2
        for writer, mappers in daemon.call(regions_of):
            if writer in sessions:
                assert mappers <= {writer}, "a rank maps what holds its own shard, not what the other has written"
    finally:
        for process, (orders, _) in zip(ranks, queues, strict=True):
            orders.put(None)
            process.join(30)
        for process in ranks:
            process.kill()
    assert [process.exitcode for process in ranks] == [0, 0]
