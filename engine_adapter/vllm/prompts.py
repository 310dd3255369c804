"""A request of vLLM as the store sees it: token ids, and what else its KV depends on.

Never made from the engine's own block hashes: those change with its settings, and for one algorithm with the process.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvstore.engine_adapter.vllm.loras import LoraIdentities
from kvstore.tokens import TOKEN
from kvstore.types import KEY_BYTES, ExtraKey, Root


class RequestPrompt:
    """Row and root of one request. ``cacheable`` is False where it can't be told what its KV depends on."""

    def __init__(self, request: Any, block_tokens: int, loras: LoraIdentities) -> None:
        lora = loras.of(request.lora_request)
        self.cacheable = lora is not None and _is_plain(request)
        self.root = Root(salt=request.cache_salt or "", lora=lora or "")
        self.extras = tuple(_merged([*_media(request), *_embeds(request, block_tokens)])) if self.cacheable else ()
        self._request = request
        self._ids = np.empty(0, TOKEN)

    def tokens(self, n: int) -> NDArray[np.uint32]:
        """The first ``n`` token ids, prompt and generated ones, uint32."""
        if n > len(self._ids):
            more = np.array(self._request.all_token_ids[len(self._ids) :], TOKEN)
            self._ids = np.concatenate((self._ids, more))
        return self._ids[:n]


def _is_plain(request: Any) -> bool:
    """Prompts that grow while they are served (streaming input) take tokens back: they are left alone."""
    return not getattr(request, "resumable", False)


def _media(request: Any) -> list[ExtraKey]:
    keys = []
    for feature in request.mm_features:
        place = feature.mm_position
        digest = hashlib.blake2b(f"{feature.modality}\0{feature.identifier}".encode(), digest_size=KEY_BYTES).digest()
        keys.append(ExtraKey(place.offset, place.length, digest))
    return keys


def _merged(keys: list[ExtraKey]) -> list[ExtraKey]:
    """Media that cover the same tokens (the sound of a video) as one key: the store knows no overlaps."""
    merged: list[ExtraKey] = []
    for key in sorted(keys, key=lambda each: (each.start_token, each.n_tokens, each.digest)):
        last = merged[-1] if merged else None
        if last is None or key.start_token >= last.start_token + last.n_tokens:
            merged.append(key)
            continue
        end = max(last.start_token + last.n_tokens, key.start_token + key.n_tokens)
        facts = f"{last.start_token} {last.n_tokens} {key.start_token} {key.n_tokens} ".encode()
        digest = hashlib.blake2b(facts + last.digest + key.digest, digest_size=KEY_BYTES).digest()
        merged[-1] = ExtraKey(last.start_token, end - last.start_token, digest)
    return merged


def _embeds(request: Any, block_tokens: int) -> list[ExtraKey]:
    """One key a block of embeddings given in place of tokens, so that prompts share what they have in common."""
    embeds = request.prompt_embeds
    if embeds is None:
        return []
    keys = []
    for start in range(0, len(embeds), block_tokens):
        rows = embeds[start : start + block_tokens].detach().cpu().contiguous()
        facts = f"embeds {rows.dtype} {tuple(rows.shape)} ".encode()
        mask = getattr(request, "prompt_is_token_ids", None)
        if mask is not None:
            facts += bytes(mask[start : start + block_tokens])
        digest = hashlib.blake2b(facts, digest_size=KEY_BYTES)
        digest.update(rows.view(torch.uint8).numpy())
        keys.append(ExtraKey(start, len(rows), digest.digest()))
    return keys
