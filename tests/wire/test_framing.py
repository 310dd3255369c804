"""Frames: what was sent comes back, and whatever else arrives is a ProtocolError."""

from __future__ import annotations

import contextlib
import struct
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvstore.errors import BadInputError, ProtocolError
from kvstore.wire import framing
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.framing import (
    FLAG_NO_REPLY,
    HEADER_BYTES,
    KNOWN_FLAGS,
    MAX_PAYLOAD_BYTES,
    MAX_SMALL_PAYLOAD_BYTES,
    PROMPTS,
    REPLIES,
    REQUESTS,
    Method,
    decode,
    decode_header,
    encode,
)

U32, U64 = (1 << 32) - 1, (1 << 64) - 1
NUMBERS = frozenset(map(int, Method))
KINDS = sorted({*REQUESTS.values(), *REPLIES.values(), pb.Error}, key=lambda kind: kind.__name__)
SCALARS: dict[int, Any] = {
    FieldDescriptor.TYPE_UINT32: st.integers(0, U32),
    FieldDescriptor.TYPE_UINT64: st.integers(0, U64),
    FieldDescriptor.TYPE_INT64: st.integers(-(1 << 63), (1 << 63) - 1),
    FieldDescriptor.TYPE_SINT32: st.integers(-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.TYPE_DOUBLE: st.floats(allow_nan=False),
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_STRING: st.text(max_size=20),
    FieldDescriptor.TYPE_BYTES: st.binary(max_size=40),
}


@st.composite
def message_of(draw: st.DrawFn, kind: Any) -> Any:
    """Any message of a kind, all its fields drawn."""
    message = kind()
    for field in kind.DESCRIPTOR.fields:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            value_type = field.message_type.fields_by_name["value"].type
            getattr(message, field.name).update(
                draw(st.dictionaries(st.text(max_size=9), SCALARS[value_type], max_size=3))
            )
        elif field.message_type is not None:
            part = getattr(pb, field.message_type.name)
            if field.is_repeated:
                getattr(message, field.name).extend(draw(st.lists(message_of(part), max_size=3)))
            elif draw(st.booleans()):
                getattr(message, field.name).CopyFrom(draw(message_of(part)))
        elif field.enum_type is not None:
            numbers = [value.number for value in field.enum_type.values]
            setattr(message, field.name, draw(st.sampled_from(numbers)))
        elif field.is_repeated:
            getattr(message, field.name).extend(draw(st.lists(SCALARS[field.type], max_size=5)))
        else:
            setattr(message, field.name, draw(SCALARS[field.type]))
    return message


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.data(), st.sampled_from(list(Method)), st.integers(0, KNOWN_FLAGS), st.integers(0, U64))
def test_what_was_sent_comes_back(data: st.DataObject, method: Method, flags: int, request_id: int) -> None:
    kind = data.draw(st.sampled_from([table[method] for table in (REQUESTS, REPLIES) if method in table]))
    message = data.draw(message_of(kind))
    frame = encode(method, flags, request_id, message)
    length, *rest = decode_header(memoryview(frame)[:HEADER_BYTES])
    assert rest == [method, flags, request_id]
    assert len(frame) == HEADER_BYTES + length
    assert decode(kind, frame[HEADER_BYTES:]) == message


def test_the_header_is_what_the_format_says() -> None:
    frame = encode(Method.RELEASE, FLAG_NO_REPLY, 0x1122334455667788, pb.ReleaseRequest(lease_id=1))
    assert frame == bytes.fromhex("02000000 0700 0400 8877665544332211 0801")


def test_every_method_has_its_own_number_and_its_messages() -> None:
    assert sorted(REQUESTS) == sorted(Method)
    assert len(Method.__members__) == len(Method)  # no number twice: that would be another name for the first
    assert set(REQUESTS) - set(REPLIES) == {Method.EVENT}


@settings(max_examples=1500, deadline=None, derandomize=True)
@given(st.binary(max_size=HEADER_BYTES + 4))
@example(b"")
@example(bytes(HEADER_BYTES - 1))
@example(bytes(HEADER_BYTES))
def test_any_bytes_are_a_sound_header_or_a_protocol_error(data: bytes) -> None:
    try:
        length, method, flags, request_id = decode_header(data)
    except ProtocolError:
        if len(data) < HEADER_BYTES:
            return
        length, method, flags, _ = struct.unpack("<IHHQ", data[:HEADER_BYTES])
        assert length > MAX_PAYLOAD_BYTES or method not in set(Method) or flags > 7
    else:
        assert struct.pack("<IHHQ", length, method, flags, request_id) == data[:HEADER_BYTES]
        assert length <= MAX_PAYLOAD_BYTES
        assert method in set(Method)
        assert flags <= 7


@settings(max_examples=500, deadline=None, derandomize=True)
@given(
    st.sampled_from(
        [0, 17, MAX_SMALL_PAYLOAD_BYTES, MAX_SMALL_PAYLOAD_BYTES + 1, MAX_PAYLOAD_BYTES, MAX_PAYLOAD_BYTES + 1, U32]
    )
    | st.integers(0, U32),
    st.sampled_from([0, 1, max(Method), max(Method) + 1, 65535]) | st.integers(0, 65535),
    st.sampled_from([0, 1, 7, 8, 65535]) | st.integers(0, 65535),
    st.integers(0, U64),
)
def test_headers_near_the_limits(length: int, method: int, flags: int, request_id: int) -> None:
    data = struct.pack("<IHHQ", length, method, flags, request_id)
    most = MAX_PAYLOAD_BYTES if method in PROMPTS or flags & 1 else MAX_SMALL_PAYLOAD_BYTES
    if length <= most and method in NUMBERS and flags <= 7:
        assert decode_header(data) == (length, method, flags, request_id)
    else:
        with pytest.raises(ProtocolError) as caught:
            decode_header(bytearray(data))
        assert any(text in str(caught.value) for text in (str(length), str(method), hex(flags)))


@settings(max_examples=1500, deadline=None, derandomize=True)
@given(st.sampled_from(KINDS), st.binary(max_size=60))
@example(pb.HelloRequest, b"\x1a\x02\xff\xfe")  # a text that is not UTF-8
@example(pb.LeaseRequest, b"\x0a\xff\xff\xff\xff\x0f")  # a part of 4 GiB
@example(pb.LeaseRequest, b"\x0b" * 60)  # groups in groups
def test_any_payload_is_a_message_or_a_protocol_error(kind: Any, payload: bytes) -> None:
    try:
        message = decode(kind, payload)
    except ProtocolError:
        return
    assert isinstance(message, kind)
    message.SerializeToString()


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.data(), st.sampled_from(KINDS))
def test_damaged_messages_are_messages_or_protocol_errors(data: st.DataObject, kind: Any) -> None:
    payload = bytearray(data.draw(message_of(kind)).SerializeToString())
    if payload:
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
        del payload[data.draw(st.integers(0, len(payload))) :]
    with contextlib.suppress(ProtocolError):
        assert isinstance(decode(kind, bytes(payload)), kind)


def test_a_payload_that_can_not_be_parsed_is_named() -> None:
    with pytest.raises(ProtocolError, match="a HelloRequest of 2 bytes can't be parsed"):
        decode(pb.HelloRequest, b"\x1a\x09")


def test_a_message_longer_than_a_frame_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(framing, "MAX_PAYLOAD_BYTES", 100)
    assert len(encode(Method.STATS, 0, 1, pb.OpenNamespaceRequest(name="x" * 98))) == HEADER_BYTES + 100
    with pytest.raises(BadInputError, match="OPEN_NAMESPACE message has 101 bytes; the most is 100"):
        encode(Method.OPEN_NAMESPACE, 0, 1, pb.OpenNamespaceRequest(name="x" * 99))
