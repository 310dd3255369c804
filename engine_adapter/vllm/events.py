"""KV events for routers: which blocks of which prompt this engine has stored, once every worker has stored its part.

The store's own evictions are not told, so a router should treat these events as hints.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.distributed.kv_events import AllBlocksCleared, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash, resolve_block_hashes

MEDIUM = "KVSTORE"


class Events:
    """Collects until the engine takes them. For one thread."""

    def __init__(self, block_tokens: int, hash_tokens: int, *, enabled: bool) -> None:
        self._block_tokens, self._hash_tokens, self._enabled = block_tokens, hash_tokens, enabled
        self._events: list[KVCacheEvent] = []

    def stored(self, request: Any, first_block: int, end_block: int) -> None:
        """Blocks ``first_block .. end_block - 1`` of a request are stored."""
        if not self._enabled or end_block <= first_block:
            return
        hashes = [*resolve_block_hashes(request.block_hashes, self._hash_tokens, self._block_tokens)[:end_block]]
        if len(hashes) < end_block:
            return
        lora = request.lora_request
        self._events.append(
            BlockStored(
                block_hashes=[maybe_convert_block_hash(each) for each in hashes[first_block:]],
                parent_block_hash=maybe_convert_block_hash(hashes[first_block - 1]) if first_block else None,
                token_ids=[*request.all_token_ids[first_block * self._block_tokens : end_block * self._block_tokens]],
                block_size=self._block_tokens,
                lora_id=lora.lora_int_id if lora is not None else None,
                medium=MEDIUM,
                lora_name=lora.lora_name if lora is not None else None,
            )
        )

    def cleared(self) -> None:
        """Nothing of what was stored is found any more."""
        if self._enabled:
            self._events.append(AllBlocksCleared())

    def take(self) -> Iterable[KVCacheEvent]:
        """What has happened since the last call."""
        events, self._events = self._events, []
        return events
