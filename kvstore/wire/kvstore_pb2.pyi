from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Code(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CODE_UNSPECIFIED: _ClassVar[Code]
    BAD_INPUT: _ClassVar[Code]
    SPEC_MISMATCH: _ClassVar[Code]
    VERSION: _ClassVar[Code]
    ENDED: _ClassVar[Code]
    SESSION_ENDED: _ClassVar[Code]
    UNAVAILABLE: _ClassVar[Code]
    INTERNAL: _ClassVar[Code]

class Channel(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CHANNEL_CALLS: _ClassVar[Channel]
    CHANNEL_EVENTS: _ClassVar[Channel]
    CHANNEL_WAITS: _ClassVar[Channel]
CODE_UNSPECIFIED: Code
BAD_INPUT: Code
SPEC_MISMATCH: Code
VERSION: Code
ENDED: Code
SESSION_ENDED: Code
UNAVAILABLE: Code
INTERNAL: Code
CHANNEL_CALLS: Channel
CHANNEL_EVENTS: Channel
CHANNEL_WAITS: Channel

class Error(_message.Message):
    __slots__ = ("code", "message")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: Code
    message: str
    def __init__(self, code: _Optional[_Union[Code, str]] = ..., message: _Optional[str] = ...) -> None: ...

class HelloRequest(_message.Message):
    __slots__ = ("version_min", "version_max", "tenant", "client_name", "channel", "session_token")
    VERSION_MIN_FIELD_NUMBER: _ClassVar[int]
    VERSION_MAX_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    CLIENT_NAME_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_FIELD_NUMBER: _ClassVar[int]
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    version_min: int
    version_max: int
    tenant: str
    client_name: str
    channel: Channel
    session_token: bytes
    def __init__(self, version_min: _Optional[int] = ..., version_max: _Optional[int] = ..., tenant: _Optional[str] = ..., client_name: _Optional[str] = ..., channel: _Optional[_Union[Channel, str]] = ..., session_token: _Optional[bytes] = ...) -> None: ...

class HelloReply(_message.Message):
    __slots__ = ("version", "session_id", "session_token", "epoch", "heartbeat_s", "lease_s_max", "server_version", "generations_bytes", "can_wait")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_S_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_MAX_FIELD_NUMBER: _ClassVar[int]
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_BYTES_FIELD_NUMBER: _ClassVar[int]
    CAN_WAIT_FIELD_NUMBER: _ClassVar[int]
    version: int
    session_id: int
    session_token: bytes
    epoch: int
    heartbeat_s: float
    lease_s_max: float
    server_version: str
    generations_bytes: int
    can_wait: bool
    def __init__(self, version: _Optional[int] = ..., session_id: _Optional[int] = ..., session_token: _Optional[bytes] = ..., epoch: _Optional[int] = ..., heartbeat_s: _Optional[float] = ..., lease_s_max: _Optional[float] = ..., server_version: _Optional[str] = ..., generations_bytes: _Optional[int] = ..., can_wait: bool = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HeartbeatReply(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("ended_leases", "ended_reservations", "retired_regions")
    ENDED_LEASES_FIELD_NUMBER: _ClassVar[int]
    ENDED_RESERVATIONS_FIELD_NUMBER: _ClassVar[int]
    RETIRED_REGIONS_FIELD_NUMBER: _ClassVar[int]
    ended_leases: _containers.RepeatedScalarFieldContainer[int]
    ended_reservations: _containers.RepeatedScalarFieldContainer[int]
    retired_regions: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ended_leases: _Optional[_Iterable[int]] = ..., ended_reservations: _Optional[_Iterable[int]] = ..., retired_regions: _Optional[_Iterable[int]] = ...) -> None: ...

class OpenNamespaceRequest(_message.Message):
    __slots__ = ("description_json", "name")
    DESCRIPTION_JSON_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    description_json: str
    name: str
    def __init__(self, description_json: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class OpenNamespaceReply(_message.Message):
    __slots__ = ("digest",)
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    def __init__(self, digest: _Optional[bytes] = ...) -> None: ...

class Extra(_message.Message):
    __slots__ = ("start_token", "n_tokens", "digest")
    START_TOKEN_FIELD_NUMBER: _ClassVar[int]
    N_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    start_token: int
    n_tokens: int
    digest: bytes
    def __init__(self, start_token: _Optional[int] = ..., n_tokens: _Optional[int] = ..., digest: _Optional[bytes] = ...) -> None: ...

class Prompt(_message.Message):
    __slots__ = ("namespace", "rows", "salt", "lora", "extras", "policy_time_s", "category")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    LORA_FIELD_NUMBER: _ClassVar[int]
    EXTRAS_FIELD_NUMBER: _ClassVar[int]
    POLICY_TIME_S_FIELD_NUMBER: _ClassVar[int]
    CATEGORY_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    rows: bytes
    salt: str
    lora: str
    extras: _containers.RepeatedCompositeFieldContainer[Extra]
    policy_time_s: float
    category: int
    def __init__(self, namespace: _Optional[bytes] = ..., rows: _Optional[bytes] = ..., salt: _Optional[str] = ..., lora: _Optional[str] = ..., extras: _Optional[_Iterable[_Union[Extra, _Mapping]]] = ..., policy_time_s: _Optional[float] = ..., category: _Optional[int] = ...) -> None: ...

class MatchRequest(_message.Message):
    __slots__ = ("prompt",)
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    prompt: Prompt
    def __init__(self, prompt: _Optional[_Union[Prompt, _Mapping]] = ...) -> None: ...

class MatchReply(_message.Message):
    __slots__ = ("n_blocks", "partial_tokens", "n_tokens", "n_dram_blocks")
    N_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    N_TOKENS_FIELD_NUMBER: _ClassVar[int]
    N_DRAM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    n_blocks: int
    partial_tokens: int
    n_tokens: int
    n_dram_blocks: int
    def __init__(self, n_blocks: _Optional[int] = ..., partial_tokens: _Optional[int] = ..., n_tokens: _Optional[int] = ..., n_dram_blocks: _Optional[int] = ...) -> None: ...

class RegionLayout(_message.Message):
    __slots__ = ("id", "slot_bytes", "generation_base")
    ID_FIELD_NUMBER: _ClassVar[int]
    SLOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    GENERATION_BASE_FIELD_NUMBER: _ClassVar[int]
    id: int
    slot_bytes: int
    generation_base: int
    def __init__(self, id: _Optional[int] = ..., slot_bytes: _Optional[int] = ..., generation_base: _Optional[int] = ...) -> None: ...

class Slots(_message.Message):
    __slots__ = ("ids", "generations", "regions")
    IDS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    REGIONS_FIELD_NUMBER: _ClassVar[int]
    ids: bytes
    generations: bytes
    regions: _containers.RepeatedCompositeFieldContainer[RegionLayout]
    def __init__(self, ids: _Optional[bytes] = ..., generations: _Optional[bytes] = ..., regions: _Optional[_Iterable[_Union[RegionLayout, _Mapping]]] = ...) -> None: ...

class LeaseRequest(_message.Message):
    __slots__ = ("prompt", "max_blocks", "first_block", "ttl_s", "wait_s")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    MAX_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    prompt: Prompt
    max_blocks: int
    first_block: int
    ttl_s: float
    wait_s: float
    def __init__(self, prompt: _Optional[_Union[Prompt, _Mapping]] = ..., max_blocks: _Optional[int] = ..., first_block: _Optional[int] = ..., ttl_s: _Optional[float] = ..., wait_s: _Optional[float] = ...) -> None: ...

class LeaseReply(_message.Message):
    __slots__ = ("lease_id", "ttl_s", "n_blocks", "partial_tokens", "n_tokens", "slots", "n_pending", "eta_s", "n_nvme")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    N_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    N_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    N_PENDING_FIELD_NUMBER: _ClassVar[int]
    ETA_S_FIELD_NUMBER: _ClassVar[int]
    N_NVME_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    ttl_s: float
    n_blocks: int
    partial_tokens: int
    n_tokens: int
    slots: Slots
    n_pending: int
    eta_s: float
    n_nvme: int
    def __init__(self, lease_id: _Optional[int] = ..., ttl_s: _Optional[float] = ..., n_blocks: _Optional[int] = ..., partial_tokens: _Optional[int] = ..., n_tokens: _Optional[int] = ..., slots: _Optional[_Union[Slots, _Mapping]] = ..., n_pending: _Optional[int] = ..., eta_s: _Optional[float] = ..., n_nvme: _Optional[int] = ...) -> None: ...

class AttachLeaseRequest(_message.Message):
    __slots__ = ("lease_id",)
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    def __init__(self, lease_id: _Optional[int] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("lease_id",)
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    def __init__(self, lease_id: _Optional[int] = ...) -> None: ...

class ReleaseReply(_message.Message):
    __slots__ = ("found",)
    FOUND_FIELD_NUMBER: _ClassVar[int]
    found: bool
    def __init__(self, found: bool = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("lease_id", "ttl_s")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    ttl_s: float
    def __init__(self, lease_id: _Optional[int] = ..., ttl_s: _Optional[float] = ...) -> None: ...

class RenewReply(_message.Message):
    __slots__ = ("ttl_s",)
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    ttl_s: float
    def __init__(self, ttl_s: _Optional[float] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("prompt", "first_block", "n_blocks", "ttl_s")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    N_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    prompt: Prompt
    first_block: int
    n_blocks: int
    ttl_s: float
    def __init__(self, prompt: _Optional[_Union[Prompt, _Mapping]] = ..., first_block: _Optional[int] = ..., n_blocks: _Optional[int] = ..., ttl_s: _Optional[float] = ...) -> None: ...

class ReserveReply(_message.Message):
    __slots__ = ("reservation_id", "ttl_s", "n_present", "n_reserved", "skipped_reason", "slots")
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    N_PRESENT_FIELD_NUMBER: _ClassVar[int]
    N_RESERVED_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_REASON_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    reservation_id: int
    ttl_s: float
    n_present: int
    n_reserved: int
    skipped_reason: str
    slots: Slots
    def __init__(self, reservation_id: _Optional[int] = ..., ttl_s: _Optional[float] = ..., n_present: _Optional[int] = ..., n_reserved: _Optional[int] = ..., skipped_reason: _Optional[str] = ..., slots: _Optional[_Union[Slots, _Mapping]] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("reservation_id", "n_blocks")
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    N_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    reservation_id: int
    n_blocks: int
    def __init__(self, reservation_id: _Optional[int] = ..., n_blocks: _Optional[int] = ...) -> None: ...

class CommitReply(_message.Message):
    __slots__ = ("n_committed", "n_duplicate")
    N_COMMITTED_FIELD_NUMBER: _ClassVar[int]
    N_DUPLICATE_FIELD_NUMBER: _ClassVar[int]
    n_committed: int
    n_duplicate: int
    def __init__(self, n_committed: _Optional[int] = ..., n_duplicate: _Optional[int] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("reservation_id",)
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    reservation_id: int
    def __init__(self, reservation_id: _Optional[int] = ...) -> None: ...

class AbortReply(_message.Message):
    __slots__ = ("found",)
    FOUND_FIELD_NUMBER: _ClassVar[int]
    found: bool
    def __init__(self, found: bool = ...) -> None: ...

class MapRegionsRequest(_message.Message):
    __slots__ = ("region_ids", "writable")
    REGION_IDS_FIELD_NUMBER: _ClassVar[int]
    WRITABLE_FIELD_NUMBER: _ClassVar[int]
    region_ids: _containers.RepeatedScalarFieldContainer[int]
    writable: bool
    def __init__(self, region_ids: _Optional[_Iterable[int]] = ..., writable: bool = ...) -> None: ...

class MapRegionsReply(_message.Message):
    __slots__ = ("region_ids", "sizes_bytes")
    REGION_IDS_FIELD_NUMBER: _ClassVar[int]
    SIZES_BYTES_FIELD_NUMBER: _ClassVar[int]
    region_ids: _containers.RepeatedScalarFieldContainer[int]
    sizes_bytes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, region_ids: _Optional[_Iterable[int]] = ..., sizes_bytes: _Optional[_Iterable[int]] = ...) -> None: ...

class RegionsMappedRequest(_message.Message):
    __slots__ = ("region_ids",)
    REGION_IDS_FIELD_NUMBER: _ClassVar[int]
    region_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, region_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class RegionsMappedReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RegionsUnmappedRequest(_message.Message):
    __slots__ = ("region_ids", "settled_epoch")
    REGION_IDS_FIELD_NUMBER: _ClassVar[int]
    SETTLED_EPOCH_FIELD_NUMBER: _ClassVar[int]
    region_ids: _containers.RepeatedScalarFieldContainer[int]
    settled_epoch: int
    def __init__(self, region_ids: _Optional[_Iterable[int]] = ..., settled_epoch: _Optional[int] = ...) -> None: ...

class RegionsUnmappedReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("prompt", "ttl_s")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    prompt: Prompt
    ttl_s: float
    def __init__(self, prompt: _Optional[_Union[Prompt, _Mapping]] = ..., ttl_s: _Optional[float] = ...) -> None: ...

class PinReply(_message.Message):
    __slots__ = ("pin_id", "n_blocks", "ttl_s")
    PIN_ID_FIELD_NUMBER: _ClassVar[int]
    N_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    pin_id: int
    n_blocks: int
    ttl_s: float
    def __init__(self, pin_id: _Optional[int] = ..., n_blocks: _Optional[int] = ..., ttl_s: _Optional[float] = ...) -> None: ...

class UnpinRequest(_message.Message):
    __slots__ = ("pin_id",)
    PIN_ID_FIELD_NUMBER: _ClassVar[int]
    pin_id: int
    def __init__(self, pin_id: _Optional[int] = ...) -> None: ...

class UnpinReply(_message.Message):
    __slots__ = ("found",)
    FOUND_FIELD_NUMBER: _ClassVar[int]
    found: bool
    def __init__(self, found: bool = ...) -> None: ...

class PrefetchRequest(_message.Message):
    __slots__ = ("prompt", "first_block", "max_blocks", "wait_s")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    MAX_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    prompt: Prompt
    first_block: int
    max_blocks: int
    wait_s: float
    def __init__(self, prompt: _Optional[_Union[Prompt, _Mapping]] = ..., first_block: _Optional[int] = ..., max_blocks: _Optional[int] = ..., wait_s: _Optional[float] = ...) -> None: ...

class PrefetchReply(_message.Message):
    __slots__ = ("n_blocks", "n_ready", "n_pending", "eta_s")
    N_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    N_READY_FIELD_NUMBER: _ClassVar[int]
    N_PENDING_FIELD_NUMBER: _ClassVar[int]
    ETA_S_FIELD_NUMBER: _ClassVar[int]
    n_blocks: int
    n_ready: int
    n_pending: int
    eta_s: float
    def __init__(self, n_blocks: _Optional[int] = ..., n_ready: _Optional[int] = ..., n_pending: _Optional[int] = ..., eta_s: _Optional[float] = ...) -> None: ...

class PersistRequest(_message.Message):
    __slots__ = ("prompt", "wait_s")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    prompt: Prompt
    wait_s: float
    def __init__(self, prompt: _Optional[_Union[Prompt, _Mapping]] = ..., wait_s: _Optional[float] = ...) -> None: ...

class PersistReply(_message.Message):
    __slots__ = ("n_blocks", "n_durable", "n_pending", "reason")
    N_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    N_DURABLE_FIELD_NUMBER: _ClassVar[int]
    N_PENDING_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    n_blocks: int
    n_durable: int
    n_pending: int
    reason: str
    def __init__(self, n_blocks: _Optional[int] = ..., n_durable: _Optional[int] = ..., n_pending: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatsReply(_message.Message):
    __slots__ = ("numbers", "texts")
    class NumbersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class TextsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    numbers: _containers.ScalarMap[str, float]
    texts: _containers.ScalarMap[str, str]
    def __init__(self, numbers: _Optional[_Mapping[str, float]] = ..., texts: _Optional[_Mapping[str, str]] = ...) -> None: ...

class GoodbyeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GoodbyeReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
