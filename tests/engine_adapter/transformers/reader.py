"""Another process with the same model: ``python -m ...transformers.reader SOCKET KIND SEED N_TOKENS [LAYER]``.

Prints as JSON how much of the prompt it was given, and what the model says. With ``LAYER`` it kills itself in the
middle of a forward, when that layer has been computed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import torch

from kvstore.client import Client
from kvstore.engine_adapter.transformers import KVStoreCache, namespace_of
from tests.engine_adapter.transformers.models import BLOCK_TOKENS, MODELS, greedy, tokens


def main() -> None:
    socket_path, kind, seed, n_tokens, *layer = sys.argv[1:]
    torch.set_num_threads(1)
    model: Any = MODELS[kind]()
    if layer:
        mlp = model.model.layers[int(layer[0])].mlp
        mlp.register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    prompt = tokens(int(seed), int(n_tokens))[None]
    with Client(socket_path, timeout_s=5.0) as client:
        cache = KVStoreCache.for_prompt(client, model, prompt, block_tokens=BLOCK_TOKENS)
        said = greedy(model, prompt, past_key_values=cache)
        cache.save()
    space = namespace_of(model, block_tokens=BLOCK_TOKENS).digest().hex()
    found = {"hit": cache.n_hit_tokens, "said": said, "why": cache.reason, "namespace": space}
    print(json.dumps(found))  # noqa: T201 - what it is for


if __name__ == "__main__":
    main()
