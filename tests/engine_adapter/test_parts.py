"""Blocks in parts: how layers become groups, and what is held of them when a prefix is cut."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvstore.client import Client, HybridHandle, NamespaceHandle
from kvstore.engine_adapter.block_layout import BlockLayout, PartSize
from kvstore.engine_adapter.block_writer import BlockWriter
from kvstore.engine_adapter.counters import SharedCounters
from kvstore.engine_adapter.parts import in_groups, open_namespace
from kvstore.engine_adapter.stored_prefix import StoredPrefix
from kvstore.errors import BadInputError
from kvstore.hybrid import PARTS_MAX, parts_of
from kvstore.types import GroupKind, KVGroup, KVSpec, Namespace, Root

FULL = KVGroup(layers=1, kv_heads=2, head_dim=8, dtype="float32")
WIDE = replace(FULL, kv_heads=4)
WINDOW = replace(FULL, kind=GroupKind.SLIDING, window_tokens=11)
SHORT = replace(WINDOW, window_tokens=3)
SPEC = KVSpec(4, in_groups([WINDOW, FULL, SHORT, FULL])[0])
ROOT = Root()


def test_windows_are_apart_behind_the_others_and_alike_layers_make_a_group() -> None:
    groups, order = in_groups([WINDOW, FULL, SHORT, WIDE, WINDOW, FULL])
    assert groups == (replace(FULL, layers=2), WIDE, replace(WINDOW, layers=2), SHORT)
    assert order == [1, 5, 3, 0, 4, 2]
    layout = BlockLayout.by_part(KVSpec(4, groups))
    assert [place.part for place in layout.layers] == [0, 0, 0, 1, 1, 2]
    assert layout.parts == (PartSize(2048, 0), PartSize(1024, 11), PartSize(512, 3))


@pytest.mark.parametrize(
    "layers",
    [
        [WINDOW, SHORT, WINDOW],
        [FULL, WIDE],
        [FULL, *(replace(WINDOW, window_tokens=1 + i) for i in range(PARTS_MAX + 1))],
    ],
)
def test_blocks_are_in_one_piece_without_windows_beside_others(layers: list[KVGroup]) -> None:
    groups, order = in_groups(layers)
    assert sum(group.layers for group in groups) == len(layers)
    assert {group.kind for group in groups} == {GroupKind.FULL}
    assert parts_of(KVSpec(4, groups)) == ()
    assert sorted(order) == list(range(len(layers)))


def test_blocks_are_in_one_piece_if_so_asked() -> None:
    assert in_groups([WINDOW, FULL, SHORT], windows_apart=False) == ((replace(FULL, layers=3),), [0, 1, 2])


def test_a_namespace_is_opened_as_its_spec_asks(client: Client) -> None:
    assert isinstance(open_namespace(client, Namespace("parts", SPEC)), HybridHandle)
    assert isinstance(open_namespace(client, Namespace("whole", KVSpec(4, (FULL,)))), NamespaceHandle)


def found(client: Client, n_tokens: int) -> StoredPrefix:
    """What is found of 40 stored tokens."""
    handle = open_namespace(client, Namespace("cut", SPEC))
    assert isinstance(handle, HybridHandle)
    tokens = np.arange(40, dtype=np.uint32)
    blocks = {
        number: np.full((10, group.layers * group.bytes_per_page(4)), number, np.uint8)
        for number, group in enumerate(SPEC.groups)
    }
    assert handle.put(tokens, blocks).n_skipped == 0
    layout = BlockLayout.by_part(SPEC)
    return StoredPrefix.find(handle, layout, tokens[:n_tokens], root=ROOT, counters=SharedCounters())


def test_only_the_last_blocks_of_windows_are_held(client: Client) -> None:
    prefix = found(client, 39)
    assert prefix.n_tokens == 39
    # Behind token 39 a window of 11 begins with token 28, one of 3 with 36: each held from its block's first on, and
    # of the block before that which a hit that ends inside of a block needs no more.
    assert [prefix.first_token(layer) for layer in range(4)] == [0, 0, 24, 32]
    with pytest.raises(BadInputError, match="layer 2 was asked for from token 23 on; held is from 24 on"):
        prefix.pages(2, 23)
    assert prefix.pages(2, 28).holds(11)
    tails = prefix.last_blocks()
    assert tails is not None
    assert [int(tail[0]) for tail in tails] == [0, 1, 2]


def test_a_prefix_that_is_cut_before_its_windows_is_looked_up_again(client: Client) -> None:
    prefix = found(client, 39)
    prefix.shorten(36)
    assert (prefix.n_tokens, prefix.first_token(2), prefix.last_blocks()) == (36, 24, None)
    prefix.shorten(22)
    assert (prefix.n_tokens, prefix.first_token(2), prefix.first_token(3)) == (22, 8, 16)
    prefix.shorten(0)
    assert (prefix.n_tokens, prefix.last_blocks()) == (0, None)


def test_tails_go_with_a_block_that_is_not_whole(client: Client) -> None:
    handle = open_namespace(client, Namespace("tails", SPEC))
    with pytest.raises(BadInputError, match="3 known tokens: tails go with a block that is not whole"):
        BlockWriter(
            handle, BlockLayout.by_part(SPEC), np.arange(3, dtype=np.uint32), root=ROOT, counters=SharedCounters()
        )
