"""Frames of one namespace, uncompressed: every size and place is fixed, so batches are written and verified as columns.

**Page groups** are as many pages of one layer as make 16 KiB, and one page where a page has that much already.
Measured with blocks in memory, halving the pieces under one checksum costs

    16 to 8 KiB 1.00 x, 8 to 4 KiB 1.04 x        where the C part hashes a batch in one call
    16 to 8 KiB 1.26 x, 8 to 4 KiB 1.45 x        where each piece is a call

so smaller ones would cost little to hash; but each takes 24 bytes of header (0.6 % at 4 KiB), and a device
transfers whole sectors of 4 KiB, of which an unaligned page group of 4 KiB covers two.

**K and V** of a page have page groups of their own, so that one can be read alone, where each has 16 KiB: halving
pages of 32 KiB costs 1.00 x (1.11 x with a call each), of 64 KiB 1.00 x (1.08 x). In page groups of several pages
they stay together, as they alternate there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.compression.frame_format import (
    CHECKSUM_BYTES,
    CODEC_RAW,
    DTYPE_NUMBERS,
    FIXED_BY_LAYOUT_BYTES,
    GROUP,
    HEADER,
    HEADER_BYTES_MAX,
    KIND_NUMBERS,
    LAYOUT_NUMBERS,
    MAGIC,
    PAGE_GROUP,
    PLANE,
    VERSION,
    Place,
    PlaneKind,
    padded,
)
from kvstore.errors import BadInputError
from kvstore.native import aligned_bytes, row_addresses
from kvstore.native.checksum import checksums
from kvstore.types import KEY_BYTES, GroupKind, KVGroup, KVSpec

PAGE_GROUP_BYTES_LEAST = 16 << 10

Bytes = NDArray[np.uint8]
Addresses = NDArray[np.uint64]
_KEY = np.dtype(f"V{KEY_BYTES}")
_NOTHING = np.zeros((), HEADER)["reserved"]


class FrameRow(NamedTuple):
    """What the key of a block was hashed from, besides its parent: ``extra_digest`` is empty or 16 bytes."""

    row: bytes
    extra_digest: bytes = b""


class FrameLayout:
    """The layout that all raw frames of one namespace share. Never changes; safe to use from any thread.

    ``header_bytes`` and ``frame_bytes`` are multiples of 4096, ``payload_bytes`` is the block's size. Build one
    with ``FrameLayout.of``.
    """

    __slots__ = (
        "_entries_at",
        "_offsets",
        "_row_at",
        "_sizes",
        "_template",
        "frame_bytes",
        "header_bytes",
        "namespace_digest",
        "payload_bytes",
        "payload_padded_bytes",
        "row_bytes_max",
    )

    def __init__(self, template: Bytes, row_bytes_max: int) -> None:
        fixed = template[: HEADER.itemsize].view(HEADER)[0]
        self.header_bytes = len(template)
        self.payload_bytes = int(fixed["payload_bytes"])
        self.payload_padded_bytes = padded(self.payload_bytes)
        self.frame_bytes = int(fixed["frame_bytes"])
        self.namespace_digest = bytes(fixed["namespace"])
        self.row_bytes_max = row_bytes_max
        self._template = template
        records_bytes = int(fixed["n_groups"]) * GROUP.itemsize + int(fixed["n_planes"]) * PLANE.itemsize
        self._entries_at = HEADER.itemsize + records_bytes
        self._row_at = self._entries_at + int(fixed["n_page_groups"]) * PAGE_GROUP.itemsize
        entries = template[self._entries_at : self._row_at].view(PAGE_GROUP)
        self._offsets = entries["offset"].astype(np.uint64)
        self._sizes = entries["stored_bytes"].astype(np.uint64)

    @classmethod
    def of(cls, spec: KVSpec, row_bytes_max: int, namespace_digest: bytes) -> FrameLayout:
        """The layout of a spec's blocks, with room for rows of up to ``row_bytes_max`` bytes.

        Raises BadInputError where the header would get longer than 4 MiB (a great many tiny layers), or the
        digest is not 16 bytes.
        """
        if len(namespace_digest) != KEY_BYTES:
            raise BadInputError(f"namespace_digest is {len(namespace_digest)} bytes; it must be {KEY_BYTES}")
        if row_bytes_max < 0:
            raise BadInputError(f"row_bytes_max is {row_bytes_max}; it must be 0 or more")
        tables_bytes = _tables_bytes(spec)
        header_bytes = padded(HEADER.itemsize + tables_bytes + row_bytes_max + CHECKSUM_BYTES)
        if header_bytes > HEADER_BYTES_MAX:
            raise BadInputError(
                f"the frame header of this spec would be {header_bytes} bytes, the most is {HEADER_BYTES_MAX}: "
                "describe its layers as fewer and larger ones, or use fewer tokens per block"
            )
        groups, planes, entries = _tables(spec)
        fixed = np.zeros(1, HEADER)
        fixed["magic"] = MAGIC
        fixed["version"] = VERSION
        fixed["codec"] = CODEC_RAW
        fixed["header_bytes"] = fixed["payload_offset"] = header_bytes
        fixed["block_tokens"] = spec.block_tokens
        fixed["page_tokens"] = spec.tokens_per_page
        fixed["n_groups"], fixed["n_planes"], fixed["n_page_groups"] = len(groups), len(planes), len(entries)
        fixed["payload_bytes"] = fixed["raw_bytes"] = spec.block_bytes
        fixed["frame_bytes"] = header_bytes + padded(spec.block_bytes)
        fixed["namespace"] = np.frombuffer(namespace_digest, _KEY)
        template = np.zeros(header_bytes, np.uint8)
        start = b"".join(part.tobytes() for part in (fixed, groups, planes, entries))
        template[: len(start)] = np.frombuffer(start, np.uint8)
        return cls(template, row_bytes_max)

    def encode_headers(
        self,
        keys: Bytes,
        parents: Bytes,
        rows: Sequence[FrameRow],
        log_seqs: NDArray[np.int64],
        payload_addresses: Addresses,
        firsts: NDArray[np.bool_] | None = None,
        out: Bytes | None = None,
    ) -> Bytes:
        """Headers of ``n`` frames, uint8 [n, header_bytes], in memory aligned to 4096 or in ``out``.

        ``keys``, ``parents``: uint8 [n, 16]. ``payload_addresses``: uint64 [n], ``payload_bytes`` mapped bytes
        each, read here to checksum them. ``firsts``: bool [n], whose parent key is a root key; without it frames
        don't say so. Blocks, for the bulk of it without Python's lock. Raises BadInputError for rows that are
        too long, digests of another length, or arrays of another shape.
        """
        n = len(rows)
        keys, parents = _keys("keys", keys, n), _keys("parents", parents, n)
        _one_each("log_seqs", log_seqs, n)
        _one_each("payload_addresses", payload_addresses, n)
        headers = self._headers_of(n) if out is None else out
        self._check_headers(headers, n)
        headers[:] = self._template
        fixed = headers[:, : HEADER.itemsize].view(HEADER)[:, 0]
        fixed["log_seq"] = log_seqs
        fixed["key"], fixed["parent"] = keys.view(_KEY)[:, 0], parents.view(_KEY)[:, 0]
        if firsts is not None:
            _one_each("firsts", firsts, n)
            fixed["place"] = np.where(firsts, Place.FIRST, Place.BEHIND)
        self._put_rows(headers, fixed, rows)
        self._page_groups(headers)["checksum"] = self._payload_checksums(payload_addresses)
        self._checksum(headers)[:] = self._header_checksums(headers)
        return headers

    def verify(self, headers: Bytes, payload_addresses: Addresses, keys: Bytes, parents: Bytes) -> NDArray[np.bool_]:
        """Which of ``n`` frames are what they should be, bool [n].

        True: the header is intact, of this layout and namespace and of the expected key and parent, and every
        page group of the payload has its checksum. ``headers``: uint8 [n, header_bytes] as read; payloads,
        keys and parents as for ``encode_headers``. Never raises for bad bytes. Blocks, for the bulk of it
        without Python's lock. Raises BadInputError for arrays of another shape.
        """
        n = len(headers)
        self._check_headers(headers, n)
        keys, parents = _keys("keys", keys, n), _keys("parents", parents, n)
        _one_each("payload_addresses", payload_addresses, n)
        good: NDArray[np.bool_] = self._checksum(headers) == self._header_checksums(headers)
        good &= (headers[:, :FIXED_BY_LAYOUT_BYTES] == self._template[:FIXED_BY_LAYOUT_BYTES]).all(axis=1)
        tables = slice(HEADER.itemsize, self._entries_at)
        good &= (headers[:, tables] == self._template[tables]).all(axis=1)
        stored, mine = self._page_groups(headers), self._page_groups(self._template[None])
        for field in ("offset", "stored_bytes", "raw_bytes", "codec_data"):
            good &= (stored[field] == mine[field]).all(axis=1)
        fixed = headers[:, : HEADER.itemsize].view(HEADER)[:, 0]
        good &= (fixed["key"] == keys.view(_KEY)[:, 0]) & (fixed["parent"] == parents.view(_KEY)[:, 0])
        good &= (fixed["row_bytes"] <= self.row_bytes_max) & (fixed["place"] <= max(Place))
        good &= ((fixed["extra_bytes"] == 0) | (fixed["extra_bytes"] == KEY_BYTES)) & (fixed["reserved"] == _NOTHING)
        intact = np.flatnonzero(good)
        actual = self._payload_checksums(payload_addresses[intact])
        good[intact] = (stored["checksum"][intact] == actual).all(axis=1)
        return good

    def _headers_of(self, n: int) -> Bytes:
        return aligned_bytes(n * self.header_bytes).reshape(n, self.header_bytes)

    def _check_headers(self, headers: Bytes, n: int) -> None:
        fits = headers.dtype == np.uint8 and headers.shape == (n, self.header_bytes) and headers.flags.c_contiguous
        if not fits:
            raise BadInputError(
                f"headers are {headers.dtype} {headers.shape}; give contiguous uint8 [{n}, {self.header_bytes}]"
            )

    def _put_rows(self, headers: Bytes, fixed: NDArray[np.void], rows: Sequence[FrameRow]) -> None:
        longest = max((len(row.row) for row in rows), default=0)
        if longest > self.row_bytes_max:
            raise BadInputError(f"a row has {longest} bytes; frames of this layout have room for {self.row_bytes_max}")
        wrong = next((len(row.extra_digest) for row in rows if len(row.extra_digest) not in (0, KEY_BYTES)), None)
        if wrong is not None:
            raise BadInputError(f"an extra digest has {wrong} bytes; it must have 0 or {KEY_BYTES}")
        text = b"".join([row.row.ljust(longest, b"\0") for row in rows])
        headers[:, self._row_at : self._row_at + longest] = np.frombuffer(text, np.uint8).reshape(len(rows), longest)
        digests = b"".join([row.extra_digest.ljust(KEY_BYTES, b"\0") for row in rows])
        fixed["extra_digest"] = np.frombuffer(digests, _KEY)
        fixed["row_bytes"] = [len(row.row) for row in rows]
        fixed["extra_bytes"] = [len(row.extra_digest) for row in rows]

    def _page_groups(self, headers: Bytes) -> NDArray[np.void]:
        """The table inside the headers, ``PAGE_GROUP`` [n, page groups]; writes through."""
        return headers[:, self._entries_at : self._row_at].view(PAGE_GROUP)

    def _checksum(self, headers: Bytes) -> NDArray[np.uint64]:
        return headers[:, -CHECKSUM_BYTES:].view("<u8")[:, 0]

    def _header_checksums(self, headers: Bytes) -> NDArray[np.uint64]:
        sizes = np.full(len(headers), self.header_bytes - CHECKSUM_BYTES, np.uint64)
        return checksums(row_addresses(headers), sizes)

    def _payload_checksums(self, addresses: Addresses) -> NDArray[np.uint64]:
        """Of every page group, uint64 [n, page groups]."""
        pieces = (addresses.astype(np.uint64, copy=False)[:, None] + self._offsets).ravel()
        return checksums(pieces, np.tile(self._sizes, len(addresses))).reshape(len(addresses), len(self._sizes))


def _tables_bytes(spec: KVSpec) -> int:
    n_bytes = 0
    for group in spec.groups:
        _, planes, per_layer = _planes(spec, group)
        n_bytes += GROUP.itemsize + planes * (PLANE.itemsize + group.layers * per_layer * PAGE_GROUP.itemsize)
    return n_bytes


def _planes(spec: KVSpec, group: KVGroup) -> tuple[int, int, int]:
    """Pages per page group, planes, and page groups per layer and plane."""
    page_bytes, pages = group.bytes_per_page(spec.tokens_per_page), spec.block_tokens // spec.tokens_per_page
    pages_per_group = min(pages, -(-PAGE_GROUP_BYTES_LEAST // page_bytes))
    has_k_and_v = group.layout != "opaque" and group.kind in (GroupKind.FULL, GroupKind.SLIDING)
    planes = 2 if has_k_and_v and pages_per_group == 1 and page_bytes >= 2 * PAGE_GROUP_BYTES_LEAST else 1
    return pages_per_group, planes, -(-pages // pages_per_group)


def _tables(spec: KVSpec) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Group, plane and page group records of a raw block; checksums are left 0."""
    groups, planes, entries = [], [], []
    group_start = 0
    pages = spec.block_tokens // spec.tokens_per_page
    for group in spec.groups:
        page_bytes = group.bytes_per_page(spec.tokens_per_page)
        pages_per_group, n_planes, per_layer = _planes(spec, group)
        groups.append(
            (
                KIND_NUMBERS[group.kind],
                DTYPE_NUMBERS[group.dtype],
                LAYOUT_NUMBERS[group.layout],
                n_planes,
                group.layers,
                group.kv_heads,
                group.head_dim,
                group.window_tokens or 0,
                page_bytes,
                pages,
                0,
            )
        )
        kinds = (PlaneKind.K, PlaneKind.V) if n_planes == 2 else (PlaneKind.WHOLE,)
        part_bytes = page_bytes // n_planes
        first_pages = np.arange(per_layer, dtype=np.int64) * pages_per_group
        sizes = np.minimum(pages - first_pages, pages_per_group) * part_bytes
        layer_starts = group_start + np.arange(group.layers, dtype=np.int64) * (pages * page_bytes)
        for number, kind in enumerate(kinds):
            planes.append((kind, CODEC_RAW, 0, part_bytes, pages_per_group, 0))
            table = np.zeros((group.layers, per_layer), PAGE_GROUP)
            table["offset"] = layer_starts[:, None] + first_pages * page_bytes + number * part_bytes
            table["stored_bytes"] = table["raw_bytes"] = sizes
            entries.append(table.ravel())
        group_start += group.layers * pages * page_bytes
    return np.array(groups, GROUP), np.array(planes, PLANE), np.concatenate(entries)


def _keys(name: str, keys: Bytes, n: int) -> Bytes:
    if keys.dtype != np.uint8 or keys.shape != (n, KEY_BYTES):
        raise BadInputError(f"{name} are {keys.dtype} {keys.shape}; give uint8 [{n}, {KEY_BYTES}]")
    return np.ascontiguousarray(keys)


def _one_each(name: str, array: NDArray[Any], n: int) -> None:
    if array.shape != (n,):
        raise BadInputError(f"{name} has shape {array.shape}; give one for each of {n} frames")
