"""The client against a real daemon: what was put is found, leased, copied, and nothing else is."""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.client import Client, NamespaceHandle, WaitRule
from kvstore.client.transport import Transport
from kvstore.clock import ManualClock
from kvstore.errors import BadInputError, EndedError, SpecMismatchError, UnavailableError
from kvstore.types import ExtraKey, KVGroup, KVSpec, Namespace, Root
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.framing import Method

BLOCK_BYTES = 8192
BLOCK_TOKENS = 16


def spec_of(block_bytes: int = BLOCK_BYTES) -> KVSpec:
    return KVSpec.opaque(BLOCK_TOKENS, block_bytes)


def tokens_of(n_blocks: int, seed: int = 0, extra: int = 0) -> NDArray[np.uint32]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 50_000, n_blocks * BLOCK_TOKENS + extra, dtype=np.uint32)


def blocks_of(n_blocks: int, seed: int = 0, block_bytes: int = BLOCK_BYTES) -> NDArray[np.uint8]:
    return np.random.default_rng(seed + 1000).integers(0, 256, (n_blocks, block_bytes), dtype=np.uint8)


@pytest.fixture
def ns(client: Client) -> NamespaceHandle:
    return client.open(Namespace("model", spec_of()))


def test_what_was_put_is_found_and_comes_back(ns: NamespaceHandle) -> None:
    tokens, blocks = tokens_of(10, extra=3), blocks_of(10)
    assert ns.match(tokens).n_blocks == 0
    result = ns.put(tokens, blocks)
    assert (result.n_stored, result.n_present, result.n_skipped) == (10, 0, 0)
    found = ns.match(tokens)
    assert (found.n_blocks, found.n_tokens, found.partial_tokens) == (10, 160, 0)
    out = np.zeros_like(blocks)
    got = ns.get_into(tokens, out)
    assert (got.n_blocks, got.n_tokens) == (10, 160)
    np.testing.assert_array_equal(out, blocks)


def test_a_second_put_copies_nothing_and_keeps_the_first_bytes(ns: NamespaceHandle) -> None:
    tokens, blocks = tokens_of(4), blocks_of(4)
    ns.put(tokens, blocks)
    again = ns.put(tokens, blocks_of(4, seed=9))
    assert (again.n_present, again.n_stored) == (4, 0)
    with ns.lease(tokens) as lease:
        np.testing.assert_array_equal(lease[0], blocks[0])


def test_a_prefix_is_extended_from_the_middle(ns: NamespaceHandle) -> None:
    tokens, blocks = tokens_of(6), blocks_of(6)
    ns.put(tokens[: 2 * BLOCK_TOKENS], blocks[:2])
    assert ns.put(tokens, blocks[2:], first_block=2).n_stored == 4
    assert ns.match(tokens).n_blocks == 6
    gap = ns.put(tokens_of(6, seed=5), blocks[2:], first_block=2)
    assert gap.n_stored == 0
    assert gap.n_skipped == 4
    assert "not stored" in gap.reason


@pytest.mark.needs("shared_memory", reason="what it shows is the store's own memory")
def test_a_lease_reads_in_place_and_read_only(ns: NamespaceHandle, client: Client) -> None:
    tokens, blocks = tokens_of(8), blocks_of(8)
    ns.put(tokens, blocks)
    with ns.lease(tokens) as lease:
        assert len(lease) == lease.n_blocks == 8
        for i in range(8):
            view = lease.view(i)
            np.testing.assert_array_equal(view, blocks[i])
            assert view.ctypes.data == lease.addresses[i]
            with pytest.raises(ValueError, match="read-only"):
                view[0] = 1
            with pytest.raises(ValueError, match="WRITEABLE"):
                view.flags.writeable = True
        del view
        assert client.stats()["leases"] == 1
    assert client.stats()["leases"] == 0
    with pytest.raises(EndedError, match=r"^this lease has ended: it was released \(id \d+\)$"):
        lease.view(0)


def test_a_reservation_that_has_ended_says_so_in_words(ns: NamespaceHandle) -> None:
    slots = ns.reserve(tokens_of(1), n_blocks=1)
    slots.abort()
    with pytest.raises(EndedError, match=r"^this write reservation has ended: "):
        slots.view(0)


def test_first_block_and_max_blocks_choose_a_part(ns: NamespaceHandle) -> None:
    tokens, blocks = tokens_of(8), blocks_of(8)
    ns.put(tokens, blocks)
    with ns.lease(tokens, first_block=2, max_blocks=5) as lease:
        assert lease.n_blocks == 5
        assert len(lease) == 3
        np.testing.assert_array_equal(lease[0], blocks[2])
        np.testing.assert_array_equal(lease[-1], blocks[4])
        with pytest.raises(IndexError):
            lease[3]
    out = np.zeros((3, BLOCK_BYTES), np.uint8)
    assert ns.get_into(tokens, out, first_block=4).n_blocks == 3
    np.testing.assert_array_equal(out, blocks[4:7])
    assert not ns.lease(tokens, max_blocks=0)
    assert not ns.lease(tokens, first_block=8)


def test_a_partial_block_is_leased_with_its_tokens(ns: NamespaceHandle) -> None:
    tokens, blocks = tokens_of(3), blocks_of(3)
    ns.put(tokens, blocks)
    prompt = tokens.copy()
    prompt[2 * BLOCK_TOKENS + 5] += 1
    with ns.lease(prompt) as lease:
        assert (lease.n_blocks, lease.partial_tokens, lease.n_tokens, len(lease)) == (2, 5, 37, 3)
        np.testing.assert_array_equal(lease[2], blocks[2])
        out = np.zeros((3, BLOCK_BYTES), np.uint8)
        assert lease.copy_into(out) == 2


def test_a_short_last_block_is_stored_as_a_leaf(ns: NamespaceHandle) -> None:
    tokens, blocks = tokens_of(2, extra=7), blocks_of(3)
    assert ns.put(tokens, blocks).n_stored == 3
    found = ns.match(tokens)
    assert (found.n_blocks, found.partial_tokens) == (2, 7)
    longer = np.concatenate([tokens, tokens_of(1, seed=3)])
    assert ns.match(longer).n_tokens == 2 * BLOCK_TOKENS + 7


def test_reservations_are_invisible_until_committed(ns: NamespaceHandle, client: Client, wait_until: Any) -> None:
    tokens, blocks = tokens_of(4), blocks_of(4)
    with ns.reserve(tokens, n_blocks=4) as reservation:
        assert len(reservation) == 4
        for i in range(4):
            reservation[i][:] = blocks[i]
        assert ns.match(tokens).n_blocks == 0
        assert reservation.commit(3) == (3, 0)
    assert ns.match(tokens).n_blocks == 3
    with ns.reserve(tokens, n_blocks=4) as reservation:
        assert reservation.n_present == 3
        assert len(reservation) == 1
    assert ns.match(tokens).n_blocks == 3
    wait_until(lambda: client.stats()["dram_reserved_bytes"] == 0, "the reservation is aborted")


def test_two_writers_of_the_same_blocks_keep_one(ns: NamespaceHandle, client: Client, connect: Any) -> None:
    tokens, blocks = tokens_of(4), blocks_of(4)
    with connect() as other:
        with ns.reserve(tokens, n_blocks=4) as mine:
            mine.fill(blocks)
            assert other.open(Namespace("model", spec_of())).put(tokens, blocks).n_stored == 4
            assert mine.commit() == (0, 4)
        assert client.stats()["blocks"] == 4
        out = np.zeros_like(blocks)
        assert ns.get_into(tokens, out).n_blocks == 4
        np.testing.assert_array_equal(out, blocks)


def test_identity_keeps_everything_apart(client: Client, connect: Any) -> None:
    """Case 5 and 6: LoRA, salt, image, dtype, block size, revision, tenant never hit each other."""
    tokens = tokens_of(3)
    group = KVGroup(layers=2, kv_heads=2, head_dim=64, dtype="bfloat16")
    base = Namespace("model", KVSpec(BLOCK_TOKENS, (group,)))
    bytes_each = base.spec.block_bytes
    ns = client.open(base)
    ns.put(tokens, blocks_of(3, block_bytes=bytes_each))
    assert ns.match(tokens).n_blocks == 3
    for root in (Root(salt="a"), Root(lora="x:1"), Root(lora="x:2"), Root(salt="a", lora="x:1")):
        assert ns.match(tokens, root=root).n_tokens == 0
        ns.put(tokens, blocks_of(3, 7, bytes_each), root=root)
        assert ns.match(tokens, root=root).n_blocks == 3
    image = [ExtraKey(start_token=20, n_tokens=4, digest=b"cat")]
    assert ns.match(tokens, extras=image).n_blocks == 1
    others = [
        Namespace("model", KVSpec(BLOCK_TOKENS, (KVGroup(2, 2, 64, dtype="float16"),))),
        Namespace("model", KVSpec(BLOCK_TOKENS, (KVGroup(2, 2, 64, layout="HND"),))),
        Namespace("model", base.spec, revision="2"),
        Namespace("other", base.spec),
        Namespace("model", base.spec, engine="vllm 0.32 avx2"),
    ]
    for namespace in others:
        assert client.open(namespace).match(tokens).n_tokens == 0
    with connect(tenant="b") as stranger:
        theirs = stranger.open(Namespace("model", base.spec, tenant="b"))
        assert theirs.match(tokens).n_tokens == 0
        with pytest.raises(BadInputError, match="tenant"):
            stranger.open(base)


def test_engine_hashes_as_rows(client: Client) -> None:
    ns = client.open(Namespace("m", spec_of(), row_kind="hashes", hash_bytes=32))  # type: ignore[arg-type]
    hashes = np.random.default_rng(1).integers(0, 256, (5, 32), dtype=np.uint8)
    blocks = blocks_of(5)
    assert ns.put(hashes, blocks).n_stored == 5
    assert ns.match([bytes(row) for row in hashes]).n_blocks == 5
    other = hashes.copy()
    other[3, 0] ^= 1
    assert ns.match(other).n_blocks == 3
    with pytest.raises(BadInputError, match="hash_bytes"):
        ns.match([b"short"])


@pytest.mark.parametrize(
    "tokens",
    [[1, 2, 3] * 8, tuple(range(40)), np.arange(40), np.arange(40, dtype=np.uint16), np.arange(80)[::2]],
)
def test_tokens_of_any_integer_kind_mean_the_same(ns: NamespaceHandle, tokens: Any) -> None:
    plain = np.array(tokens, np.uint32)
    ns.put(plain, blocks_of(len(plain) // BLOCK_TOKENS))
    assert ns.match(tokens).n_blocks == len(plain) // BLOCK_TOKENS


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda ns: ns.match([1.5, 2.0]), "integers"),
        (lambda ns: ns.match([-1]), "-1"),
        (lambda ns: ns.match([1 << 32]), "4294967296"),
        (lambda ns: ns.match([[1, 2]]), "one dimension"),
        (lambda ns: ns.put(tokens_of(2), np.zeros((2, 100), np.uint8)), "100"),
        (lambda ns: ns.put(tokens_of(2), np.zeros((3, BLOCK_BYTES), np.uint8)), "2 blocks"),
        (lambda ns: ns.put(tokens_of(2), np.zeros((2, 2 * BLOCK_BYTES), np.uint8)[:, ::2]), "contiguous"),
        (lambda ns: ns.lease(tokens_of(2), first_block=-1), "-1"),
        (lambda ns: ns.lease(tokens_of(2), ttl_s=-3.0), "-3"),
        (lambda ns: ns.lease(tokens_of(2), ttl_s=float("nan")), "nan"),
        (lambda ns: ns.get_into(tokens_of(2), np.zeros(10, np.uint8)), "whole blocks"),
        (lambda ns: ns.match(tokens_of(2), root="salt"), "kvstore.Root"),
        (lambda ns: ns.persist(tokens_of(2), wait_s="wait"), "wait_s is 'wait'"),
        (lambda ns: ns.persist(tokens_of(2), wait_s=WaitRule(1.0)), "wait_s is WaitRule"),
        (lambda ns: ns.put(tokens_of(2, 9), blocks_of(2), durable_within_s=-1), "durable_within_s is -1"),
        (lambda ns: ns.unpin(3), "what pin"),
    ],
)
def test_wrong_arguments_are_named_and_lose_nothing(ns: NamespaceHandle, call: Any, words: str) -> None:
    ns.put(tokens_of(2), blocks_of(2))
    with pytest.raises(BadInputError, match=words):
        call(ns)
    assert ns.match(tokens_of(2)).n_blocks == 2


def test_nothing_is_stored_by_a_put_with_a_wrong_wait(ns: NamespaceHandle) -> None:
    with pytest.raises(BadInputError, match="durable_within_s"):
        ns.put(tokens_of(2), blocks_of(2), durable_within_s=-1)
    assert ns.match(tokens_of(2)).n_blocks == 0


def test_what_is_held_says_what_it_is(ns: NamespaceHandle) -> None:
    tokens = tokens_of(3)
    with ns.reserve(tokens, n_blocks=3) as reservation:
        shown = "n_present=0, n_skipped=0, reason='', valid=True"
        assert repr(reservation) == f"WriteReservation(id={reservation.id}, {shown})"
        reservation.fill(blocks_of(3))
        reservation.commit()
        assert "valid=False" in repr(reservation)
    with ns.lease(tokens[:40]) as lease:
        shown = "first_block=0, n_blocks=2, n_tokens=40, partial_tokens=8, n_pending=0, valid=True"
        assert repr(lease) == f"Lease(id={lease.id}, {shown})"
        assert len(lease) == 3


def test_a_name_stands_for_one_description(client: Client) -> None:
    client.open(Namespace("m", spec_of()), name="prod")
    client.open(Namespace("m", spec_of()), name="prod")
    with pytest.raises(SpecMismatchError, match=r"block_tokens: 16 != 32"):
        client.open(Namespace("m", KVSpec.opaque(32, BLOCK_BYTES)), name="prod")


@pytest.mark.needs("processes", reason="the store has no clients in other processes")
def test_another_process_reads_what_the_first_wrote(ns: NamespaceHandle, place: Any) -> None:
    tokens, blocks = tokens_of(5), blocks_of(5)
    ns.put(tokens, blocks)
    spawn = multiprocessing.get_context("spawn")
    with spawn.Pool(1) as pool:
        got = pool.apply(_read_elsewhere, (place.target, tokens, BLOCK_BYTES))
    np.testing.assert_array_equal(got, blocks)


def _read_elsewhere(path: str, tokens: NDArray[np.uint32], block_bytes: int) -> NDArray[np.uint8]:
    with Client(path, timeout_s=10.0) as client:
        ns = client.open(Namespace("model", spec_of(block_bytes)))
        with ns.lease(tokens) as lease:
            return np.stack([lease[i] for i in range(len(lease))])


def test_a_lease_is_usable_from_another_connection_of_the_tenant(
    ns: NamespaceHandle, client: Client, connect: Any
) -> None:
    tokens, blocks = tokens_of(3), blocks_of(3)
    ns.put(tokens, blocks)
    stranger = connect(tenant="b")
    with stranger, ns.lease(tokens, first_block=1) as lease, connect() as other:
        with other.attach(lease.id, BLOCK_BYTES) as theirs:
            lease.release()
            assert theirs.first_block == 1
            np.testing.assert_array_equal(theirs[0], blocks[1])
            assert client.stats()["leases"] == 1
        with pytest.raises(EndedError):
            other.attach(lease.id, BLOCK_BYTES)
        with ns.lease(tokens) as mine, pytest.raises(EndedError):
            stranger.attach(mine.id, BLOCK_BYTES)


def test_a_lease_is_read_as_what_it_is_over_or_not_at_all(ns: NamespaceHandle, client: Client, connect: Any) -> None:
    tokens, blocks = tokens_of(2), blocks_of(2)
    ns.put(tokens, blocks)
    same_size = Namespace("another model", spec_of())
    with ns.lease(tokens) as lease, connect() as other:
        wrong: list[dict[str, Any]] = [
            {"namespace": same_size}, {"block_bytes": BLOCK_BYTES // 2}, {"block_bytes": 1 << 40},
        ]  # fmt: skip
        for said in wrong:
            with pytest.raises(BadInputError, match="attach to it through the namespace that it was taken in"):
                other.attach(lease.id, **said)
        with pytest.raises(BadInputError, match="namespace is 'model'"):
            other.attach(lease.id, namespace="model")
        with pytest.raises(BadInputError, match="give block_bytes, or the namespace"):
            other.attach(lease.id, BLOCK_BYTES, namespace=ns.namespace)
        with other.attach(lease.id, namespace=ns.namespace) as theirs:
            np.testing.assert_array_equal(theirs[1], blocks[1])
    assert client.stats()["leases"] == 0


def test_pins_keep_blocks_under_pressure(ns: NamespaceHandle) -> None:
    tokens, blocks = tokens_of(20), blocks_of(20)
    ns.put(tokens, blocks)
    pinned = ns.pin(tokens)
    assert pinned.n_blocks == 20
    for seed in range(1, 80):
        ns.put(tokens_of(20, seed), blocks_of(20, seed))
    assert ns.match(tokens).n_blocks == 20
    assert ns.unpin(pinned)
    assert not ns.unpin(pinned)
    for seed in range(80, 160):
        ns.put(tokens_of(20, seed), blocks_of(20, seed))
    assert ns.match(tokens).n_blocks == 0


@pytest.mark.needs("shared_memory", reason="about a hold that outlives its right")
def test_an_ended_lease_is_a_miss_for_staged_reads(serve: Any, wait_until: Any) -> None:
    clock = ManualClock(1000.0)
    with serve(clock, lease_s_default=30.0, heartbeat_s=3600.0).connect() as client:
        ns = client.open(Namespace("model", spec_of()))
        ns.put(tokens_of(3), blocks_of(3))
        lease = ns.lease(tokens_of(3))
        out = np.zeros((3, BLOCK_BYTES), np.uint8)
        assert lease.copy_into(out) == 3
        assert lease.renew(40.0)
        clock.advance(35.0)
        assert lease.valid
        clock.advance(10.0)
        wait_until(lambda: not lease.valid, "the daemon tells that the lease has ended")
        assert lease.copy_into(out) == 0
        assert not lease.renew()
        with pytest.raises(EndedError, match="time was up"):
            lease.view(0)
        assert client.stats()["leases_ended_unacknowledged"] == 1
        lease.release()
        assert client.stats()["leases_ended_unacknowledged"] == 0


def test_a_forgotten_lease_gives_its_blocks_back(ns: NamespaceHandle, client: Client, wait_until: Any) -> None:
    ns.put(tokens_of(2), blocks_of(2))
    lease = ns.lease(tokens_of(2))
    assert client.stats()["leases"] == 1
    del lease
    gc.collect()
    wait_until(lambda: client.stats()["leases"] == 0, "the lease is released")


@pytest.mark.needs("shared_memory", reason="a tensor over the store's own memory")
def test_torch_tensors_share_the_memory(client: Client) -> None:
    torch = pytest.importorskip("torch")
    group = KVGroup(layers=1, kv_heads=2, head_dim=8, dtype="bfloat16")
    ns = client.open(Namespace("t", KVSpec(BLOCK_TOKENS, (group,))))
    values = torch.arange(2 * 16 * 2 * 8, dtype=torch.float32).to(torch.bfloat16).reshape(1, 2, 16, 2, 8)
    ns.put(tokens_of(1), values.view(torch.uint16).numpy())
    with ns.lease(tokens_of(1)) as lease:
        tensor = lease.tensor(0, "bfloat16", (2, 16, 2, 8))
        assert torch.equal(tensor, values[0])
        assert tensor.data_ptr() == int(lease.addresses[0])
        assert torch.equal(lease.tensor(0, torch.bfloat16, (2, 16, 2, 8)), tensor)
        with pytest.raises(BadInputError, match="shape"):
            lease.tensor(0, "bfloat16", (7,))
        with pytest.raises(BadInputError, match="float64"):
            lease.tensor(0, torch.float64)
        with pytest.raises(BadInputError, match="float64"):
            lease.tensor(0, "float64")
        del tensor


@pytest.mark.needs("fork", reason="a forked child reaches no store that lives in its parent, and has no gRPC")
def test_a_forked_child_has_its_own_session(ns: NamespaceHandle, client: Client) -> None:
    tokens, blocks = tokens_of(3), blocks_of(3)
    ns.put(tokens, blocks)
    lease = ns.lease(tokens)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            out = np.zeros_like(blocks)
            fine = not lease.valid and ns.get_into(tokens, out).n_blocks == 3
            fine = fine and bool((out == blocks).all()) and ns.put(tokens_of(2, 5), blocks_of(2, 5)).n_stored == 2
            code = 0 if fine else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    np.testing.assert_array_equal(lease[0], blocks[0])
    lease.release()
    assert ns.match(tokens_of(2, 5)).n_blocks == 2


def test_no_daemon_is_an_error_once_and_misses_afterwards(tmp_path: Any) -> None:
    path = tmp_path / "nobody.sock"
    with pytest.raises(UnavailableError, match=r"kvstore serve --socket"):
        Client(path)
    with Client(path, required=False) as client:
        ns = client.open(Namespace("m", spec_of()))
        assert ns.match(tokens_of(2)).n_tokens == 0
        assert not ns.lease(tokens_of(2))
        result = ns.put(tokens_of(2), blocks_of(2))
        assert (result.n_stored, result.n_skipped) == (0, 2)
        assert "down" in result.reason
        out = np.zeros((2, BLOCK_BYTES), np.uint8)
        assert ns.get_into(tokens_of(2), out).n_blocks == 0
        with pytest.raises(UnavailableError):
            client.stats()


def test_the_tier_never_holds_more_than_its_room(ns: NamespaceHandle, client: Client) -> None:
    """Case 9 on a DRAM tier: eight times the capacity goes in, the newest survives."""
    for seed in range(100):
        result = ns.put(tokens_of(80, seed), blocks_of(80, seed))
        assert result.n_stored == 80, result
        stats = client.stats()
        assert float(stats["dram_used_bytes"]) <= float(stats["dram_capacity_bytes"])
    assert ns.match(tokens_of(80, 99)).n_blocks == 80
    assert ns.match(tokens_of(80, 0)).n_blocks == 0


@pytest.mark.needs("unix_socket", reason="about that socket's connections")
def test_a_connection_closed_by_another_thread_is_a_broken_one(client: Client) -> None:
    """The background thread may be about to send on it: it must see what it knows how to deal with."""
    transport = Transport(client._session._link.address, 1.0)
    transport.close()
    with pytest.raises(UnavailableError):
        transport.send(Method.HEARTBEAT, pb.HeartbeatRequest(), time.monotonic() + 1.0)
