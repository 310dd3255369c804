"""Memory that clients have mapped or opened, in whichever tier it is."""

from __future__ import annotations

from kvstore.tiers.dram import DramTier
from kvstore.tiers.hbm import HbmTier


class Mapped:
    """Regions of all tiers, by their ids, which no two tiers have in common."""

    def __init__(self, dram: DramTier, hbm: HbmTier | None) -> None:
        self._dram = dram
        self._hbm = hbm

    def is_mapped_by(self, client: int) -> bool:
        """Whether a client may have regions mapped, retired ones included."""
        return self._dram.is_mapped_by(client) or (self._hbm is not None and self._hbm.is_mapped_by(client))

    def mapped_by(self, client: int) -> dict[int, int]:
        """The regions that a client may have mapped, each with its inode; 0 if it has none, or it is not known."""
        others = self._hbm.mapped_by(client) if self._hbm is not None else {}
        return self._dram.mapped_by(client) | others

    def remove_mapper(self, region_id: int, client: int) -> None:
        """A client says that it has unmapped a region. Does nothing for one long gone."""
        self._dram.remove_mapper(region_id, client)
        if self._hbm is not None:
            self._hbm.remove_mapper(region_id, client)

    def drop_client(self, client: int) -> None:
        """A client is gone with all its mappings."""
        self._dram.drop_client(client)
        if self._hbm is not None:
            self._hbm.drop_client(client)

    def pending_unmaps(self) -> dict[int, list[int]]:
        """For each client the retired regions that it still maps: it must be asked to unmap them."""
        asked = self._dram.pending_unmaps()
        for client, region_ids in self._hbm.pending_unmaps().items() if self._hbm is not None else ():
            asked.setdefault(client, []).extend(region_ids)
        return asked
