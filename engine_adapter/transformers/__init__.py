"""Hugging Face transformers: a cache for ``generate`` that reuses stored prefixes, across processes.

    cache = KVStoreCache.for_prompt(client, model, input_ids)
    output = model.generate(input_ids, past_key_values=cache)
    cache.save()

Needs torch and transformers: ``pip install '.[transformers]'`` in a checkout.
"""

from kvstore.engine_adapter.needs import needs

with needs(__name__, ("torch", "transformers"), "pip install '.[transformers]' in a checkout of kvstored"):
    from kvstore.engine_adapter.transformers.cache import COUNTERS, KVStoreCache
    from kvstore.engine_adapter.transformers.explaining import explain
    from kvstore.engine_adapter.transformers.identity import namespace_of

__all__ = ["COUNTERS", "KVStoreCache", "explain", "namespace_of"]
