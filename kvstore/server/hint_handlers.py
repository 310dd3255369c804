"""What callers tell beyond the hints of a request."""

from __future__ import annotations

from kvstore.hints import check_session_id
from kvstore.server.prompts import PromptReader
from kvstore.server.replies import Reply, Result
from kvstore.server.session import Session
from kvstore.store.store import Store
from kvstore.wire import kvstore_pb2 as pb


class HintHandlers:
    """Handlers over one store. Called on the loop's thread only."""

    def __init__(self, store: Store, prompts: PromptReader) -> None:
        self._store = store
        self._prompts = prompts

    def end_session(self, session: Session, request: pb.EndSessionRequest) -> Result:
        check_session_id(request.session_id)
        opened = self._prompts.opened(session, request.namespace)
        root_key = opened.root_key(request.salt, request.lora)
        return Reply(pb.EndSessionReply(n_blocks=self._store.end_session(root_key, request.session_id)))
