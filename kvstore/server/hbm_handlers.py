"""What clients need to read HBM themselves: handles of the device's memory, and the generations of its slots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvstore.errors import BadInputError, DeviceError, EndedError
from kvstore.server.replies import Reply, Result
from kvstore.server.session import Session
from kvstore.store.store import Store
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.framing import Method

HANDLES_MAX = 1024


class HbmHandlers:
    """Handlers over one store. Called on the loop's thread only."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def register(self, by_method: dict[int, Callable[[Session, Any], Result]]) -> None:
        by_method[Method.MAP_HBM] = self.map_hbm

    def map_hbm(self, session: Session, request: pb.MapHbmRequest) -> Result:
        """Handles of regions of the session's own tenant. A region counts as open there from now on."""
        hbm, ids = self._store.hbm, list(request.region_ids)
        if session.remote or hbm is None:
            raise BadInputError("the daemon has no HBM tier, or not for clients of other machines")
        if not 0 < len(ids) <= HANDLES_MAX:
            raise BadInputError(f"{len(ids)} regions were asked for; ask for 1 to {HANDLES_MAX} at a time")
        reply = pb.MapHbmReply(device_uuid=hbm.device.facts.uuid, generations_bytes=hbm.tier.generations_bytes)
        for region_id in ids:
            region = self._store.share_hbm(session.id, session.tenant, region_id)
            try:
                handle = region.handle
            except DeviceError as error:
                hbm.tier.remove_mapper(region_id, session.id)
                raise EndedError(f"region {region_id} of HBM can't be shared: {error}") from error
            reply.regions.add(id=region_id, size_bytes=region.size_bytes, handle=handle)
        return Reply(reply, (hbm.tier.generations_fd,))
