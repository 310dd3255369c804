"""How much room the file system has, as jobs last saw it: to ask may take as long as the disk is stuck."""

from __future__ import annotations

from contextlib import suppress

from kvstore.clock import Clock
from kvstore.tiers.nvme.files import Files

LOOK_S = 1.0
"""A disk that limits the tier is looked at this often."""


class DiskRoom:
    """``free_bytes`` for new segment files; ``kept_bytes`` of what the file system has are for other purposes."""

    def __init__(self, files: Files, clock: Clock, kept_bytes: int) -> None:
        self.free_bytes = 0
        self._files = files
        self._clock = clock
        self._kept_bytes = kept_bytes
        self._looked_at_s = 0.0

    @property
    def is_old(self) -> bool:
        """It was some time ago that anybody looked."""
        return self._clock.now_s() - self._looked_at_s >= LOOK_S

    def look(self) -> None:
        """See how much there is now; if the file system does not say, what was known stays. Blocks; for any thread."""
        self._looked_at_s = self._clock.now_s()
        with suppress(OSError):
            self.free_bytes = max(self._files.disk_free_bytes() - self._kept_bytes, 0)
