"""Operators' calls, over every transport."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvstore.client import Client
from kvstore.client.watching import BlockEvent
from kvstore.errors import DeniedError
from kvstore.types import KVSpec, Namespace
from tests.client.conftest import Place

NAMESPACE = Namespace(model="m", revision="r", spec=KVSpec.opaque(4, 4096))
TOKENS = list(range(12))


@pytest.fixture
def stored(client: Client) -> Any:
    """The handle of a namespace with three blocks."""
    handle = client.open(NAMESPACE, "name")
    assert handle.put(TOKENS, np.ones((3, 4096), np.uint8)).n_stored == 3
    return handle


def test_namespaces(client: Client, stored: Any) -> None:
    (info,) = client.namespaces(model="m")
    assert (info.namespace, info.names, info.n_blocks, info.n_dram_blocks) == (NAMESPACE, ("name",), 3, 3)
    assert client.namespaces(model="m", revision="other") == []


def test_a_prompt_is_inspected(stored: Any) -> None:
    seen = stored.inspect([*TOKENS[:10], 99, 11])
    assert (seen.n_rows, seen.n_blocks, seen.partial_tokens, seen.differs_at_token) == (3, 2, 2, 10)
    assert seen.in_dram.all()


def test_a_miss_is_explained(client: Client, stored: Any) -> None:
    told = stored.explain([*TOKENS[:10], 99, 11])
    assert (told.n_rows, told.n_blocks, told.partial_tokens, told.n_dram_blocks) == (3, 2, 2, 2)
    assert (told.reason, told.block, told.missing) == ("never_stored", 2, {"never_stored": 1})
    assert (told.differs_at_token, told.here_token, told.stored_token) == (10, 99, 10)
    assert told.lines[0] == "2 of 3 blocks can be used, and 2 tokens of one more: 2 in DRAM, 0 on NVMe only"
    assert stored.explain(TOKENS).reason == "stored"
    (near,) = client.open(Namespace(model="n", spec=NAMESPACE.spec)).explain(TOKENS).namespaces
    assert (near.digest, near.n_matching, near.n_blocks) == (NAMESPACE.digest(), 3, 3)
    assert near.differences == ("model: 'n' != 'm'", "revision: '' != 'r'")
    client.clear(name="name")
    told = stored.explain(TOKENS)
    assert (told.reason, told.block, told.n_cleared_blocks) == ("cleared", 0, 3)
    assert told.left_ago_s is not None
    assert 0 <= told.left_ago_s < 60


def test_a_clearing_leaves_misses(client: Client, stored: Any) -> None:
    assert client.clear(name="name", dry_run=True).n_blocks == 3
    done = client.clear(name="name")
    assert (done.n_blocks, done.durable, done.n_left_blocks) == (3, True, 0)
    assert stored.match(TOKENS).n_blocks == 0
    assert stored.put(TOKENS, np.zeros((3, 4096), np.uint8)).n_stored == 3


def test_claims_are_listed(client: Client, stored: Any) -> None:
    with stored.lease(TOKENS) as lease:
        seen = client.claims()
    assert [(claim.kind, claim.id, claim.n_blocks) for claim in seen.claims] == [("lease", lease.id, 3)]
    assert seen.claims[0].session_ids[0] in [session.id for session in seen.sessions if session.live]


def test_events_are_watched(client: Client, stored: Any) -> None:
    watch = client.watch()
    client.clear(everything=True)
    seen = watch.poll(5.0)
    assert all(isinstance(each, BlockEvent) and each.reason == "cleared" for each in seen)
    assert len(seen) == 3


def test_all_tenants_are_shown_to_the_machine_s_own_clients_only(place: Place) -> None:
    with place.connect() as client, place.connect(tenant="other") as other:
        other.open(Namespace(model="x", spec=NAMESPACE.spec, tenant="other"))
        assert client.namespaces() == []
        if place.target is not None and place.target.startswith("grpc"):
            with pytest.raises(DeniedError):
                client.namespaces(all_tenants=True)
            with pytest.raises(DeniedError):
                client.verify()
        else:
            assert len(client.namespaces(all_tenants=True)) == 1
            assert client.verify().ok
