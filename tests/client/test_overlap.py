"""What routers ask, over every transport: how much of prompts is stored where, and how long loading it would take."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.client import Client, NamespaceHandle, Overlap
from kvstore.errors import BadInputError
from kvstore.types import ExtraKey, Namespace, Root
from tests.client.scene import BLOCK_BYTES, BLOCK_TOKENS, blocks_of, spec_of, tokens_of
from tests.client.test_family import put, spaces
from tests.client.test_family import tokens_of as family_tokens

NVME_BYTES = 64 << 20


def tiers(found: Overlap) -> tuple[int, int, int, int]:
    return found.n_tokens, found.n_dram_tokens, found.n_nvme_tokens, found.n_loading_tokens


def test_tokens_in_dram_and_a_time_to_copy_them(ns: NamespaceHandle) -> None:
    tokens = tokens_of(6)
    assert ns.overlap(tokens) == Overlap(0, 0, 0, 0, 0.0, 1.0)
    ns.put(tokens, blocks_of(4))
    found = ns.overlap(tokens)
    assert tiers(found) == (64, 64, 0, 0)
    assert 0 < found.load_s < 1.0
    assert found.load_error >= 1.0
    partly = np.append(tokens[: 2 * BLOCK_TOKENS + 5], tokens_of(3, seed=9))
    assert ns.overlap(partly).n_tokens == ns.match(partly).n_tokens == 37


def test_many_prompts_in_one_call_and_each_below_its_root(ns: NamespaceHandle) -> None:
    prompts = [tokens_of(4, seed) for seed in range(5)]
    for seed in (1, 3):
        ns.put(prompts[seed], blocks_of(seed, seed))
    ns.put(prompts[0], blocks_of(4), root=Root(salt="mine"))
    assert [found.n_tokens for found in ns.overlaps(prompts)] == [0, 16, 0, 48, 0]
    assert [found.n_tokens for found in ns.overlaps(prompts, root=Root(salt="mine"))] == [64, 0, 0, 0, 0]
    assert ns.overlaps([]) == []


def test_extras_are_each_prompts_own(ns: NamespaceHandle) -> None:
    tokens, image, other = tokens_of(2), ExtraKey(0, 8, b"a" * 16), ExtraKey(0, 8, b"b" * 16)
    ns.put(tokens, blocks_of(2), extras=[image])
    assert ns.overlap(tokens, extras=[image]).n_tokens == 32
    found = ns.overlaps([tokens] * 3, extras=[[image], [other], []])
    assert [each.n_tokens for each in found] == [32, 0, 0]
    with pytest.raises(BadInputError, match="extras are given for 1 prompts, and there are 2"):
        ns.overlaps([tokens, tokens], extras=[[image]])


def test_more_prompts_than_one_call_takes(ns: NamespaceHandle) -> None:
    tokens = tokens_of(1)
    ns.put(tokens, blocks_of(1))
    prompts = [tokens if i % 100 == 7 else tokens_of(1, seed=i + 1) for i in range(600)]
    found = ns.overlaps(prompts)
    assert [i for i, each in enumerate(found) if each.n_tokens] == list(range(7, 600, 100))


def test_families_and_tenants(client: Client, connect: Any) -> None:
    family = client.open_family(spaces())
    put(family, (5, 3))
    assert tiers(family.overlap(family_tokens(5))) == (48, 48, 0, 0)
    with connect(tenant="other") as other:
        assert other.open(Namespace("model", spec_of(), tenant="other")).overlap(family_tokens(5)).n_tokens == 0


def test_what_lies_on_nvme_only_stays_there(serve: Callable[..., Any], tmp_path: Path) -> None:
    place = serve(nvme_dir=tmp_path / "nvme", nvme_bytes=NVME_BYTES)
    with place.connect() as client:
        ns = client.open(Namespace("model", spec_of()))
        tokens, blocks = tokens_of(8), blocks_of(8)
        assert ns.put(tokens, blocks, durable_within_s=20.0).n_durable == 8
        n_others = 0
        while ns.overlap(tokens).n_nvme_tokens == 0:  # until others have taken its room in DRAM
            n_others += 1
            assert n_others < 20_000
            others = tokens_of(64, seed=n_others + 1)
            ns.put(others, np.zeros((64, BLOCK_BYTES), np.uint8))
        found = ns.overlap(tokens)
        assert found.n_tokens == 128
        assert found.n_nvme_tokens >= BLOCK_TOKENS
        assert found.n_loading_tokens == 0
        assert 0 < found.load_s < math.inf
        n_read = client.stats().get("onboarded_blocks", 0)
        out = np.empty_like(blocks)
        assert ns.get_into(tokens, out).n_blocks == 8
        assert (out == blocks).all()
        assert client.stats()["onboarded_blocks"] > n_read
        assert ns.overlap(tokens).n_dram_tokens == 128


def test_a_store_that_is_gone_is_no_overlap(client: Client, ns: NamespaceHandle) -> None:
    tokens = tokens_of(2)
    ns.put(tokens, blocks_of(2))
    client.close()
    found = ns.overlaps([tokens, tokens])
    assert [tiers(each) for each in found] == [(0, 0, 0, 0)] * 2
    assert found[0].reason


@pytest.mark.needs("shared_memory", reason="copies over gRPC are no copies within the daemon's machine")
@pytest.mark.parametrize("way", ["get_into", "copy_into"])
def test_what_clients_copied_is_learnt_from(ns: NamespaceHandle, way: str) -> None:
    tokens, blocks = tokens_of(4), blocks_of(4)
    ns.put(tokens, blocks)
    before = ns.overlap(tokens)
    out = np.empty_like(blocks)
    for _ in range(2):  # the daemon hears of a copy with the next request
        if way == "get_into":
            assert ns.get_into(tokens, out).n_blocks == 4
        else:
            with ns.lease(tokens) as lease:
                assert lease.copy_into(out) == 4
    after = ns.overlap(tokens)
    assert after.load_s != before.load_s
