"""What an adapter needs of a device: registered memory, staged reads and writes; opened and closed as one."""

from __future__ import annotations

from kvstore.client import Client
from kvstore.device.seam import Device
from kvstore.engine_adapter.counters import SharedCounters
from kvstore.engine_adapter.gpu.choice import Choice, unmeasured
from kvstore.engine_adapter.gpu.events import EventPool
from kvstore.engine_adapter.gpu.lane import LaneSizes
from kvstore.engine_adapter.gpu.pinned_regions import PinnedRegions
from kvstore.engine_adapter.gpu.staged import StagedMoves, StagedReader, StagedWriter


class DeviceMover:
    """See ``moving.Mover``: pages in the memory of ``device``, which stays the caller's to close, after this.

    ``clients``: those that find and reserve blocks; the memory that they map is registered with the device in the
    background. ``choice``: how copies go, by ``choice.measure``; published rates without.
    """

    on_device = True

    def __init__(
        self,
        device: Device,
        *clients: Client,
        choice: Choice | None = None,
        read_lanes: int = 2,
        write_lanes: int = 1,
        sizes: LaneSizes | None = None,
        counters: SharedCounters | None = None,
    ) -> None:
        self.device = device
        self.counters = counters or SharedCounters()
        self.pinned = PinnedRegions(device, self.counters)
        self._events = EventPool(device)
        self._clients = clients
        chosen = choice or unmeasured()
        self.reader = StagedReader(
            device, self.pinned, chosen, lanes=read_lanes, sizes=sizes, counters=self.counters, events=self._events
        )
        self.writer = StagedWriter(
            device, self.pinned, chosen, lanes=write_lanes, sizes=sizes, counters=self.counters, events=self._events
        )
        for client in clients:
            client.watch_mappings(self.pinned)

    def loading(self) -> StagedMoves:
        """See ``Mover``."""
        return self.reader.begin()

    def storing(self) -> StagedMoves:
        """See ``Mover``."""
        return self.writer.begin()

    def close(self) -> None:
        """Wait for the copies under way and give everything back. Close what uses it first; idempotent."""
        clients, self._clients = self._clients, ()
        for client in clients:
            client.unwatch_mappings(self.pinned)
        self.reader.close()
        self.writer.close()
        self.pinned.close()
        self._events.close()
