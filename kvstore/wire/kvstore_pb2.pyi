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
    DENIED: _ClassVar[Code]
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
DENIED: Code
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
    __slots__ = ("version", "session_id", "session_token", "epoch", "heartbeat_s", "lease_s_max", "server_version", "generations_bytes", "can_wait", "hbm_uuid")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_S_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_MAX_FIELD_NUMBER: _ClassVar[int]
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_BYTES_FIELD_NUMBER: _ClassVar[int]
    CAN_WAIT_FIELD_NUMBER: _ClassVar[int]
    HBM_UUID_FIELD_NUMBER: _ClassVar[int]
    version: int
    session_id: int
    session_token: bytes
    epoch: int
    heartbeat_s: float
    lease_s_max: float
    server_version: str
    generations_bytes: int
    can_wait: bool
    hbm_uuid: str
    def __init__(self, version: _Optional[int] = ..., session_id: _Optional[int] = ..., session_token: _Optional[bytes] = ..., epoch: _Optional[int] = ..., heartbeat_s: _Optional[float] = ..., lease_s_max: _Optional[float] = ..., server_version: _Optional[str] = ..., generations_bytes: _Optional[int] = ..., can_wait: bool = ..., hbm_uuid: _Optional[str] = ...) -> None: ...

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
    __slots__ = ("description_json", "name", "attention_doubling_tokens")
    DESCRIPTION_JSON_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_DOUBLING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    description_json: str
    name: str
    attention_doubling_tokens: float
    def __init__(self, description_json: _Optional[str] = ..., name: _Optional[str] = ..., attention_doubling_tokens: _Optional[float] = ...) -> None: ...

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

class Hints(_message.Message):
    __slots__ = ("request_type", "turn", "session_id", "expected_reuse", "ttl_s", "priority", "no_reuse", "output_tokens")
    REQUEST_TYPE_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_REUSE_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    NO_REUSE_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_type: str
    turn: int
    session_id: str
    expected_reuse: float
    ttl_s: float
    priority: int
    no_reuse: bool
    output_tokens: int
    def __init__(self, request_type: _Optional[str] = ..., turn: _Optional[int] = ..., session_id: _Optional[str] = ..., expected_reuse: _Optional[float] = ..., ttl_s: _Optional[float] = ..., priority: _Optional[int] = ..., no_reuse: bool = ..., output_tokens: _Optional[int] = ...) -> None: ...

class Prompt(_message.Message):
    __slots__ = ("namespace", "rows", "salt", "lora", "extras", "policy_time_s", "category", "hints", "shards", "n_prompt_tokens", "prompt_only", "part", "ahead")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    LORA_FIELD_NUMBER: _ClassVar[int]
    EXTRAS_FIELD_NUMBER: _ClassVar[int]
    POLICY_TIME_S_FIELD_NUMBER: _ClassVar[int]
    CATEGORY_FIELD_NUMBER: _ClassVar[int]
    HINTS_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    N_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_ONLY_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    rows: bytes
    salt: str
    lora: str
    extras: _containers.RepeatedCompositeFieldContainer[Extra]
    policy_time_s: float
    category: int
    hints: Hints
    shards: bytes
    n_prompt_tokens: int
    prompt_only: bool
    part: int
    ahead: bool
    def __init__(self, namespace: _Optional[bytes] = ..., rows: _Optional[bytes] = ..., salt: _Optional[str] = ..., lora: _Optional[str] = ..., extras: _Optional[_Iterable[_Union[Extra, _Mapping]]] = ..., policy_time_s: _Optional[float] = ..., category: _Optional[int] = ..., hints: _Optional[_Union[Hints, _Mapping]] = ..., shards: _Optional[bytes] = ..., n_prompt_tokens: _Optional[int] = ..., prompt_only: bool = ..., part: _Optional[int] = ..., ahead: bool = ...) -> None: ...

class MatchRequest(_message.Message):
    __slots__ = ("prompt",)
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    prompt: Prompt
    def __init__(self, prompt: _Optional[_Union[Prompt, _Mapping]] = ...) -> None: ...

class MatchReply(_message.Message):
    __slots__ = ("n_blocks", "partial_tokens", "n_tokens", "n_dram_blocks", "part_blocks")
    N_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    N_TOKENS_FIELD_NUMBER: _ClassVar[int]
    N_DRAM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PART_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    n_blocks: int
    partial_tokens: int
    n_tokens: int
    n_dram_blocks: int
    part_blocks: bytes
    def __init__(self, n_blocks: _Optional[int] = ..., partial_tokens: _Optional[int] = ..., n_tokens: _Optional[int] = ..., n_dram_blocks: _Optional[int] = ..., part_blocks: _Optional[bytes] = ...) -> None: ...

class OverlapRequest(_message.Message):
    __slots__ = ("prompts",)
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    prompts: _containers.RepeatedCompositeFieldContainer[Prompt]
    def __init__(self, prompts: _Optional[_Iterable[_Union[Prompt, _Mapping]]] = ...) -> None: ...

class OverlapReply(_message.Message):
    __slots__ = ("n_tokens", "n_dram_tokens", "n_loading_tokens", "load_s", "load_error", "n_hbm_tokens")
    N_TOKENS_FIELD_NUMBER: _ClassVar[int]
    N_DRAM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    N_LOADING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOAD_S_FIELD_NUMBER: _ClassVar[int]
    LOAD_ERROR_FIELD_NUMBER: _ClassVar[int]
    N_HBM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    n_tokens: bytes
    n_dram_tokens: bytes
    n_loading_tokens: bytes
    load_s: bytes
    load_error: bytes
    n_hbm_tokens: bytes
    def __init__(self, n_tokens: _Optional[bytes] = ..., n_dram_tokens: _Optional[bytes] = ..., n_loading_tokens: _Optional[bytes] = ..., load_s: _Optional[bytes] = ..., load_error: _Optional[bytes] = ..., n_hbm_tokens: _Optional[bytes] = ...) -> None: ...

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

class PartSlots(_message.Message):
    __slots__ = ("part", "first_block", "slots")
    PART_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    part: int
    first_block: int
    slots: Slots
    def __init__(self, part: _Optional[int] = ..., first_block: _Optional[int] = ..., slots: _Optional[_Union[Slots, _Mapping]] = ...) -> None: ...

class LeaseRequest(_message.Message):
    __slots__ = ("prompt", "max_blocks", "first_block", "ttl_s", "wait_s", "glance", "copied_bytes", "copied_s", "copied_after_read", "hbm")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    MAX_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    GLANCE_FIELD_NUMBER: _ClassVar[int]
    COPIED_BYTES_FIELD_NUMBER: _ClassVar[int]
    COPIED_S_FIELD_NUMBER: _ClassVar[int]
    COPIED_AFTER_READ_FIELD_NUMBER: _ClassVar[int]
    HBM_FIELD_NUMBER: _ClassVar[int]
    prompt: Prompt
    max_blocks: int
    first_block: int
    ttl_s: float
    wait_s: float
    glance: bool
    copied_bytes: int
    copied_s: float
    copied_after_read: bool
    hbm: bool
    def __init__(self, prompt: _Optional[_Union[Prompt, _Mapping]] = ..., max_blocks: _Optional[int] = ..., first_block: _Optional[int] = ..., ttl_s: _Optional[float] = ..., wait_s: _Optional[float] = ..., glance: bool = ..., copied_bytes: _Optional[int] = ..., copied_s: _Optional[float] = ..., copied_after_read: bool = ..., hbm: bool = ...) -> None: ...

class LeaseReply(_message.Message):
    __slots__ = ("lease_id", "ttl_s", "n_blocks", "partial_tokens", "n_tokens", "slots", "n_pending", "eta_s", "n_nvme", "first_block", "waited_s", "hbm", "parts")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    N_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    N_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    N_PENDING_FIELD_NUMBER: _ClassVar[int]
    ETA_S_FIELD_NUMBER: _ClassVar[int]
    N_NVME_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    WAITED_S_FIELD_NUMBER: _ClassVar[int]
    HBM_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    ttl_s: float
    n_blocks: int
    partial_tokens: int
    n_tokens: int
    slots: Slots
    n_pending: int
    eta_s: float
    n_nvme: int
    first_block: int
    waited_s: float
    hbm: HbmSlots
    parts: _containers.RepeatedCompositeFieldContainer[PartSlots]
    def __init__(self, lease_id: _Optional[int] = ..., ttl_s: _Optional[float] = ..., n_blocks: _Optional[int] = ..., partial_tokens: _Optional[int] = ..., n_tokens: _Optional[int] = ..., slots: _Optional[_Union[Slots, _Mapping]] = ..., n_pending: _Optional[int] = ..., eta_s: _Optional[float] = ..., n_nvme: _Optional[int] = ..., first_block: _Optional[int] = ..., waited_s: _Optional[float] = ..., hbm: _Optional[_Union[HbmSlots, _Mapping]] = ..., parts: _Optional[_Iterable[_Union[PartSlots, _Mapping]]] = ...) -> None: ...

class HbmSlots(_message.Message):
    __slots__ = ("at", "slots")
    AT_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    at: bytes
    slots: Slots
    def __init__(self, at: _Optional[bytes] = ..., slots: _Optional[_Union[Slots, _Mapping]] = ...) -> None: ...

class MapHbmRequest(_message.Message):
    __slots__ = ("region_ids",)
    REGION_IDS_FIELD_NUMBER: _ClassVar[int]
    region_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, region_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class HbmRegion(_message.Message):
    __slots__ = ("id", "size_bytes", "handle")
    ID_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    id: int
    size_bytes: int
    handle: bytes
    def __init__(self, id: _Optional[int] = ..., size_bytes: _Optional[int] = ..., handle: _Optional[bytes] = ...) -> None: ...

class MapHbmReply(_message.Message):
    __slots__ = ("device_uuid", "generations_bytes", "regions")
    DEVICE_UUID_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_BYTES_FIELD_NUMBER: _ClassVar[int]
    REGIONS_FIELD_NUMBER: _ClassVar[int]
    device_uuid: str
    generations_bytes: int
    regions: _containers.RepeatedCompositeFieldContainer[HbmRegion]
    def __init__(self, device_uuid: _Optional[str] = ..., generations_bytes: _Optional[int] = ..., regions: _Optional[_Iterable[_Union[HbmRegion, _Mapping]]] = ...) -> None: ...

class AttachLeaseRequest(_message.Message):
    __slots__ = ("lease_id", "shards", "namespace", "block_bytes")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    shards: bytes
    namespace: bytes
    block_bytes: int
    def __init__(self, lease_id: _Optional[int] = ..., shards: _Optional[bytes] = ..., namespace: _Optional[bytes] = ..., block_bytes: _Optional[int] = ...) -> None: ...

class LeaseShardRequest(_message.Message):
    __slots__ = ("lease_id", "shard")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    shard: bytes
    def __init__(self, lease_id: _Optional[int] = ..., shard: _Optional[bytes] = ...) -> None: ...

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
    __slots__ = ("region_ids", "sizes_bytes", "unsealed_ids")
    REGION_IDS_FIELD_NUMBER: _ClassVar[int]
    SIZES_BYTES_FIELD_NUMBER: _ClassVar[int]
    UNSEALED_IDS_FIELD_NUMBER: _ClassVar[int]
    region_ids: _containers.RepeatedScalarFieldContainer[int]
    sizes_bytes: _containers.RepeatedScalarFieldContainer[int]
    unsealed_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, region_ids: _Optional[_Iterable[int]] = ..., sizes_bytes: _Optional[_Iterable[int]] = ..., unsealed_ids: _Optional[_Iterable[int]] = ...) -> None: ...

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
    __slots__ = ("prompt", "ttl_s", "keep")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    prompt: Prompt
    ttl_s: float
    keep: bool
    def __init__(self, prompt: _Optional[_Union[Prompt, _Mapping]] = ..., ttl_s: _Optional[float] = ..., keep: bool = ...) -> None: ...

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

class EndSessionRequest(_message.Message):
    __slots__ = ("namespace", "session_id", "salt", "lora")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    LORA_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    session_id: str
    salt: str
    lora: str
    def __init__(self, namespace: _Optional[bytes] = ..., session_id: _Optional[str] = ..., salt: _Optional[str] = ..., lora: _Optional[str] = ...) -> None: ...

class EndSessionReply(_message.Message):
    __slots__ = ("n_blocks",)
    N_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    n_blocks: int
    def __init__(self, n_blocks: _Optional[int] = ...) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatsReply(_message.Message):
    __slots__ = ("numbers", "texts", "bounds_s", "latencies")
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
    BOUNDS_S_FIELD_NUMBER: _ClassVar[int]
    LATENCIES_FIELD_NUMBER: _ClassVar[int]
    numbers: _containers.ScalarMap[str, float]
    texts: _containers.ScalarMap[str, str]
    bounds_s: bytes
    latencies: _containers.RepeatedCompositeFieldContainer[Latency]
    def __init__(self, numbers: _Optional[_Mapping[str, float]] = ..., texts: _Optional[_Mapping[str, str]] = ..., bounds_s: _Optional[bytes] = ..., latencies: _Optional[_Iterable[_Union[Latency, _Mapping]]] = ...) -> None: ...

class Latency(_message.Message):
    __slots__ = ("method", "waited", "counts", "total_s")
    METHOD_FIELD_NUMBER: _ClassVar[int]
    WAITED_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_S_FIELD_NUMBER: _ClassVar[int]
    method: str
    waited: bool
    counts: bytes
    total_s: float
    def __init__(self, method: _Optional[str] = ..., waited: bool = ..., counts: _Optional[bytes] = ..., total_s: _Optional[float] = ...) -> None: ...

class NamespaceFilter(_message.Message):
    __slots__ = ("name", "digest_prefix", "model", "revision", "tp_rank", "pp_rank")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_PREFIX_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    TP_RANK_FIELD_NUMBER: _ClassVar[int]
    PP_RANK_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest_prefix: str
    model: str
    revision: str
    tp_rank: int
    pp_rank: int
    def __init__(self, name: _Optional[str] = ..., digest_prefix: _Optional[str] = ..., model: _Optional[str] = ..., revision: _Optional[str] = ..., tp_rank: _Optional[int] = ..., pp_rank: _Optional[int] = ...) -> None: ...

class NamespacesRequest(_message.Message):
    __slots__ = ("filter", "all_tenants")
    FILTER_FIELD_NUMBER: _ClassVar[int]
    ALL_TENANTS_FIELD_NUMBER: _ClassVar[int]
    filter: NamespaceFilter
    all_tenants: bool
    def __init__(self, filter: _Optional[_Union[NamespaceFilter, _Mapping]] = ..., all_tenants: bool = ...) -> None: ...

class NamespaceInfo(_message.Message):
    __slots__ = ("digest", "description_json", "names", "is_open", "n_blocks", "n_dram_blocks", "n_nvme_blocks", "dram_bytes", "nvme_bytes", "n_pinned_blocks", "n_lookups", "n_lookup_blocks", "n_hit_blocks", "idle_s")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_JSON_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    IS_OPEN_FIELD_NUMBER: _ClassVar[int]
    N_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    N_DRAM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    N_NVME_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DRAM_BYTES_FIELD_NUMBER: _ClassVar[int]
    NVME_BYTES_FIELD_NUMBER: _ClassVar[int]
    N_PINNED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    N_LOOKUPS_FIELD_NUMBER: _ClassVar[int]
    N_LOOKUP_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    N_HIT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    IDLE_S_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    description_json: str
    names: _containers.RepeatedScalarFieldContainer[str]
    is_open: bool
    n_blocks: int
    n_dram_blocks: int
    n_nvme_blocks: int
    dram_bytes: int
    nvme_bytes: int
    n_pinned_blocks: int
    n_lookups: int
    n_lookup_blocks: int
    n_hit_blocks: int
    idle_s: float
    def __init__(self, digest: _Optional[bytes] = ..., description_json: _Optional[str] = ..., names: _Optional[_Iterable[str]] = ..., is_open: bool = ..., n_blocks: _Optional[int] = ..., n_dram_blocks: _Optional[int] = ..., n_nvme_blocks: _Optional[int] = ..., dram_bytes: _Optional[int] = ..., nvme_bytes: _Optional[int] = ..., n_pinned_blocks: _Optional[int] = ..., n_lookups: _Optional[int] = ..., n_lookup_blocks: _Optional[int] = ..., n_hit_blocks: _Optional[int] = ..., idle_s: _Optional[float] = ...) -> None: ...

class NamespacesReply(_message.Message):
    __slots__ = ("namespaces", "truncated")
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    namespaces: _containers.RepeatedCompositeFieldContainer[NamespaceInfo]
    truncated: bool
    def __init__(self, namespaces: _Optional[_Iterable[_Union[NamespaceInfo, _Mapping]]] = ..., truncated: bool = ...) -> None: ...

class ClearRequest(_message.Message):
    __slots__ = ("filter", "everything", "all_tenants", "dry_run", "wait_s")
    FILTER_FIELD_NUMBER: _ClassVar[int]
    EVERYTHING_FIELD_NUMBER: _ClassVar[int]
    ALL_TENANTS_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    filter: NamespaceFilter
    everything: bool
    all_tenants: bool
    dry_run: bool
    wait_s: float
    def __init__(self, filter: _Optional[_Union[NamespaceFilter, _Mapping]] = ..., everything: bool = ..., all_tenants: bool = ..., dry_run: bool = ..., wait_s: _Optional[float] = ...) -> None: ...

class ClearedNamespace(_message.Message):
    __slots__ = ("digest", "n_blocks", "n_dram_blocks", "n_nvme_blocks")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    N_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    N_DRAM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    N_NVME_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    n_blocks: int
    n_dram_blocks: int
    n_nvme_blocks: int
    def __init__(self, digest: _Optional[bytes] = ..., n_blocks: _Optional[int] = ..., n_dram_blocks: _Optional[int] = ..., n_nvme_blocks: _Optional[int] = ...) -> None: ...

class ClearReply(_message.Message):
    __slots__ = ("namespaces", "n_ended_reservations", "n_left_blocks", "n_left_names")
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    N_ENDED_RESERVATIONS_FIELD_NUMBER: _ClassVar[int]
    N_LEFT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    N_LEFT_NAMES_FIELD_NUMBER: _ClassVar[int]
    namespaces: _containers.RepeatedCompositeFieldContainer[ClearedNamespace]
    n_ended_reservations: int
    n_left_blocks: int
    n_left_names: int
    def __init__(self, namespaces: _Optional[_Iterable[_Union[ClearedNamespace, _Mapping]]] = ..., n_ended_reservations: _Optional[int] = ..., n_left_blocks: _Optional[int] = ..., n_left_names: _Optional[int] = ...) -> None: ...

class InspectRequest(_message.Message):
    __slots__ = ("prompt", "first_block", "max_blocks")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    MAX_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    prompt: Prompt
    first_block: int
    max_blocks: int
    def __init__(self, prompt: _Optional[_Union[Prompt, _Mapping]] = ..., first_block: _Optional[int] = ..., max_blocks: _Optional[int] = ...) -> None: ...

class InspectReply(_message.Message):
    __slots__ = ("n_rows", "n_blocks", "partial_tokens", "keys", "tiers", "sizes", "hits", "idle_s", "pins", "ends", "differs_at_token", "hints_json")
    N_ROWS_FIELD_NUMBER: _ClassVar[int]
    N_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    IDLE_S_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    DIFFERS_AT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    HINTS_JSON_FIELD_NUMBER: _ClassVar[int]
    n_rows: int
    n_blocks: int
    partial_tokens: int
    keys: bytes
    tiers: bytes
    sizes: bytes
    hits: bytes
    idle_s: bytes
    pins: bytes
    ends: str
    differs_at_token: int
    hints_json: str
    def __init__(self, n_rows: _Optional[int] = ..., n_blocks: _Optional[int] = ..., partial_tokens: _Optional[int] = ..., keys: _Optional[bytes] = ..., tiers: _Optional[bytes] = ..., sizes: _Optional[bytes] = ..., hits: _Optional[bytes] = ..., idle_s: _Optional[bytes] = ..., pins: _Optional[bytes] = ..., ends: _Optional[str] = ..., differs_at_token: _Optional[int] = ..., hints_json: _Optional[str] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("prompt", "other_salts")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    OTHER_SALTS_FIELD_NUMBER: _ClassVar[int]
    prompt: Prompt
    other_salts: bool
    def __init__(self, prompt: _Optional[_Union[Prompt, _Mapping]] = ..., other_salts: bool = ...) -> None: ...

class NearNamespace(_message.Message):
    __slots__ = ("digest", "differences", "n_matching", "n_blocks")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    DIFFERENCES_FIELD_NUMBER: _ClassVar[int]
    N_MATCHING_FIELD_NUMBER: _ClassVar[int]
    N_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    differences: _containers.RepeatedScalarFieldContainer[str]
    n_matching: int
    n_blocks: int
    def __init__(self, digest: _Optional[bytes] = ..., differences: _Optional[_Iterable[str]] = ..., n_matching: _Optional[int] = ..., n_blocks: _Optional[int] = ...) -> None: ...

class NearRoot(_message.Message):
    __slots__ = ("salt_differs", "lora_differs", "lora", "n_matching")
    SALT_DIFFERS_FIELD_NUMBER: _ClassVar[int]
    LORA_DIFFERS_FIELD_NUMBER: _ClassVar[int]
    LORA_FIELD_NUMBER: _ClassVar[int]
    N_MATCHING_FIELD_NUMBER: _ClassVar[int]
    salt_differs: bool
    lora_differs: bool
    lora: str
    n_matching: int
    def __init__(self, salt_differs: bool = ..., lora_differs: bool = ..., lora: _Optional[str] = ..., n_matching: _Optional[int] = ...) -> None: ...

class MissingBlocks(_message.Message):
    __slots__ = ("reason", "n")
    REASON_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    reason: str
    n: int
    def __init__(self, reason: _Optional[str] = ..., n: _Optional[int] = ...) -> None: ...

class ExplainReply(_message.Message):
    __slots__ = ("n_rows", "n_blocks", "partial_tokens", "n_dram_blocks", "n_nvme_blocks", "block", "reason", "lines", "advice", "tier", "policy", "left_ago_s", "unused_s", "unwritten", "groups", "missing", "differs_at_token", "here_token", "stored_token", "content", "namespaces", "roots", "remembered_s", "forgot", "cleared_ago_s", "n_cleared_blocks", "n_hbm_blocks")
    N_ROWS_FIELD_NUMBER: _ClassVar[int]
    N_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    N_DRAM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    N_NVME_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    LINES_FIELD_NUMBER: _ClassVar[int]
    ADVICE_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    LEFT_AGO_S_FIELD_NUMBER: _ClassVar[int]
    UNUSED_S_FIELD_NUMBER: _ClassVar[int]
    UNWRITTEN_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    DIFFERS_AT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    HERE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    STORED_TOKEN_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    ROOTS_FIELD_NUMBER: _ClassVar[int]
    REMEMBERED_S_FIELD_NUMBER: _ClassVar[int]
    FORGOT_FIELD_NUMBER: _ClassVar[int]
    CLEARED_AGO_S_FIELD_NUMBER: _ClassVar[int]
    N_CLEARED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    N_HBM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    n_rows: int
    n_blocks: int
    partial_tokens: int
    n_dram_blocks: int
    n_nvme_blocks: int
    block: int
    reason: str
    lines: _containers.RepeatedScalarFieldContainer[str]
    advice: _containers.RepeatedScalarFieldContainer[str]
    tier: str
    policy: str
    left_ago_s: float
    unused_s: float
    unwritten: str
    groups: _containers.RepeatedScalarFieldContainer[int]
    missing: _containers.RepeatedCompositeFieldContainer[MissingBlocks]
    differs_at_token: int
    here_token: int
    stored_token: int
    content: str
    namespaces: _containers.RepeatedCompositeFieldContainer[NearNamespace]
    roots: _containers.RepeatedCompositeFieldContainer[NearRoot]
    remembered_s: float
    forgot: bool
    cleared_ago_s: float
    n_cleared_blocks: int
    n_hbm_blocks: int
    def __init__(self, n_rows: _Optional[int] = ..., n_blocks: _Optional[int] = ..., partial_tokens: _Optional[int] = ..., n_dram_blocks: _Optional[int] = ..., n_nvme_blocks: _Optional[int] = ..., block: _Optional[int] = ..., reason: _Optional[str] = ..., lines: _Optional[_Iterable[str]] = ..., advice: _Optional[_Iterable[str]] = ..., tier: _Optional[str] = ..., policy: _Optional[str] = ..., left_ago_s: _Optional[float] = ..., unused_s: _Optional[float] = ..., unwritten: _Optional[str] = ..., groups: _Optional[_Iterable[int]] = ..., missing: _Optional[_Iterable[_Union[MissingBlocks, _Mapping]]] = ..., differs_at_token: _Optional[int] = ..., here_token: _Optional[int] = ..., stored_token: _Optional[int] = ..., content: _Optional[str] = ..., namespaces: _Optional[_Iterable[_Union[NearNamespace, _Mapping]]] = ..., roots: _Optional[_Iterable[_Union[NearRoot, _Mapping]]] = ..., remembered_s: _Optional[float] = ..., forgot: bool = ..., cleared_ago_s: _Optional[float] = ..., n_cleared_blocks: _Optional[int] = ..., n_hbm_blocks: _Optional[int] = ...) -> None: ...

class ClaimsRequest(_message.Message):
    __slots__ = ("all_tenants",)
    ALL_TENANTS_FIELD_NUMBER: _ClassVar[int]
    all_tenants: bool
    def __init__(self, all_tenants: bool = ...) -> None: ...

class SessionInfo(_message.Message):
    __slots__ = ("id", "tenant", "client_name", "pid", "live", "silent_s")
    ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    CLIENT_NAME_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    SILENT_S_FIELD_NUMBER: _ClassVar[int]
    id: int
    tenant: str
    client_name: str
    pid: int
    live: bool
    silent_s: float
    def __init__(self, id: _Optional[int] = ..., tenant: _Optional[str] = ..., client_name: _Optional[str] = ..., pid: _Optional[int] = ..., live: bool = ..., silent_s: _Optional[float] = ...) -> None: ...

class ClaimInfo(_message.Message):
    __slots__ = ("kind", "id", "tenant", "session_ids", "left_s", "ended", "n_blocks")
    KIND_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SESSION_IDS_FIELD_NUMBER: _ClassVar[int]
    LEFT_S_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    N_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    kind: str
    id: int
    tenant: str
    session_ids: _containers.RepeatedScalarFieldContainer[int]
    left_s: float
    ended: bool
    n_blocks: int
    def __init__(self, kind: _Optional[str] = ..., id: _Optional[int] = ..., tenant: _Optional[str] = ..., session_ids: _Optional[_Iterable[int]] = ..., left_s: _Optional[float] = ..., ended: bool = ..., n_blocks: _Optional[int] = ...) -> None: ...

class ClaimsReply(_message.Message):
    __slots__ = ("sessions", "claims", "truncated")
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    CLAIMS_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[SessionInfo]
    claims: _containers.RepeatedCompositeFieldContainer[ClaimInfo]
    truncated: bool
    def __init__(self, sessions: _Optional[_Iterable[_Union[SessionInfo, _Mapping]]] = ..., claims: _Optional[_Iterable[_Union[ClaimInfo, _Mapping]]] = ..., truncated: bool = ...) -> None: ...

class TenantsRequest(_message.Message):
    __slots__ = ("all_tenants",)
    ALL_TENANTS_FIELD_NUMBER: _ClassVar[int]
    all_tenants: bool
    def __init__(self, all_tenants: bool = ...) -> None: ...

class TenantTier(_message.Message):
    __slots__ = ("tier", "used_bytes", "share_bytes", "min_bytes", "max_bytes", "n_evicted", "n_suffered", "n_caused")
    TIER_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHARE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MIN_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    N_EVICTED_FIELD_NUMBER: _ClassVar[int]
    N_SUFFERED_FIELD_NUMBER: _ClassVar[int]
    N_CAUSED_FIELD_NUMBER: _ClassVar[int]
    tier: str
    used_bytes: int
    share_bytes: int
    min_bytes: int
    max_bytes: int
    n_evicted: int
    n_suffered: int
    n_caused: int
    def __init__(self, tier: _Optional[str] = ..., used_bytes: _Optional[int] = ..., share_bytes: _Optional[int] = ..., min_bytes: _Optional[int] = ..., max_bytes: _Optional[int] = ..., n_evicted: _Optional[int] = ..., n_suffered: _Optional[int] = ..., n_caused: _Optional[int] = ...) -> None: ...

class TenantInfo(_message.Message):
    __slots__ = ("tenant", "weight", "tiers", "pinned_bytes", "pin_max_bytes", "n_pins")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    PINNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PIN_MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    N_PINS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    weight: float
    tiers: _containers.RepeatedCompositeFieldContainer[TenantTier]
    pinned_bytes: int
    pin_max_bytes: int
    n_pins: int
    def __init__(self, tenant: _Optional[str] = ..., weight: _Optional[float] = ..., tiers: _Optional[_Iterable[_Union[TenantTier, _Mapping]]] = ..., pinned_bytes: _Optional[int] = ..., pin_max_bytes: _Optional[int] = ..., n_pins: _Optional[int] = ...) -> None: ...

class TenantsReply(_message.Message):
    __slots__ = ("tenants", "truncated")
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    tenants: _containers.RepeatedCompositeFieldContainer[TenantInfo]
    truncated: bool
    def __init__(self, tenants: _Optional[_Iterable[_Union[TenantInfo, _Mapping]]] = ..., truncated: bool = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("after_seq", "from_now", "wait_s", "max_events", "all_tenants", "filter", "kinds")
    AFTER_SEQ_FIELD_NUMBER: _ClassVar[int]
    FROM_NOW_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    MAX_EVENTS_FIELD_NUMBER: _ClassVar[int]
    ALL_TENANTS_FIELD_NUMBER: _ClassVar[int]
    FILTER_FIELD_NUMBER: _ClassVar[int]
    KINDS_FIELD_NUMBER: _ClassVar[int]
    after_seq: int
    from_now: bool
    wait_s: float
    max_events: int
    all_tenants: bool
    filter: NamespaceFilter
    kinds: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, after_seq: _Optional[int] = ..., from_now: bool = ..., wait_s: _Optional[float] = ..., max_events: _Optional[int] = ..., all_tenants: bool = ..., filter: _Optional[_Union[NamespaceFilter, _Mapping]] = ..., kinds: _Optional[_Iterable[str]] = ...) -> None: ...

class EventBatch(_message.Message):
    __slots__ = ("time_s", "kind", "tier", "reason", "namespace", "seqs", "keys", "parents", "n_tokens", "last")
    TIME_S_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    SEQS_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    N_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    time_s: float
    kind: str
    tier: str
    reason: str
    namespace: bytes
    seqs: bytes
    keys: bytes
    parents: bytes
    n_tokens: bytes
    last: bytes
    def __init__(self, time_s: _Optional[float] = ..., kind: _Optional[str] = ..., tier: _Optional[str] = ..., reason: _Optional[str] = ..., namespace: _Optional[bytes] = ..., seqs: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., parents: _Optional[bytes] = ..., n_tokens: _Optional[bytes] = ..., last: _Optional[bytes] = ...) -> None: ...

class WatchReply(_message.Message):
    __slots__ = ("next_seq", "epoch", "n_lost", "gap", "batches")
    NEXT_SEQ_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    N_LOST_FIELD_NUMBER: _ClassVar[int]
    GAP_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    next_seq: int
    epoch: int
    n_lost: int
    gap: bool
    batches: _containers.RepeatedCompositeFieldContainer[EventBatch]
    def __init__(self, next_seq: _Optional[int] = ..., epoch: _Optional[int] = ..., n_lost: _Optional[int] = ..., gap: bool = ..., batches: _Optional[_Iterable[_Union[EventBatch, _Mapping]]] = ...) -> None: ...

class RecordRequest(_message.Message):
    __slots__ = ("namespace", "after_seq", "from_now")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    AFTER_SEQ_FIELD_NUMBER: _ClassVar[int]
    FROM_NOW_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    after_seq: int
    from_now: bool
    def __init__(self, namespace: _Optional[bytes] = ..., after_seq: _Optional[int] = ..., from_now: bool = ...) -> None: ...

class RecordReply(_message.Message):
    __slots__ = ("next_seq", "epoch", "n_lost", "gap", "times_s", "n_tokens", "n_output", "turns", "sessions", "types", "n_rows", "keys")
    NEXT_SEQ_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    N_LOST_FIELD_NUMBER: _ClassVar[int]
    GAP_FIELD_NUMBER: _ClassVar[int]
    TIMES_S_FIELD_NUMBER: _ClassVar[int]
    N_TOKENS_FIELD_NUMBER: _ClassVar[int]
    N_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    TURNS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    TYPES_FIELD_NUMBER: _ClassVar[int]
    N_ROWS_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    next_seq: int
    epoch: int
    n_lost: int
    gap: bool
    times_s: bytes
    n_tokens: bytes
    n_output: bytes
    turns: bytes
    sessions: bytes
    types: _containers.RepeatedScalarFieldContainer[str]
    n_rows: bytes
    keys: bytes
    def __init__(self, next_seq: _Optional[int] = ..., epoch: _Optional[int] = ..., n_lost: _Optional[int] = ..., gap: bool = ..., times_s: _Optional[bytes] = ..., n_tokens: _Optional[bytes] = ..., n_output: _Optional[bytes] = ..., turns: _Optional[bytes] = ..., sessions: _Optional[bytes] = ..., types: _Optional[_Iterable[str]] = ..., n_rows: _Optional[bytes] = ..., keys: _Optional[bytes] = ...) -> None: ...

class VerifyRequest(_message.Message):
    __slots__ = ("first_id", "frames", "wait_s")
    FIRST_ID_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    first_id: int
    frames: bool
    wait_s: float
    def __init__(self, first_id: _Optional[int] = ..., frames: bool = ..., wait_s: _Optional[float] = ...) -> None: ...

class VerifyReply(_message.Message):
    __slots__ = ("next_id", "end_id", "n_blocks", "n_frames", "n_bytes", "n_corrupt", "n_unreadable", "n_unread", "problems")
    NEXT_ID_FIELD_NUMBER: _ClassVar[int]
    END_ID_FIELD_NUMBER: _ClassVar[int]
    N_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    N_FRAMES_FIELD_NUMBER: _ClassVar[int]
    N_BYTES_FIELD_NUMBER: _ClassVar[int]
    N_CORRUPT_FIELD_NUMBER: _ClassVar[int]
    N_UNREADABLE_FIELD_NUMBER: _ClassVar[int]
    N_UNREAD_FIELD_NUMBER: _ClassVar[int]
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    next_id: int
    end_id: int
    n_blocks: int
    n_frames: int
    n_bytes: int
    n_corrupt: int
    n_unreadable: int
    n_unread: int
    problems: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, next_id: _Optional[int] = ..., end_id: _Optional[int] = ..., n_blocks: _Optional[int] = ..., n_frames: _Optional[int] = ..., n_bytes: _Optional[int] = ..., n_corrupt: _Optional[int] = ..., n_unreadable: _Optional[int] = ..., n_unread: _Optional[int] = ..., problems: _Optional[_Iterable[str]] = ...) -> None: ...

class GoodbyeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GoodbyeReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
