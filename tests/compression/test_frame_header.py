"""One header: what is wrong with it is said, whatever its bytes are, and nothing but FrameError comes out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.compression.frame import (
    FrameError,
    FrameHeader,
    decode_header,
    header_bytes_of,
    inspect,
    verify_frame,
)
from kvstore.compression.frame_format import GROUP, HEADER, PAGE_GROUP, PLANE
from kvstore.errors import IntegrityError
from kvstore.types import GroupKind, KVGroup, KVSpec

SPEC = KVSpec(
    block_tokens=8,
    page_tokens=2,
    groups=(
        KVGroup(layers=2, kv_heads=8, head_dim=1024),
        KVGroup(layers=2, kv_heads=2, head_dim=16, kind=GroupKind.SLIDING, window_tokens=64),
        KVGroup(layers=1, dtype="uint8", layout="opaque", page_bytes=9000, kind=GroupKind.STATE),
    ),
)
N_GROUPS, N_PLANES, N_PAGE_GROUPS = 3, 4, 2 * 4 * 2 + 2 + 2
GROUPS_AT = 160
PLANES_AT = GROUPS_AT + 32 * N_GROUPS
PAGE_GROUPS_AT = PLANES_AT + 16 * N_PLANES
ROW_AT = PAGE_GROUPS_AT + 24 * N_PAGE_GROUPS
STARTS = {
    "": (0, HEADER),
    "group": (GROUPS_AT, GROUP),
    "plane": (PLANES_AT, PLANE),
    "page": (PAGE_GROUPS_AT, PAGE_GROUP),
}


@pytest.fixture(scope="module")
def frame(make_frames: Callable[..., Any]) -> bytes:
    whole: bytes = make_frames(SPEC, 2).whole(1)
    return whole


@pytest.fixture(scope="module")
def frames(make_frames: Callable[..., Any]) -> Any:
    """Two frames to be spoilt; the second is ``frame``."""
    return make_frames(SPEC, 2)


def seal(header: bytes | bytearray) -> bytes:
    """The header with the checksum that its other bytes have."""
    return bytes(header[:-8]) + xxhash.xxh3_64_intdigest(bytes(header[:-8])).to_bytes(8, "little")


def changed(header: bytes, where: str, value: int | bytes) -> bytes:
    """A sealed header in which ``record[i].field`` has another value."""
    record, _, field = where.rpartition(".")
    name, _, index = record.partition("[")
    start, dtype = STARTS[name]
    assert dtype.fields is not None
    kind, offset = dtype.fields[field][:2]
    at = start + (int(index.rstrip("]")) if index else 0) * dtype.itemsize + offset
    raw = value if isinstance(value, bytes) else value.to_bytes(kind.itemsize, "little")
    return seal(header[:at] + raw.ljust(kind.itemsize, b"\0") + header[at + kind.itemsize :])


@pytest.mark.parametrize(
    ("where", "value", "words"),
    [
        ("magic", b"KVSFRAMF", "no frame starts here"),
        ("version", 0, "format version 0"),
        ("version", 2, "format version 2; this release reads version 1"),
        ("header_bytes", 0, "claims 0 bytes"),
        ("header_bytes", 4095, "claims 4095 bytes"),
        ("header_bytes", 8 << 20, "claims 8388608 bytes"),
        ("header_bytes", 1 << 20, "is cut off: 4096 bytes of 1048576"),
        ("codec", 1, "codec 1, which this release does not know"),
        ("flags", 1, "flags 0x01, which"),
        ("payload_offset", 8192, "the payload starts at 8192, not 4096"),
        ("payload_bytes", 0, "the payload has 0 bytes"),
        ("payload_bytes", 1 << 32, "the payload has 4294967296 bytes"),
        ("payload_bytes", 304, "the frame has"),
        ("raw_bytes", 0, "the block has 0 bytes"),
        ("raw_bytes", (1 << 64) - 1, "the block has 18446744073709551615 bytes"),
        ("raw_bytes", 100, "groups have more bytes than the block"),
        ("raw_bytes", 1 << 31, "the block 2147483648"),
        ("frame_bytes", 4096, "the frame has 4096 bytes, not"),
        ("n_groups", 0, "groups and planes don't add up"),
        ("n_groups", 2, "groups and planes don't add up"),
        ("n_groups", (1 << 32) - 1, "tables and row take"),
        ("n_planes", 5, "groups and planes don't add up"),
        ("n_planes", (1 << 32) - 1, "tables and row take"),
        ("n_page_groups", N_PAGE_GROUPS + 1, "planes and page groups don't add up"),
        ("n_page_groups", N_PAGE_GROUPS - 1, "planes and page groups don't add up"),
        ("n_page_groups", (1 << 32) - 1, "tables and row take"),
        ("row_bytes", 4096, "tables and row take"),
        ("row_bytes", 4096 - 8 - ROW_AT + 1, "tables and row take"),
        ("row_bytes", (1 << 32) - 1, "tables and row take"),
        ("extra_bytes", 1, "the extra digest has 1 bytes"),
        ("extra_bytes", 17, "the extra digest has 17 bytes"),
        ("place", 3, "its place is 3"),
        ("reserved", b"\0\1", "a reserved byte is set"),
        ("group[0].kind", 4, "a group is of an unknown kind"),
        ("group[1].dtype", 0, "a group is of an unknown kind"),
        ("group[2].layout", 3, "a group is of an unknown kind"),
        ("group[0].n_planes", 1, "groups and planes don't add up"),
        ("group[0].layers", 0, "a group has no pages"),
        ("group[0].layers", 1, "a raw page group has another size"),
        ("group[0].layers", (1 << 32) - 1, "groups have more bytes than the block"),
        ("group[0].pages", 0, "a group has no pages"),
        ("group[0].pages", (1 << 32) - 1, "groups have more bytes than the block"),
        ("group[2].page_bytes", 9000 - 8, "a plane's pages have no fitting size"),
        ("group[0].page_bytes", 65535, "planes don't make up their pages"),
        ("group[0].page_bytes", 1, "a plane's pages have no fitting size"),
        ("group[0].reserved", 1, "a reserved byte is set"),
        ("plane[0].kind", 9, "kind 9, codec 0"),
        ("plane[1].codec", 1, "kind 2, codec 1"),
        ("plane[2].flags", 256, "flags 0x0100"),
        ("plane[0].page_bytes", 0, "a plane's pages have no fitting size"),
        ("plane[0].page_bytes", (1 << 32) - 1, "a plane's pages have no fitting size"),
        ("plane[0].pages_per_group", 0, "a plane's pages have no fitting size"),
        ("plane[0].pages_per_group", 5, "a plane's pages have no fitting size"),
        ("plane[0].pages_per_group", 2, "a raw page group has another size"),
        ("plane[3].pages_per_group", 1, "planes and page groups don't add up"),
        ("plane[0].codec_data", 1, "a raw page group has another size"),
        ("page[0].offset", 1, "page groups overlap, leave gaps"),
        ("page[0].offset", 1 << 31, "page groups overlap, leave gaps"),
        ("page[3].stored_bytes", 32767, "a raw page group has another size"),
        ("page[3].raw_bytes", 32769, "a raw page group has another size"),
        (f"page[{N_PAGE_GROUPS - 1}].codec_data", 1, "a raw page group has another size"),
    ],
)
def test_a_header_that_is_sealed_but_wrong(frame: bytes, where: str, value: int | bytes, words: str) -> None:
    bad = changed(frame[:4096], where, value)
    with pytest.raises(FrameError, match=words):
        decode_header(bad)
    assert not verify_frame(bad + frame[4096:])


def test_a_page_group_over_another_is_refused(frame: bytes) -> None:
    bad = changed(frame[:4096], "page[1].offset", 0)
    with pytest.raises(FrameError, match="overlap"):
        decode_header(bad)


def test_what_may_change_does_no_harm(frame: bytes) -> None:
    """The table of cases is about the values, not about having been changed."""
    header = decode_header(changed(frame[:4096], "log_seq", 77))
    assert header.log_seq == 77
    assert decode_header(changed(frame[:4096], "row_bytes", 4096 - 8 - ROW_AT)).row[64:] == bytes(4024 - ROW_AT)
    # A checksum of a page group is a matter of the payload.
    wrong = changed(frame[:4096], "page[2].checksum", 5)
    decode_header(wrong)
    assert not verify_frame(wrong + frame[4096:])


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("version", 2),
        ("codec", 1),
        ("codec", 255),
        ("flags", 128),
        ("place", 9),
        ("reserved", b"\0" * 17 + b"\1"),
        ("row_bytes", 65 << 20),
        ("extra_bytes", 8),
    ],
)
def test_frames_of_later_releases_are_no_frames_and_no_crash(
    make_frames: Callable[..., Any], frame: bytes, where: str, value: int
) -> None:
    later = changed(frame[:4096], where, value)
    assert inspect(memoryview(later)) is None
    frames = make_frames(SPEC, 2)
    frames.headers[1] = np.frombuffer(later, np.uint8)
    assert frames.verify() == [True, False]


@pytest.mark.parametrize(
    "where",
    ["group[0].layers", "plane[1].kind", "plane[3].codec_data"]
    + [
        f"page[{i}].{field}"
        for i in (0, 17)
        for field in ("offset", "stored_bytes", "raw_bytes", "codec_data", "checksum")
    ],
)
def test_a_sealed_frame_with_another_table_is_no_hit(make_frames: Callable[..., Any], frame: bytes, where: str) -> None:
    frames = make_frames(SPEC, 2)
    frames.headers[1] = np.frombuffer(changed(frame[:4096], where, 3), np.uint8)
    assert frames.verify() == [True, False]


def test_a_flip_anywhere_in_a_header_is_an_error(frame: bytes) -> None:
    header = bytearray(frame[:4096])
    for at in range(4096):
        mask = 1 << at % 8 if at % 3 else 255
        header[at] ^= mask
        with pytest.raises(FrameError):
            decode_header(header)
        assert inspect(memoryview(header)) is None
        header[at] ^= mask
    decode_header(header)


def test_a_header_cut_off_anywhere_is_an_error(frame: bytes) -> None:
    for n in range(4096):
        with pytest.raises(FrameError):
            decode_header(frame[:n])
        assert inspect(memoryview(frame)[:n]) is None
    decode_header(frame[:4096])


def test_a_payload_cut_off_anywhere_does_not_verify(frame: bytes) -> None:
    header = decode_header(frame)
    end = header.payload_offset + header.payload_bytes
    assert verify_frame(frame[:end])
    for n in [*range(end - 50, end), *range(4096, end, 4095)]:
        assert not verify_frame(frame[:n])


def test_the_length_of_a_header_is_told_by_its_start(frame: bytes, make_frames: Callable[..., Any]) -> None:
    assert header_bytes_of(frame[:4096]) == header_bytes_of(frame[:16]) == 4096
    long = make_frames(KVSpec(block_tokens=1, groups=(KVGroup(600, 1, 1, dtype="int8"),)), 1).whole(0)
    assert header_bytes_of(memoryview(long)[:4096]) == 4 * 4096
    assert inspect(memoryview(long)[:4096]) is None
    assert inspect(memoryview(long)[: 4 * 4096]) is not None
    for bad in (b"", frame[:15], bytes(4096), b"KVSFRAME" + b"\xff" * 8, b"\0" + frame[:4095]):
        assert header_bytes_of(bad) is None


def test_any_kind_of_buffer_is_taken_and_copied(frame: bytes) -> None:
    array = np.frombuffer(frame, np.uint8).copy()
    header = decode_header(array.view(np.uint32).data)
    assert header.key == decode_header(bytearray(frame)).key == decode_header(frame).key
    before = header.page_groups().tobytes()
    array[:] = 0
    assert header.page_groups().tobytes() == before
    assert header.row == decode_header(frame).row


def test_an_error_of_a_frame_is_one_of_integrity() -> None:
    assert issubclass(FrameError, IntegrityError)


def survives(data: bytes) -> None:
    """Only FrameError, and what does decode keeps the promises that readers build on."""
    length = header_bytes_of(data)
    facts = inspect(memoryview(data))
    try:
        header: FrameHeader | None = decode_header(data)
    except FrameError:
        header = None
    whole = verify_frame(data)
    if header is None:
        assert not whole
        return
    assert facts is not None
    assert length == header.header_bytes == facts.header_bytes <= len(data)
    table = header.page_groups()
    ends = table["offset"].astype(np.int64) + table["stored_bytes"]
    assert int(ends.max()) == int(table["stored_bytes"].sum(dtype=np.int64)) == header.payload_bytes
    assert header.frame_bytes % 4096 == 0
    assert header.frame_bytes >= header.payload_offset + header.payload_bytes
    assert len(header.extra_digest) in (0, 16)
    for group in header.groups:
        assert sum(plane.page_bytes for plane in group.planes) == group.page_bytes
        for plane in group.planes:
            assert plane.page_groups.shape == (group.layers, -(-group.pages // plane.pages_per_group))
    assert sum(group.layers * group.pages * group.page_bytes for group in header.groups) == header.raw_bytes


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    start=st.sampled_from([b"", b"KVSFRAME", b"KVSFRAME\1\0\0\0\0\x10\0\0"]),
    data=st.binary(max_size=200),
    sealed=st.booleans(),
)
def test_noise_is_survived(start: bytes, data: bytes, sealed: bool) -> None:
    noise = (start + data).ljust(4096, b"\0")
    survives(start + data)
    survives(seal(noise) if sealed else noise)


EDGES = st.sampled_from([0, 1, 2, 3, 255, 4096, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, (1 << 64) - 1])
EDITS = st.lists(
    st.tuples(st.integers(0, ROW_AT + 80), st.integers(0, 255) | EDGES, st.sampled_from([1, 2, 4, 8])),
    min_size=1,
    max_size=6,
)


@settings(max_examples=700, deadline=None, derandomize=True)
@given(edits=EDITS, sealed=st.booleans(), aligned=st.booleans())
def test_mutations_are_survived(
    frames: Any, frame: bytes, edits: list[tuple[int, int, int]], sealed: bool, aligned: bool
) -> None:
    header = bytearray(frame[:4096])
    for at, value, size in edits:
        place = at // size * size if aligned else at
        header[place : place + size] = (value % (1 << 8 * size)).to_bytes(size, "little")
    whole = (seal(header) if sealed else bytes(header)) + frame[4096:]
    survives(whole)
    # What a layout takes for its own is also good to those who don't know the layout.
    frames.headers[1] = np.frombuffer(whole[:4096], np.uint8)
    assert not frames.verify()[1] or verify_frame(whole)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(counts=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 4)), min_size=1, max_size=4), data=st.data())
def test_counts_that_nearly_fit_are_survived(frame: bytes, counts: list[tuple[int, int]], data: st.DataObject) -> None:
    """Small changes to the fields that size other things, sealed: they pass the first checks most often."""
    fields = [
        ("n_groups", 3), ("n_planes", 4), ("n_page_groups", N_PAGE_GROUPS), ("group[0].layers", 2),
        ("group[1].pages", 4), ("plane[2].pages_per_group", 4), ("group[0].n_planes", 2),
    ]  # fmt: skip
    header = frame[:4096]
    for which, delta in counts:
        name, value = fields[which]
        header = changed(header, name, max(0, value + delta - 2))
    for i in range(data.draw(st.integers(0, 3))):
        header = changed(header, f"page[{i}].offset", data.draw(st.integers(0, 1 << 18)))
    survives(header + frame[4096:])
