"""Another process with the same model: ``python -m ...transformers.reader SOCKET KIND SEED N_TOKENS``.

Prints as JSON how much of the prompt it was given, and what the model says.
"""

from __future__ import annotations

import json
import sys

import torch

from kvstore.client import Client
from kvstore.engine_adapter.transformers import KVStoreCache
from tests.engine_adapter.transformers.models import BLOCK_TOKENS, MODELS, greedy, tokens


def main() -> None:
    socket_path, kind, seed, n_tokens = sys.argv[1:]
    torch.set_num_threads(1)
    model = MODELS[kind]()
    prompt = tokens(int(seed), int(n_tokens))[None]
    with Client(socket_path, timeout_s=5.0) as client:
        cache = KVStoreCache.for_prompt(client, model, prompt, block_tokens=BLOCK_TOKENS)
        said = greedy(model, prompt, past_key_values=cache)
        cache.save()
    print(json.dumps({"hit": cache.n_hit_tokens, "said": said, "why": cache.reason}))  # noqa: T201 - what it is for


if __name__ == "__main__":
    main()
