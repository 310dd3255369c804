"""What a prompt and its namespace are: identity, kinds of rows, names, and arguments that can't be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.client import Client, NamespaceHandle, WaitRule
from kvstore.errors import BadInputError, SpecMismatchError, UnavailableError
from kvstore.types import ExtraKey, KVGroup, KVSpec, Namespace, Root
from tests.client.scene import BLOCK_BYTES, BLOCK_TOKENS, blocks_of, spec_of, tokens_of


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
        (lambda ns: ns.match("hello"), "'hello'.*tokenise it first"),
        (lambda ns: ns.match(["hello", "you"]), "tokenise it first"),
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


@pytest.mark.parametrize("fits", [np.uint8, np.int8, np.uint16, np.int16])
def test_arrays_of_values_that_the_blocks_hold(client: Client, fits: type[np.generic]) -> None:
    spec = KVSpec(BLOCK_TOKENS, (KVGroup(layers=2, kv_heads=2, head_dim=64),))
    ns = client.open(Namespace("values", spec))
    blocks = np.zeros((2, spec.block_bytes // np.dtype(fits).itemsize), fits)
    assert ns.put(tokens_of(2), blocks).n_stored == 2
    assert ns.get_into(tokens_of(2), blocks).n_blocks == 2
    for wrong in (np.float32, np.float16):  # half of the same size is another kind all the same
        other = np.zeros((2, spec.block_bytes // np.dtype(wrong).itemsize), wrong)
        with pytest.raises(BadInputError, match=rf"{other.dtype} was given.*bfloat16.*view\(numpy.uint8\)"):
            ns.put(tokens_of(2, 5), other)
        with pytest.raises(BadInputError, match=f"{other.dtype} was given"):
            ns.get_into(tokens_of(2), other)
    assert ns.match(tokens_of(2, 5)).n_blocks == 0
    half = client.open(Namespace("values", KVSpec(BLOCK_TOKENS, (replace(spec.groups[0], dtype="float16"),))))
    assert half.put(tokens_of(2), np.zeros((2, spec.block_bytes // 2), np.float16)).n_stored == 2
    mixed = KVSpec(BLOCK_TOKENS, (*spec.groups, KVGroup(layers=2, kv_heads=2, head_dim=64, dtype="float16")))
    whole = np.zeros((1, mixed.block_bytes // 4), np.float32)
    assert client.open(Namespace("values", mixed)).put(tokens_of(1), whole).n_stored == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tensor_is_told_how_to_become_an_array(ns: NamespaceHandle, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    kind = getattr(torch, dtype)
    tensor = torch.ones((2, BLOCK_BYTES // kind.itemsize), dtype=kind)
    with pytest.raises(BadInputError, match=r"torch.Tensor.*view\(torch.uint8\).numpy\(\)"):
        ns.put(tokens_of(2), tensor)
    assert ns.put(tokens_of(2), tensor.cpu().contiguous().view(torch.uint8).numpy()).n_stored == 2


@pytest.mark.parametrize("address", ["localhost:7443", "http://store:7443", "[::1]:7443", "tcp://a/b", "grpcss://a:1"])
def test_an_address_of_another_host_is_not_taken_for_a_path(address: str) -> None:
    with pytest.raises(BadInputError, match=r"no path of a Unix socket.*grpcs://host:port.*--grpc-tls-cert"):
        Client(address)


def test_a_path_may_have_a_colon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a:1").touch()
    for path in ("a:1", str(tmp_path / "b:2"), Path("c:3")):
        with pytest.raises(UnavailableError, match="no kvstore daemon answers"):
            Client(path)


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
