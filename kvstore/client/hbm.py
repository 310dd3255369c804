"""Blocks in HBM as a client reaches them: regions of a device's memory, opened by their handles.

A region stays open as long as anything looks at it: the session, or a lease. It is closed when the last of them is
gone, which waits for the device's work, and only then is the daemon told.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.client.mapping import Call
from kvstore.errors import BadInputError, DeviceError, ProtocolError, UnavailableError
from kvstore.native import Mapping
from kvstore.types import FIRST_HBM_REGION_ID, SLOT_BITS
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.framing import Method
from kvstore.wire.packing import I64, U32, U64, unpack

_INDEX_MASK = (1 << SLOT_BITS) - 1
_NONE = np.empty(0, np.uint64)


class DeviceFacts(Protocol):
    """What is asked of a device's facts."""

    @property
    def uuid(self) -> str: ...


class IpcDevice(Protocol):
    """What is asked of a device; those of ``kvstore.device`` are such."""

    @property
    def facts(self) -> DeviceFacts: ...

    def ipc_open(self, handle: bytes) -> int: ...

    def ipc_close(self, address: int) -> None: ...


class OpenRegion:
    """One region, open in this process at ``address`` of its device."""

    def __init__(self, device: IpcDevice, handle: bytes, size_bytes: int) -> None:
        """Raises DeviceError."""
        self.size_bytes = size_bytes
        self.after_close: Callable[[], None] | None = None
        self._device = device
        self._pid = os.getpid()
        self.address = device.ipc_open(handle)

    def __del__(self) -> None:
        if hasattr(self, "address") and self._pid == os.getpid():
            try:
                self._device.ipc_close(self.address)
            except DeviceError:
                return  # the device is gone, and all that was open with it; the daemon hears when the process is
            except BadInputError:
                pass  # it is not open: the device was closed first
            if self.after_close is not None:
                self.after_close()


class HbmRegions:
    """The regions that one client has open, by region id, on one device.

    ``on_closed(region_id)`` is called, on any thread, once a region that was asked back is closed. ``retire`` may be
    called on any thread; everything else under the session's lock.
    """

    def __init__(self, device: IpcDevice, on_closed: Callable[[int], None]) -> None:
        self.device = device
        self.generations: NDArray[np.uint64] = _NONE
        """Of all slots in HBM, as they are now; read-only."""
        self.failure = ""
        """Why the daemon's HBM can't be opened, if it can't: then nothing more is asked of it."""
        self._on_closed = on_closed
        self._open: dict[int, OpenRegion] = {}
        self._leaving: dict[int, weakref.ref[OpenRegion]] = {}
        self._alive: weakref.WeakSet[OpenRegion] = weakref.WeakSet()

    def find(self, call: Call, region_ids: list[int]) -> dict[int, OpenRegion]:
        """These regions, opened where they are not. Raises UnavailableError if that can't be done."""
        missing = [region_id for region_id in region_ids if region_id not in self._open]
        if missing:
            self._ask(call, missing)
        return {region_id: self._open[region_id] for region_id in region_ids}

    def _ask(self, call: Call, region_ids: list[int]) -> None:
        fds: list[int] = []
        try:
            reply = call(Method.MAP_HBM, pb.MapHbmRequest(region_ids=region_ids), pb.MapHbmReply, fds)
            if [region.id for region in reply.regions] != region_ids or len(fds) != 1:
                raise UnavailableError("the daemon gave other regions of HBM than were asked for")
            if reply.device_uuid != self.device.facts.uuid:
                raise BadInputError(f"it is on device {reply.device_uuid}, this client's is {self.device.facts.uuid}")
            if not len(self.generations):
                table = Mapping(fds[0], reply.generations_bytes, writable=False, inherit=False)
                self.generations = table.array().view(np.uint64)
            for region in reply.regions:
                opened = OpenRegion(self.device, region.handle, region.size_bytes)
                self._open[region.id] = opened
                self._alive.add(opened)
        except (DeviceError, BadInputError, OSError) as error:
            self.failure = f"the daemon's HBM can't be opened: {error}"
            raise UnavailableError(self.failure) from error
        finally:
            for fd in fds:
                os.close(fd)

    def retire(self, region_ids: Iterable[int]) -> None:
        """Let go of regions that the daemon wants back; each is closed when nobody looks at it any more."""
        for region_id in region_ids:
            opened = self._open.pop(region_id, None)
            if opened is not None:
                self._leaving[region_id] = weakref.ref(opened)
                opened.after_close = partial(self._left, region_id)
            elif region_id not in self._leaving:
                self._on_closed(region_id)

    def _left(self, region_id: int) -> None:
        self._leaving.pop(region_id, None)
        self._on_closed(region_id)

    def drop_all(self) -> bool:
        """Let go of everything. True if nothing is open any more, False if leases still keep some."""
        self._open = {}
        self.generations = _NONE
        return not len(self._alive)


def split(region_ids: Iterable[int]) -> tuple[list[int], list[int]]:
    """Ids of regions of host memory, and of HBM."""
    host: list[int] = []
    hbm: list[int] = []
    for region_id in region_ids:
        (hbm if region_id > FIRST_HBM_REGION_ID else host).append(region_id)
    return host, hbm


class HbmBlocks:
    """Those of a lease's blocks that are in HBM.

    ``at``: which of the lease's blocks they are, uint32 [n].
    """

    def __init__(self, regions: HbmRegions | None, opened: dict[int, OpenRegion], message: pb.HbmSlots) -> None:
        """Raises ProtocolError for slots outside the regions that came with them."""
        ids = unpack("hbm slots", message.slots.ids, I64)
        self.at: NDArray[np.uint32] = unpack("hbm.at", message.at, U32, len(ids))
        self._granted = unpack("hbm generations", message.slots.generations, U64, len(ids))
        self._generations = regions.generations if regions is not None else _NONE
        self.device = regions.device if regions is not None else None
        """With which they were opened."""
        self._opened = opened
        self._usable: Callable[[], object] = lambda: None
        self._addresses = np.zeros(len(ids), np.uint64)
        self._places = np.zeros(len(ids), np.uint64)
        known = np.zeros(len(ids), np.bool_)
        for layout in message.slots.regions:
            mine = (ids >> SLOT_BITS) == layout.id
            indexes = (ids[mine] & _INDEX_MASK).astype(np.uint64)
            region = opened[layout.id]
            if len(indexes) and (int(indexes.max()) + 1) * layout.slot_bytes > region.size_bytes:
                raise ProtocolError(f"a slot lies outside region {layout.id} of {region.size_bytes} bytes of HBM")
            self._addresses[mine] = np.uint64(region.address) + indexes * np.uint64(layout.slot_bytes)
            self._places[mine] = indexes + np.uint64(layout.generation_base)
            known |= mine
        if not known.all():
            raise ProtocolError("a slot in HBM lies outside the regions that came with it")

    def __len__(self) -> int:
        return len(self.at)

    def tie(self, usable: Callable[[], object]) -> None:
        """``usable`` raises EndedError when the blocks must not be read any more."""
        if len(self):
            self._usable = usable

    @property
    def addresses(self) -> NDArray[np.uint64]:
        """Where each block lies on the client's device, uint64 [n]. Raises EndedError after the end of the right.

        Nothing may be read there once the lease was released: let the device finish first, or have ``Lease.hold_hbm``.
        """
        self._usable()
        return self._addresses

    def unchanged(self) -> bool:
        """Whether the blocks are what they were when they were leased; ask after the device has copied them."""
        return bool(np.array_equal(self._generations[self._places], self._granted))

    def forget(self) -> None:
        """The regions may be closed, unless somebody still holds them."""
        self._opened = {}

    @property
    def opened(self) -> dict[int, OpenRegion]:
        """What must stay open while the blocks are read."""
        return self._opened


class HbmHeld:
    """Blocks in HBM in the hands of a device: while this exists they stay as they are, and their memory open, whatever
    becomes of the lease.

    ``at`` and ``addresses`` as in ``HbmBlocks``; ``block_bytes`` each.
    """

    def __init__(self, blocks: HbmBlocks, block_bytes: int, answers: Callable[[], bool], hold: object) -> None:
        """``answers``: whether the daemon that lent them still does; may block."""
        self.at, self.addresses, self.block_bytes = blocks.at, blocks.addresses, block_bytes
        self.device = blocks.device
        self._blocks, self._answers = blocks, answers
        self._kept = blocks.opened, hold

    def __len__(self) -> int:
        return len(self.at)

    def vouched(self) -> bool:
        """Whether what a device has read of them until now counts: they are what was leased, and the daemon is alive,
        as its memory ends with it. Blocks for one round trip."""
        return self._blocks.unchanged() and self._answers()


NO_HBM_BLOCKS = HbmBlocks(None, {}, pb.HbmSlots())
