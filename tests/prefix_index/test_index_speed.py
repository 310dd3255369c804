"""The index's figures: the benchmark runs, its probe is what it claims, and memory stays within its bound."""

from __future__ import annotations

from kvstore.bench import index_speed
from kvstore.prefix_index.node import Node


def test_figures_are_there_and_a_block_weighs_at_most_400_bytes() -> None:
    figures = index_speed.run(pairs=1, large_blocks=12_000, memory_blocks=9000, children=50)
    assert figures["size_large_blocks"] >= 12_000
    for block_tokens in (16, 512):
        for edges in (16, 256):
            assert figures[f"edges_{edges}_block_{block_tokens}_ratio"] > 0
        for shape in ("chat", "flat", "forks", "nvme_chat"):
            assert 0 < figures[f"bytes_per_block_{shape}_block_{block_tokens}"] <= 400
    assert figures["bytes_per_block_cold"] <= 200
    assert figures["reopen_blocks"] == 12_000 + 131_072 // 16
    for name in ("unwritten", "written", "nvme"):
        assert figures[f"evict_64_{name}_ratio"] > 0
    assert figures["reopen_blocks_per_s"] > 0


def test_the_probe_lies_on_as_many_edges_as_said() -> None:
    index = index_speed._split_index(index_speed._tokens(1), 512, 256)
    sizes = []
    todo: list[Node] = [*index._tree.roots.values()]
    while todo:
        node = todo.pop()
        todo.extend(node.kids or ())
        sizes.append(len(node.ids))
    assert sorted(sizes) == [0] + [1] * 511
