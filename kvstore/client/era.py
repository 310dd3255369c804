"""What a client was lent in one epoch of the daemon, as long as any of it may still be in use."""

from __future__ import annotations

import os

from kvstore.client.acks import Acknowledgements
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.framing import Method


class Era:
    """Kept by every hold of its epoch. Once another epoch has begun, and no hold of this one or an earlier one
    is left, the daemon is told, from whatever thread let go last."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._next: Era | None = None
        self._acks: Acknowledgements | None = None
        self._next_epoch = 0

    def followed_by(self, acks: Acknowledgements, epoch: int) -> Era:
        """The era of the epoch that has begun. This one keeps it, so that it does not seem over before this one is."""
        self._next, self._acks, self._next_epoch = Era(), acks, epoch
        return self._next

    def __del__(self) -> None:
        if self._acks is not None and self._pid == os.getpid():
            self._acks.add(Method.REGIONS_UNMAPPED, pb.RegionsUnmappedRequest(settled_epoch=self._next_epoch))
