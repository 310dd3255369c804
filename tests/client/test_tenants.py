"""What operators see of tenants, and quotas of pins, over every transport."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvstore.client import NamespaceHandle
from kvstore.config import PinOptions, TenantOptions
from kvstore.errors import BadInputError
from kvstore.store import pins
from kvstore.types import KVSpec, Namespace

BLOCK_BYTES, BLOCK_TOKENS, MIB = 16384, 16, 1 << 20
SPEC = KVSpec.opaque(BLOCK_TOKENS, BLOCK_BYTES)


def tokens(n_blocks: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(0, 1 << 20, n_blocks * BLOCK_TOKENS, dtype=np.uint32)


def put(ns: NamespaceHandle, n_blocks: int, seed: int = 0) -> Any:
    return ns.put(tokens(n_blocks, seed), np.zeros((n_blocks, BLOCK_BYTES), np.uint8))


def test_who_has_what(serve: Any) -> None:
    place = serve(tenants=TenantOptions(weights="a=3", dram_min="b=64KiB", dram_max="b=1MiB"))
    with place.connect(tenant="a") as mine, place.connect(tenant="b") as theirs:
        put(mine.open(Namespace("m", SPEC, tenant="a")), 4)
        put(theirs.open(Namespace("m", SPEC, tenant="b")), 8)
        (a,), (b,) = mine.tenants(), theirs.tenants()
        assert (a.tenant, a.weight, a.n_pins) == ("a", 3.0, 0)
        (dram,) = a.tiers
        assert (dram.tier, dram.used_bytes, dram.min_bytes, dram.max_bytes) == ("dram", 4 * BLOCK_BYTES, 0, None)
        assert dram.share_bytes == 6 * MIB
        assert (dram.n_evicted, dram.n_suffered, dram.n_caused) == (0, 0, 0)
        assert (b.tiers[0].share_bytes, b.tiers[0].min_bytes, b.tiers[0].max_bytes) == (2 * MIB, 65536, MIB)
        assert mine.stats()["tenants"] == 2


@pytest.mark.needs("shared_memory", reason="all tenants are for who is on the daemon's machine")
def test_all_tenants_are_for_the_daemons_own_machine(serve: Any) -> None:
    place = serve()
    with place.connect(tenant="a") as mine, place.connect(tenant="b") as theirs:
        put(theirs.open(Namespace("m", SPEC, tenant="b")), 8)
        put(mine.open(Namespace("m", SPEC, tenant="a")), 4)
        assert [each.tenant for each in mine.tenants(all_tenants=True)] == ["b", "a"]


def test_a_quota_holds_in_an_empty_tier(serve: Any) -> None:
    place = serve(tenants=TenantOptions(dram_max="a=128KiB"))
    with place.connect(tenant="a") as client:
        ns = client.open(Namespace("m", SPEC, tenant="a"))
        assert put(ns, 6, seed=1).n_stored == 6
        assert put(ns, 6, seed=2).n_stored == 6
        assert client.tenants()[0].tiers[0].used_bytes <= 128 << 10
        assert ns.match(tokens(6, 2)).n_blocks == 6
        assert ns.match(tokens(6, 1)).n_blocks < 6
        with ns.lease(tokens(6, 2)) as lease:
            assert lease.n_blocks == 6
            stored = put(ns, 6, seed=3)
            assert stored.n_stored == 2
            assert "may have 128.0 KiB of DRAM (--tenant-dram-max)" in stored.reason


def test_pins_have_a_quota_of_all_and_of_each(serve: Any) -> None:
    place = serve(pins=PinOptions(dram_bytes=20 * BLOCK_BYTES, tenant_bytes=12 * BLOCK_BYTES))
    with place.connect(tenant="a") as mine, place.connect(tenant="b") as theirs:
        ns, ns2 = (client.open(Namespace("m", SPEC, tenant=name)) for name, client in (("a", mine), ("b", theirs)))
        for space in (ns, ns2):
            put(space, 12)
            put(space, 9, seed=1)
        first = ns.pin(tokens(12), ttl_s=100.0)
        again = ns.pin(tokens(12))  # what is pinned already costs nothing
        with pytest.raises(BadInputError, match=r"tenant 'a' can't pin 64.0 KiB more: it has pinned 192.0 KiB of the"):
            ns.pin(tokens(9, 1)[: 4 * BLOCK_TOKENS])
        with pytest.raises(
            BadInputError, match=r"pins may hold 320.0 KiB in all \(--pin-dram\), 128.0 KiB of it are left"
        ):
            ns2.pin(tokens(9, 1))
        assert ns2.pin(tokens(12)[: 8 * BLOCK_TOKENS]).n_blocks == 8
        assert mine.stats()["pinned_bytes"] == 20 * BLOCK_BYTES
        assert mine.stats()["refused_pins"] == 2
        assert (mine.tenants()[0].pinned_bytes, mine.tenants()[0].n_pins) == (12 * BLOCK_BYTES, 2)
        assert ns.unpin(first)
        assert mine.stats()["pinned_bytes"] == 20 * BLOCK_BYTES
        assert ns.unpin(again)
        assert ns.pin(tokens(9, 1)).n_blocks == 9
        assert mine.stats()["pinned_bytes"] == 17 * BLOCK_BYTES


def test_pins_beyond_a_share_that_has_become_smaller_are_not_renewed(serve: Any) -> None:
    place = serve(pins=PinOptions(dram_bytes=12 * BLOCK_BYTES))
    with place.connect(tenant="a") as mine, place.connect(tenant="b") as theirs:
        ns, ns2 = (client.open(Namespace("m", SPEC, tenant=name)) for name, client in (("a", mine), ("b", theirs)))
        put(ns, 12)
        first = ns.pin(tokens(12), ttl_s=100.0)
        assert ns.pin(tokens(12)).n_blocks == 12, "alone it has all"
        put(ns2, 12)
        with pytest.raises(BadInputError, match=r"tenant 'a' can't pin the same again: it has pinned 192.0 KiB of the"):
            ns.pin(tokens(12))
        assert ns.unpin(first)


def test_a_pin_lives_no_longer_than_pins_may(serve: Any) -> None:
    place = serve(pins=PinOptions(default_s=5.0, max_s=60.0))
    with place.connect() as client:
        ns = client.open(Namespace("m", SPEC))
        put(ns, 2)
        assert ns.pin(tokens(2)).ttl_s == pytest.approx(5.0, abs=0.5)
        assert ns.pin(tokens(2), ttl_s=1e6).ttl_s == pytest.approx(60.0, abs=0.5)


def test_pins_end_with_their_client(serve: Any, wait_until: Any) -> None:
    place = serve()
    with place.connect() as other:
        with place.connect() as client:
            ns = client.open(Namespace("m", SPEC))
            put(ns, 2)
            ns.pin(tokens(2), ttl_s=600.0)
            assert other.stats()["pinned_bytes"] == 2 * BLOCK_BYTES
        wait_until(lambda: other.stats()["pinned_bytes"] == 0, "the pins of a client that is gone end")


def test_pins_are_bounded_in_number_too(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pins, "PINS_PER_TENANT_MAX", 3)
    monkeypatch.setattr(pins, "PIN_ENTRIES_PER_TENANT_MAX", 12)
    place = serve()
    with place.connect() as client, place.connect() as other:
        ns, again = client.open(Namespace("m", SPEC)), other.open(Namespace("m", SPEC))
        put(ns, 8)
        first = ns.pin(tokens(8))
        with pytest.raises(BadInputError, match="has 1 pins of 8 blocks in all, the most are 3 of 12"):
            again.pin(tokens(8)[: 5 * BLOCK_TOKENS])
        again.pin(tokens(8)[:BLOCK_TOKENS])
        again.pin(tokens(8)[:BLOCK_TOKENS])
        with pytest.raises(BadInputError, match="has 3 pins of 10 blocks in all"):
            ns.pin(tokens(8)[:BLOCK_TOKENS])
        assert ns.unpin(first)
        assert ns.pin(tokens(8)[:BLOCK_TOKENS]).n_blocks == 1
        assert client.tenants()[0].n_pins == 3


def test_a_kept_pin_outlives_its_client_and_is_its_tenant_s(serve: Any, wait_until: Any) -> None:
    place = serve()
    with place.connect() as other, place.connect(tenant="b") as foreign:
        with place.connect() as client:
            ns = client.open(Namespace("m", SPEC))
            put(ns, 2)
            kept, own = ns.pin(tokens(2), keep=True, ttl_s=600.0), ns.pin(tokens(2), ttl_s=600.0)
            assert not other.unpin(own.id), "another client's, while it is there"
        wait_until(lambda: other.stats()["pins"] == 1, "the pin of the client that is gone ends")
        assert not foreign.unpin(kept.id)
        assert other.unpin(kept.id)
        assert not other.unpin(kept.id)
        assert other.stats()["pinned_bytes"] == 0
