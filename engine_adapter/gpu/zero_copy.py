"""Zero-copy reads: kernels read leased blocks where they lie, in registered host memory.

Nothing is copied, so nothing may go away: while ``Pointers`` are open their lease can't be released, their blocks stay
what they are whatever becomes of the right to read, and their memory stays mapped and registered.
"""

from __future__ import annotations

import time
import weakref
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from kvstore.client import Lease
from kvstore.client.hbm import HbmHeld
from kvstore.device.seam import Device
from kvstore.engine_adapter.gpu.events import AfterEvents
from kvstore.engine_adapter.gpu.pinned_regions import PinnedRegions, Use
from kvstore.engine_adapter.parts import held_of
from kvstore.errors import BadInputError, DeviceError, EndedError

if TYPE_CHECKING:
    import torch

    from kvstore.client.lease import Loan

Bytes = NDArray[np.uint8]

REGISTER_S_MAX = 5.0
"""How long ``open`` waits for regions that are being registered."""


class ZeroCopyReader:
    """Makes pointers; any thread. ``close`` before ``pinned`` and the device are closed."""

    def __init__(self, device: Device, pinned: PinnedRegions) -> None:
        self._device, self._pinned = device, pinned
        self._after = AfterEvents(device)

    def open(self, lease: Lease, part: int = 0, *, timeout_s: float = REGISTER_S_MAX) -> Pointers:
        """Where the blocks of a lease (of one part of them) lie for kernels: in HBM, those that are there.

        Blocks until the regions of the others are registered. Raises EndedError if the lease has ended, DeviceError
        with the reason if the device can't reach all of them: read them staged then.
        """
        addresses, sizes, in_dram, views, in_hbm = leased_blocks(lease, part, self._device)
        use = self._pinned.use_all(addresses[in_dram], sizes[in_dram], time.monotonic() + timeout_s)
        try:
            addresses[in_dram] = use.mapped
            loan = lease.lend([*views, in_hbm] if in_hbm is not None else views)
        except BaseException:
            use.end()
            raise
        return Pointers(lease, loan, use, Places(addresses, sizes, in_hbm), self._device, self._after)

    def close(self) -> None:
        """Wait for the pointers that are closed after events."""
        self._after.close()


class LeasedBlocks(NamedTuple):
    """Address and bytes of each block, uint64 [n]: the host's where ``in_dram``, bool [n], else the device's.

    ``views`` are the arrays over those in DRAM, ``in_hbm`` holds the others.
    """

    addresses: NDArray[np.uint64]
    sizes: NDArray[np.uint64]
    in_dram: NDArray[np.bool_]
    views: list[Bytes]
    in_hbm: HbmHeld | None


def leased_blocks(lease: Lease, part: int, device: Device) -> LeasedBlocks:
    """Where the blocks of a lease (of one part of it) lie. Raises EndedError if it has ended."""
    held = held_of(lease, part)
    # Addresses first: a remote client fetches all blocks at once then.
    addresses = held.addresses.copy()
    in_hbm = lease.hold_hbm() if len(lease.hbm) and lease.hbm.device is device else None
    in_dram, sizes = np.ones(len(held), np.bool_), np.empty(len(held), np.uint64)
    if in_hbm is not None:
        in_dram[in_hbm.at] = False
        addresses[in_hbm.at], sizes[in_hbm.at] = in_hbm.addresses, in_hbm.block_bytes
    views = [held[i] for i in np.flatnonzero(in_dram).tolist()]
    sizes[in_dram] = [view.nbytes for view in views]
    return LeasedBlocks(addresses, sizes, in_dram, views, in_hbm)


class Places(NamedTuple):
    """Device address and bytes of each block, uint64 [n]; those ``in_hbm`` are not in host memory."""

    addresses: NDArray[np.uint64]
    sizes: NDArray[np.uint64]
    in_hbm: HbmHeld | None


class Pointers:
    """The blocks of a lease for kernels. Must be closed; also a context, which closes it.

    Kernels only read. What they read counts if ``unchanged`` afterwards.
    """

    def __init__(
        self,
        lease: Lease,
        loan: Loan,
        use: Use,
        places: Places,
        device: Device,
        after: AfterEvents,
    ) -> None:
        self._lease, self._loan, self._use = lease, loan, use
        self._addresses, self._sizes, self._in_hbm = places
        self._device, self._after = device, after
        self._views: weakref.WeakSet[_View] = weakref.WeakSet()
        self._open = True

    def __len__(self) -> int:
        return len(self._sizes)

    @property
    def addresses(self) -> NDArray[np.uint64]:
        """Device address of each block, uint64 [n]; valid until ``close``. Raises EndedError after it."""
        self._must_be_open()
        return self._addresses

    @property
    def sizes(self) -> NDArray[np.uint64]:
        """Bytes of each block, uint64 [n]."""
        return self._sizes

    def let_wait(self, stream: int) -> None:
        """Nothing: what lies in host memory need not be waited for. As ``Brought`` has it."""

    def unchanged(self) -> bool:
        """Whether the lease still holds, and its blocks are what they were: what kernels read until now counts.

        Blocks for a round trip if some are in HBM, as these end with the daemon.
        """
        in_hbm = self._in_hbm
        return self._open and self._lease.unchanged() and (in_hbm is None or in_hbm.vouched())

    def view(self, i: int) -> Any:
        """Block ``i`` by ``__cuda_array_interface__``: uint8 [its bytes]. These can't be closed while it is alive."""
        self._must_be_open()
        if not -len(self) <= i < len(self):
            raise IndexError(f"block {i} of {len(self)}")
        view = _View(int(self._addresses[i]), int(self._sizes[i]))
        self._views.add(view)
        return view

    def tensor(self, i: int, dtype: str | torch.dtype = "uint8", shape: tuple[int, ...] | None = None) -> torch.Tensor:
        """A torch tensor on the GPU over block ``i``, no copy; never write to it. It counts as a view.

        Raises ImportError without torch, DeviceError on a device that torch does not know.
        """
        self._must_be_cuda("torch")
        import torch

        from kvstore.client.tensors import typed

        whole = torch.as_tensor(self.view(i), device=f"cuda:{self._device.facts.ordinal}")
        return typed(whole, dtype, shape)

    def array(self, i: int, dtype: str = "uint8", shape: tuple[int, ...] | None = None) -> Any:
        """As ``tensor``, for cupy; raises ImportError without it."""
        self._must_be_cuda("cupy")
        import cupy

        with cupy.cuda.Device(self._device.facts.ordinal):
            whole = cupy.asarray(self.view(i)).view(dtype)
        return whole if shape is None else whole.reshape(shape)

    def close(self, event: int | None = None) -> None:
        """No kernel reads this from here on, or none after ``event``: then the lease may be released. Idempotent.

        Does not block. The event may be recorded again, or freed, at once. Raises BadInputError while views are alive
        and for what is no event, DeviceError if the device failed: they stay open then.
        """
        if not self._open:
            return
        if self._views:
            raise BadInputError(
                f"{len(self._views)} views of these blocks are alive: delete tensors and arrays made from them first"
            )
        if event is not None and not self._device.query(event):
            self._after.do(event, self._let_go)
            self._open = False
        else:
            self._open = False
            self._let_go()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or not self._views:  # else what the caller has to hear of is the error
            self.close()

    def _let_go(self) -> None:
        self._in_hbm = None
        self._use.end()
        self._loan.end()

    def _must_be_open(self) -> None:
        if not self._open:
            raise EndedError("these pointers are closed; open the lease again")

    def _must_be_cuda(self, library: str) -> None:
        kind = self._device.facts.kind
        if kind != "cuda":
            raise DeviceError(f"{library} can't look into the memory of a {kind} device: give addresses to its kernels")


class _View:
    """One block as ``__cuda_array_interface__`` says it; tensors and arrays keep it."""

    def __init__(self, address: int, n_bytes: int) -> None:
        self.shape = (n_bytes,)
        # Not said to be read-only: torch takes no such arrays.
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": self.shape,
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
        }
