"""One stream and the bounded memory that copies on it pass through.

Host memory that is registered is read and written by the device itself, by the route that is expected to take least.
What is not registered goes through pinned memory of the lane ("bounced"), with one more copy by the processor. What the
device has in its own memory already is spread by a kernel, or copied.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from kvstore import native
from kvstore.device.seam import Device
from kvstore.engine_adapter.counters import SharedCounters
from kvstore.engine_adapter.gpu.choice import Choice, Route
from kvstore.engine_adapter.gpu.copies import Addresses, Copies, packed
from kvstore.engine_adapter.gpu.kernel_copies import SPREAD_BLOCKS, KernelCopies
from kvstore.engine_adapter.gpu.pinned_regions import PinnedRegions
from kvstore.engine_adapter.gpu.rings import DeviceRing, HostRing, Piece
from kvstore.errors import DeviceMemoryError
from kvstore.logs import about
from kvstore.plan.ways import Direction

Going = Callable[[], bool]

_LOG = logging.getLogger(__name__)

GIVEN_BYTES_MAX = 32 << 20
"""What is given to the device between two looks at whether to go on."""
NO_ROOM_S = 10.0
"""For so long a device that had no room for a route is not asked again."""


@dataclass(frozen=True, slots=True)
class LaneSizes:
    """Of one lane: ``pieces`` pieces each of device memory and of pinned host memory, had when first needed, and as
    many tables of ``table_runs`` runs."""

    piece_bytes: int = 8 << 20
    pieces: int = 2
    table_runs: int = 16 << 10


class Lane:
    """See the module. Any thread; copies are given one call after the other."""

    def __init__(
        self,
        device: Device,
        pinned: PinnedRegions,
        direction: Direction,
        choice: Choice,
        sizes: LaneSizes,
        counters: SharedCounters,
    ) -> None:
        self.stream = device.stream()
        self.direction = direction
        self.n_calls = 0
        self._device, self._pinned = device, pinned
        self._choice, self._sizes, self._counters = choice, sizes, counters
        self._giving = threading.Lock()
        self._kernels = KernelCopies(device, sizes.table_runs, sizes.pieces)
        self._staging: DeviceRing | None = None
        self._bounce: HostRing | None = None
        self._no_room: dict[Route, float] = {}
        """Routes that the device had no room for, and when to ask again (monotonic)."""

    def give(
        self, copies: Copies, end: int, to_finish: list[Piece], going: Going, in_hbm: NDArray[np.bool_] | None = None
    ) -> tuple[bool, set[Route]]:
        """Give copies to the device, and record the event ``end`` behind them. Blocks for pinned memory that is in use.

        ``in_hbm``, bool ``[n]``: those whose ``host`` is an address of the device itself.
        Whether all were given, and how they go. Pieces that ``finish`` must be called for are added to ``to_finish``,
        also if this raises: till then the processor has yet to write to where the copies go.
        """
        given = _Given(going, to_finish)
        with self._giving:
            self.n_calls += 1
            try:
                if in_hbm is not None and in_hbm.any():
                    self._inside(copies.chosen(in_hbm), given)
                    copies = copies.chosen(~in_hbm)
                with self._pinned.use(copies.host, copies.sizes) as use:
                    registered = use.mapped != 0
                    apart = replace(copies, regions=use.regions)
                    if registered.all():
                        self._move(apart, use.mapped, given)
                    elif registered.any():
                        self._move(apart.chosen(registered), use.mapped[registered], given)
                if not registered.all():
                    self._bounced(copies.chosen(~registered), given)
            finally:
                self._device.record(end, self.stream)
        return given.all_given, given.routes

    def finish(self, piece: Piece) -> None:
        """Wait for a piece's use, and let the processor copy what it has to. Raises DeviceError."""
        with self._giving:
            if self._bounce is not None:
                self._bounce.finish(piece)

    def close(self) -> None:
        """Wait for the device and give everything back."""
        with self._giving:
            self._device.sync_stream(self.stream)
            for ring in (self._staging, self._bounce):
                if ring is not None:
                    ring.close()
            self._kernels.close()
            self._device.free_stream(self.stream)

    # Inside --------------------------------------------------------------------------------------

    def _move(self, copies: Copies, mapped: Addresses, given: _Given) -> None:
        """Copies whose host memory is registered, and lies at ``mapped`` for kernels."""
        if not len(copies) or not given.going():
            return
        route = self._route(copies)
        given.routes.add(route)
        self._counters.add(f"{self.direction}_{route}_bytes", copies.n_bytes)
        if route is Route.DIRECT:
            for piece in given.while_going(copies.pieces(GIVEN_BYTES_MAX, self._sizes.table_runs)):
                self._copy(piece.host, piece.device, piece.sizes)
        elif route is Route.KERNEL:
            seen = replace(copies, host=mapped)
            for piece in given.while_going(seen.pieces(GIVEN_BYTES_MAX, self._sizes.table_runs)):
                self._by_kernel(piece.host, piece.device, piece.sizes, self._choice.copy_blocks)
        else:
            self._staged(copies, self._have_staging(), given)

    def _inside(self, copies: Copies, given: _Given) -> None:
        """Copies from the device's own memory."""
        self._counters.add(f"{self.direction}_hbm_bytes", copies.n_bytes)
        by_kernel = self._has_room(Route.KERNEL)
        for piece in given.while_going(copies.pieces(GIVEN_BYTES_MAX, self._sizes.table_runs)):
            if by_kernel:
                self._by_kernel(piece.host, piece.device, piece.sizes, SPREAD_BLOCKS)
            else:
                self._copy(piece.host, piece.device, piece.sizes)

    def _route(self, copies: Copies) -> Route:
        """What is expected to take least of what there is memory for. Direct needs none."""
        n_runs, n_spans = len(copies), len(copies.span_starts())
        for route in self._choice.routes(self.direction, copies.n_bytes, n_runs, n_spans):
            if route is Route.DIRECT or self._has_room(route):
                return route
        self._counters.add(f"{self.direction}_no_room_bytes", copies.n_bytes)
        return Route.DIRECT

    def _has_room(self, route: Route) -> bool:
        """Whether a route has its memory, had by now."""
        if time.monotonic() < self._no_room.get(route, 0.0):
            return False
        try:
            self._kernels.open()
            if route is Route.STAGED:
                self._have_staging()
        except DeviceMemoryError as error:
            self._no_room[route] = time.monotonic() + NO_ROOM_S
            _LOG.warning(
                "the device has no room for the quickest copies: slower ones need none",
                extra=about("device_full", route=str(route), reason=str(error)),
            )
            return False
        return True

    def _have_staging(self) -> DeviceRing:
        if self._staging is None:
            self._staging = DeviceRing(self._device, self._sizes.piece_bytes, self._sizes.pieces)
        return self._staging

    def _staged(self, copies: Copies, staging: DeviceRing, given: _Given) -> None:
        for part in given.while_going(copies.pieces(staging.piece_bytes, self._sizes.table_runs)):
            packing = packed(part)
            piece = staging.take(self.stream)
            start = np.uint64(piece.address)
            if self.direction is Direction.LOAD:
                self._copy(packing.starts, start + packing.offsets, packing.sizes)
                self._by_kernel(start + packing.at, part.device, part.sizes, SPREAD_BLOCKS)
            else:
                self._by_kernel(start + packing.at, part.device, part.sizes, SPREAD_BLOCKS)
                self._copy(packing.starts, start + packing.offsets, packing.sizes)
            staging.used(piece, self.stream)

    def _bounced(self, copies: Copies, given: _Given) -> None:
        if not given.going():
            return
        if self._bounce is None:
            self._bounce = HostRing(self._device, self._sizes.piece_bytes, self._sizes.pieces)
        self._counters.add(f"{self.direction}_bounced_bytes", copies.n_bytes)
        for part in given.while_going(copies.pieces(self._bounce.piece_bytes, self._sizes.table_runs)):
            packing = packed(part)
            piece = self._bounce.take_for_host()
            ours = np.uint64(piece.address) + packing.offsets
            here = replace(part, host=np.uint64(piece.address) + packing.at)
            if self.direction is Direction.LOAD:
                native.copy_batch(ours, packing.starts, packing.sizes)
            drain: _Drain | None = None
            try:
                self._move(here, np.uint64(piece.device_address) + packing.at, given)
                if self.direction is Direction.STORE and given.all_given:
                    drain = _Drain(packing.starts, ours, packing.sizes)
            finally:
                self._bounce.used(piece, self.stream, drain)
            if drain is not None:
                given.to_finish.append(piece)

    def _copy(self, host: Addresses, device: Addresses, sizes: Addresses) -> None:
        to, come_from = (device, host) if self.direction is Direction.LOAD else (host, device)
        self._device.copy_batch(to, come_from, sizes, self.stream)

    def _by_kernel(self, packed_at: Addresses, pages: Addresses, sizes: Addresses, blocks: int) -> None:
        to, come_from = (pages, packed_at) if self.direction is Direction.LOAD else (packed_at, pages)
        self._kernels.copy(to, come_from, sizes, self.stream, blocks=blocks)


class _Given:
    """What became of one call."""

    def __init__(self, going: Going, to_finish: list[Piece]) -> None:
        self.all_given = True
        self.to_finish = to_finish
        self.routes: set[Route] = set()
        self._going = going

    def going(self) -> bool:
        self.all_given = self.all_given and self._going()
        return self.all_given

    def while_going(self, parts: Iterator[Copies]) -> Iterator[Copies]:
        for part in parts:
            if not self.going():
                return
            yield part


@dataclass(frozen=True, slots=True)
class _Drain:
    """Copies that the processor makes when those of the device are over."""

    to: Addresses
    come_from: Addresses
    sizes: Addresses

    def __call__(self) -> None:
        native.copy_batch(self.to, self.come_from, self.sizes)
