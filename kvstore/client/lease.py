"""What a client holds: leases to read in place, reservations to fill in place."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from kvstore.client.claims import Claimed
from kvstore.client.era import Era
from kvstore.client.hbm import NO_HBM_BLOCKS, HbmBlocks, HbmHeld
from kvstore.client.session import Session
from kvstore.client.slots import Bytes, Slots, rows_of
from kvstore.errors import BadInputError, EndedError, UnavailableError
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.framing import Method

if TYPE_CHECKING:
    import torch


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


class Held(Claimed):
    """A lease or reservation: a right with a deadline that must be let go of.

    The right may end early (deadline, disconnect, another daemon). ``valid`` tells; the slots themselves
    are not reused before ``release``, so what a view shows never changes under its reader; nor while another thread
    copies from or to them.
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
        """Address of each block in this process, uint64 [n]; for readers that take pointers. See ``view``."""
        self.usable()
        return self.slots.addresses

    def __len__(self) -> int:
        return len(self.slots)

    def __repr__(self) -> str:
        facts = ", ".join(f"{name}={getattr(self, name)!r}" for name in ("id", *self._SHOWN, "valid"))
        return f"{type(self).__name__}({facts})"

    def usable(self) -> Hold:
        """What keeps the slots as they are for as long as the caller has it. Raises EndedError after the end of the
        right."""
        hold = self._hold  # before the look at the right, which another thread may end
        if hold is None or not self.valid:
            del hold  # the error must not keep it
            what = "".join(f" {c.lower()}" if c.isupper() else c for c in type(self).__name__).strip()
            raise EndedError(f"this {what} has ended: {self._ended or 'its time was up'} (id {self.id})")
        return hold

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Around a copy: the daemon hears of a release or abort on another thread when that has ended. Raises as
        ``usable``."""
        hold = self.usable()
        try:
            yield
        finally:
            del hold  # an error must not keep it

    def view(self, i: int) -> Bytes:
        """uint8 [block_bytes] over block ``i`` without a copy. Raises EndedError after the end of the right.

        A remote client fetches the block, and some that follow, when it is first looked at: that blocks, and raises
        EndedError too if it can't be had.
        """
        return self.slots.view(i, self.usable())

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


class Loan:
    """Blocks of a lease in the hands of a reader that nobody here sees, as a device: they stay as they are until
    ``end``, whatever becomes of the lease."""

    def __init__(self, lease: Lease, kept: Sequence[object]) -> None:
        self._lease: Lease | None = lease
        self._kept = tuple(kept)
        lease.loans.add(self)

    def end(self) -> None:
        """The reader is done. Idempotent."""
        lease, self._lease, self._kept = self._lease, None, ()
        if lease is not None:
            lease.loans.discard(self)


class Lease(Held):
    """The right to read the blocks found for a prompt, in place. A context manager; falsy if it holds nothing:
    if nothing was found, or if what was found has yet to come from a slower tier (``n_pending``).

    Index 0 is block ``first_block`` of the prompt. If ``partial_tokens`` > 0 the last entry is one more block than
    ``n_blocks``, of which only the first ``partial_tokens`` tokens match; ``n_tokens`` counts them, too.
    """

    _SHOWN = ("first_block", "n_blocks", "n_tokens", "partial_tokens", "n_pending")

    def __init__(
        self,
        session: Session,
        reply: pb.LeaseReply,
        block_bytes: int,
        first_block: int,
        reason: str = "",
        shared: Hold | None = None,
    ) -> None:
        """``shared``: the hold of another lease object with this id, which is the one to hear of its end."""
        slots = session.slots(reply.lease_id, reply.slots if reply.lease_id else None, block_bytes, writable=False)
        lease_id = reply.lease_id
        release = pb.ReleaseRequest(lease_id=lease_id)
        hold = shared or Hold(
            session, lambda: session.acknowledge(Method.RELEASE, release), lambda: session.release(release)
        )
        self.hbm: HbmBlocks = session.hbm_blocks(reply.hbm) if reply.lease_id else NO_HBM_BLOCKS
        """Which blocks are in HBM, for a lease that asked for it; ``view`` and copies are of those in DRAM only."""
        self._waited_s: float = reply.waited_s
        self._asked_s = 0.0
        self._copied: Callable[[int, float, bool], None] | None = None
        self.loans: set[Loan] = set()
        """What of it was lent and is not given back; see ``lend``."""
        super().__init__(session, lease_id, reply.ttl_s, slots, hold)
        if len(self.hbm):
            self.hbm.tie(_usable_while_there(self))
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
        if reply.lease_id and shared is None:
            session.claims.watch(True, reply.lease_id, self)

    def __bool__(self) -> bool:
        return bool(len(self))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.release()
        else:  # which is what the caller has to hear of
            self._give_up("it was released")

    def lend(self, views: Sequence[Bytes | HbmHeld]) -> Loan:
        """Blocks (arrays of this lease's, or what ``hold_hbm`` gave) that a device reads from here on; ``release``
        raises until they are back."""
        self.usable()
        return Loan(self, views)

    def hold_hbm(self) -> HbmHeld:
        """The blocks in HBM, which stay as they are while the result is alive, also after ``release``.

        Raises EndedError after the end of the right.
        """
        hold = self.usable()
        session, epoch = self._session, self._epoch
        return HbmHeld(self.hbm, self.slots.block_bytes, lambda: session.still_answers(epoch), hold)

    def tell_copies(self, copied: Callable[[int, float, bool], None], asked_s: float) -> None:
        """Call ``copied(n_bytes, took_s, after_read)`` after copies by one thread.

        It took ``asked_s`` to get this lease: what of that it did not wait for blocks belongs to the first copy.
        """
        self._copied, self._asked_s = copied, max(asked_s - self._waited_s, 0.0)

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
        return n if n and self.copy_out(self.slots, room[:n], threads) else 0

    def copy_out(self, slots: Slots, rows: Bytes, threads: int, offset_bytes: int = 0) -> bool:
        """See ``Slots``; slots of this lease. False also if its right ended before the copy was complete."""
        begun_s = time.perf_counter()
        try:
            with self.in_use():
                done = slots.copy_out(rows, threads, offset_bytes) and self.valid
        except EndedError:
            return False
        if done and threads == 1 and self._copied is not None:
            asked_s, self._asked_s = self._asked_s, 0.0
            self._copied(rows.nbytes, asked_s + time.perf_counter() - begun_s, self._waited_s > 0)
        return done

    def unchanged(self) -> bool:
        """Whether the right still holds, and all that it is over is what it was when it began.

        Asked after a copy from addresses: what was copied counts only then.
        """
        return self.valid and self.slots.unchanged() and self.hbm.unchanged()

    def abandon(self, why: str) -> None:
        super().abandon(why)
        self.hbm.forget()

    def _give_up(self, why: str, *, told: bool = False) -> None:
        super()._give_up(why, told=told)
        self.hbm.forget()

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
        Raises BadInputError while a device still reads what was lent to it.
        """
        self.must_be_back()
        self._give_up("it was released")

    def must_be_back(self) -> None:
        """Raises BadInputError while a device still reads what was lent to it."""
        if self.loans:
            raise BadInputError(
                f"lease {self.id} is still read from by a device ({len(self.loans)} readers): close these readers first"
            )


def _usable_while_there(lease: Lease) -> Callable[[], object]:
    """``lease.usable``, without keeping the lease: its end must not wait for a collection."""
    there = weakref.ref(lease)

    def usable() -> object:
        found = there()
        if found is None:
            raise EndedError("this lease is gone: keep it, or what hold_hbm gives, while its blocks are read")
        return found.usable()

    return usable


class WriteReservation(Held):
    """The right to fill slots that nobody sees before ``commit``. A context manager that aborts what was not committed.

    ``n_present`` blocks of those asked for were stored already; index 0 here is the block after them.
    """

    _SHOWN = ("n_present", "n_skipped", "reason")

    def __init__(self, session: Session, reply: pb.ReserveReply, block_bytes: int, n_asked: int) -> None:
        slots = session.slots(
            reply.reservation_id, reply.slots if reply.reservation_id else None, block_bytes, writable=True
        )
        reservation_id = reply.reservation_id
        hold = Hold(session, lambda: session.acknowledge(Method.ABORT, pb.AbortRequest(reservation_id=reservation_id)))
        super().__init__(session, reservation_id, reply.ttl_s, slots, hold)
        self.n_present: int = reply.n_present
        self.n_skipped: int = n_asked - reply.n_present - len(slots)
        self.reason: str = reply.skipped_reason
        self._filling = threading.Lock()
        if reply.reservation_id:
            session.claims.watch(False, reply.reservation_id, self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def fill(self, blocks: NDArray[Any], threads: int = 1, *, kept: bool = False) -> None:
        """Copy ``blocks`` [n, ...] (n = len(self), C-contiguous) into the slots. Blocks for the copy.

        ``kept=True`` promises that they stay as they are until the commit: a remote client then sends them from there.
        """
        rows = rows_of(blocks, self.slots.block_bytes)
        if len(rows) != len(self):
            raise BadInputError(f"{len(rows)} blocks were given for {len(self)} reserved slots")
        self.usable()
        with self._filling, self.in_use():
            self.slots.fill(rows, threads, kept=kept)

    def commit(self, n_blocks: int | None = None) -> tuple[int, int]:
        """Make the first ``n_blocks`` (default all) visible; returns (stored, duplicates). One round trip.

        (0, 0) if the right had ended or the daemon is unreachable: nothing was stored then, as far as is known.
        Waits for a ``fill`` on another thread.
        """
        if self._pid != os.getpid():  # whose thread may have been filling when this process was forked
            return 0, 0
        with self._filling:
            if self._hold is None or not self.id:
                return 0, 0
            n = len(self) if n_blocks is None else n_blocks
            if not 0 <= n <= len(self):
                raise BadInputError(f"commit of {n} blocks; {len(self)} are reserved")
            if n == 0:
                self.abort()
                return 0, 0
            commit = self.slots.commit(pb.CommitRequest(reservation_id=self.id, n_blocks=n))
            self._give_up("it was committed", told=True)
        try:
            reply = commit()
        except BaseException as error:
            # Whatever became of it: nothing is written any more.
            self._session.acknowledge(Method.ABORT, pb.AbortRequest(reservation_id=self.id))
            if not isinstance(error, EndedError | UnavailableError):
                raise
            self.reason = str(error)
            return 0, 0
        return reply.n_committed, reply.n_duplicate

    def abort(self) -> None:
        """Give the slots back unseen. Idempotent, never fails.

        Nothing may be written through pointers from here on; arrays that are still alive keep the slots.
        """
        self._give_up("it was aborted")
