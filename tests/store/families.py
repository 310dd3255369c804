"""Shard families for tests of the store: namespaces, prompts over all shards, and what a lease of one holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvstore.lease import Lease
from kvstore.store.family import FamilyPrompt
from kvstore.types import Shard
from tests.store.rig import Rig

KIB = 1 << 10


class Family:
    """Shards of one model over a rig. ``block_bytes``: of each shard, as ranks of a pipeline may differ."""

    def __init__(self, rig: Rig, block_bytes: Sequence[int] = (4 * KIB, 4 * KIB), **more: Any) -> None:
        self.rig = rig
        n = len(block_bytes)
        self.spaces = [rig.namespace(size, shard=Shard(i, n), **more) for i, size in enumerate(block_bytes)]

    def prompt(self, tokens: Sequence[int], **more: Any) -> FamilyPrompt:
        return FamilyPrompt(tuple(self.rig.prompt(tokens, opened, **more) for opened in self.spaces))

    def rows(self, n_rows: int, tag: int) -> FamilyPrompt:
        return FamilyPrompt(tuple(self.rig.rows(n_rows, tag=tag, namespace=opened) for opened in self.spaces))

    def put(self, prompt: FamilyPrompt, n_blocks: int = 0) -> None:
        """Every rank stores its shard's blocks; rank ``i`` is session ``i + 1``."""
        for i, shard in enumerate(prompt.shards):
            self.rig.put(i + 1, shard, n_blocks=n_blocks)

    def hit(self, prompt: FamilyPrompt) -> tuple[int, int]:
        reach = self.rig.store.family_match(prompt)
        return reach.n_blocks, reach.partial_tokens

    def check_bytes(self, lease: Lease, prompt: FamilyPrompt, first_block: int = 0) -> None:
        """What every shard's slots hold is what its rank has put there."""
        for shard in prompt.shards:
            ids = lease.ids_of(shard.namespace.digest)
            size = shard.namespace.block_bytes
            got = self.rig.bytes_at(self.rig.store.index.slots(ids), size)[: lease.n_blocks - first_block]
            assert got == self.rig.expected(shard, lease.n_blocks, first_block)
