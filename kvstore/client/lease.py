"""What a client holds: leases to read in place, reservations to fill in place."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from kvstore import native
from kvstore.client.claims import Claimed
from kvstore.client.era import Era
from kvstore.client.session import Session
from kvstore.errors import BadInputError, EndedError, ProtocolError, UnavailableError
from kvstore.native import Mapping
from kvstore.types import SLOT_BITS
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.framing import Method
from kvstore.wire.packing import I64, U64, unpack

if TYPE_CHECKING:
    import torch

Bytes = NDArray[np.uint8]

_INDEX_MASK = (1 << SLOT_BITS) - 1
_NO_SLOTS = np.empty(0, np.int64)


class Hold:
    """What keeps a claim's slots from being reused: owned by the claim and by every array over its slots.

    The daemon is told when the last owner is gone: by ``later``, which never blocks, as that may happen on any
    thread; by ``now`` if it happens while ``prompt`` is set.
    """

    def __init__(self, session: Session, later: Callable[[], None], now: Callable[[], None] | None = None) -> None:
        self.prompt = False
        self.armed = True
        """Cleared when the daemon has been told in another way."""
        self._later = later
        self._now = now or later
        self._session = session
        self._epoch = session.epoch
        self._era: Era | None = session.era
        self._pid = os.getpid()

    def disarm(self) -> None:
        """There is nothing that the daemon would have to hear of."""
        self.armed = False
        self._era = None

    def __del__(self) -> None:
        # Another process, or a daemon that has not lent this, need not hear of it.
        if self.armed and self._pid == os.getpid() and self._session.epoch == self._epoch:
            (self._now if self.prompt else self._later)()


class _View:
    """The memory of one slot as numpy takes it; becomes the base of the array."""

    def __init__(self, address: int, n_bytes: int, writable: bool, mapping: Mapping, hold: Hold | None) -> None:
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (n_bytes,),
            "data": (address, not writable),
        }
        self._kept = (mapping, hold)


class Slots:
    """Where blocks lie in this process. Addresses are worked out when they are first asked for."""

    def __init__(self, session: Session, message: pb.Slots | None, block_bytes: int, *, writable: bool) -> None:
        """Maps regions that are not mapped yet. Call with the session's lock held."""
        self.block_bytes = block_bytes
        self._session = session
        self._writable = writable
        self._message = message
        self._ids = unpack("slots", message.ids, I64) if message is not None else _NO_SLOTS
        self._layouts = {layout.id: layout for layout in message.regions} if message is not None else {}
        # A view made later must find the mapping even if the daemon retires the region meanwhile.
        self._mappings = session.mappings(list(self._layouts), writable=writable)
        self._addresses: NDArray[np.uint64] | None = None

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def addresses(self) -> NDArray[np.uint64]:
        """uint64 [n]. Raises ProtocolError for slots outside the regions that came with them."""
        if self._addresses is None:
            self._addresses = self._by_region(self._start_of)
        return self._addresses

    def view(self, i: int, hold: Hold | None) -> Bytes:
        """uint8 [block_bytes] over slot ``i``, no copy; read-only unless these slots are reserved.

        The array keeps ``hold`` and the mapping. It can't be made writable, although the writer of a region has
        that mapped writable.
        """
        mapping = self._mappings[int(self._ids[i]) >> SLOT_BITS]
        return np.asarray(_View(int(self.addresses[i]), self.block_bytes, self._writable, mapping, hold))

    def forget(self) -> None:
        """Let the mappings go; only arrays that are still alive keep them."""
        self._mappings = {}

    def unchanged(self) -> bool:
        """Whether every slot still has the contents it had when it was handed out."""
        if self._message is None:
            return True
        granted = unpack("generations", self._message.generations, U64, len(self._ids))
        now = self._session.generations(self._by_region(lambda layout, _: (layout.generation_base, 1)))
        return bool(np.array_equal(now, granted))

    def _start_of(self, layout: pb.RegionLayout, index_max: int) -> tuple[int, int]:
        mapping = self._mappings.get(layout.id)
        if mapping is None or self.block_bytes > layout.slot_bytes:
            raise ProtocolError(f"region {layout.id} can't hold blocks of {self.block_bytes} bytes in this process")
        if (index_max + 1) * layout.slot_bytes > mapping.length_bytes:
            raise ProtocolError(f"slot {index_max} lies outside region {layout.id} of {mapping.length_bytes} bytes")
        return mapping.address, layout.slot_bytes

    def _by_region(self, start_and_step: Callable[[pb.RegionLayout, int], tuple[int, int]]) -> NDArray[np.uint64]:
        """``start + index * step`` of every slot, by its region."""
        ids = self._ids
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


class Held(Claimed):
    """A lease or reservation: a right with a deadline that must be let go of.

    The right may end early (deadline, disconnect, another daemon). ``valid`` tells; the slots themselves
    are not reused before ``release``, so what a view shows never changes under its reader.
    """

    _SHOWN: tuple[str, ...] = ()

    def __init__(self, session: Session, claim_id: int, ttl_s: float, slots: Slots, hold: Hold) -> None:
        self.id = claim_id
        self.slots = slots
        self._session = session
        self._epoch = session.epoch
        self._pid = os.getpid()
        self._deadline_s = time.monotonic() + ttl_s
        self._ended = "" if claim_id else "it holds nothing"
        self._hold: Hold | None = hold
        if not claim_id:
            hold.disarm()

    @property
    def valid(self) -> bool:
        """Whether the right still holds."""
        return (
            not self._ended
            and time.monotonic() < self._deadline_s
            and self._session.epoch == self._epoch
            and self._pid == os.getpid()
        )

    @property
    def addresses(self) -> NDArray[np.uint64]:
        """Address of each block in this process, uint64 [n]; for readers that take pointers."""
        self._must_be_usable()
        return self.slots.addresses

    def __len__(self) -> int:
        return len(self.slots)

    def __repr__(self) -> str:
        facts = ", ".join(f"{name}={getattr(self, name)!r}" for name in ("id", *self._SHOWN, "valid"))
        return f"{type(self).__name__}({facts})"

    def view(self, i: int) -> Bytes:
        """uint8 [block_bytes] over block ``i`` without a copy. Raises EndedError after the end of the right."""
        self._must_be_usable()
        return self.slots.view(i, self._hold)

    def __getitem__(self, i: int) -> Bytes:
        if not -len(self) <= i < len(self):
            raise IndexError(f"block {i} of {len(self)}")
        return self.view(i % len(self))

    def end(self, why: str) -> None:
        self._ended = self._ended or why

    def abandon(self, why: str) -> None:
        """The claim is over; arrays that are still alive keep its slots."""
        self.end(why)
        self._hold = None
        self.slots.forget()

    def _give_up(self, why: str, *, told: bool = False) -> None:
        """Nothing is read or written through this any more; the hold goes with the last array."""
        hold, self._hold = self._hold, None
        self.end(why)
        self.slots.forget()
        self._session.claims.unwatch(isinstance(self, Lease), self.id)
        if hold is None:
            return
        hold.armed &= not told
        hold.prompt, still_there = True, weakref.ref(hold)
        del hold
        if (hold := still_there()) is not None:
            hold.prompt = False

    def _must_be_usable(self) -> None:
        if not self.valid:
            raise EndedError(f"{type(self).__name__.lower()} {self.id} has ended: {self._ended or 'its time was up'}")


class Lease(Held):
    """The right to read the blocks found for a prompt, in place. A context manager; falsy if it holds nothing:
    if nothing was found, or if what was found has yet to come from a slower tier (``n_pending``).

    Index 0 is block ``first_block`` of the prompt. If ``partial_tokens`` > 0 the last entry is one more block than
    ``n_blocks``, of which only the first ``partial_tokens`` tokens match; ``n_tokens`` counts them, too.
    """

    _SHOWN = ("first_block", "n_blocks", "n_tokens", "partial_tokens", "n_pending")

    def __init__(
        self, session: Session, reply: pb.LeaseReply, block_bytes: int, first_block: int, reason: str = ""
    ) -> None:
        slots = Slots(session, reply.slots if reply.lease_id else None, block_bytes, writable=False)
        lease_id = reply.lease_id
        hold = Hold(
            session,
            lambda: session.acknowledge(Method.RELEASE, pb.ReleaseRequest(lease_id=lease_id)),
            lambda: session.release(lease_id),
        )
        super().__init__(session, lease_id, reply.ttl_s, slots, hold)
        self.first_block = first_block
        self.n_blocks: int = reply.n_blocks
        self.n_tokens: int = reply.n_tokens
        self.partial_tokens: int = reply.partial_tokens
        self.n_pending: int = reply.n_pending
        """Blocks that match too but are not in DRAM (yet), and so are not held."""
        self.eta_s: float = reply.eta_s
        """A guess when they are, in seconds from the answer; 0 if unknown."""
        self.n_nvme: int = reply.n_nvme
        """Of the blocks held: those that were read from NVMe for this lease."""
        self.reason = reason
        """Why there was nothing to find out, if the daemon could not be asked."""
        if reply.lease_id:
            session.claims.watch(True, reply.lease_id, self)

    def __bool__(self) -> bool:
        return bool(len(self))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def tensor(self, i: int, dtype: str | torch.dtype = "uint8", shape: tuple[int, ...] | None = None) -> torch.Tensor:
        """A torch tensor over block ``i``, no copy. Raises ImportError without torch.

        torch knows no read-only tensors; writing to this one ends the process with SIGSEGV, as the memory is
        mapped read-only (or, in the process that wrote the block, corrupts the block: never write to it).
        """
        from kvstore.client.tensors import as_tensor

        return as_tensor(self.view(i), dtype, shape)

    def copy_into(self, out: NDArray[Any], threads: int = 1) -> int:
        """Copy the leased whole blocks to ``out`` and return how many arrived, from ``first_block`` on.

        ``out``: C-contiguous, [m, ...] with m * block_bytes bytes; at most m blocks are copied. 0 if the lease
        ended before the copy was complete: then ``out`` holds nothing that can be used. Blocks for the copy.
        """
        room = rows_of(out, self.slots.block_bytes)
        if not room.flags.writeable:
            raise BadInputError("out is read-only; give an array that may be written to")
        n = min(max(self.n_blocks - self.first_block, 0), len(room), len(self))
        if n == 0 or not self.valid:
            return 0
        to, come_from = native.row_addresses(room[:n]), self.slots.addresses[:n]
        native.copy_batch(to, come_from, self.slots.block_bytes, threads=threads)
        return n if self.valid and self.slots.unchanged() else 0

    def renew(self, ttl_s: float = 0.0) -> bool:
        """Ask for more time; False if the right is gone. Blocks for one round trip."""
        if not self.valid:
            return False
        try:
            reply = self._session.call(Method.RENEW, pb.RenewRequest(lease_id=self.id, ttl_s=ttl_s), pb.RenewReply)
        except (EndedError, UnavailableError):
            return False
        self._deadline_s = time.monotonic() + reply.ttl_s
        return True

    def release(self) -> None:
        """Say that nothing is read any more. Idempotent.

        Pointers must not be used from here on. Arrays that are still alive keep the blocks until they are gone.
        """
        self._give_up("it was released")


class WriteReservation(Held):
    """The right to fill slots that nobody sees before ``commit``. A context manager that aborts what was not committed.

    ``n_present`` blocks of those asked for were stored already; index 0 here is the block after them.
    """

    _SHOWN = ("n_present", "n_skipped", "reason")

    def __init__(self, session: Session, reply: pb.ReserveReply, block_bytes: int, n_asked: int) -> None:
        slots = Slots(session, reply.slots if reply.reservation_id else None, block_bytes, writable=True)
        reservation_id = reply.reservation_id
        hold = Hold(session, lambda: session.acknowledge(Method.ABORT, pb.AbortRequest(reservation_id=reservation_id)))
        super().__init__(session, reservation_id, reply.ttl_s, slots, hold)
        self.n_present: int = reply.n_present
        self.n_skipped: int = n_asked - reply.n_present - len(slots)
        self.reason: str = reply.skipped_reason
        if reply.reservation_id:
            session.claims.watch(False, reply.reservation_id, self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def fill(self, blocks: NDArray[Any], threads: int = 1) -> None:
        """Copy ``blocks`` [n, ...] (n = len(self), C-contiguous) into the slots. Blocks for the copy."""
        rows = rows_of(blocks, self.slots.block_bytes)
        if len(rows) != len(self):
            raise BadInputError(f"{len(rows)} blocks were given for {len(self)} reserved slots")
        self._must_be_usable()
        native.copy_batch(self.slots.addresses, native.row_addresses(rows), self.slots.block_bytes, threads=threads)

    def commit(self, n_blocks: int | None = None) -> tuple[int, int]:
        """Make the first ``n_blocks`` (default all) visible; returns (stored, duplicates). One round trip.

        (0, 0) if the right had ended or the daemon is unreachable: nothing was stored then, as far as is known.
        """
        if self._hold is None or not self.id:
            return 0, 0
        n = len(self) if n_blocks is None else n_blocks
        if not 0 <= n <= len(self):
            raise BadInputError(f"commit of {n} blocks; {len(self)} are reserved")
        if n == 0:
            self.abort()
            return 0, 0
        self._give_up("it was committed", told=True)
        try:
            reply = self._session.call(
                Method.COMMIT, pb.CommitRequest(reservation_id=self.id, n_blocks=n), pb.CommitReply
            )
        except (EndedError, UnavailableError) as error:
            self.reason = str(error)
            # Whatever became of it: nothing is written any more.
            self._session.acknowledge(Method.ABORT, pb.AbortRequest(reservation_id=self.id))
            return 0, 0
        return reply.n_committed, reply.n_duplicate

    def abort(self) -> None:
        """Give the slots back unseen. Idempotent, never fails.

        Nothing may be written through pointers from here on; arrays that are still alive keep the slots.
        """
        self._give_up("it was aborted")


def rows_of(array: NDArray[Any], block_bytes: int) -> Bytes:
    """A C-contiguous array as uint8 [n, block_bytes], without a copy."""
    if not isinstance(array, np.ndarray) or not array.flags.c_contiguous:
        raise BadInputError("blocks must be a C-contiguous numpy array [n, ...]; use numpy.ascontiguousarray")
    if array.nbytes % block_bytes or array.ndim == 0 or (len(array) and array.nbytes != len(array) * block_bytes):
        raise BadInputError(
            f"an array of shape {array.shape} and {array.nbytes} bytes "
            f"does not hold whole blocks of {block_bytes} bytes: "
            "its first dimension must count blocks"
        )
    return array.reshape(-1).view(np.uint8).reshape(-1, block_bytes)
