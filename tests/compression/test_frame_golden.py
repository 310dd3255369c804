"""Format version 1, frozen: one frame written down byte by byte from the tables of docs/FORMAT.md.

A change that breaks this test is a new format version, not a refactoring.
"""

from __future__ import annotations

import numpy as np

from kvstore.compression.frame import (
    FrameFacts,
    FrameLayout,
    FrameRow,
    Place,
    PlaneKind,
    decode_header,
    inspect,
    verify_frame,
)
from kvstore.types import GroupKind, KVGroup, KVSpec

USED = bytes.fromhex(
    "4b56534652414d45"  # magic
    "0100"  # format version
    "00"  # codec: raw
    "00"  # flags
    "00100000"  # header bytes
    "00100000"  # offset of the payload
    "02000000"  # tokens per block
    "01000000"  # tokens per page
    "03000000"  # groups
    "04000000"  # planes
    "0a000000"  # page groups
    "1400020000000000"  # payload bytes
    "1400020000000000"  # raw bytes
    "0020020000000000"  # frame bytes
    "a0a1a2a3a4a5a6a7a8a9aaabacadaeaf"  # namespace
    "0807060504030201"  # log sequence number
    "101112131415161718191a1b1c1d1e1f"  # key
    "303132333435363738393a3b3c3d3e3f"  # parent
    "505152535455565758595a5b5c5d5e5f"  # extra digest
    "04000000"  # bytes of the row
    "10"  # bytes of the extra digest
    "01"  # place: first
    "000000000000000000000000000000000000"  # zeros
    # sliding, bfloat16, NHD, 2 planes; 2 layers, 8 x 1024, window 96, 2 pages of 32768
    "0103000202000000080000000004000060000000008000000200000000000000"
    # mla, int8, HND, 1 plane; 1 layer, 1 x 3, no window, 2 pages of 3
    "0306010101000000010000000300000000000000030000000200000000000000"
    # state, uint8, opaque, 1 plane; 1 layer, 1 x 1, no window, 2 pages of 7
    "0207020101000000010000000100000000000000070000000200000000000000"
    "01000000004000000100000000000000"  # K, raw, flags, 16384 of a page, 1 page to a page group, codec data
    "02000000004000000100000000000000"  # V
    "00000000030000000200000000000000"  # all, 3 of a page, 2 pages to a page group
    "00000000070000000200000000000000"  # all, 7 of a page
    "000000000040000000400000000000002c81dd900f4ac94a"  # K of layer 0, page 0
    "008000000040000000400000000000007c5763426e5250e6"  # K of layer 0, page 1
    "000001000040000000400000000000009c8047a3087419d8"  # K of layer 1, page 0
    "008001000040000000400000000000001ea277fbfadef1c8"  # K of layer 1, page 1
    "00400000004000000040000000000000104a40349c474f6f"  # V of layer 0, page 0
    "00c000000040000000400000000000007767891b85b42ef2"  # V of layer 0, page 1
    "004001000040000000400000000000009c984983c5b67b76"  # V of layer 1, page 0
    "00c001000040000000400000000000006df4c193171869ab"  # V of layer 1, page 1
    "00000200060000000600000000000000331ac911e7859078"  # latents
    "060002000e0000000e000000000000009a605e9cdff52edc"  # states
    "01000080"  # row: one token, 0x80000001
)
CHECKSUM = bytes.fromhex("4ef612735657917c")
HEADER = USED + bytes(4096 - len(USED) - len(CHECKSUM)) + CHECKSUM
PAYLOAD = bytes((7 * i * i + i // 97) % 256 for i in range(131092))
PADDING = bytes(135168 - 131092)

SPEC = KVSpec(
    block_tokens=2,
    page_tokens=1,
    groups=(
        KVGroup(layers=2, kv_heads=8, head_dim=1024, kind=GroupKind.SLIDING, window_tokens=96),
        KVGroup(layers=1, head_dim=3, dtype="int8", kind=GroupKind.MLA, layout="HND"),
        KVGroup(layers=1, dtype="uint8", kind=GroupKind.STATE, layout="opaque", page_bytes=7),
    ),
)
NAMESPACE = bytes(range(0xA0, 0xB0))
KEY, PARENT, EXTRA = bytes(range(0x10, 0x20)), bytes(range(0x30, 0x40)), bytes(range(0x50, 0x60))
ROW = bytes.fromhex("01000080")
LOG_SEQ = 0x0102030405060708


def test_the_encoder_writes_these_bytes() -> None:
    layout = FrameLayout.of(SPEC, 8, NAMESPACE)
    assert (layout.header_bytes, layout.payload_bytes, layout.frame_bytes) == (4096, 131092, 139264)
    payload = np.frombuffer(PAYLOAD, np.uint8)
    header = layout.encode_headers(
        np.frombuffer(KEY, np.uint8)[None],
        np.frombuffer(PARENT, np.uint8)[None],
        [FrameRow(ROW, EXTRA)],
        np.array([LOG_SEQ]),
        np.array([payload.ctypes.data], np.uint64),
        np.array([True]),
    )
    assert header.tobytes() == HEADER


def test_these_bytes_say_what_they_said() -> None:
    header = decode_header(HEADER)
    assert (header.version, header.codec, header.header_bytes, header.payload_offset) == (1, 0, 4096, 4096)
    assert (header.payload_bytes, header.raw_bytes, header.frame_bytes) == (131092, 131092, 139264)
    assert (header.block_tokens, header.page_tokens, header.log_seq) == (2, 1, LOG_SEQ)
    assert (header.namespace, header.key, header.parent) == (NAMESPACE, KEY, PARENT)
    assert (header.row, header.extra_digest, header.place) == (ROW, EXTRA, Place.FIRST)
    sliding, mla, state = header.groups
    assert (sliding.kind, sliding.dtype, sliding.layout) == (GroupKind.SLIDING, "bfloat16", "NHD")
    assert (sliding.layers, sliding.kv_heads, sliding.head_dim, sliding.window_tokens) == (2, 8, 1024, 96)
    assert (sliding.page_bytes, sliding.pages) == (32768, 2)
    assert [plane.kind for plane in sliding.planes] == [PlaneKind.K, PlaneKind.V]
    assert sliding.planes[1].page_groups["offset"].tolist() == [[16384, 49152], [81920, 114688]]
    assert (mla.kind, mla.dtype, mla.layout, mla.head_dim) == (GroupKind.MLA, "int8", "HND", 3)
    assert mla.window_tokens is None
    assert (mla.planes[0].kind, mla.planes[0].page_bytes, mla.planes[0].pages_per_group) == (PlaneKind.WHOLE, 3, 2)
    assert (state.kind, state.dtype, state.layout) == (GroupKind.STATE, "uint8", "opaque")
    assert state.planes[0].page_groups[["offset", "stored_bytes", "raw_bytes"]].tolist() == [[(131078, 14, 14)]]
    assert len(header.page_groups()) == 10


def test_a_catalog_is_rebuilt_from_these_bytes() -> None:
    facts = inspect(memoryview(HEADER + PAYLOAD + PADDING))
    assert facts == FrameFacts(KEY, PARENT, NAMESPACE, 139264, 131092, 4096, LOG_SEQ, True)


def test_the_whole_frame_verifies() -> None:
    assert verify_frame(HEADER + PAYLOAD + PADDING)
    assert not verify_frame(HEADER + PAYLOAD[:-1] + b"x" + PADDING)
