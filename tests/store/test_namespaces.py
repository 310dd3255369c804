"""Whose blocks are whose: namespaces, roots, tenants, regions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvstore.errors import BadInputError, EndedError, SpecMismatchError
from kvstore.prefix_index.block_table import BlockTable
from kvstore.prefix_index.rows import RowPath
from kvstore.prefix_index.tenants import Tenants
from kvstore.store import namespaces as namespaces_module
from kvstore.store.namespaces import Namespaces
from kvstore.store.requests import Prompt
from kvstore.types import ExtraKey, KVGroup, KVSpec, Namespace, Root, RowKind, Shard
from tests.store.rig import Rig

ALICE, BOB, EVE = 1, 2, 3
SPEC = KVSpec(4, (KVGroup(layers=2, kv_heads=2, head_dim=64),), page_tokens=4)
BASE = Namespace(model="m", spec=SPEC)


def other_spec(**changes: Any) -> Namespace:
    return replace(BASE, spec=replace(SPEC, groups=(replace(SPEC.groups[0], **changes),)))


OTHERS: dict[str, Namespace] = {
    "model": replace(BASE, model="n"),
    "revision": replace(BASE, revision="2"),
    "tenant": replace(BASE, tenant="other"),
    "engine": replace(BASE, engine="vllm"),
    "shard.tp_size": replace(BASE, shard=Shard(0, 2)),
    "shard.pp_size": replace(BASE, shard=Shard(pp_size=2)),
    "row_kind": replace(BASE, row_kind=RowKind.HASHES, hash_bytes=32),
    "spec.block_tokens": replace(BASE, spec=KVSpec(8, SPEC.groups, page_tokens=4)),
    "spec.page_tokens": replace(BASE, spec=KVSpec(4, SPEC.groups, page_tokens=2)),
    "spec.groups": replace(BASE, spec=KVSpec(4, SPEC.groups * 2, page_tokens=4)),
    "spec.groups[0].dtype": other_spec(dtype="float16"),
    "spec.groups[0].layout": other_spec(layout="HND"),
    "spec.groups[0].layers": other_spec(layers=3),
    "spec.groups[0].kv_heads": other_spec(kv_heads=1),
    "spec.groups[0].head_dim": other_spec(head_dim=32),
    "spec.groups[0].kind": other_spec(kind="state"),
}


# Names and descriptions --------------------------------------------------------------------------


def test_equal_descriptions_share_one_entry() -> None:
    spaces = Namespaces(Tenants(BlockTable()))
    entry = spaces.open(BASE)
    again = Namespace.from_dict(BASE.to_dict())
    assert spaces.open(again) is spaces.open(replace(BASE), "name") is entry
    assert len(spaces) == 1
    assert spaces.get(entry.digest) is entry
    assert spaces.get(b"x" * 16) is None
    assert entry.block_bytes == SPEC.block_bytes


@pytest.mark.parametrize("field", OTHERS)
def test_a_name_stands_for_one_description_and_the_error_says_what_differs(field: str) -> None:
    spaces = Namespaces(Tenants(BlockTable()))
    entry = spaces.open(BASE, "llama")
    other = OTHERS[field]
    if field == "tenant":
        assert spaces.open(other, "llama") is not entry  # names belong to tenants
        return
    with pytest.raises(SpecMismatchError, match="'llama'") as caught:
        spaces.open(other, "llama")
    assert f"{field}: " in str(caught.value)
    assert spaces.open(other) is spaces.open(other, "another name") is not entry
    assert spaces.open(BASE, "llama") is entry


def test_the_cost_of_attention_is_told_to_policies_and_no_part_of_what_a_namespace_is() -> None:
    spaces = Namespaces(Tenants(BlockTable(1)))
    opened = spaces.open(BASE)
    assert spaces.open(BASE, "", 30_000.0) is opened
    assert spaces.open(BASE) is opened  # who does not know it does not change it
    prompt = Prompt(opened, opened.root_key("", ""), RowPath.from_tokens(np.arange(4, dtype=np.uint32), 4), 1.0)
    assert prompt.use().attention_doubling_tokens == 30_000.0
    with pytest.raises(BadInputError, match="attention_doubling_tokens is -3"):
        spaces.open(replace(BASE, model="another"), "", -3.0)
    assert len(spaces) == 1


def test_names_and_descriptions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces_module, "NAMESPACES_MAX", 5)
    monkeypatch.setattr(namespaces_module, "NAMESPACES_PER_TENANT_MAX", 2)
    monkeypatch.setattr(namespaces_module, "NAMES_PER_TENANT_MAX", 3)
    spaces = Namespaces(Tenants(BlockTable()))
    for model in "ab":
        spaces.open(replace(BASE, model=model), model)
    with pytest.raises(BadInputError, match="tenant 'default' has 2 namespaces open"):
        spaces.open(BASE)
    a = replace(BASE, model="a")
    spaces.open(a, "third")
    with pytest.raises(BadInputError, match="tenant 'default' has bound 3 namespace names"):
        spaces.open(a, "fourth")
    spaces.open(a, "third")
    with pytest.raises(BadInputError, match="300 characters"):
        spaces.open(a, "x" * 300)
    assert len(spaces) == 2


def test_a_tenant_that_has_all_it_may_have_takes_nothing_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces_module, "NAMESPACES_MAX", 5)
    monkeypatch.setattr(namespaces_module, "NAMESPACES_PER_TENANT_MAX", 2)
    monkeypatch.setattr(namespaces_module, "NAMES_PER_TENANT_MAX", 1)
    spaces = Namespaces(Tenants(BlockTable()))
    for tenant in ("greedy", "modest"):
        for model in "ab":
            spaces.open(replace(BASE, model=model, tenant=tenant))
        with pytest.raises(BadInputError, match=f"tenant '{tenant}' has 2"):
            spaces.open(replace(BASE, model="c", tenant=tenant))
        spaces.open(replace(BASE, model="a", tenant=tenant), "name")
    spaces.open(replace(BASE, tenant="third"))
    with pytest.raises(BadInputError, match="5 namespaces are open, the most a daemon keeps"):
        spaces.open(replace(BASE, model="b", tenant="third"))


def test_root_keys_are_remembered_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces_module, "ROOT_KEYS_CACHED_MAX", 4)
    entry = Namespaces(Tenants(BlockTable())).open(BASE)
    for _ in range(2):
        for i in range(10):
            assert entry.root_key(str(i), "") == Root(salt=str(i)).key(BASE.digest())
            assert len(entry._root_keys) <= 4
    assert entry.root_key("a", "") != entry.root_key("", "a") != entry.root_key("", "")


# Cases 5 and 6 of the public reports: no hit across identities --------------------------------------


@pytest.mark.parametrize("field", [field for field in OTHERS if field != "row_kind"])
def test_no_hit_across_descriptions(make_rig: Any, field: str) -> None:
    rig = make_rig()
    tokens = list(range(16))
    base, other = (rig.store.namespaces.open(namespace) for namespace in (BASE, OTHERS[field]))
    mine = rig.prompt(tokens, base)
    assert rig.put(ALICE, mine).n_committed == 4
    theirs = rig.prompt(tokens, other)
    lease = rig.store.lease(BOB, theirs)
    assert (lease.id, lease.n_tokens) == (0, 0)
    assert rig.put(EVE, theirs).n_committed == len(tokens) // other.namespace.spec.block_tokens
    for prompt in (mine, theirs):
        lease = rig.store.lease(BOB, prompt)
        size = prompt.namespace.block_bytes
        assert rig.bytes_at(rig.slots_of(lease), size) == rig.expected(prompt, lease.n_blocks)
        assert lease.n_tokens == 16


def test_no_hit_across_loras_their_weights_or_salts(make_rig: Any) -> None:
    rig = make_rig(capacity_bytes=512 << 10)
    identities = [
        {},
        {"lora": "A"},
        {"lora": "B"},
        {"lora": "A:digest of other weights"},
        {"salt": "A"},
        {"salt": "B"},
        {"salt": "A", "lora": "A"},
    ]
    prompts = [rig.prompt([1, 2, 3, 4], **identity) for identity in identities]
    for i, prompt in enumerate(prompts):
        assert [rig.found(other) for other in prompts] == [2] * i + [0] * (len(prompts) - i)
        assert rig.put(ALICE, prompt).n_committed == 2
    for prompt in prompts:
        lease = rig.store.lease(BOB, prompt)
        assert rig.bytes_at(rig.slots_of(lease)) == rig.expected(prompt, 2)


def test_no_hit_across_images(rig: Rig) -> None:
    def prompt(digest: bytes) -> Any:
        return rig.prompt([1, 2, 7, 7, 7, 7, 8, 9], extras=[ExtraKey(2, 4, digest)])

    rig.put(ALICE, prompt(b"cat"))
    assert rig.found(prompt(b"cat")) == 4
    assert rig.found(prompt(b"dog")) == 1
    assert rig.found(rig.prompt([1, 2, 7, 7, 7, 7, 8, 9])) == 1
    lease = rig.store.lease(BOB, prompt(b"dog"))
    assert (lease.n_blocks, lease.partial_tokens) == (1, 0)


# Regions -----------------------------------------------------------------------------------------


def test_a_writer_maps_then_seals_then_others_read(rig: Rig) -> None:
    prompt = rig.rows(2, tag=1)
    reservation = rig.reserve(ALICE, prompt)
    region_id = int(reservation.slots[0]) >> 20
    with pytest.raises(EndedError, match="still being set up"):
        rig.store.share_region(BOB, "default", region_id, writable=False)
    with pytest.raises(BadInputError, match="another client's"):
        rig.store.share_region(BOB, "default", region_id, writable=True)
    with pytest.raises(BadInputError, match="not this client's to seal"):
        rig.store.seal_region(BOB, region_id)
    region = rig.store.share_region(ALICE, "default", region_id, writable=True)
    assert (region.id, region.sealed) == (region_id, False)
    rig.store.seal_region(ALICE, region_id)
    rig.store.seal_region(ALICE, region_id)
    assert region.sealed
    with pytest.raises(BadInputError, match="sealed"):
        rig.store.share_region(ALICE, "default", region_id, writable=True)
    with pytest.raises(BadInputError, match="another client's"):
        rig.store.share_region(BOB, "default", region_id, writable=True)
    assert rig.store.share_region(BOB, "default", region_id, writable=False) is region
    assert region.mappers == {ALICE, BOB}


def test_a_refused_descriptor_leaves_no_mapper(rig: Rig) -> None:
    reservation = rig.reserve(ALICE, rig.rows(2, tag=1))
    region_id = int(reservation.slots[0]) >> 20
    for session, tenant, writable in ((BOB, "default", False), (BOB, "default", True), (EVE, "other", False)):
        with pytest.raises((BadInputError, EndedError)):
            rig.store.share_region(session, tenant, region_id, writable=writable)
    assert rig.dram.region(region_id).mappers == set()


def test_another_tenants_region_can_not_be_told_from_none(rig: Rig) -> None:
    rig.put(ALICE, rig.rows(2, tag=1))
    (region_id,) = rig.dram.regions
    texts = []
    for number in (region_id, 999):
        for writable in (False, True):
            with pytest.raises(EndedError) as caught:
                rig.store.share_region(EVE, "other", number, writable=writable)
            texts.append(str(caught.value).replace(str(number), "N"))
    assert len(set(texts)) == 1
    with pytest.raises(BadInputError):
        rig.store.seal_region(EVE, 999)


def test_tenants_never_share_a_region(rig: Rig) -> None:
    for tag in range(1, 12):
        for session, tenant in ((ALICE, "default"), (EVE, "other")):
            prompt = rig.rows(3, tag=tag, namespace=rig.namespace(tenant=tenant))
            rig.put(session, prompt)
            rig.unmap_retired()
            lease = rig.store.lease(session, prompt)
            regions = {slot >> 20 for slot in rig.slots_of(lease).tolist()}
            assert {rig.dram.region(region_id).tenant for region_id in regions} <= {tenant}
            if lease.id:
                assert rig.bytes_at(rig.slots_of(lease)) == rig.expected(prompt, lease.n_blocks)
                rig.store.release(session, lease.id)


def test_slots_of_one_reservation_are_the_writers_own(rig: Rig) -> None:
    for session in (ALICE, BOB):
        reservation = rig.reserve(session, rig.rows(3, tag=session))
        writers = {rig.dram.region(slot >> 20).writer for slot in reservation.slots.tolist()}
        assert writers == {session}
    assert len(np.unique(reservation.slots)) == 3
