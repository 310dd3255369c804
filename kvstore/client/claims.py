"""Claims a session must tell of their end: kept weakly, by kind and id."""

from __future__ import annotations

import weakref


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
        self._refs: dict[tuple[bool, int], weakref.ref[Claimed]] = {}

    def watch(self, lease: bool, claim_id: int, claimed: Claimed) -> None:
        """Tell ``claimed`` when its right ends, until ``unwatch``."""
        self._refs[(lease, claim_id)] = weakref.ref(claimed)

    def unwatch(self, lease: bool, claim_id: int) -> None:
        """The claim was let go of."""
        self._refs.pop((lease, claim_id), None)

    def end(self, lease: bool, claim_id: int, why: str) -> bool:
        """One claim's right is gone; False if it is not known here."""
        ref = self._refs.pop((lease, claim_id), None)
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
