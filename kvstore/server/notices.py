"""What clients are told unasked: that claims have ended, and which regions they should unmap."""

from __future__ import annotations

from collections.abc import Mapping

from kvstore.server.session import Sessions
from kvstore.store.mapped import Mapped
from kvstore.wire import kvstore_pb2 as pb


class Notices:
    """To the sessions of a daemon, as far as they have a connection for events. No call blocks."""

    def __init__(self, mapped: Mapped, sessions: Sessions) -> None:
        self._mapped = mapped
        self._sessions = sessions
        self._asked_to_unmap: dict[int, set[int]] = {}

    def tell(self, events: Mapping[int, pb.Event]) -> None:
        """Send each session its event."""
        for session_id, event in events.items():
            self._send(session_id, event)

    def ask_to_unmap(self) -> None:
        """Ask for regions that are to go, once for each client that has one mapped."""
        for session_id, region_ids in self._mapped.pending_unmaps().items():
            asked = self._asked_to_unmap.setdefault(session_id, set())
            fresh = [region_id for region_id in region_ids if region_id not in asked]
            if fresh and self._send(session_id, pb.Event(retired_regions=fresh)):
                asked.update(fresh)

    def forget(self, session_id: int) -> None:
        """The session is gone, or what it was told may have been lost: what it should unmap is asked for again."""
        self._asked_to_unmap.pop(session_id, None)

    def _send(self, session_id: int, event: pb.Event) -> bool:
        session = self._sessions.get(session_id)
        if session is None or session.events is None:
            return False
        session.events.send_event(event)
        return True
