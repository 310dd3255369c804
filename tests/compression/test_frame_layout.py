"""Batches of frames: what is written is what is read, and whatever differs is no hit."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.compression.frame import (
    FrameGroup,
    FrameLayout,
    FramePlane,
    FrameRow,
    Place,
    PlaneKind,
    decode_header,
    inspect,
    verify_frame,
)
from kvstore.compression.frame_format import DTYPE_NUMBERS, KIND_NUMBERS, LAYOUT_NUMBERS
from kvstore.errors import BadInputError
from kvstore.types import DTYPE_BYTES, GroupKind, KVGroup, KVSpec

LEAST = 16 << 10


@st.composite
def kv_groups(draw: st.DrawFn) -> KVGroup:
    kind = draw(st.sampled_from(GroupKind))
    layout = draw(st.sampled_from(["NHD", "HND", "opaque"]))
    opaque_bytes = st.one_of(st.integers(1, 50), st.integers(16000, 17000), st.integers(32000, 34000))
    return KVGroup(
        layers=draw(st.integers(1, 4)),
        kv_heads=draw(st.integers(1, 8)),
        head_dim=draw(st.sampled_from([1, 3, 64, 128, 576, 1024])),
        dtype=draw(st.sampled_from(sorted(DTYPE_BYTES))),
        kind=kind,
        layout=layout,
        window_tokens=draw(st.integers(1, 1 << 31)) if kind is GroupKind.SLIDING else None,
        page_bytes=draw(opaque_bytes) if layout == "opaque" else None,
    )


@st.composite
def specs(draw: st.DrawFn) -> KVSpec:
    page_tokens = draw(st.sampled_from([1, 2, 7]))
    groups = tuple(draw(st.lists(kv_groups(), min_size=1, max_size=3)))
    return KVSpec(page_tokens * draw(st.integers(1, 9)), groups, page_tokens)


def pieces(spec: KVSpec, group: KVGroup, decoded: FrameGroup) -> list[tuple[FramePlane, int, int, int, bool]]:
    """Plane, layer, first page, pages, and whether one piece holds all of a page, in the order of the table."""
    pages = spec.block_tokens // spec.tokens_per_page
    return [
        (plane, layer, page, min(plane.pages_per_group, pages - page), plane.kind is PlaneKind.WHOLE)
        for plane in decoded.planes
        for layer in range(group.layers)
        for page in range(0, pages, plane.pages_per_group)
    ]


def check_table(spec: KVSpec, groups: tuple[FrameGroup, ...], payload: bytes) -> None:
    """Every entry against where the bytes of that page must lie in a raw block, worked out page by page."""
    start = 0
    pages = spec.block_tokens // spec.tokens_per_page
    covered = np.zeros(len(payload), np.uint8)
    for group, decoded in zip(spec.groups, groups, strict=True):
        page_bytes = group.bytes_per_page(spec.tokens_per_page)
        assert (decoded.kind, decoded.dtype, decoded.layout) == (group.kind, group.dtype, group.layout)
        assert (decoded.layers, decoded.kv_heads, decoded.head_dim) == (group.layers, group.kv_heads, group.head_dim)
        assert (decoded.window_tokens, decoded.page_bytes, decoded.pages) == (group.window_tokens, page_bytes, pages)
        entries = np.concatenate([plane.page_groups.ravel() for plane in decoded.planes]).tolist()
        for entry, (plane, layer, page, n, whole) in zip(entries, pieces(spec, group, decoded), strict=True):
            size = n * page_bytes if whole else page_bytes // 2
            at = start + (layer * pages + page) * page_bytes + (size if plane.kind is PlaneKind.V else 0)
            assert whole or n == 1
            assert entry == (at, size, size, 0, xxhash.xxh3_64_intdigest(payload[at : at + size]))
            covered[at : at + size] += 1
        start += group.layers * pages * page_bytes
    assert (covered == 1).all()


@settings(max_examples=80, deadline=None, derandomize=True)
@given(spec=specs(), seed=st.integers(0, 1000), row_bytes_max=st.sampled_from([0, 4, 100, 5000]))
def test_frames_of_any_spec_come_back(
    make_frames: Callable[..., Any], spec: KVSpec, seed: int, row_bytes_max: int
) -> None:
    frames = make_frames(spec, 3, seed, row_bytes_max)
    layout = frames.layout
    assert layout.header_bytes % 4096 == layout.frame_bytes % 4096 == frames.headers.ctypes.data % 4096 == 0
    assert layout.payload_bytes == spec.block_bytes
    assert frames.verify() == [True] * 3
    for i in range(3):
        header = decode_header(frames.headers[i].tobytes())
        assert (header.key, header.parent) == (frames.keys[i].tobytes(), frames.parents[i].tobytes())
        assert (header.row, header.extra_digest) == frames.rows[i]
        assert (header.log_seq, header.place == Place.FIRST) == (frames.log_seqs[i], frames.firsts[i])
        assert (header.block_tokens, header.page_tokens) == (spec.block_tokens, spec.tokens_per_page)
        assert header.payload_bytes == header.raw_bytes == spec.block_bytes
        assert header.payload_offset == header.header_bytes == layout.header_bytes
        assert header.frame_bytes == layout.frame_bytes == len(frames.whole(i))
        check_table(spec, header.groups, frames.payloads[i].tobytes())
        assert verify_frame(frames.whole(i))
        facts = inspect(memoryview(frames.whole(i)))
        assert facts is not None
        assert facts[:3] == (header.key, header.parent, header.namespace)
        assert facts[3:6] == (layout.frame_bytes, layout.payload_bytes, layout.header_bytes)
        assert (facts.log_seq, facts.is_first) == (header.log_seq, bool(frames.firsts[i]))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(spec=specs())
def test_page_groups_have_the_promised_size(spec: KVSpec) -> None:
    layout = FrameLayout.of(spec, 4, bytes(16))
    n = 0
    memory = np.zeros(layout.payload_bytes, np.uint8)
    ids = np.zeros((1, 16), np.uint8)
    header = layout.encode_headers(ids, ids, [FrameRow(b"")], np.zeros(1, np.int64), _address(memory))
    for group, decoded in zip(spec.groups, decode_header(header.tobytes()).groups, strict=True):
        page_bytes = group.bytes_per_page(spec.tokens_per_page)
        pages = spec.block_tokens // spec.tokens_per_page
        two = group.layout != "opaque" and group.kind in (GroupKind.FULL, GroupKind.SLIDING)
        split = two and page_bytes >= 2 * LEAST
        assert [plane.kind for plane in decoded.planes] == ([PlaneKind.K, PlaneKind.V] if split else [PlaneKind.WHOLE])
        for plane in decoded.planes:
            whole_ones = plane.page_groups["raw_bytes"][:, : pages // plane.pages_per_group]
            assert plane.pages_per_group == pages or (whole_ones >= LEAST).all()
            assert plane.pages_per_group == 1 or (plane.pages_per_group - 1) * page_bytes < LEAST
            n += plane.page_groups.size
    assert n == len(decode_header(header.tobytes()).page_groups())


def _address(memory: np.ndarray[Any, np.dtype[np.uint8]]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    return np.array([memory.ctypes.data], np.uint64)


@pytest.mark.parametrize("mask", [1 << bit for bit in range(8)] + [255])
def test_a_flip_anywhere_in_a_header_is_found(make_frames: Callable[..., Any], all_kinds: KVSpec, mask: int) -> None:
    frames = make_frames(all_kinds, 1)
    n = frames.layout.header_bytes
    flipped = np.repeat(frames.headers, n, axis=0)
    flipped[np.arange(n), np.arange(n)] ^= mask
    one = np.zeros(n, np.intp)
    good = frames.layout.verify(flipped, frames.addresses[one], frames.keys[one], frames.parents[one])
    assert not good.any(), f"undetected at {np.flatnonzero(good)[:10]}"
    for header in flipped:
        assert inspect(memoryview(header)) is None
    assert frames.verify() == [True]


def test_a_flip_anywhere_in_a_payload_is_found_and_only_there(
    make_frames: Callable[..., Any], all_kinds: KVSpec
) -> None:
    frames = make_frames(all_kinds, 4)
    rng = np.random.default_rng(3)
    table = decode_header(frames.headers[0].tobytes()).page_groups()
    first = table["offset"].astype(np.int64)
    last = first + table["stored_bytes"] - 1
    places = np.concatenate((first, last, rng.integers(0, frames.layout.payload_bytes, 200)))
    assert {0, frames.layout.payload_bytes - 1} <= set(places.tolist())
    for place in places.tolist():
        i = int(rng.integers(4))
        mask = np.uint8(1 << rng.integers(8))
        frames.payloads[i, place] ^= mask
        assert frames.verify() == [j != i for j in range(4)]
        assert not verify_frame(frames.whole(i))
        frames.payloads[i, place] ^= mask
    assert frames.verify() == [True] * 4


def test_page_groups_that_changed_places_are_found(make_frames: Callable[..., Any], all_kinds: KVSpec) -> None:
    frames = make_frames(all_kinds, 1)
    page = frames.payloads[0, : 32 << 10].copy()
    frames.payloads[0, : 32 << 10] = frames.payloads[0, 32 << 10 : 64 << 10]
    frames.payloads[0, 32 << 10 : 64 << 10] = page
    assert frames.verify() == [False]


def test_frames_of_others_are_no_hits(make_frames: Callable[..., Any], all_kinds: KVSpec) -> None:
    frames = make_frames(all_kinds, 3)
    layout, headers, at = frames.layout, frames.headers, frames.addresses
    assert layout.verify(headers, at, frames.keys[[0, 2, 1]], frames.parents).tolist() == [True, False, False]
    assert layout.verify(headers, at, frames.keys, frames.parents[[1, 0, 2]]).tolist() == [False, False, True]
    assert layout.verify(headers[[1, 0, 2]], at, frames.keys[[1, 0, 2]], frames.parents[[1, 0, 2]]).tolist() == [
        False, False, True,
    ]  # fmt: skip
    assert not FrameLayout.of(all_kinds, 64, bytes(16)).verify(headers, at, frames.keys, frames.parents).any()


def other_specs(spec: KVSpec) -> list[KVSpec]:
    """Specs whose blocks have the same size and yet mean something else."""
    first = spec.groups[0]
    changed = [
        replace(first, dtype="float16"),
        replace(first, layout="HND"),
        replace(first, kv_heads=4, head_dim=256),
        replace(first, layers=1, kv_heads=16),
        replace(first, kind=GroupKind.SLIDING, window_tokens=9),
        replace(first, layout="opaque", page_bytes=first.bytes_per_page(16)),
    ]
    return [replace(spec, groups=(group, *spec.groups[1:])) for group in changed]


def test_frames_of_another_layout_are_no_hits(make_frames: Callable[..., Any], all_kinds: KVSpec) -> None:
    frames = make_frames(all_kinds, 1)
    for spec in other_specs(all_kinds):
        other = FrameLayout.of(spec, 64, frames.layout.namespace_digest)
        assert (other.payload_bytes, other.header_bytes) == (frames.layout.payload_bytes, frames.layout.header_bytes)
        assert not other.verify(frames.headers, frames.addresses, frames.keys, frames.parents).any()


def test_zeros_and_noise_are_no_hits(make_frames: Callable[..., Any], all_kinds: KVSpec) -> None:
    frames = make_frames(all_kinds, 3)
    rng = np.random.default_rng(8)
    frames.headers[0] = 0
    frames.headers[1] = rng.integers(0, 256, frames.layout.header_bytes, dtype=np.uint8)
    assert frames.verify() == [False, False, True]


def test_what_one_layout_wrote_stays_readable_without_it(make_frames: Callable[..., Any]) -> None:
    """A frame with a header of several sectors: 4,000 page groups."""
    spec = KVSpec(block_tokens=1, groups=(KVGroup(layers=4000, kv_heads=1, head_dim=3, dtype="int8"),))
    frames = make_frames(spec, 2, row_bytes_max=4)
    assert frames.layout.header_bytes == 24 * 4096
    assert frames.verify() == [True, True]
    assert verify_frame(frames.whole(1))


def test_a_spec_of_too_many_pieces_is_refused_with_a_way_out() -> None:
    spec = KVSpec(block_tokens=1, groups=tuple(KVGroup(1 << 16, 1, 1, dtype="int8") for _ in range(4)))
    with pytest.raises(BadInputError, match="the most is 4194304: describe its layers"):
        FrameLayout.of(spec, 4, bytes(16))
    with pytest.raises(BadInputError, match="namespace_digest is 15 bytes"):
        FrameLayout.of(KVSpec.opaque(1, 1), 4, bytes(15))
    with pytest.raises(BadInputError, match="row_bytes_max is -1"):
        FrameLayout.of(KVSpec.opaque(1, 1), -1, bytes(16))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rows": [FrameRow(bytes(65))]}, "a row has 65 bytes; frames of this layout have room for 64"),
        ({"rows": [FrameRow(b"r", bytes(15))]}, "an extra digest has 15 bytes"),
        ({"rows": [FrameRow(b"r")] * 2}, "keys are uint8 \\(1, 16\\); give uint8 \\[2, 16\\]"),
        ({"keys": np.zeros((1, 15), np.uint8)}, "keys are"),
        ({"parents": np.zeros((1, 16), np.int8)}, "parents are int8"),
        ({"log_seqs": np.zeros(2, np.int64)}, "log_seqs has shape"),
        ({"payload_addresses": np.zeros((1, 1), np.uint64)}, "payload_addresses has shape"),
        ({"firsts": np.zeros(2, np.bool_)}, "firsts has shape"),
        ({"out": np.zeros((1, 4095), np.uint8)}, "headers are uint8 \\(1, 4095\\)"),
        ({"out": np.zeros((1, 8192), np.uint8)[:, ::2]}, "headers are uint8 \\(1, 4096\\); give contiguous"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change: dict[str, Any], words: str) -> None:
    layout = FrameLayout.of(KVSpec.opaque(16, 100), 64, bytes(16))
    memory = np.zeros(100, np.uint8)
    arguments: dict[str, Any] = {
        "keys": np.zeros((1, 16), np.uint8),
        "parents": np.zeros((1, 16), np.uint8),
        "rows": [FrameRow(b"row")],
        "log_seqs": np.zeros(1, np.int64),
        "payload_addresses": _address(memory),
    }
    layout.encode_headers(**arguments)
    with pytest.raises(BadInputError, match=words):
        layout.encode_headers(**{**arguments, **change})
    with pytest.raises(BadInputError, match="headers are"):
        layout.verify(np.zeros((1, 4096), np.int8), _address(memory), *[arguments["keys"]] * 2)


def test_headers_go_where_they_are_wanted(make_frames: Callable[..., Any], all_kinds: KVSpec) -> None:
    frames = make_frames(all_kinds, 3)
    out = np.full((3, frames.layout.header_bytes), 255, np.uint8)
    arguments = (frames.keys, frames.parents, frames.rows, frames.log_seqs, frames.addresses, frames.firsts)
    assert frames.layout.encode_headers(*arguments, out=out) is out
    assert np.array_equal(out, frames.headers)


def test_no_frames_are_no_work() -> None:
    layout = FrameLayout.of(KVSpec.opaque(16, 100), 64, bytes(16))
    ids, none = np.zeros((0, 16), np.uint8), np.zeros(0, np.uint64)
    headers = layout.encode_headers(ids, ids, [], np.zeros(0, np.int64), none)
    assert headers.shape == (0, 4096)
    assert layout.verify(headers, none, ids, ids).shape == (0,)


def test_a_layout_serves_many_threads(make_frames: Callable[..., Any], all_kinds: KVSpec) -> None:
    frames = make_frames(all_kinds, 4)
    arguments = (frames.keys, frames.parents, frames.rows, frames.log_seqs, frames.addresses, frames.firsts)
    expected = frames.headers.tobytes()

    def work(_: int) -> bool:
        same = (
            frames.layout.encode_headers(*arguments).tobytes() == expected and all(frames.verify()) for _ in range(20)
        )
        return all(same)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


def test_every_name_of_a_spec_has_its_number() -> None:
    assert set(DTYPE_NUMBERS) == set(DTYPE_BYTES)
    assert set(KIND_NUMBERS) == set(GroupKind)
    assert set(LAYOUT_NUMBERS) == {"NHD", "HND", "opaque"}
    for numbers in (DTYPE_NUMBERS, KIND_NUMBERS, LAYOUT_NUMBERS):
        assert len(set(numbers.values())) == len(numbers)
