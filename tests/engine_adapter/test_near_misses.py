"""What an adapter can say when nothing hits: what is stored of the same model, and which field keeps it apart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.client import Client
from kvstore.engine_adapter.near_misses import FIELDS_MAX, LINES_MAX, near_misses
from kvstore.types import KVGroup, KVSpec, Namespace, Shard

SPEC = KVSpec(16, (KVGroup(layers=2, kv_heads=2, head_dim=8),))
STORED = Namespace("m", SPEC, revision="1")


def store(client: Client, namespace: Namespace) -> None:
    client.open(namespace).put(np.arange(32), np.zeros((2, namespace.spec.block_bytes), np.uint8))


def of(**group: Any) -> Namespace:
    return replace(STORED, spec=KVSpec(16, (replace(SPEC.groups[0], **group),)))


def test_the_field_that_differs_is_named(client: Client) -> None:
    store(client, STORED)
    for other, says in (
        (of(dtype="float16"), "2 blocks: spec.groups[0].dtype: 'float16' != 'bfloat16'"),
        (of(layout="HND"), "2 blocks: spec.groups[0].layout: 'HND' != 'NHD'"),
        (replace(STORED, revision="2"), "2 blocks: revision: '2' != '1'"),
        (replace(STORED, shard=Shard(0, 2)), "2 blocks: shard.tp_size: 2 != 1"),
    ):
        assert near_misses(client, other) == [says]


def test_the_nearest_come_first_and_lines_have_an_end(client: Client) -> None:
    for revision in ("2", "3", "4", "5"):
        store(client, replace(STORED, revision=revision))
    far = replace(of(dtype="float16", layers=3, kv_heads=4, head_dim=4), revision="9", engine="e")
    store(client, of(dtype="float16"))
    lines = near_misses(client, STORED)
    assert len(lines) == LINES_MAX
    store(client, far)
    (*_, last) = near_misses(client, replace(far, tenant=STORED.tenant, engine="f", revision="10"))
    assert last.count("; ") == FIELDS_MAX
    assert near_misses(client, replace(far, engine="f"))[0] == "2 blocks: engine: 'f' != 'e'"


def test_nothing_is_said_without_need(client: Client, tmp_path: Path) -> None:
    assert near_misses(client, STORED) == []
    client.open(of(dtype="float16")).match(np.arange(32))  # known, but empty
    assert near_misses(client, STORED) == []
    store(client, replace(STORED, shard=Shard(1, 2)))  # another rank
    store(client, replace(STORED, model="another"))
    assert near_misses(client, STORED) == []
    store(client, of(dtype="float16"))
    assert len(near_misses(client, STORED)) == 1
    store(client, STORED)
    assert near_misses(client, STORED) == []
    with Client(tmp_path / "nobody.sock", required=False) as nobody:
        assert near_misses(nobody, STORED) == []
