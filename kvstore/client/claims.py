"""Claims a session must tell of their end: kept weakly, by kind and id."""

from __future__ import annotations

import threading
import weakref

UNSEEN_MAX = 4096


class Claimed:
    """What a session must hear about: something with a right that can end before its holder lets go."""

    def end(self, why: str) -> None:
        """The right is gone; must not block nor call the session."""
        raise NotImplementedError

    def abandon(self, why: str) -> None:
        """The session is being closed: let go of what nothing but the claim itself keeps."""
        raise NotImplementedError


class Claims:
    """The claims of one session. Methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._refs: dict[tuple[bool, int], weakref.ref[Claimed]] = {}
        self._ended_unseen: dict[tuple[bool, int], str] = {}
        """Rights that ended before anybody here knew of them: what is made of them later is over already."""

    def watch(self, lease: bool, claim_id: int, claimed: Claimed) -> None:
        """Tell ``claimed`` when its right ends, until ``unwatch``; at once if it has."""
        with self._lock:
            self._refs[(lease, claim_id)] = weakref.ref(claimed)
            why = self._ended_unseen.pop((lease, claim_id), None)
        if why is not None:
            self.end(lease, claim_id, why)

    def unwatch(self, lease: bool, claim_id: int) -> None:
        """The claim was let go of."""
        self._refs.pop((lease, claim_id), None)

    def end(self, lease: bool, claim_id: int, why: str) -> bool:
        """One claim's right is gone; False if it is not known here."""
        with self._lock:
            ref = self._refs.pop((lease, claim_id), None)
            if ref is None:
                if len(self._ended_unseen) >= UNSEEN_MAX:
                    del self._ended_unseen[next(iter(self._ended_unseen))]
                self._ended_unseen[(lease, claim_id)] = why
        if ref is not None and (claimed := ref()) is not None:
            claimed.end(why)
        return ref is not None

    def end_all(self, why: str) -> None:
        """All rights are gone."""
        refs, self._refs = self._refs, {}
        for ref in refs.values():
            if (claimed := ref()) is not None:
                claimed.end(why)

    def abandon_all(self, why: str) -> None:
        """All claims let go of what nothing but themselves keeps."""
        for ref in list(self._refs.values()):
            if (claimed := ref()) is not None:
                claimed.abandon(why)
