"""All requests that are operators' rather than engines'."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvstore.server.admin_handlers import AdminHandlers
from kvstore.server.explain_handlers import ExplainHandlers
from kvstore.server.prompts import PromptReader
from kvstore.server.record_handlers import RecordHandlers
from kvstore.server.replies import Result
from kvstore.server.scrub_handlers import ScrubHandlers
from kvstore.server.session import Session, Sessions
from kvstore.server.tenant_handlers import TenantHandlers
from kvstore.server.watch_handlers import WatchHandlers
from kvstore.store.store import Store


def register_operators(
    by_method: dict[int, Callable[[Session, Any], Result]], store: Store, prompts: PromptReader, sessions: Sessions,
    epoch: int,
) -> None:  # fmt: skip
    """Have them answered."""
    AdminHandlers(store, prompts, sessions).register(by_method)
    WatchHandlers(store, epoch).register(by_method)
    ScrubHandlers(store).register(by_method)
    ExplainHandlers(store, prompts).register(by_method)
    TenantHandlers(store).register(by_method)
    RecordHandlers(store, epoch).register(by_method)
