"""What a frame's header says: decoded, checked against itself, and the few facts that rebuild a catalog."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvstore.compression.frame_format import (
    CHECKSUM_BYTES,
    CODEC_RAW,
    DTYPE_NUMBERS,
    GROUP,
    HEADER,
    HEADER_BYTES_MAX,
    KIND_NUMBERS,
    KNOWN_CODECS,
    LAYOUT_NUMBERS,
    MAGIC,
    PAGE_GROUP,
    PAYLOAD_BYTES_MAX,
    PLANE,
    SECTOR_BYTES,
    VERSION,
    FrameError,
    Place,
    PlaneKind,
    padded,
)
from kvstore.native.checksum import checksums
from kvstore.types import GroupKind

Buffer = bytes | bytearray | memoryview

_KINDS = {number: GroupKind(name) for name, number in KIND_NUMBERS.items()}
_LAYOUTS = {number: name for name, number in LAYOUT_NUMBERS.items()}
_DTYPES = {number: name for name, number in DTYPE_NUMBERS.items()}
_PLANES = {int(kind): kind for kind in PlaneKind}
_PLACES = frozenset(int(place) for place in Place)
_START_BYTES = 16
"""What every version has in these places: magic, version, header_bytes."""


@dataclass(frozen=True, slots=True)
class FramePlane:
    """One plane of a group: its codec and its page groups.

    ``page_groups`` has dtype ``PAGE_GROUP`` and shape [layers, ceil(pages / pages_per_group)]; offsets count
    from the start of the payload. ``page_bytes`` is what one page of one layer has in this plane, decoded.
    """

    kind: PlaneKind
    codec: int
    page_bytes: int
    pages_per_group: int
    codec_data: int
    page_groups: NDArray[np.void]


@dataclass(frozen=True, slots=True)
class FrameGroup:
    """One group of layers as the frame describes it; ``page_bytes`` are raw bytes of all its planes."""

    kind: GroupKind
    dtype: str
    layout: str
    layers: int
    kv_heads: int
    head_dim: int
    window_tokens: int | None
    page_bytes: int
    pages: int
    planes: tuple[FramePlane, ...]


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """Everything a header says. Sizes are checked against each other; bytes of the payload are not."""

    version: int
    codec: int
    header_bytes: int
    payload_offset: int
    payload_bytes: int
    frame_bytes: int
    raw_bytes: int
    block_tokens: int
    page_tokens: int
    log_seq: int
    namespace: bytes
    key: bytes
    parent: bytes
    place: Place
    row: bytes
    extra_digest: bytes
    groups: tuple[FrameGroup, ...]

    def page_groups(self) -> NDArray[np.void]:
        """The whole table, ``PAGE_GROUP`` [n]: by group, plane, layer, page group."""
        return np.concatenate([plane.page_groups.ravel() for group in self.groups for plane in group.planes])


class FrameFacts(NamedTuple):
    """What a tier needs to know about a frame that it finds on its disk.

    ``is_first``: the parent is a root key, so there is no parent block to look for; None if the writer did not say.
    """

    key: bytes
    parent: bytes
    namespace: bytes
    frame_bytes: int
    payload_bytes: int
    header_bytes: int
    log_seq: int
    is_first: bool | None = None


class _Fixed(NamedTuple):
    """``HEADER`` as Python values."""

    magic: bytes
    version: int
    codec: int
    flags: int
    header_bytes: int
    payload_offset: int
    block_tokens: int
    page_tokens: int
    n_groups: int
    n_planes: int
    n_page_groups: int
    payload_bytes: int
    raw_bytes: int
    frame_bytes: int
    namespace: bytes
    log_seq: int
    key: bytes
    parent: bytes
    extra_digest: bytes
    row_bytes: int
    extra_bytes: int
    place: int
    reserved: bytes

    @property
    def used_bytes(self) -> int:
        """Header bytes before the zeros."""
        tables_bytes = (
            self.n_groups * GROUP.itemsize + self.n_planes * PLANE.itemsize + self.n_page_groups * PAGE_GROUP.itemsize
        )
        return HEADER.itemsize + tables_bytes + self.row_bytes


def decode_header(buffer: Buffer) -> FrameHeader:
    """The header at the start of ``buffer``, which must hold all of it. Copies what it keeps.

    Raises FrameError that says what is wrong: not a frame, another version, an unknown codec, a checksum that
    does not match, a buffer that ends too early, or sizes that contradict each other.
    """
    view = _bytes_of(buffer)
    fixed = _checked_start(view)
    at = HEADER.itemsize
    tables = []
    for record, n in ((GROUP, fixed.n_groups), (PLANE, fixed.n_planes), (PAGE_GROUP, fixed.n_page_groups)):
        tables.append(np.frombuffer(view, record, n, at).copy())
        at += n * record.itemsize
    groups = _groups(fixed, *tables)
    _check_payload(fixed, tables[2])
    return FrameHeader(
        version=fixed.version,
        codec=fixed.codec,
        header_bytes=fixed.header_bytes,
        payload_offset=fixed.payload_offset,
        payload_bytes=fixed.payload_bytes,
        frame_bytes=fixed.frame_bytes,
        raw_bytes=fixed.raw_bytes,
        block_tokens=fixed.block_tokens,
        page_tokens=fixed.page_tokens,
        log_seq=fixed.log_seq,
        namespace=fixed.namespace,
        key=fixed.key,
        parent=fixed.parent,
        place=Place(fixed.place),
        row=bytes(view[at : at + fixed.row_bytes]),
        extra_digest=fixed.extra_digest[: fixed.extra_bytes],
        groups=groups,
    )


def header_bytes_of(first_bytes: Buffer) -> int | None:
    """How long the header is that seems to start here, from its first 16 bytes; None if none does.

    Nothing but magic, version and bounds is checked: read that many bytes and ask ``inspect``.
    """
    try:
        return _header_bytes(_bytes_of(first_bytes))
    except FrameError:
        return None


def inspect(buffer: Buffer) -> FrameFacts | None:
    """What frame starts at the start of ``buffer``; None if no intact header of a known kind does.

    ``buffer`` must hold the whole header (``header_bytes_of``). Never raises for bad bytes; the page group table
    and the payload are not looked at.
    """
    try:
        fixed = _checked_start(_bytes_of(buffer))
    except FrameError:
        return None
    return FrameFacts(
        fixed.key,
        fixed.parent,
        fixed.namespace,
        fixed.frame_bytes,
        fixed.payload_bytes,
        fixed.header_bytes,
        fixed.log_seq,
        None if fixed.place == Place.UNKNOWN else fixed.place == Place.FIRST,
    )


def verify_frame(frame: Buffer) -> bool:
    """Whether a whole frame is intact: header, and every page group's checksum. Never raises for bad bytes.

    Blocks, for the bulk of it without Python's lock.
    """
    view = _bytes_of(frame)
    try:
        header = decode_header(view)
    except FrameError:
        return False
    if len(view) < header.payload_offset + header.payload_bytes:
        return False
    table = header.page_groups()
    payload_address = np.frombuffer(view, np.uint8).ctypes.data + header.payload_offset
    addresses = table["offset"].astype(np.uint64) + np.uint64(payload_address)
    return bool((checksums(addresses, table["stored_bytes"].astype(np.uint64)) == table["checksum"]).all())


def _bytes_of(buffer: Buffer) -> memoryview:
    view = memoryview(buffer)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def _must(holds: bool, what: str) -> None:
    if not holds:
        raise FrameError(f"the frame header contradicts itself: {what}")


def _header_bytes(view: memoryview) -> int:
    if len(view) < _START_BYTES:
        raise FrameError(f"{len(view)} bytes are no frame header; it has at least {SECTOR_BYTES}")
    if view[: len(MAGIC)] != MAGIC:
        raise FrameError(f"no frame starts here: the first bytes are {bytes(view[: len(MAGIC)])!r}, not {MAGIC!r}")
    version = int.from_bytes(view[8:10], "little")
    if version != VERSION:
        raise FrameError(f"the frame has format version {version}; this release reads version {VERSION} only")
    header_bytes = int.from_bytes(view[12:16], "little")
    if header_bytes % SECTOR_BYTES or not SECTOR_BYTES <= header_bytes <= HEADER_BYTES_MAX:
        raise FrameError(
            f"the frame header claims {header_bytes} bytes; it must be a multiple of {SECTOR_BYTES} "
            f"up to {HEADER_BYTES_MAX}"
        )
    return header_bytes


def _checked_start(view: memoryview) -> _Fixed:
    """The fixed part of an intact header, with sizes that fit into each other and into the header."""
    header_bytes = _header_bytes(view)
    if len(view) < header_bytes:
        raise FrameError(f"the frame header is cut off: {len(view)} bytes of {header_bytes} are there")
    end = header_bytes - CHECKSUM_BYTES
    stored, actual = int.from_bytes(view[end:header_bytes], "little"), xxhash.xxh3_64_intdigest(view[:end])
    if stored != actual:
        raise FrameError(f"the frame header's checksum is {actual:016x}, but {stored:016x} was written")
    fixed = _Fixed(*np.frombuffer(view, HEADER, 1)[0].item())
    if fixed.flags:
        raise FrameError(f"the frame has flags {fixed.flags:#04x}, which this release does not know")
    if fixed.codec not in KNOWN_CODECS:
        raise FrameError(f"the frame has codec {fixed.codec}, which this release does not know")
    _must(fixed.payload_offset == header_bytes, f"the payload starts at {fixed.payload_offset}, not {header_bytes}")
    for what, n_bytes in (("payload", fixed.payload_bytes), ("block", fixed.raw_bytes)):
        _must(0 < n_bytes <= PAYLOAD_BYTES_MAX, f"the {what} has {n_bytes} bytes")
    whole_bytes = header_bytes + padded(fixed.payload_bytes)
    _must(fixed.frame_bytes == whole_bytes, f"the frame has {fixed.frame_bytes} bytes, not {whole_bytes}")
    _must(
        fixed.used_bytes + CHECKSUM_BYTES <= header_bytes,
        f"tables and row take {fixed.used_bytes} bytes of {header_bytes}",
    )
    _must(fixed.extra_bytes in (0, len(fixed.extra_digest)), f"the extra digest has {fixed.extra_bytes} bytes")
    _must(fixed.place in _PLACES, f"its place is {fixed.place}")
    _must(not any(fixed.reserved), "a reserved byte is set")
    return fixed


def _groups(
    fixed: _Fixed, groups: NDArray[np.void], planes: NDArray[np.void], page_groups: NDArray[np.void]
) -> tuple[FrameGroup, ...]:
    _must(int(groups["n_planes"].sum(dtype=np.int64)) == fixed.n_planes, "groups and planes don't add up")
    result = []
    raw_bytes = next_plane = next_entry = 0
    for group in groups:
        kind, dtype, layout, n_planes, layers, kv_heads, head_dim, window, page_bytes, pages, reserved = group.item()
        _must(kind in _KINDS and dtype in _DTYPES and layout in _LAYOUTS, "a group is of an unknown kind")
        _must(not reserved, "a reserved byte is set")
        _must(layers > 0 and pages > 0, "a group has no pages")
        raw_bytes += layers * pages * page_bytes
        _must(raw_bytes <= fixed.raw_bytes, "groups have more bytes than the block")
        mine = []
        for plane in planes[next_plane : next_plane + n_planes]:
            decoded = _plane(plane, layers, pages, page_bytes, page_groups[next_entry:])
            next_entry += decoded.page_groups.size
            mine.append(decoded)
        next_plane += n_planes
        _must(sum(plane.page_bytes for plane in mine) == page_bytes, "planes don't make up their pages")
        result.append(
            FrameGroup(
                kind=_KINDS[kind],
                dtype=_DTYPES[dtype],
                layout=_LAYOUTS[layout],
                layers=layers,
                kv_heads=kv_heads,
                head_dim=head_dim,
                window_tokens=window or None,
                page_bytes=page_bytes,
                pages=pages,
                planes=tuple(mine),
            )
        )
    _must(next_entry == len(page_groups), "planes and page groups don't add up")
    _must(raw_bytes == fixed.raw_bytes, f"groups have {raw_bytes} bytes, the block {fixed.raw_bytes}")
    _must(max((p.codec for g in result for p in g.planes), default=-1) == fixed.codec, "planes have another codec")
    return tuple(result)


def _plane(plane: Any, layers: int, pages: int, most_page_bytes: int, rest: NDArray[np.void]) -> FramePlane:
    kind, codec, flags, page_bytes, pages_per_group, codec_data = plane.item()
    if kind not in _PLANES or codec not in KNOWN_CODECS or flags:
        raise FrameError(
            f"a plane is of kind {kind}, codec {codec}, flags {flags:#06x}, which this release does not know"
        )
    _must(0 < pages_per_group <= pages and 0 < page_bytes <= most_page_bytes, "a plane's pages have no fitting size")
    per_layer = -(-pages // pages_per_group)
    _must(layers * per_layer <= len(rest), "planes and page groups don't add up")
    mine = rest[: layers * per_layer].reshape(layers, per_layer)
    if codec == CODEC_RAW:
        raw_bytes = np.full(per_layer, pages_per_group * page_bytes, np.int64)
        raw_bytes[-1] = (pages - (per_layer - 1) * pages_per_group) * page_bytes
        plain = (mine["raw_bytes"] == raw_bytes).all() and (mine["stored_bytes"] == raw_bytes).all()
        _must(bool(plain) and not codec_data and not mine["codec_data"].any(), "a raw page group has another size")
    return FramePlane(_PLANES[kind], codec, page_bytes, pages_per_group, codec_data, mine)


def _check_payload(fixed: _Fixed, page_groups: NDArray[np.void]) -> None:
    """Page groups lie side by side and fill the payload: every byte of it has one checksum."""
    order = np.argsort(page_groups["offset"], kind="stable")
    offsets = page_groups["offset"][order].astype(np.int64)
    ends = offsets + page_groups["stored_bytes"][order].astype(np.int64)
    tiled = len(ends) > 0 and offsets[0] == 0 and (offsets[1:] == ends[:-1]).all() and ends[-1] == fixed.payload_bytes
    _must(bool(tiled), "page groups overlap, leave gaps, or don't fill the payload")
