"""EXPLAIN: why not more of a prompt can be used."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from kvstore.errors import DeniedError
from kvstore.prefix_index.block_table import DRAM
from kvstore.server.explain_words import Wording
from kvstore.server.prompts import PromptReader
from kvstore.server.replies import Reply, Result
from kvstore.server.session import Session
from kvstore.server.waits import paced
from kvstore.store.explaining import Explained, Explainer
from kvstore.store.requests import Prompt
from kvstore.store.store import Store
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.framing import Method


class ExplainHandlers:
    """Handlers over one store. Called on the loop's thread only."""

    def __init__(self, store: Store, prompts: PromptReader) -> None:
        self._store = store
        self._prompts = prompts
        self._explainer = Explainer(store)
        self._words = Wording(store)

    def register(self, by_method: dict[int, Callable[[Session, Any], Result]]) -> None:
        """Take the requests that are answered here."""
        by_method[Method.EXPLAIN] = self.explain

    def explain(self, session: Session, request: pb.ExplainRequest) -> Result:
        if request.other_salts and session.remote:
            raise DeniedError("other salts can be asked for over the daemon's own socket only: run this on its machine")
        return self._explain(self._prompts.read(session, request.prompt), other_salts=request.other_salts)

    async def _explain(self, prompt: Prompt, *, other_salts: bool) -> Reply:
        told = self._explainer.explain(prompt)
        await paced(self._explainer.look_around(prompt, told, other_salts=other_salts))
        return Reply(self._message(prompt, told))

    def _message(self, prompt: Prompt, told: Explained) -> pb.ExplainReply:
        history, left, found = self._store.index.history, told.departure, told.found
        reply = pb.ExplainReply(
            n_rows=prompt.path.n_rows,
            n_blocks=told.n_hit,
            partial_tokens=told.partial_tokens,
            n_dram_blocks=told.n_in_dram,
            n_nvme_blocks=told.n_on_nvme,
            n_hbm_blocks=told.n_in_hbm,
            block=told.block,
            reason=told.reason,
            lines=self._words.lines(prompt, told),
            advice=self._words.advice(told),
            left_ago_s=-1.0,
            unused_s=-1.0,
            groups=told.groups,
            differs_at_token=found.differs_at,
            here_token=found.here,
            stored_token=found.stored,
            content=found.content,
            remembered_s=history.reach_s if history else -1.0,
            forgot=history.has_forgotten,
            cleared_ago_s=-1.0 if told.cleared_ago_s is None else told.cleared_ago_s,
            n_cleared_blocks=told.n_cleared,
        )
        if left is not None:
            reply.left_ago_s = left.ago_s
            reply.unused_s = -1.0 if math.isnan(left.idle_s) else left.idle_s
            reply.unwritten = left.unwritten or ""
            if left.tier >= 0:
                reply.tier = "dram" if left.tier == DRAM else "nvme"
                reply.policy = self._store.index.policy.of(left.tier).name
        for reason, n in sorted(told.missing.items()):
            reply.missing.add(reason=reason, n=n)
        for space in told.namespaces:
            reply.namespaces.add(
                digest=space.known.digest,
                differences=space.differences,
                n_matching=space.n_matching,
                n_blocks=space.n_blocks,
            )
        for root in told.roots:
            reply.roots.add(
                salt_differs=root.salt_differs,
                lora_differs=root.lora_differs,
                lora=root.lora,
                n_matching=root.n_matching,
            )
        return reply
