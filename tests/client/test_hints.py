"""Hints through the client: what is accepted, what is refused with which words, and what comes of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore import Hints
from kvstore.client import Client, NamespaceHandle
from kvstore.client.prompts import DEFAULT_ROOT
from kvstore.clock import ManualClock
from kvstore.errors import BadInputError
from kvstore.types import KVSpec, Namespace, Root
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.framing import Method

BLOCK_BYTES, BLOCK_TOKENS = 4096, 16
SPACE = Namespace("model", KVSpec.opaque(BLOCK_TOKENS, BLOCK_BYTES))


def tokens_of(n_blocks: int, seed: int = 0) -> NDArray[np.uint32]:
    return np.random.default_rng(seed).integers(0, 50_000, n_blocks * BLOCK_TOKENS, dtype=np.uint32)


def blocks_of(n_blocks: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed + 1000).integers(0, 256, (n_blocks, BLOCK_BYTES), dtype=np.uint8)


@pytest.fixture
def ns(client: Client) -> NamespaceHandle:
    return client.open(SPACE)


@pytest.mark.parametrize(
    ("hints", "words"),
    [
        ({"request_type": 3}, "request_type is 3"),
        ({"request_type": "x" * 65}, "at most 64 characters"),
        ({"session_id": "x" * 257}, "at most 256 characters"),
        ({"session_id": "\ud800"}, "half a surrogate pair"),
        ({"turn": -1}, "turn is -1; it must be a whole number from 0 to 65535"),
        ({"turn": True}, "turn is True"),
        ({"turn": 65536}, "turn is 65536"),
        ({"priority": 101}, "priority is 101; it must be a whole number from -100 to 100"),
        ({"priority": 1.0}, r"priority is 1\.0"),
        ({"expected_reuse": -0.5}, r"expected_reuse is -0\.5"),
        ({"expected_reuse": float("nan")}, "expected_reuse is nan"),
        ({"ttl_s": float("inf")}, "ttl_s is inf"),
        ({"ttl_s": "60"}, "ttl_s is '60'"),
        ({"no_reuse": 1}, "no_reuse is 1; it must be True or False"),
        ({"output_tokens": -1}, "output_tokens is -1; it must be a whole number from 0"),
        ({"no_reuse": True, "expected_reuse": 1.0}, "no_reuse contradicts expected_reuse"),
    ],
)
def test_values_that_can_not_be_are_named(hints: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInputError, match=words):
        Hints(**hints)


def test_every_call_that_uses_or_stores_takes_them(ns: NamespaceHandle, client: Client) -> None:
    hints = Hints("chat", 2, "s", 1.5, 600.0, 10)
    tokens, blocks = tokens_of(4), blocks_of(4)
    assert ns.put(tokens[:32], blocks[:2], hints=hints).n_stored == 2
    with ns.reserve(tokens, n_blocks=2, first_block=2, hints=hints) as reservation:
        reservation.fill(blocks[2:])
        assert reservation.commit() == (2, 0)
    with ns.lease(tokens, hints=hints) as lease:
        assert lease.n_blocks == 4
    assert ns.get_into(tokens, np.zeros_like(blocks), hints=hints).n_blocks == 4
    assert ns.prefetch(tokens, hints=hints).n_ready == 4
    assert client.stats()["hinted_requests"] == 4
    wrong: Any = {"turn": 1}
    for call in (ns.lease, ns.prefetch):
        with pytest.raises(BadInputError, match=r"give a kvstore\.Hints"):
            call(tokens, hints=wrong)


def test_the_daemon_checks_them_too(ns: NamespaceHandle, client: Client) -> None:
    request = pb.LeaseRequest()
    request.prompt.namespace, request.prompt.rows = ns.ensure_open(), tokens_of(1).tobytes()
    for name, value, words in (("priority", 1000, "priority is 1000"), ("ttl_s", float("nan"), "ttl_s is nan")):
        request.prompt.hints.Clear()
        setattr(request.prompt.hints, name, value)
        with pytest.raises(BadInputError, match=words):
            client._session.call(Method.LEASE, request, pb.LeaseReply)


def test_a_life_ends(serve: Any) -> None:
    clock = ManualClock(1000.0)
    with serve(clock, heartbeat_s=3600.0).connect() as client:
        ns = client.open(SPACE)
        ns.put(tokens_of(3), blocks_of(3), hints=Hints(ttl_s=60.0))
        clock.advance(59.0)
        assert ns.match(tokens_of(3)).n_blocks == 3
        clock.advance(2.0)
        assert ns.match(tokens_of(3)).n_blocks == 0
        assert not ns.lease(tokens_of(3))
        assert ns.put(tokens_of(3), blocks_of(3)).n_present == 3
        assert ns.match(tokens_of(3)).n_blocks == 3


def test_an_ended_session_makes_room_first(ns: NamespaceHandle, client: Client) -> None:
    kept = tokens_of(100, seed=1)
    ns.put(kept, blocks_of(100, seed=1))
    ended = tokens_of(100, seed=2)
    ns.put(ended, blocks_of(100, seed=2), hints=Hints(session_id="s"))
    assert ns.end_session("s") == 100
    assert ns.end_session("s") == 0
    for seed in range(3, 300):
        ns.put(tokens_of(20, seed), blocks_of(20, seed))
        if ns.match(ended).n_blocks < 50:
            break
    assert ns.match(ended).n_blocks < 50
    assert ns.match(kept).n_blocks == 100
    for wrong in ("", 3, "x" * 300):
        with pytest.raises(BadInputError, match="session_id"):
            ns.end_session(wrong)  # type: ignore[arg-type]
    with pytest.raises(BadInputError, match="session_id is empty"):
        client._session.call(Method.END_SESSION, pb.EndSessionRequest(namespace=ns.ensure_open()), pb.EndSessionReply)


def test_a_session_is_ended_below_its_root_only(ns: NamespaceHandle) -> None:
    root = Root(salt="secret", lora="adapter")
    ns.put(tokens_of(3), blocks_of(3), root=root, hints=Hints(session_id="s"))
    others = (DEFAULT_ROOT, Root(salt="secret"), Root(lora="adapter"), Root(salt="guess", lora="adapter"))
    assert [ns.end_session("s", other) for other in others] == [0] * 4
    assert ns.end_session("s", root) == 3


def test_what_is_known_can_be_looked_at(ns: NamespaceHandle) -> None:
    tokens = tokens_of(3)
    ns.put(tokens[:16], blocks_of(1))
    assert ns.inspect(tokens).hints == ()
    ns.put(tokens, blocks_of(3), hints=Hints("chat", turn=2, session_id="s", ttl_s=60.0))
    seen = ns.inspect(tokens)
    assert [each.get("session_id") for each in seen.hints] == ["s"] * 3
    assert [each.get("request_type") for each in seen.hints] == ["chat"] * 3
    assert "ttl_s" not in seen.hints[0], "it was stored before, without a limit"
    assert 0 < seen.hints[2]["ttl_s"] <= 60
