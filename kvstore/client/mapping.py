"""Regions of the daemon's memory in this process.

A mapping lives as long as anything looks at it: the client, or an array that a caller still keeps. It is
unmapped when the last of them is gone, and only then is the daemon told.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

from google.protobuf.message import Message

from kvstore.client.transport import ReplyT
from kvstore.errors import UnavailableError
from kvstore.native import Mapping
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.framing import Method


class Call(Protocol):
    """One request and its reply; received descriptors are appended to ``descriptors`` and the caller's."""

    def __call__(
        self, method: Method, request: Message, kind: type[ReplyT], descriptors: list[int] | None = None
    ) -> ReplyT: ...


class MappingListener(Protocol):
    """Who must know what a session maps, as one that has it registered with a device; it may keep mappings alive.

    Called on any thread, perhaps under the session's lock: only ``let_go`` may block, and none may call the client.
    """

    def mapped(self, mapping: Mapping) -> None:
        """This is mapped now."""
        ...

    def leaving(self, mapping: Mapping) -> None:
        """The session needs it no more, and the daemon may wait for it to be unmapped: let go of it soon."""
        ...

    def let_go(self) -> None:
        """Let go of all mappings that are not in use, before this returns."""
        ...


class Regions:
    """The mapped regions of one session by region id.

    ``retire`` may be called on any thread at any time: the daemon retires a region only when nobody holds a
    lease or reservation in it. Everything else is called under the session's lock.

    ``on_unmapped(region_id)`` is called, on any thread, once a retired region is really unmapped. ``listeners`` may
    change at any time.
    """

    def __init__(self, on_unmapped: Callable[[int], None], listeners: Sequence[MappingListener] = ()) -> None:
        self._mappings: dict[int, Mapping] = {}
        self._listeners = listeners
        self._on_unmapped = on_unmapped
        self._dropped: dict[int, weakref.ref[Mapping]] = {}
        self._leaving: dict[int, weakref.ref[Mapping]] = {}
        self._alive: weakref.WeakSet[Mapping] = weakref.WeakSet()

    def add(self, region_id: int, fd: int, size_bytes: int, *, writable: bool, unsealed: bool = False) -> None:
        """Map a region's descriptor, with its page tables filled. Raises OSError if the kernel refuses.

        One that is ``unsealed`` is mapped writable for reading, too: there are GPUs that take no other memory.
        """
        mapping = Mapping(fd, size_bytes, writable=writable or unsealed, inherit=False)
        mapping.populate()
        if writable:  # before anybody else maps it: the daemon may not have come to all of it yet
            mapping.gather()
        replaced = self._mappings.get(region_id)
        self._mappings[region_id] = mapping
        self._alive.add(mapping)
        if replaced is not None:
            self._tell_leaving(replaced)
        for listener in tuple(self._listeners):
            listener.mapped(mapping)

    def tell_all(self, listener: MappingListener) -> None:
        """Tell a listener of everything that is mapped already."""
        for mapping in self._mappings.values():
            listener.mapped(mapping)

    def forget(self, region_ids: Iterable[int]) -> None:
        """Let go of mappings that must not be used, which nobody looks at yet."""
        for region_id in region_ids:
            mapping = self._mappings.pop(region_id, None)
            if mapping is not None:
                self._tell_leaving(mapping)

    def find(self, region_ids: list[int], *, writable: bool) -> dict[int, Mapping]:
        """The mappings of those among these regions that are mapped, for writing if so asked."""
        mappings = self._mappings
        found = {region_id: mappings.get(region_id) for region_id in region_ids}
        return {
            region_id: mapping
            for region_id, mapping in found.items()
            if mapping is not None and (mapping.writable or not writable)
        }

    def retire(self, region_ids: Iterable[int]) -> None:
        """Let go of regions the daemon wants back; each is unmapped when nobody looks at it any more.

        The daemon may ask twice, if it can't know that it was heard.
        """
        for region_id in region_ids:
            mapping = self._mappings.pop(region_id, None)
            if mapping is not None:
                self._leaving[region_id] = weakref.ref(mapping)
                mapping.after_unmap = partial(self._left, region_id)
                self._tell_leaving(mapping)
            elif region_id not in self._leaving:
                self._on_unmapped(region_id)

    def _tell_leaving(self, mapping: Mapping) -> None:
        for listener in tuple(self._listeners):
            listener.leaving(mapping)

    def _left(self, region_id: int) -> None:
        self._leaving.pop(region_id, None)
        self._on_unmapped(region_id)

    def drop_all(self) -> bool:
        """Let go of everything. True if nothing is mapped any more, False if arrays still keep some."""
        self._dropped = {region_id: weakref.ref(mapping) for region_id, mapping in self._mappings.items()}
        leaving, self._mappings = list(self._mappings.values()), {}
        while leaving:
            self._tell_leaving(leaving.pop())
        return not len(self._alive)

    def unmapped(self) -> list[list[int]]:
        """The regions that ``drop_all`` really unmapped, in lists of a size that fits a message."""
        gone = [region_id for region_id, ref in self._dropped.items() if ref() is None]
        return [gone[start : start + 1024] for start in range(0, len(gone), 1024)]


def map_regions(call: Call, regions: Regions, region_ids: list[int], *, writable: bool) -> None:
    """Ask for these regions and map them. Blocks for two round trips. Raises UnavailableError."""
    fds: list[int] = []
    try:
        request = pb.MapRegionsRequest(region_ids=region_ids, writable=writable)
        reply = call(Method.MAP_REGIONS, request, pb.MapRegionsReply, fds)
        if len(fds) != len(region_ids) or len(reply.sizes_bytes) != len(region_ids):
            raise UnavailableError(
                f"{len(fds)} descriptors came for {len(region_ids)} regions: is a descriptor limit reached?"
            )
        unsealed = frozenset(reply.unsealed_ids)
        for region_id, fd, size_bytes in zip(region_ids, fds, reply.sizes_bytes, strict=True):
            regions.add(region_id, fd, size_bytes, writable=writable, unsealed=region_id in unsealed)
    except OSError as error:
        raise UnavailableError(f"the daemon's memory can't be mapped: {error.strerror or error}") from error
    finally:
        for fd in fds:
            os.close(fd)
    try:
        if writable:
            # Only when the daemon knows that we have our writable mapping can it seal, and others read.
            call(Method.REGIONS_MAPPED, pb.RegionsMappedRequest(region_ids=region_ids), pb.RegionsMappedReply)
        else:
            # If it was gone before we had them, the next one may have found that we don't map them.
            call(Method.HEARTBEAT, pb.HeartbeatRequest(), pb.HeartbeatReply)
    except UnavailableError:
        regions.forget(region_ids)
        raise
