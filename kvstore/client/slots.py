"""Where the bytes of leased and reserved blocks are: in memory that the daemon shares, or elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import numpy as np
from google.protobuf.message import Message
from numpy.typing import NDArray

from kvstore import native
from kvstore.client.borrowing import current
from kvstore.client.transport import ReplyT
from kvstore.errors import BadInputError, EndedError, ProtocolError
from kvstore.native import Mapping
from kvstore.types import DTYPE_BYTES, SLOT_BITS
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.framing import Method
from kvstore.wire.packing import I64, U64, unpack

Bytes = NDArray[np.uint8]

_INDEX_MASK = (1 << SLOT_BITS) - 1
_NO_SLOTS = np.empty(0, np.int64)


class Slots(Protocol):
    """The blocks of one claim as this process reaches them. Who holds the claim says until when they may be used."""

    block_bytes: int

    def __len__(self) -> int: ...

    @property
    def addresses(self) -> NDArray[np.uint64]:
        """Where each block lies in this process, uint64 [n]."""
        ...

    def view(self, i: int, hold: object) -> Bytes:
        """uint8 [block_bytes] over block ``i``, no copy. The array keeps ``hold`` if the block would go without it."""
        ...

    def unchanged(self) -> bool:
        """Whether the blocks are what they were when they were handed out; asked after a copy from ``addresses``."""
        ...

    def copy_out(self, rows: Bytes, threads: int, offset_bytes: int = 0) -> bool:
        """Copy the first blocks to ``rows`` (uint8 [m, block_bytes]), or of each only the bytes from ``offset_bytes``
        on that a row has room for. False if that can't be vouched for. Blocks. Raises EndedError after
        ``forget``, perhaps."""
        ...

    def fill(self, rows: Bytes, threads: int, *, kept: bool) -> None:
        """Copy ``rows`` (uint8 [n, block_bytes]) to reserved blocks. Blocks. Raises EndedError after ``forget``.

        With ``kept`` they stay as they are until the commit, so that they may be copied then.
        """
        ...

    def commit(self, request: pb.CommitRequest) -> Callable[[], pb.CommitReply]:
        """What makes reserved blocks visible: call it after ``forget``. Blocks; raises as a session's ``call``."""
        ...

    def forget(self) -> None:
        """Nothing is looked at any more but arrays that are still alive; a copy that goes on ends as if nothing was."""
        ...


class MappingSession(Protocol):
    """What mapped slots need of a session."""

    def call(self, method: Method, request: Message, kind: type[ReplyT], timeout_s: float | None = None) -> ReplyT:
        """One request and its reply."""
        ...

    def mappings(self, region_ids: list[int], *, writable: bool) -> dict[int, Mapping]:
        """The mappings of these regions."""
        ...

    def generations(self, indices: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """The generations of slots as they are now."""
        ...


class View:
    """The memory of one block as numpy takes it; becomes the base of the array."""

    def __init__(self, address: int, n_bytes: int, writable: bool, *kept: object) -> None:
        """``kept``: what the memory needs as long as anything looks at it."""
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (n_bytes,),
            "data": (address, not writable),
        }
        self._kept = kept


class MappedSlots:
    """Slots of the daemon's memory, mapped into this process. Addresses are worked out when first asked for."""

    def __init__(
        self,
        session: MappingSession,
        message: pb.Slots | None,
        block_bytes: int,
        *,
        writable: bool,
        mappings: dict[int, Mapping] | None = None,
    ) -> None:
        """Maps regions that are not mapped yet, unless given all ``mappings``. Call with the session's lock held."""
        self.block_bytes = block_bytes
        self._session = session
        self._writable = writable
        self._message = message
        self._ids = unpack("slots", message.ids, I64) if message is not None else _NO_SLOTS
        self._layouts = {layout.id: layout for layout in message.regions} if message is not None else {}
        # A view made later must find the mapping even if the daemon retires the region meanwhile.
        self._mappings = session.mappings(list(self._layouts), writable=writable) if mappings is None else mappings
        self._addresses: NDArray[np.uint64] | None = None
        self._here = self._ids >= 0
        """Not of blocks that are in HBM only."""
        self._are_all_here = bool(self._here.all())

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def addresses(self) -> NDArray[np.uint64]:
        """uint64 [n], 0 for a block in HBM only. Raises ProtocolError for slots outside the regions sent with them."""
        return self._addresses_in(self._mapped())

    def view(self, i: int, hold: object) -> Bytes:
        """uint8 [block_bytes] over slot ``i``, no copy; read-only unless these slots are reserved.

        The array keeps ``hold`` and the mapping. It can't be made writable, although the writer of a region has
        that mapped writable. Raises BadInputError for a block in HBM only.
        """
        self._must_be_here(slice(i, i + 1))
        mappings = self._mapped()
        mapping = mappings[int(self._ids[i]) >> SLOT_BITS]
        address = int(self._addresses_in(mappings)[i])
        return np.asarray(View(address, self.block_bytes, self._writable, mapping, hold))

    def forget(self) -> None:
        """Let the mappings go; only arrays that are still alive keep them."""
        self._mappings = {}

    def unchanged(self) -> bool:
        """Whether every slot still has the contents it had when it was handed out."""
        if self._message is None:
            return True
        granted = unpack("generations", self._message.generations, U64, int(np.count_nonzero(self._here)))
        now = self._session.generations(self._by_region(lambda layout, _: (layout.generation_base, 1)))
        return bool(np.array_equal(now, granted))

    def copy_out(self, rows: Bytes, threads: int, offset_bytes: int = 0) -> bool:
        """See ``Slots``."""
        self._must_be_here(slice(len(rows)))
        mappings = self._mapped()  # kept here until the copy has ended
        addresses = self._addresses_in(mappings)[: len(rows)] + np.uint64(offset_bytes)
        with current().touching():
            native.copy_batch(native.row_addresses(rows), addresses, rows.shape[1], threads=threads)
        return self.unchanged()

    def fill(self, rows: Bytes, threads: int, *, kept: bool) -> None:  # noqa: ARG002 - filled now
        """See ``Slots``."""
        mappings = self._mapped()  # kept here until the copy has ended
        addresses = self._addresses_in(mappings)
        with current().touching():
            native.copy_batch(addresses, native.row_addresses(rows), self.block_bytes, threads=threads)

    def commit(self, request: pb.CommitRequest) -> Callable[[], pb.CommitReply]:
        """See ``Slots``: what was filled is there already."""
        return lambda: self._session.call(Method.COMMIT, request, pb.CommitReply)

    def _mapped(self) -> dict[int, Mapping]:
        """The mappings: none of them goes while the caller has this."""
        mappings = self._mappings
        if not mappings and self._layouts:
            raise EndedError("these blocks were let go of")
        return mappings

    def _addresses_in(self, mappings: dict[int, Mapping]) -> NDArray[np.uint64]:
        if self._addresses is None:
            addresses = self._by_region(partial(self._start_of, mappings))
            if not self._are_all_here:
                here, addresses = addresses, np.zeros(len(self._ids), np.uint64)
                addresses[self._here] = here
            self._addresses = addresses
        return self._addresses

    def _must_be_here(self, which: slice) -> None:
        if not self._are_all_here and not self._here[which].all():
            block = int(self._here[which].argmin()) + (which.start or 0)
            raise BadInputError(f"block {block} of the lease is in HBM only: read it there, see Lease.hbm")

    def _start_of(self, mappings: dict[int, Mapping], layout: pb.RegionLayout, index_max: int) -> tuple[int, int]:
        mapping = mappings.get(layout.id)
        if mapping is None or self.block_bytes > layout.slot_bytes:
            raise ProtocolError(f"region {layout.id} can't hold blocks of {self.block_bytes} bytes in this process")
        if (index_max + 1) * layout.slot_bytes > mapping.length_bytes:
            raise ProtocolError(f"slot {index_max} lies outside region {layout.id} of {mapping.length_bytes} bytes")
        return mapping.address, layout.slot_bytes

    def _by_region(self, start_and_step: Callable[[pb.RegionLayout, int], tuple[int, int]]) -> NDArray[np.uint64]:
        """``start + index * step`` of every slot here, by its region."""
        ids = self._ids if self._are_all_here else self._ids[self._here]
        if not len(ids):
            return np.empty(0, np.uint64)
        if len(self._layouts) == 1:
            (layout,) = self._layouts.values()
            first_id = layout.id << SLOT_BITS
            low, high = int(ids.min()) - first_id, int(ids.max()) - first_id
            if low < 0 or high > _INDEX_MASK:
                raise ProtocolError(f"a slot lies outside the only region, {layout.id}")
            start, step = start_and_step(layout, high)
            return (ids * step + (start - first_id * step)).view(np.uint64)
        # Regions in the order of their ids, so that each slot finds its own by bisection.
        layouts = [self._layouts[region_id] for region_id in sorted(self._layouts)]
        first_ids = np.array([layout.id << SLOT_BITS for layout in layouts], np.int64)
        rows = np.searchsorted(first_ids, ids, side="right") - 1
        indexes = ids - first_ids[rows]
        index_max = np.zeros(len(layouts), np.int64)
        np.maximum.at(index_max, rows, indexes)
        if int(rows.min()) < 0 or int(index_max.max()) > _INDEX_MASK:
            raise ProtocolError("a slot lies outside the regions that came with it")
        pairs = [start_and_step(*each) for each in zip(layouts, index_max.tolist(), strict=True)]
        starts, steps = np.array(pairs, np.int64).T
        out: NDArray[np.uint64] = (starts[rows] + indexes * steps[rows]).view(np.uint64)
        return out


def _may_hold(given: np.dtype[Any], dtype: str) -> bool:
    """Whether an array of this type may hold values of ``dtype``."""
    if "float" in given.name or given.kind == "c":
        return given.name.removesuffix("fn") == dtype  # float8_e4m3fn is what others call it
    return given.itemsize in (1, DTYPE_BYTES[dtype])


def rows_of(array: NDArray[Any], block_bytes: int, dtype: str = "") -> Bytes:
    """A C-contiguous array as uint8 [n, block_bytes], without a copy.

    ``dtype``: what the blocks hold, if that is known. Raises BadInputError for an array of other values, also of floats
    of the same size, such as float16 for bfloat16. Plain bytes, and integers of the same size, do.
    """
    if type(array).__module__.partition(".")[0] == "torch":
        raise BadInputError(
            "blocks are a torch.Tensor: give a numpy array over its memory, tensor.cpu().contiguous().numpy(); of "
            "bfloat16 or float8, which numpy has not, tensor.cpu().contiguous().view(torch.uint8).numpy()"
        )
    if not isinstance(array, np.ndarray) or not array.flags.c_contiguous:
        raise BadInputError("blocks must be a C-contiguous numpy array [n, ...]; use numpy.ascontiguousarray")
    if array.nbytes % block_bytes or array.ndim == 0 or (len(array) and array.nbytes != len(array) * block_bytes):
        raise BadInputError(
            f"an array of shape {array.shape} and {array.nbytes} bytes "
            f"does not hold whole blocks of {block_bytes} bytes: "
            "its first dimension must count blocks"
        )
    if dtype and not _may_hold(array.dtype, dtype):
        raise BadInputError(
            f"an array of {array.dtype} was given, the namespace's blocks hold {dtype}: convert the values, or give "
            "what are such values already as bytes, array.view(numpy.uint8)"
        )
    return array.reshape(-1).view(np.uint8).reshape(-1, block_bytes)
