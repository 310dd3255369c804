"""Turns requests that a daemon was asked into lines of a trace, as ``load_trace`` reads them.

Keys of blocks become numbers in the order of their coming, and so do sessions: a trace says which prompts begin alike,
when they came and how long they were, and nothing of what is in them.
"""

from __future__ import annotations

import json
from typing import Any

from kvstore.client.recording import RecordedRequest

_NO_PARENT = -1


class TraceLines:
    """Makes the lines of one trace; remembers 8 bytes a block, in a table of Python's, of all that came."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._numbers: dict[int, int] = {}
        self._last_of: dict[int, int] = {}
        self._first_s: float | None = None
        self.n_requests = 0

    @property
    def n_unique_blocks(self) -> int:
        """Different blocks of all requests so far."""
        return len(self._numbers)

    def line(self, request: RecordedRequest) -> str:
        """One request as a line, its end included. Call it in the order in which they came."""
        if self._first_s is None:
            self._first_s = request.time_s
        numbers = self._numbers
        record: dict[str, Any] = {
            "chat_id": self.n_requests,
            "parent_chat_id": self._last_of.get(request.session, _NO_PARENT) if request.session else _NO_PARENT,
            "timestamp": round(max(request.time_s - self._first_s, 0.0), 6),
            "input_length": request.n_tokens,
            "output_length": request.n_output,
            "type": request.request_type or None,
            "turn": request.turn,
            "block_tokens": self._block_tokens,
            "hash_ids": [numbers.setdefault(key, len(numbers)) for key in request.keys.tolist()],
        }
        if request.session:
            self._last_of[request.session] = self.n_requests
        self.n_requests += 1
        return json.dumps(record, separators=(",", ":")) + "\n"
