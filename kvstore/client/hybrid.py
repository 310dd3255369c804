"""A hybrid namespace as one client sees it: blocks of several groups of layers, each stored and held as a hit needs it.

Groups are numbered as in the spec. Full and MLA groups are needed of every block, and come and go together; of a
sliding group a hit needs the last blocks before its end, of a state group the very last one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvstore.client.borrowing import current
from kvstore.client.explaining import Explaining
from kvstore.client.finding import Finding
from kvstore.client.lease import Lease, WriteReservation
from kvstore.client.namespace import NamespaceHandle, Stored
from kvstore.client.prompts import DEFAULT_ROOT, count, rows_of_prompt
from kvstore.client.results import GetResult, Match, PutResult
from kvstore.client.session import Session
from kvstore.client.slots import Bytes, Slots, rows_of
from kvstore.client.waiting import Wait, checked_wait_s
from kvstore.errors import BadInputError, ProtocolError
from kvstore.hints import Hints
from kvstore.hybrid import Part, parts_of, place_of
from kvstore.types import ExtraKey, Namespace, Root, RowKind
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.framing import Method
from kvstore.wire.packing import U32, unpack

GroupBlocks = NDArray[Any] | tuple[int, NDArray[Any]]
"""Blocks of one group, [n, ...] and C-contiguous; with the number of the first one where that is another."""


@dataclass(frozen=True, slots=True)
class HybridPut:
    """What became of the blocks of each group that was given (full and MLA groups share one result)."""

    by_group: Mapping[int, PutResult]
    reason: str = ""
    """Why not all of them are stored, or durable."""
    n_durable: int = 0
    """With ``durable_within_s``: the hit in blocks, from the start of the prompt, that a crash can't take any more."""

    @property
    def n_skipped(self) -> int:
        """Blocks that were not stored, of all groups."""
        return sum(result.n_skipped for result in {id(each): each for each in self.by_group.values()}.values())


@dataclass(frozen=True, slots=True)
class HybridGet(GetResult):
    """``n_blocks`` and ``n_tokens`` of the hit, and per group which blocks were copied: (first one, how many)."""

    by_group: Mapping[int, tuple[int, int]] | None = None


class GroupView:
    """What a lease holds of one group. Index 0 is block ``first_block`` of the prompt.

    If the lease has ``partial_tokens`` > 0 the last entry is the partly matching block, as in the lease.
    """

    def __init__(
        self, lease: HybridLease, slots: Slots | None, first_block: int, offset_bytes: int, block_bytes: int
    ) -> None:
        self.first_block = first_block
        self.block_bytes = block_bytes
        self._lease = lease
        self._slots = slots
        self._offset_bytes = offset_bytes

    def __len__(self) -> int:
        return len(self._slots) if self._slots is not None else 0

    @property
    def addresses(self) -> NDArray[np.uint64]:
        """Address of each block of the group in this process, uint64 [n]. Raises EndedError after the lease's end."""
        self._lease.usable()
        if self._slots is None:
            return np.empty(0, np.uint64)
        return self._slots.addresses + np.uint64(self._offset_bytes)

    def view(self, i: int) -> Bytes:
        """uint8 [block_bytes] over one block of the group without a copy. Raises EndedError after the lease's end."""
        hold = self._lease.usable()
        if self._slots is None:
            raise IndexError(f"block {i} of 0")
        whole = self._slots.view(i, hold)
        return whole[self._offset_bytes : self._offset_bytes + self.block_bytes]

    def __getitem__(self, i: int) -> Bytes:
        if not -len(self) <= i < len(self):
            raise IndexError(f"block {i} of {len(self)}")
        return self.view(i % len(self))

    def copy_into(self, out: NDArray[Any], threads: int = 1) -> int:
        """Copy the whole blocks of the group to ``out`` ([m, ...], C-contiguous); returns how many arrived.

        0 if the lease ended before the copy was complete: then ``out`` holds nothing that can be used. Blocks.
        """
        room = rows_of(out, self.block_bytes)
        if not room.flags.writeable:
            raise BadInputError("out is read-only; give an array that may be written to")
        n = min(max(self._lease.n_blocks - self.first_block, 0), len(room), len(self))
        if self._slots is None or n == 0:
            return 0
        return n if self._lease.copy_out(self._slots, room[:n], threads, self._offset_bytes) else 0


class HybridLease(Lease):
    """The right to read, in every group, what a hit needs. As a ``Lease`` it shows the blocks' full and MLA groups
    together (as part 0); ``group`` has each group by itself."""

    def __init__(
        self, session: Session, reply: pb.LeaseReply, namespace: Namespace, first_block: int, reason: str = ""
    ) -> None:
        self._spec = namespace.spec
        parts = parts_of(namespace.spec)
        super().__init__(session, reply, parts[0].block_bytes, first_block, reason)
        self._held: dict[int, tuple[Slots, int]] = {}
        for held in reply.parts:
            if not 0 < held.part < len(parts):
                raise ProtocolError(f"the daemon gave a part {held.part}; this namespace has {len(parts)}")
            slots = session.slots(reply.lease_id, held.slots, parts[held.part].block_bytes, writable=False)
            self._held[held.part] = slots, held.first_block

    def group(self, group: int) -> GroupView:
        """What is held of a group. Raises BadInputError for one that the spec doesn't have."""
        part, offset_bytes, block_bytes = place_of(self._spec, group)
        return self._view(part, offset_bytes, block_bytes)

    def part(self, number: int) -> GroupView:
        """What is held of a part, its groups one behind the other. Raises BadInputError for one that is not there."""
        parts = parts_of(self._spec)
        if not 0 <= number < len(parts):
            raise BadInputError(f"part is {number!r}; this namespace has parts 0 to {len(parts) - 1}")
        return self._view(parts[number], 0, parts[number].block_bytes)

    def unchanged(self) -> bool:
        return super().unchanged() and all(slots.unchanged() for slots, _ in self._held.values())

    def _view(self, part: Part, offset_bytes: int, block_bytes: int) -> GroupView:
        slots, first_block = self._held.get(part.number, (None, self.first_block))
        return GroupView(self, self.slots if part.number == 0 else slots, first_block, offset_bytes, block_bytes)

    def abandon(self, why: str) -> None:
        super().abandon(why)
        self._forget_parts()

    def _give_up(self, why: str, *, told: bool = False) -> None:
        super()._give_up(why, told=told)
        self._forget_parts()

    def _forget_parts(self) -> None:
        for slots, _ in self._held.values():
            slots.forget()


class HybridHandle(Finding[HybridLease], Explaining):
    """A hybrid namespace as seen by one client. ``parts`` says which groups are stored together, see ``Part``."""

    def __init__(
        self,
        session: Session,
        namespace: Namespace,
        name: str = "",
        store: Stored = "all",
        attention_doubling_tokens: float = 0.0,
    ) -> None:
        """Raises BadInputError for a namespace whose spec is not hybrid."""
        super().__init__(session, namespace)
        self.parts: tuple[Part, ...] = parts_of(namespace.spec)
        if not self.parts:
            raise BadInputError("the spec has no sliding or state group besides others: open it with Client.open")
        opener = NamespaceHandle(session, namespace, name, store, attention_doubling_tokens)
        self._writers, self._ahead_writers = (
            [_PartWriter(session, namespace, store, opener, part, ahead) for part in self.parts]
            for ahead in (False, True)
        )
        self._opener = opener

    def ensure_open(self) -> bytes:
        """As of a ``NamespaceHandle``."""
        return self._opener.ensure_open()

    def _name(self, prompt: pb.Prompt) -> None:
        prompt.namespace = self.ensure_open()

    def _leased(self, reply: pb.LeaseReply, first_block: int, reason: str = "") -> HybridLease:
        return HybridLease(self._session, reply, self.namespace, first_block, reason)

    def _matched(self, reply: pb.MatchReply) -> Match:
        n_groups = len(self.namespace.spec.groups)
        by_part = unpack("part_blocks", reply.part_blocks, U32, len(self.parts)).tolist()
        by_group = tuple(by_part[place_of(self.namespace.spec, group)[0].number] for group in range(n_groups))
        return replace(super()._matched(reply), by_group=by_group)

    def attach(self, lease_id: int) -> HybridLease:
        """Read through a lease that another client of this tenant took in this namespace.

        Raises EndedError if it has ended, BadInputError if it is over another one. Both must release; the blocks stay
        until both have.
        """
        request = pb.AttachLeaseRequest(lease_id=count("lease_id", lease_id, 1 << 64), namespace=self.ensure_open())
        return self._session.granted(
            Method.ATTACH_LEASE, request, pb.LeaseReply, lambda reply: self._leased(reply, reply.first_block)
        )

    def reserve(self, tokens: ArrayLike, part: int = 0, *, ahead: bool = False, **more: Any) -> WriteReservation:
        """Slots for one part of blocks, to be filled in place; else as ``NamespaceHandle.reserve``.

        Part 0 has the full and MLA groups of a block one behind the other, in the order of the spec (without any:
        ``MARK_BYTES`` zeros). The others can be reserved for blocks whose part 0 is stored; with ``ahead`` also for
        those of which it will be before the commit, which stores nothing otherwise. So all can be filled at once.
        """
        if isinstance(part, bool) or not isinstance(part, int) or not 0 <= part < len(self.parts):
            raise BadInputError(f"part is {part!r}; this namespace has parts 0 to {len(self.parts) - 1}")
        return (self._ahead_writers if ahead else self._writers)[part].reserve(tokens, **more)

    def put(
        self,
        tokens: ArrayLike,
        blocks: Mapping[int, GroupBlocks],
        *,
        first_block: int = 0,
        root: Root = DEFAULT_ROOT,
        extras: Sequence[ExtraKey] = (),
        durable_within_s: float | None = None,
        threads: int = 1,
        policy_time_s: float | None = None,
        category: int = 0,
        hints: Hints | None = None,
        n_prompt_tokens: int | None = None,
    ) -> HybridPut:
        """Store blocks of any groups: per group an array [n, ...] of blocks from ``first_block`` on, or a pair of
        another first block and such an array: ``{FULL: all, SLIDING: (n_blocks - n_window, last_ones)}``. An array of
        a sliding or state group that ends before the full groups in the same call (without them: before the prompt's
        last whole block) must be such a pair, else BadInputError: it would count as the first blocks.

        Full and MLA groups come together, for the same blocks. Parts of a block are stored where the block itself is:
        give both in one call, or the full groups first. What is not stored of a group is skipped, and a hit then ends
        where it still has everything; nothing is ever half a block. Otherwise as ``NamespaceHandle.put``.
        """
        if durable_within_s is not None:
            checked_wait_s("durable_within_s", durable_within_s)
        by_part = self._by_part(blocks, first_block)
        self._check_window_places(tokens, blocks, by_part)
        results: dict[int, PutResult] = {}
        for part, (first, rows) in by_part.items():
            done = self._writers[part.number].put(
                tokens, rows, first_block=first, root=root, extras=extras, threads=threads,
                policy_time_s=policy_time_s, category=category, hints=hints, n_prompt_tokens=n_prompt_tokens,
            )  # fmt: skip
            results.update(dict.fromkeys(part.groups, done))
        reason = next((done.reason for done in results.values() if done.reason), "")
        if durable_within_s is None or not by_part:
            return HybridPut(results, reason)
        end = max(first + len(rows) for first, rows in by_part.values())
        done_durable = self.persist(tokens, durable_within_s, root=root, extras=extras, n_blocks=end)
        return HybridPut(results, reason or done_durable.reason, done_durable.n_durable)

    def get_into(
        self,
        tokens: ArrayLike,
        out: Mapping[int, NDArray[Any]],
        *,
        root: Root = DEFAULT_ROOT,
        extras: Sequence[ExtraKey] = (),
        first_block: int = 0,
        max_blocks: int | None = None,
        wait: Wait = "wait",
        threads: int = 1,
        policy_time_s: float | None = None,
        category: int = 0,
        hints: Hints | None = None,
    ) -> HybridGet:
        """Copy what a hit needs of the groups in ``out`` ([m, ...] each, C-contiguous), from ``first_block`` on.

        The hit counts for all groups, also for those left out. An array of a full group holds blocks from
        ``first_block`` on, and bounds the hit by its length; of another group the blocks that ``by_group`` names:
        room for its window (one block for a state) is enough, less raises BadInputError. All arrive or none.
        """
        most = self._most_blocks(out, first_block, max_blocks)
        with self.lease(
            tokens, root=root, extras=extras, first_block=first_block, max_blocks=most,
            wait=wait, policy_time_s=policy_time_s, category=category, hints=hints,
        ) as lease:  # fmt: skip
            copied = {}
            for group, array in out.items():
                view = lease.group(group)
                n_there = max(min(lease.n_blocks - view.first_block, len(view)), 0)
                if len(array) < n_there:
                    raise BadInputError(f"out[{group}] has room for {len(array)} blocks; the hit needs {n_there} of it")
                n = view.copy_into(array, threads)
                if n < n_there:
                    return HybridGet(0, 0, "the lease ended during the copy", lease.n_pending, {})
                copied[group] = view.first_block, n
            n_blocks = lease.n_blocks if lease else 0
            return HybridGet(n_blocks, n_blocks * self.block_tokens, lease.reason, lease.n_pending, copied)

    def end_session(self, session_id: str, root: Root = DEFAULT_ROOT) -> int:
        """As of a ``NamespaceHandle``."""
        return self._opener.end_session(session_id, root)

    def _most_blocks(self, out: Mapping[int, NDArray[Any]], first_block: int, max_blocks: int | None) -> int | None:
        """The end of the hit that full groups have room for; checks the room of the others."""
        rows = {group: self._rows(group, array) for group, array in out.items()}
        most = [first_block + len(rows[group]) for group in self.parts[0].groups if group in rows]
        if max_blocks is not None:
            most.append(max_blocks)
        end = min(most, default=None)
        for part in self.parts[1:]:
            least = part.window_blocks if end is None else min(part.window_blocks, max(end - first_block, 0))
            short = next((group for group in part.groups if group in rows and len(rows[group]) < least), None)
            if short is not None:
                raise BadInputError(
                    f"out[{short}] has room for {len(rows[short])} blocks; a hit may need {least} of this group"
                )
        return end

    def _by_part(self, blocks: Mapping[int, GroupBlocks], first_block: int) -> dict[Part, tuple[int, Bytes]]:
        """What is given, by part and in their order: the first block, and bytes [n, block bytes of the part]."""
        given: dict[int, tuple[int, Bytes]] = {}
        for group, value in blocks.items():
            first, array = value if isinstance(value, tuple) else (first_block, value)
            given[group] = count(f"the first block of group {group}", first), self._rows(group, array)
        out: dict[Part, tuple[int, Bytes]] = {}
        for part in self.parts:
            mine = [given[group] for group in part.groups if group in given]
            if not part.groups:
                end = max((first + len(rows) for first, rows in given.values()), default=first_block)
                if end > first_block:
                    out[part] = first_block, np.zeros((end - first_block, part.block_bytes), np.uint8)
            elif mine:
                if len(mine) < len(part.groups) or len({(first, len(rows)) for first, rows in mine}) > 1:
                    raise BadInputError(
                        f"groups {', '.join(map(str, part.groups))} are needed of every block: "
                        "give all of them, for the same blocks"
                    )
                with current().touching():
                    rows = mine[0][1] if len(mine) == 1 else np.concatenate([rows for _, rows in mine], axis=1)
                out[part] = mine[0][0], rows
        return {part: value for part, value in out.items() if len(value[1])}

    def _check_window_places(
        self, tokens: ArrayLike, blocks: Mapping[int, GroupBlocks], by_part: Mapping[Part, tuple[int, Bytes]]
    ) -> None:
        """Raises BadInputError for an array that looks like the last blocks of a prompt, without their place."""
        plain = [part for part in by_part if part.number and not isinstance(blocks[part.groups[0]], tuple)]
        if not plain:
            return
        if self.parts[0].groups and self.parts[0] in by_part:
            first, rows = by_part[self.parts[0]]
            end, of_what = first + len(rows), "the full groups given with it"
        else:
            whole = rows_of_prompt(self.namespace, tokens)
            is_hashes = self.namespace.row_kind is RowKind.HASHES
            end, of_what = len(whole) // (1 if is_hashes else self.block_tokens), "the prompt's whole blocks"
        for part in plain:
            (first, rows), group = by_part[part], part.groups[0]
            if first + len(rows) < end:
                raise BadInputError(
                    f"blocks[{group}] has {len(rows)} blocks, which would be {first} to {first + len(rows) - 1}, but "
                    f"{of_what} end with block {end - 1}: say which one is its first, as a pair, such as "
                    f"{{{group}: ({max(end - len(rows), 0)}, array)}} for the last ones"
                )

    def _rows(self, group: int, array: NDArray[Any]) -> Bytes:
        block_bytes = place_of(self.namespace.spec, group)[2]
        return rows_of(array, block_bytes, self.namespace.spec.groups[group].value_dtype)


class _PartWriter(NamespaceHandle):
    """Stores one part of the blocks."""

    def __init__(
        self, session: Session, namespace: Namespace, store: Stored, opener: NamespaceHandle, part: Part, ahead: bool
    ) -> None:
        super().__init__(session, namespace, "", store)
        self.block_bytes = part.block_bytes
        self._opener = opener
        self._part, self._ahead = part, ahead

    def ensure_open(self) -> bytes:
        return self._opener.ensure_open()

    def _name(self, prompt: pb.Prompt) -> None:
        super()._name(prompt)
        prompt.part, prompt.ahead = self._part.number, self._ahead
