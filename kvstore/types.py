"""What KV looks like and whose it is: specs, groups, shards, namespaces, roots.

All are frozen values. Their identity is total (invariant 7): two descriptions that differ in any
field have different digests, and equal ones have equal digests in every process and on every host.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

from kvstore.errors import BadInputError

KEY_BYTES = 16
"""Length of a block key, a root key and every other identity digest."""

TOKEN_BYTES = 4
"""A token id on the wire and in the index: unsigned 32 bits, little-endian."""

FIRST_HBM_REGION_ID = 1 << 30
"""Regions of HBM have higher ids, all others lower ones."""

SLOT_BITS = 20
"""A slot id is ``region id << SLOT_BITS | index of the slot in its region``, signed 64 bits."""

MAX_BLOCK_TOKENS = 1 << 16
MAX_BLOCK_BYTES = 1 << 30

DTYPE_BYTES: Mapping[str, int] = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}


class GroupKind(StrEnum):
    """How the layers of a group use the past."""

    FULL = "full"
    SLIDING = "sliding"
    STATE = "state"
    MLA = "mla"


class RowKind(StrEnum):
    """What one row of a namespace's index is."""

    TOKENS = "tokens"
    HASHES = "hashes"


def canonical_digest(purpose: str, value: object) -> bytes:
    """16-byte BLAKE2b digest of a JSON-able value; ``purpose`` keeps kinds of digest apart."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.blake2b(text.encode(), digest_size=KEY_BYTES, person=purpose.encode()).digest()


def _positive(name: str, value: object, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= most:
        raise BadInputError(f"{name} is {value!r}; it must be a whole number from 1 to {most}")


def _text(name: str, value: object) -> None:
    if not isinstance(value, str) or len(value) > 1024:
        raise BadInputError(f"{name} is {value!r:.80}; it must be a text of at most 1024 characters")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise BadInputError(f"{name} is {value!r:.80}; it has half a surrogate pair, which is no text") from None


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share shape and lifetime.

    ``kv_heads`` and ``head_dim`` must be given unless the interior is opaque or a state, where they are 1; so is
    ``kv_heads`` of a latent.
    ``page_bytes`` is the size of ``page_tokens`` tokens of one layer, K and V together. It is derived
    from heads, dim and dtype; give it only with ``layout="opaque"``, where the engine alone knows what
    is inside.
    """

    layers: int
    kv_heads: int = 0
    head_dim: int = 0
    dtype: str = "bfloat16"
    kind: GroupKind = GroupKind.FULL
    layout: str = "NHD"
    window_tokens: int | None = None
    page_bytes: int | None = None

    def __post_init__(self) -> None:
        _positive("layers", self.layers, 1 << 16)
        object.__setattr__(self, "kind", _enum(GroupKind, "kind", self.kind))
        if not isinstance(self.dtype, str) or self.dtype not in DTYPE_BYTES:
            raise BadInputError(f"dtype is {self.dtype!r}; known are {', '.join(sorted(DTYPE_BYTES))}")
        if not isinstance(self.layout, str) or self.layout not in ("NHD", "HND", "opaque"):
            raise BadInputError(f"layout is {self.layout!r}; known are NHD, HND, opaque")
        is_free = self.layout == "opaque" or self.kind is GroupKind.STATE
        self._check_shape("kv_heads", 1 << 16, is_free=is_free or self.kind is GroupKind.MLA)
        self._check_shape("head_dim", 1 << 20, is_free=is_free)
        if (self.page_bytes is not None) != (self.layout == "opaque"):
            raise BadInputError("page_bytes goes with layout='opaque', and only with it")
        if self.page_bytes is not None:
            _positive("page_bytes", self.page_bytes, MAX_BLOCK_BYTES)
        if self.window_tokens is None and self.kind is GroupKind.SLIDING:
            raise BadInputError("window_tokens is missing: kind='sliding' needs how many tokens back its layers look")
        if self.window_tokens is not None and self.kind is not GroupKind.SLIDING:
            raise BadInputError("window_tokens goes with kind='sliding', and only with it")
        if self.window_tokens is not None:
            _positive("window_tokens", self.window_tokens, 1 << 31)

    def _check_shape(self, name: str, most: int, *, is_free: bool) -> None:
        """``is_free``: it is 1 if it was not given."""
        if type(value := getattr(self, name)) is int and value == 0:
            if not is_free:
                raise BadInputError(
                    f"{name} is missing or 0: a group of kind {self.kind.value!r} needs it for its size"
                )
            object.__setattr__(self, name, 1)
        _positive(name, getattr(self, name), most)

    @property
    def value_dtype(self) -> str:
        """``dtype``; empty where the interior is unknown."""
        return "" if self.layout == "opaque" else self.dtype

    def bytes_per_page(self, page_tokens: int) -> int:
        """Bytes of one page of one layer: K and V, or one latent for MLA, or the opaque size."""
        if self.page_bytes is not None:
            return self.page_bytes
        planes = 1 if self.kind is GroupKind.MLA else 2
        return planes * page_tokens * self.kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class KVSpec:
    """The shape of KV: tokens per block, tokens per page, and groups of layers."""

    block_tokens: int
    groups: tuple[KVGroup, ...]
    page_tokens: int | None = None

    def __post_init__(self) -> None:
        _positive("block_tokens", self.block_tokens, MAX_BLOCK_TOKENS)
        if self.page_tokens is None:
            object.__setattr__(self, "page_tokens", self.block_tokens)
        _positive("page_tokens", self.page_tokens, self.block_tokens)
        if self.block_tokens % self.tokens_per_page:
            raise BadInputError(f"page_tokens is {self.page_tokens}; it must divide block_tokens {self.block_tokens}")
        if not isinstance(self.groups, tuple | list) or not all(isinstance(g, KVGroup) for g in self.groups):
            raise BadInputError(f"groups is {self.groups!r:.80}; it must be a tuple of KVGroup")
        object.__setattr__(self, "groups", tuple(self.groups))
        if not self.groups:
            raise BadInputError("a KVSpec needs at least one group of layers")
        if self.block_bytes > MAX_BLOCK_BYTES:
            raise BadInputError(
                f"a block of this spec is {self.block_bytes} bytes; the most is {MAX_BLOCK_BYTES}: lower block_tokens"
            )

    @classmethod
    def opaque(cls, block_tokens: int, block_bytes: int) -> KVSpec:
        """A spec whose blocks are just ``block_bytes`` bytes, interior unknown."""
        _positive("block_bytes", block_bytes, MAX_BLOCK_BYTES)
        group = KVGroup(layers=1, dtype="uint8", layout="opaque", page_bytes=block_bytes)
        return cls(block_tokens=block_tokens, groups=(group,))

    @property
    def tokens_per_page(self) -> int:
        """``page_tokens`` with its default filled in."""
        return self.page_tokens if self.page_tokens is not None else self.block_tokens

    @property
    def dtype(self) -> str:
        """What the values of all groups are; empty where groups differ, or the interior of one is unknown."""
        dtypes = {group.value_dtype for group in self.groups}
        return dtypes.pop() if len(dtypes) == 1 else ""

    @property
    def block_bytes(self) -> int:
        """Bytes of one whole block of one shard, all groups and layers."""
        pages = self.block_tokens // self.tokens_per_page
        return sum(g.layers * pages * g.bytes_per_page(self.tokens_per_page) for g in self.groups)


@dataclass(frozen=True, slots=True)
class Shard:
    """The slice of layers and heads that one rank holds. Replicated ranks use the same shard."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1

    def __post_init__(self) -> None:
        for axis, rank, size in (("tp", self.tp_rank, self.tp_size), ("pp", self.pp_rank, self.pp_size)):
            _positive(f"{axis}_size", size, 1 << 16)
            if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < size:
                raise BadInputError(f"{axis}_rank is {rank!r}; with {axis}_size {size} it must be in 0..{size - 1}")


@dataclass(frozen=True, slots=True)
class Namespace:
    """Everything that must be equal before one block may stand for another.

    ``engine`` names the engine, version and ISA where the block interior is opaque. ``hash_bytes`` is
    the width of one engine hash and goes with ``row_kind="hashes"``.
    """

    model: str
    spec: KVSpec
    revision: str = ""
    tenant: str = "default"
    engine: str = ""
    shard: Shard = field(default_factory=Shard)
    row_kind: RowKind = RowKind.TOKENS
    hash_bytes: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "row_kind", _enum(RowKind, "row_kind", self.row_kind))
        for name in ("model", "revision", "engine"):
            _text(name, getattr(self, name))
        if not self.model:
            raise BadInputError("model is empty; name the model, its weights decide what the KV means")
        self.check_tenant(self.tenant)
        if not isinstance(self.spec, KVSpec):
            raise BadInputError(f"spec is {self.spec!r:.80}; it must be a KVSpec")
        if not isinstance(self.shard, Shard):
            raise BadInputError(f"shard is {self.shard!r:.80}; it must be a Shard")
        if self.row_kind is RowKind.HASHES:
            _positive("hash_bytes", self.hash_bytes, 64)
        elif type(self.hash_bytes) is not int or self.hash_bytes != 0:
            raise BadInputError(f"hash_bytes is {self.hash_bytes!r}; it goes with row_kind='hashes' only")

    @staticmethod
    def check_tenant(tenant: object) -> None:
        """Raises BadInputError unless ``tenant`` can name a tenant."""
        _text("tenant", tenant)
        if not tenant:
            raise BadInputError("tenant is empty; leave it out for 'default'")

    @property
    def row_bytes(self) -> int:
        """Bytes of one full row of the index: the token ids of a block, or one engine hash."""
        return self.hash_bytes if self.row_kind is RowKind.HASHES else TOKEN_BYTES * self.spec.block_tokens

    def to_dict(self) -> dict[str, Any]:
        """JSON-able description; ``from_dict`` gives an equal namespace back."""
        plain: dict[str, Any] = _to_plain(self)
        return plain

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Namespace:
        """Raises BadInputError that names an unknown, missing or ill-typed field."""
        values = dict(_checked(cls, plain))
        spec = dict(_checked(KVSpec, _mapping("spec", values.get("spec"))))
        groups = spec.get("groups")
        if not isinstance(groups, list | tuple):
            raise BadInputError(f"spec.groups is {groups!r:.80}; it must be a list")
        spec["groups"] = tuple(KVGroup(**_checked(KVGroup, _mapping("spec.groups", g))) for g in groups)
        values["spec"] = KVSpec(**spec)
        if "shard" in values:
            values["shard"] = Shard(**_checked(Shard, _mapping("shard", values["shard"])))
        return cls(**values)

    def digest(self) -> bytes:
        """16 bytes; equal exactly when every field is equal."""
        return canonical_digest("kvstore.ns.1", self.to_dict())

    def differences(self, other: Namespace) -> list[str]:
        """The fields that differ, as ``path: mine != theirs``."""
        return list(_differences("", self.to_dict(), other.to_dict()))


@dataclass(frozen=True, slots=True)
class Root:
    """The per-request part of identity: cache salt and LoRA identity (name and digest of its weights)."""

    salt: str = ""
    lora: str = ""

    def __post_init__(self) -> None:
        _text("salt", self.salt)
        _text("lora", self.lora)

    def key(self, namespace_digest: bytes) -> bytes:
        """The 16-byte parent key of a first block."""
        value = [namespace_digest.hex(), self.salt, self.lora]
        return canonical_digest("kvstore.root.1", value)


@dataclass(frozen=True, slots=True)
class ExtraKey:
    """Content behind placeholder tokens (an image, a sound): where it lies and the digest of what it is."""

    start_token: int
    n_tokens: int
    digest: bytes

    def __post_init__(self) -> None:
        if type(self.start_token) is not int or not 0 <= self.start_token < 1 << 31:
            raise BadInputError(f"start_token is {self.start_token!r}; it must be in 0..{(1 << 31) - 1}")
        _positive("n_tokens", self.n_tokens, (1 << 31) - 1)
        if not isinstance(self.digest, bytes) or not 0 < len(self.digest) <= 64:
            raise BadInputError(f"digest is {self.digest!r:.80}; it must be 1 to 64 bytes")


def _enum(kind: Any, name: str, value: object) -> Any:
    try:
        return kind(value)
    except ValueError:
        raise BadInputError(f"{name} is {value!r}; known are {', '.join(kind)}") from None


def _to_plain(value: Any) -> Any:
    if hasattr(value, "__dataclass_fields__"):
        return {f.name: _to_plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, StrEnum):
        return value.value
    if isinstance(value, tuple):
        return [_to_plain(v) for v in value]
    return value


def _mapping(name: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise BadInputError(f"{name} is {value!r:.80}; it must be an object with fields")
    return value


def _checked(kind: Any, plain: Mapping[str, Any]) -> Mapping[str, Any]:
    known = {f.name for f in fields(kind)}
    unknown = [name for name in plain if name not in known]
    if unknown:
        raise BadInputError(f"{kind.__name__} has no field {unknown[0]!r}; known are {', '.join(sorted(known))}")
    no_default = [f.name for f in fields(kind) if f.default is f.default_factory and f.name not in plain]
    if no_default:
        raise BadInputError(f"{kind.__name__} lacks the field {no_default[0]!r}")
    return plain


def _differences(path: str, mine: Any, theirs: Any) -> Iterator[str]:
    if isinstance(mine, dict) and isinstance(theirs, dict):
        for name in sorted(mine.keys() | theirs.keys()):
            yield from _differences(f"{path}.{name}" if path else name, mine.get(name), theirs.get(name))
    elif isinstance(mine, list) and isinstance(theirs, list) and len(mine) == len(theirs):
        for index, (left, right) in enumerate(zip(mine, theirs, strict=True)):
            yield from _differences(f"{path}[{index}]", left, right)
    elif mine != theirs:
        yield f"{path}: {mine!r} != {theirs!r}"
