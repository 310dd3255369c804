"""Blocks of a lease for kernels, brought into the device's memory or read where they lie, whichever is recommended."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.client import Lease
from kvstore.engine_adapter.gpu.copies import ALIGNMENT_BYTES
from kvstore.engine_adapter.gpu.mover import DeviceMover
from kvstore.engine_adapter.gpu.staged import StagedMoves
from kvstore.engine_adapter.gpu.zero_copy import REGISTER_S_MAX, ZeroCopyReader, leased_blocks
from kvstore.engine_adapter.moving import Copy
from kvstore.engine_adapter.runs import Runs
from kvstore.errors import DeviceError
from kvstore.plan.regime import Action, Case

Addresses = NDArray[np.uint64]


class Room(NamedTuple):
    """The caller's memory on the device, which blocks may be brought into: one after the other, each at a multiple of
    ``ALIGNMENT_BYTES`` from its beginning."""

    address: int
    size_bytes: int


NO_ROOM = Room(0, 0)


class Readable(Protocol):
    """Blocks of a lease for kernels: ``zero_copy.Pointers`` or ``Brought``."""

    @property
    def addresses(self) -> Addresses:
        """Device address of each block, uint64 [n]; valid until ``close``."""
        ...

    @property
    def sizes(self) -> NDArray[np.uint64]:
        """Bytes of each block, uint64 [n]."""
        ...

    def let_wait(self, stream: int) -> None:
        """Kernels that the stream is given from now on find the blocks. Does not block."""
        ...

    def unchanged(self) -> bool:
        """Whether what kernels have read until now counts: ask when they are over. May block for copies."""
        ...

    def close(self, event: int | None = None) -> None:
        """No kernel reads this from here on, or none after ``event``: then the lease may be released. Idempotent."""
        ...


class Brought:
    """Blocks on their way into the device's memory."""

    def __init__(self, moves: StagedMoves, addresses: Addresses, sizes: NDArray[np.uint64]) -> None:
        self.addresses, self.sizes = addresses, sizes
        self._moves = moves
        self._mark = moves.mark()
        self._failure: str | None = None

    def let_wait(self, stream: int) -> None:
        """See ``Readable``."""
        self._moves.let_wait(stream, self._mark)

    def unchanged(self) -> bool:
        """See ``Readable``. Blocks until the copies are over; what they brought is the caller's from then on."""
        if self._failure is None:
            self._failure = self._moves.finish()
        return not self._failure

    def close(self, event: int | None = None) -> None:  # noqa: ARG002
        """See ``Readable``. Blocks until the copies are over; kernels read the caller's own memory, and may go on."""
        self.unchanged()


class BlockReader:
    """Opens leases for kernels, whichever way; any thread. ``close`` before ``mover`` is."""

    def __init__(self, mover: DeviceMover) -> None:
        self._mover = mover
        self._in_place = ZeroCopyReader(mover.device, mover.pinned)

    def open(
        self,
        lease: Lease,
        part: int = 0,
        *,
        reads_per_byte: float,
        room: Room = NO_ROOM,
        stream: int | None = None,
        timeout_s: float = REGISTER_S_MAX,
    ) -> Readable:
        """The blocks of a lease (of one part of them) for kernels that read each byte so often while it is open.

        They are brought into ``room``, after all that ``stream`` was given until now, or stay where they lie: see
        ``DeviceMover.recommend``, which is asked of those that are not in HBM. What can't be read in place is brought
        if there is room for it, and the other way round. Blocks up to ``timeout_s`` for regions to be registered.
        Raises EndedError if the lease has ended, DeviceError if neither can be done.
        """
        here, sizes, in_dram, _, _ = leased_blocks(lease, part, self._mover.device)
        behind = np.cumsum(-(-sizes.astype(np.int64) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)
        has_room = not len(sizes) or int(behind[-1]) <= room.size_bytes
        n_bytes = int(sizes[in_dram].sum())
        case = Case(n_bytes, max(n_bytes // max(len(sizes), 1), 1), reads_per_byte, n_bytes if has_room else 0)
        option = self._mover.recommend(case).option if n_bytes else None
        if not has_room or not n_bytes or (option is not None and option.action is Action.ZERO_COPY):
            try:
                pointers = self._in_place.open(lease, part, timeout_s=timeout_s)
            except DeviceError:
                if not has_room:
                    raise
            else:
                self._mover.counters.add("load_in_place_bytes", n_bytes)
                return pointers
        moves = self._mover.loading()
        moves.hold(lease, part + 1)
        moves.after(stream)
        at = np.concatenate(([0], behind[:-1]))[: len(sizes)]
        try:
            moves.copy([Copy(Runs(at, here.view(np.int64), sizes), room.address, 0)])
        except BaseException:
            moves.finish()
            raise
        return Brought(moves, np.uint64(room.address) + at.astype(np.uint64), sizes)

    def close(self) -> None:
        """Wait for what was closed after events."""
        self._in_place.close()
