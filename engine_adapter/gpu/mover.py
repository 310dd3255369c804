"""What an adapter needs of a device: registered memory, staged reads and writes; opened and closed as one."""

from __future__ import annotations

import os

from kvstore.client import Client
from kvstore.client.hbm import IpcDevice
from kvstore.device.seam import Device
from kvstore.engine_adapter.counters import SharedCounters
from kvstore.engine_adapter.gpu.choice import Choice, unmeasured
from kvstore.engine_adapter.gpu.events import EventPool
from kvstore.engine_adapter.gpu.lane import LaneSizes
from kvstore.engine_adapter.gpu.pinned_regions import PinnedRegions
from kvstore.engine_adapter.gpu.staged import StagedMoves, StagedReader, StagedWriter
from kvstore.plan.regime import Advisor, Case, Facts, Recommendation


class DeviceMover:
    """See ``moving.Mover``: pages in the memory of ``device``, which stays the caller's to close, after this.

    ``clients``: those that find and reserve blocks; the memory that they map is registered with the device in the
    background. ``choice``: how copies go, by ``choice.measure``; published rates without. ``facts`` are for
    ``recommend``: by default those of a GPU behind PCIe.
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
        facts: Facts | None = None,
    ) -> None:
        self._pid = os.getpid()
        self.device = device
        self.counters = counters or SharedCounters()
        self.pinned = PinnedRegions(device, self.counters)
        self._events = EventPool(device)
        self._clients = clients
        chosen = choice or unmeasured()
        self._advisor = Advisor(chosen.calibration, facts or _facts_of(device))
        self.reader = StagedReader(
            device, self.pinned, chosen, lanes=read_lanes, sizes=sizes, counters=self.counters, events=self._events
        )
        self.writer = StagedWriter(
            device, self.pinned, chosen, lanes=write_lanes, sizes=sizes, counters=self.counters, events=self._events
        )
        for client in clients:
            client.watch_mappings(self.pinned)

    def reads_hbm(self, device: IpcDevice | None) -> bool:
        """See ``Mover``: it must be the very device that copies, as addresses of one mean nothing to another."""
        return device is self.device

    def loading(self) -> StagedMoves:
        """See ``Mover``."""
        return self.reader.begin()

    def storing(self) -> StagedMoves:
        """See ``Mover``."""
        return self.writer.begin()

    def recommend(self, case: Case) -> Recommendation:
        """How stored KV is used best now: brought here, or read where it lies; by the rates that copies go by.

        Reading in place is recommended only if ``choice`` was measured. Does not block.
        """
        return self._advisor.recommend(case)

    def close(self) -> None:
        """Wait for the copies under way and give everything back. Close what uses it first; idempotent.

        In a forked child it does nothing: all is the parent's.
        """
        if os.getpid() != self._pid:
            return
        clients, self._clients = self._clients, ()
        for client in clients:
            client.unwatch_mappings(self.pinned)
        self.reader.close()
        self.writer.close()
        self.pinned.close()
        self._events.close()


def _facts_of(device: Device) -> Facts:
    can_map = device.facts.can_register_read_only
    return Facts(can_map=can_map, cannot_map_reason="" if can_map else "this device can't register sealed regions")
