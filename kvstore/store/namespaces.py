"""Open namespaces by digest, their root keys and their names."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from kvstore.errors import BadInputError, SpecMismatchError
from kvstore.hybrid import Part, parts_of
from kvstore.load_time import LoadTime
from kvstore.prefix_index.parts import Rule
from kvstore.prefix_index.tenants import Tenants
from kvstore.recompute import checked_doubling_tokens
from kvstore.types import KVSpec, Namespace, Root

NAMESPACES_MAX = 32768
NAMESPACES_PER_TENANT_MAX = 4096
"""Far below those of a daemon, so that no tenant takes them from the others."""
ROOT_KEYS_CACHED_MAX = 1024
NAME_CHARS_MAX = 256
NAMES_PER_TENANT_MAX = 8192

_FIRST_GUESS_S, _FIRST_GUESS_BYTES_PER_S = 1e-4, 5e9


@dataclass(frozen=True, slots=True)
class Stored:
    """What lies in slots and frames of one kind: whole blocks of a namespace, or one part of each.

    ``digest`` and ``ordinal`` are the namespace's own for whole blocks. ``description`` is for humans.
    """

    ordinal: int
    digest: bytes
    spec: KVSpec
    description: str

    @property
    def block_bytes(self) -> int:
        """Bytes of a slot's contents."""
        return self.spec.block_bytes


class Described(NamedTuple):
    """What a description says: the namespace, its digest, and which part of its blocks it is of."""

    digest: bytes
    namespace: Namespace | None
    part: int


def described(digest: bytes, text: str) -> Described:
    """What has this digest and this description, as it stands on NVMe or as the daemon before has noted it."""
    try:
        plain = json.loads(text) if text else {}
        namespace = Namespace.from_dict(plain.get("of", plain)) if plain else None
        part = int(plain.get("part", 0))
    except (ValueError, TypeError, RecursionError):  # what the disk says may be anything
        return Described(digest, None, 0)
    return Described(digest if namespace is None else namespace.digest(), namespace, part)


@dataclass(slots=True)
class OpenNamespace:
    """A namespace that this daemon knows. ``ordinal`` is its number here, ``block_bytes`` what a block in the tree has.

    Of a hybrid one ``parts`` are those that its blocks have, each with its ``Stored`` in ``stored``; the block in the
    tree is part 0, and ``rules`` say what a hit needs of the others. Otherwise ``stored`` has one entry. ``tenant`` is
    the tenant's number here.
    """

    namespace: Namespace
    digest: bytes
    block_bytes: int
    ordinal: int
    stored: tuple[Stored, ...]
    tenant: int
    parts: tuple[Part, ...] = ()
    rules: tuple[Rule, ...] = ()
    attention_doubling_tokens: float = 0.0
    """Of the model, see ``kvstore.recompute``; 0 while nobody has told."""
    n_lookups: int = 0
    """Prompts looked up to use them; so are blocks and hits."""
    n_lookup_blocks: int = 0
    n_hit_blocks: int = 0
    used_at_s: float = -math.inf
    """The last time, by the store's clock."""
    copy_times: tuple[LoadTime, LoadTime] = field(default_factory=lambda: (_copy_guess(), _copy_guess()))
    """How long its clients take for asking for blocks and copying them, as they say: of those that are in DRAM, and of
    those that were read from NVMe first, without the reading."""
    copies_from_s: float = -math.inf
    """When the next one will be looked at, by the store's clock."""
    _root_keys: dict[tuple[str, str], bytes] = field(default_factory=dict)
    token_bytes: float = field(init=False)
    """Bytes of KV of one token, all parts of it."""

    def __post_init__(self) -> None:
        self.token_bytes = self.namespace.spec.block_bytes / self.namespace.spec.block_tokens

    @property
    def ordinals(self) -> tuple[int, ...]:
        """The numbers in the block table of everything that it has there."""
        return tuple(each.ordinal for each in self.stored)

    def stored_as(self, ordinal: int) -> Stored:
        """What has this number."""
        return self.stored[self.ordinals.index(ordinal)]

    @property
    def roots(self) -> dict[tuple[str, str], bytes]:
        """Keys of roots that were asked for lately, by salt and LoRA identity."""
        return dict(self._root_keys)

    def looked_up(self, n_blocks: int, n_hit_blocks: int, now_s: float) -> None:
        """A prompt of so many blocks was looked up to use it, and so many of them were found."""
        self.n_lookups += 1
        self.n_lookup_blocks += n_blocks
        self.n_hit_blocks += n_hit_blocks
        self.used_at_s = now_s

    def root_key(self, salt: str, lora: str) -> bytes:
        """The 16-byte key of a root; remembered, as most requests use the same few."""
        key = self._root_keys.get((salt, lora))
        if key is None:
            # Of part 0 if there are parts: what was stored of the same namespace in one piece is another thing.
            key = Root(salt=salt, lora=lora).key(self.stored[0].digest)
            if len(self._root_keys) >= ROOT_KEYS_CACHED_MAX:
                self._root_keys.clear()
            self._root_keys[(salt, lora)] = key
        return key


def _copy_guess() -> LoadTime:
    return LoadTime(_FIRST_GUESS_S, _FIRST_GUESS_BYTES_PER_S)


class Namespaces:
    """The namespaces of one daemon. Equal descriptions share one entry."""

    def __init__(self, tenants: Tenants) -> None:
        """``tenants`` is told whose each namespace is."""
        self._tenants = tenants
        self._by_digest: dict[bytes, OpenNamespace] = {}
        self._ordinals: dict[bytes, int] = {}
        self._digests: list[bytes] = []
        self._by_ordinal: dict[int, OpenNamespace] = {}
        self._noted: dict[bytes, str] = {}
        """Descriptions, by digest, of what was taken over and may not have been opened since."""
        self._names: dict[tuple[str, str], OpenNamespace] = {}
        self._n_open: Counter[str] = Counter()
        self._n_names: Counter[str] = Counter()
        """By tenant."""

    def __len__(self) -> int:
        return len(self._by_digest)

    def open(self, namespace: Namespace, name: str = "", attention_doubling_tokens: float = 0.0) -> OpenNamespace:
        """The entry for a description; ``name``, if given, is bound to it within its tenant.

        ``attention_doubling_tokens`` is what was told last, no part of what it is; 0 tells nothing.
        Raises SpecMismatchError if the name stands for another description, and says which fields differ.
        """
        if len(name) > NAME_CHARS_MAX:
            raise BadInputError(
                f"the namespace name {name[:40]!r}... has {len(name)} characters; the most is {NAME_CHARS_MAX}"
            )
        bound = self._names.get((namespace.tenant, name)) if name else None
        if bound is not None and bound.namespace != namespace:
            differs = "; ".join(bound.namespace.differences(namespace))
            raise SpecMismatchError(
                f"the namespace name {name!r} is bound to another description ({differs}): "
                "use another name, or none, to keep both"
            )
        tenant = namespace.tenant
        if name and bound is None and self._n_names[tenant] >= NAMES_PER_TENANT_MAX:
            raise BadInputError(
                f"tenant {tenant!r} has bound {NAMES_PER_TENANT_MAX} namespace names, the most it may have: use no name"
            )
        doubling_tokens = checked_doubling_tokens(attention_doubling_tokens)
        digest = namespace.digest()
        entry = self._by_digest.get(digest)
        if entry is None:
            self._check_room(tenant)
            entry = self._described(namespace, digest)
            self._by_digest[digest] = entry
            self._n_open[tenant] += 1
            for ordinal in entry.ordinals:
                self._by_ordinal[ordinal] = entry
        entry.attention_doubling_tokens = doubling_tokens or entry.attention_doubling_tokens
        if name and bound is None:
            self._names[(tenant, name)] = entry
            self._n_names[tenant] += 1
        return entry

    def _check_room(self, tenant: str) -> None:
        way_out = "use salts for what changes per request"
        if self._n_open[tenant] >= NAMESPACES_PER_TENANT_MAX:
            raise BadInputError(
                f"tenant {tenant!r} has {NAMESPACES_PER_TENANT_MAX} namespaces open, the most it may have: {way_out}"
            )
        if len(self._by_digest) >= NAMESPACES_MAX:
            raise BadInputError(f"{NAMESPACES_MAX} namespaces are open, the most a daemon keeps: {way_out}")

    def _described(self, namespace: Namespace, digest: bytes) -> OpenNamespace:
        spec, plain = namespace.spec, namespace.to_dict()
        tenant = self._tenants.number(namespace.tenant)
        parts = parts_of(spec)
        if not parts:
            whole = Stored(self.ordinal(digest), digest, spec, json.dumps(plain))
            self._tenants.owns(tenant, whole.ordinal)
            return OpenNamespace(namespace, digest, spec.block_bytes, whole.ordinal, (whole,), tenant)
        stored = tuple(
            Stored(
                self.ordinal(part.digest(digest)), part.digest(digest), part.spec,
                json.dumps({"part": part.number, "groups": part.groups, "of": plain}),
            )
            for part in parts
        )  # fmt: skip
        for each in stored:
            self._tenants.owns(tenant, each.ordinal)
        rules = tuple(Rule(part.number, part.window_blocks, part.is_state) for part in parts[1:])
        return OpenNamespace(namespace, digest, parts[0].block_bytes, stored[0].ordinal, stored, tenant, parts, rules)

    def get(self, digest: bytes) -> OpenNamespace | None:
        """The open namespace with this digest."""
        return self._by_digest.get(digest)

    def opened_as(self, ordinal: int) -> OpenNamespace | None:
        """The open namespace that has something with this number, if it is open."""
        return self._by_ordinal.get(ordinal)

    def opened(self) -> list[OpenNamespace]:
        """All that are open."""
        return list(self._by_digest.values())

    def unopened(self) -> list[tuple[int, bytes]]:
        """Numbers and digests of those that have a number and that nobody has opened."""
        return [each for each in enumerate(self._digests) if each[0] not in self._by_ordinal]

    def names(self) -> dict[bytes, tuple[str, ...]]:
        """The names bound to namespaces, by digest."""
        names: dict[bytes, tuple[str, ...]] = {}
        for (_, name), entry in self._names.items():
            names[entry.digest] = (*names.get(entry.digest, ()), name)
        return names

    def ordinal(self, digest: bytes) -> int:
        """The number of a namespace in this daemon, given now if it has none; it need not be open."""
        ordinal = self._ordinals.setdefault(digest, len(self._ordinals))
        if ordinal == len(self._digests):
            self._digests.append(digest)
        return ordinal

    def found(self, digest: bytes, description: str) -> int:
        """As ``ordinal``, for what has blocks from before; its description, if there is one, says whose they are."""
        ordinal = self.ordinal(digest)
        namespace = described(digest, description).namespace
        if namespace is not None:
            self._tenants.owns(self._tenants.number(namespace.tenant), ordinal)
        return ordinal

    def digest(self, ordinal: int) -> bytes:
        """The digest of the namespace with this number, which must have been given."""
        return self._digests[ordinal]

    def note(self, digest: bytes, description: str) -> None:
        """What has this digest, as the daemon before has said; it need not be open."""
        self._noted[digest] = description

    def description(self, ordinal: int) -> str:
        """As ``Stored`` has it, of what is open or was noted; empty if nobody has said what has this number."""
        opened = self._by_ordinal.get(ordinal)
        if opened is not None:
            return opened.stored_as(ordinal).description
        return self._noted.get(self.digest(ordinal), "")

    def by_ordinal(self, ordinal: int) -> OpenNamespace:
        """The open namespace that has something with this number."""
        return self._by_ordinal[ordinal]
