"""Decode attention that reads K and V page by page where they lie: device memory, host memory, both.

Needs torch (``pip install '.[torch]'`` in a checkout); on a GPU also triton.
"""

from __future__ import annotations

from kvstore.engine_adapter.needs import needs

with needs(__name__, ("torch",), "pip install '.[torch]' in a checkout of kvstored"):
    from kvstore.engine_adapter.attention.decode import decode_attention
    from kvstore.engine_adapter.attention.merge import Part, merge
    from kvstore.engine_adapter.attention.pages import KVPages, PageLayout, block_pages

__all__ = ["KVPages", "PageLayout", "Part", "block_pages", "decode_attention", "merge"]
