"""vLLM's KV connector for the store: ``--kv-transfer-config`` names this module and ``KVStoreConnector``."""

from __future__ import annotations

from kvstore.engine_adapter.needs import needs

with needs(__name__, ("torch", "vllm"), "install kvstored (pip install . in a checkout) where vLLM is installed"):
    from kvstore.engine_adapter.vllm.connector import KVStoreConnector

__all__ = ["KVStoreConnector"]
