from kvstore.wire import kvstore_pb2 as _kvstore_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SessionMessage(_message.Message):
    __slots__ = ("hello", "event", "message_bytes_max")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    hello: _kvstore_pb2.HelloReply
    event: _kvstore_pb2.Event
    message_bytes_max: int
    def __init__(self, hello: _Optional[_Union[_kvstore_pb2.HelloReply, _Mapping]] = ..., event: _Optional[_Union[_kvstore_pb2.Event, _Mapping]] = ..., message_bytes_max: _Optional[int] = ...) -> None: ...

class ReadRequest(_message.Message):
    __slots__ = ("lease_id", "lease", "first", "n_blocks", "chunk_bytes_max", "slots")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    N_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    lease: _kvstore_pb2.LeaseRequest
    first: int
    n_blocks: int
    chunk_bytes_max: int
    slots: bytes
    def __init__(self, lease_id: _Optional[int] = ..., lease: _Optional[_Union[_kvstore_pb2.LeaseRequest, _Mapping]] = ..., first: _Optional[int] = ..., n_blocks: _Optional[int] = ..., chunk_bytes_max: _Optional[int] = ..., slots: _Optional[bytes] = ...) -> None: ...

class ReadReply(_message.Message):
    __slots__ = ("data", "offset", "checksums", "block_bytes", "n_blocks", "lease")
    DATA_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    N_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    offset: int
    checksums: bytes
    block_bytes: int
    n_blocks: int
    lease: _kvstore_pb2.LeaseReply
    def __init__(self, data: _Optional[bytes] = ..., offset: _Optional[int] = ..., checksums: _Optional[bytes] = ..., block_bytes: _Optional[int] = ..., n_blocks: _Optional[int] = ..., lease: _Optional[_Union[_kvstore_pb2.LeaseReply, _Mapping]] = ...) -> None: ...

class WriteRequest(_message.Message):
    __slots__ = ("data", "offset", "checksums", "reservation_id", "reserve", "commit")
    DATA_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    offset: int
    checksums: bytes
    reservation_id: int
    reserve: _kvstore_pb2.ReserveRequest
    commit: _kvstore_pb2.CommitRequest
    def __init__(self, data: _Optional[bytes] = ..., offset: _Optional[int] = ..., checksums: _Optional[bytes] = ..., reservation_id: _Optional[int] = ..., reserve: _Optional[_Union[_kvstore_pb2.ReserveRequest, _Mapping]] = ..., commit: _Optional[_Union[_kvstore_pb2.CommitRequest, _Mapping]] = ...) -> None: ...

class WriteReply(_message.Message):
    __slots__ = ("reserve", "commit", "filled_bytes")
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    FILLED_BYTES_FIELD_NUMBER: _ClassVar[int]
    reserve: _kvstore_pb2.ReserveReply
    commit: _kvstore_pb2.CommitReply
    filled_bytes: int
    def __init__(self, reserve: _Optional[_Union[_kvstore_pb2.ReserveReply, _Mapping]] = ..., commit: _Optional[_Union[_kvstore_pb2.CommitReply, _Mapping]] = ..., filled_bytes: _Optional[int] = ...) -> None: ...
