"""Memory without Python's lock: copies with streaming stores, checksums, shared mappings, page population."""

from __future__ import annotations

from kvstore.native.buffers import aligned_bytes, row_addresses
from kvstore.native.mapping import Mapping, huge_pages_note, populate
from kvstore.native.memcopy import backend, copy_batch

__all__ = ["Mapping", "aligned_bytes", "backend", "copy_batch", "huge_pages_note", "populate", "row_addresses"]
