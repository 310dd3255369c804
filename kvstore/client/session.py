"""A client's session: requests and their replies over its connections."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from google.protobuf.message import Message
from numpy.typing import NDArray

from kvstore.client.hbm import NO_HBM_BLOCKS, HbmBlocks, HbmRegions, IpcDevice
from kvstore.client.mapping import map_regions
from kvstore.client.presence import Presence
from kvstore.client.slots import Bytes, Slots
from kvstore.client.transport import RefusedError, ReplyT, TimedOutError, TurnedAwayError
from kvstore.client.waiting import WaitingCalls
from kvstore.errors import BadInputError, KVStoreError, ProtocolError, SessionEndedError, UnavailableError
from kvstore.native import Mapping
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.framing import MAX_DESCRIPTORS, Method

ClaimT = TypeVar("ClaimT")
MovedT = TypeVar("MovedT")


class Session(Presence):
    """See ``Presence``. All methods may be called from any thread."""

    def call(self, method: Method, request: Message, kind: type[ReplyT], timeout_s: float | None = None) -> ReplyT:
        """One request and its reply. Raises what the daemon answers, or UnavailableError by the deadline."""
        deadline_s = time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)
        with self.exclusive():
            return self._call(method, request, kind, deadline_s, None)

    def _call(
        self,
        method: Method,
        request: Message,
        kind: type[ReplyT],
        deadline_s: float,
        descriptors: list[int] | None,
    ) -> ReplyT:
        calls = self._must_be_up()
        try:
            reply = calls.call(method, request, kind, deadline_s, descriptors)
        except TimedOutError:
            self._suspect()
            raise
        except RefusedError:
            raise
        except TurnedAwayError as error:
            self._disconnected(str(error), error)
            raise
        except (UnavailableError, ProtocolError) as error:
            self._disconnected(str(error))
            raise UnavailableError(str(error)) from error
        except SessionEndedError as error:
            self._disconnected(str(error))  # the thread says hello again
            raise UnavailableError(str(error)) from error
        self._give_back(calls)
        return reply

    def call_waiting(self, method: Method, request: Message, kind: type[ReplyT], wait_s: float) -> ReplyT:
        """As ``call``, for what grants nothing and may be answered ``wait_s`` later; other calls go on meanwhile."""
        return self._wait_for(method, request, kind, wait_s)[0]

    def granted(
        self,
        method: Method,
        request: Message,
        kind: type[ReplyT],
        use: Callable[[ReplyT], ClaimT],
        wait_s: float = 0.0,
    ) -> ClaimT:
        """A call, and ``use(reply)`` before anything else happens to the session.

        What the reply granted is given back if that raises. The daemon may take ``wait_s`` longer to answer;
        other calls go on meanwhile. Raises as ``call``.
        """
        if not (wait_s and self._can_wait):
            with self.exclusive():
                return self._use(self.call(method, request, kind), use)
        reply, waiting = self._wait_for(method, request, kind, wait_s)
        with self.exclusive():
            if self._waiting is not waiting:
                self._acks.give_back([reply])
                raise UnavailableError("the connection to the daemon was lost meanwhile")
            return self._use(reply, use)

    def _use(self, reply: ReplyT, use: Callable[[ReplyT], ClaimT]) -> ClaimT:
        try:
            return use(reply)
        except BaseException:
            self._acks.give_back([reply])
            raise

    def _wait_for(
        self, method: Method, request: Message, kind: type[ReplyT], wait_s: float
    ) -> tuple[ReplyT, WaitingCalls]:
        """The reply, and the connections over which it came: replaced as soon as the session lost its own."""
        deadline_s = time.monotonic() + wait_s + self.timeout_s
        with self.exclusive():
            self._must_be_up()
            waiting = self._waiting
        try:
            return waiting.call(method, request, kind, deadline_s), waiting
        except SessionEndedError as error:
            with self._lock:
                if self._waiting is waiting:
                    self._disconnected(str(error))  # the thread says hello again
            raise UnavailableError(str(error)) from error
        except RefusedError:
            raise
        except TurnedAwayError as error:
            with self._lock:
                if self._waiting is waiting:
                    self._disconnected(str(error), error)
            raise
        except (UnavailableError, ProtocolError) as error:
            if self._waiting is waiting:
                self._suspect()
            raise UnavailableError(str(error)) from error

    def release(self, request: pb.ReleaseRequest) -> None:
        """Give up a lease without waiting for an answer; never fails."""
        if self._pid != os.getpid():
            return
        with self._lock:
            calls = self._calls
            if calls is not None and self._healthy.is_set():
                try:
                    calls.send(Method.RELEASE, request, time.monotonic() + self.timeout_s, no_reply=True)
                except KVStoreError as error:
                    self._disconnected(str(error))
                else:
                    return
        self.acknowledge(Method.RELEASE, request)

    def slots(self, claim_id: int, message: pb.Slots | None, block_bytes: int, *, writable: bool) -> Slots:
        """The blocks that a claim holds (None for none), as this process reaches them. Call with the lock held.

        Raises UnavailableError if they can't be.
        """
        return self._link.slots(self, claim_id, message, block_bytes, writable=writable)

    def use_hbm(self, device: IpcDevice) -> None:
        """Read blocks in HBM with this device from now on. Raises BadInputError if another is in use."""
        with self.exclusive():
            if self.hbm is not None and self.hbm.device is not device:
                raise BadInputError("this client reads HBM with another device already: make another client")
            if self.hbm is None:
                self.hbm = HbmRegions(device, self._region_unmapped)

    @property
    def reads_hbm(self) -> bool:
        """Whether it has a device for that, with which the daemon's memory could be opened as far as is known."""
        return self.hbm is not None and not self.hbm.failure

    def still_answers(self, epoch: int) -> bool:
        """Whether the daemon of that epoch is alive. Blocks for one round trip."""
        try:
            self.call(Method.HEARTBEAT, pb.HeartbeatRequest(), pb.HeartbeatReply)
        except KVStoreError:
            return False
        return self.epoch == epoch

    def hbm_blocks(self, message: pb.HbmSlots) -> HbmBlocks:
        """Those blocks of a lease that are in HBM, their regions opened. Call with the lock held.

        Raises UnavailableError if they can't be.
        """
        regions = self.hbm
        if regions is None or not message.at:
            return NO_HBM_BLOCKS
        opened = regions.find(self._call_now, [layout.id for layout in message.slots.regions])
        return HbmBlocks(regions, opened, message)

    def reads_at_once(self, rows: Bytes) -> bool:
        """Whether ``read_at_once`` does better than a lease and a copy, for as much."""
        return self._link.reads_at_once(rows)

    def read_at_once(self, request: pb.LeaseRequest, rows: Bytes, threads: int) -> pb.LeaseReply | None:
        """Copy what a lease would hold to the first ``rows`` (uint8 [n, block_bytes]), for which one call is enough.

        None if the copy can't be vouched for: it takes a lease. Raises as ``call``. In both cases ``rows`` hold nothing
        that can be used. The daemon may take ``wait_s`` longer.
        """
        return self._link.read_at_once(self, request, rows, threads)

    def bulk(self, move: Callable[[Any], MovedT]) -> MovedT:
        """Move bytes of blocks over the session's connection: ``move(calls)``, while other calls go on.

        Raises what the daemon answers, or UnavailableError by the deadline.
        """
        with self.exclusive():
            calls = self._must_be_up()
        try:
            return move(calls)
        except TimedOutError:
            self._suspect()
            raise
        except RefusedError:
            raise
        except (UnavailableError, ProtocolError, SessionEndedError) as error:
            with self._lock:
                if self._calls is calls:
                    self._disconnected(str(error), error)
            if isinstance(error, TurnedAwayError):
                raise
            raise UnavailableError(str(error)) from error

    def mappings(self, region_ids: list[int], *, writable: bool) -> dict[int, Mapping]:
        """The mappings of these regions, made where they are missing. Raises UnavailableError if that fails."""
        found = self.regions.find(region_ids, writable=writable)
        if len(found) == len(region_ids):
            return found
        missing = [region_id for region_id in region_ids if region_id not in found]
        for start in range(0, len(missing), MAX_DESCRIPTORS):
            map_regions(self._call_now, self.regions, missing[start : start + MAX_DESCRIPTORS], writable=writable)
        return self.regions.find(region_ids, writable=writable)

    def _call_now(
        self, method: Method, request: Message, kind: type[ReplyT], descriptors: list[int] | None = None
    ) -> ReplyT:
        return self._call(method, request, kind, time.monotonic() + self.timeout_s, descriptors)

    def generations(self, indices: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """The generations of slots as they are now, uint64 [n]; changed ones mean other contents."""
        return self._generations[indices]
