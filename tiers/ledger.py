"""Whom a tier tells about its regions, so that a later daemon can find them and knows who maps them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from kvstore.tiers.region import Region


class Ledger(Protocol):
    """Hears of every change before it has an effect outside the daemon. Never raises, never blocks for long."""

    def region_made(self, region: Region, base: int) -> None:
        """A region with an id; ``base`` is the place of its first slot. Nobody has its descriptor yet."""
        ...

    def region_mapped(self, region_id: int, client: int) -> None:
        """A client is about to get the descriptor."""
        ...

    def regions_unmapped(self, region_ids: Collection[int], client: int) -> None:
        """A client does not map these any more."""
        ...

    def region_retired(self, region_id: int, size_bytes: int, inode: int) -> None:
        """It is empty and gone but for those who map it. Its descriptor is about to be closed."""
        ...

    def region_gone(self, region_id: int) -> None:
        """Nobody maps it any more."""
        ...


class NoLedger:
    """Nobody wants to know."""

    def region_made(self, region: Region, base: int) -> None:
        pass

    def region_mapped(self, region_id: int, client: int) -> None:
        pass

    def regions_unmapped(self, region_ids: Collection[int], client: int) -> None:
        pass

    def region_retired(self, region_id: int, size_bytes: int, inode: int) -> None:
        pass

    def region_gone(self, region_id: int) -> None:
        pass
