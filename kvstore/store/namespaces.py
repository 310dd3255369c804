"""Open namespaces by digest, their root keys and their names."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.errors import BadInputError, SpecMismatchError
from kvstore.types import Namespace, Root

NAMESPACES_MAX = 4096
ROOT_KEYS_CACHED_MAX = 1024
NAME_CHARS_MAX = 256
NAMES_MAX = 16384


@dataclass(slots=True)
class OpenNamespace:
    """A namespace that this daemon knows. ``ordinal`` is its number here."""

    namespace: Namespace
    digest: bytes
    block_bytes: int
    ordinal: int
    _root_keys: dict[tuple[str, str], bytes] = field(default_factory=dict)

    def root_key(self, salt: str, lora: str) -> bytes:
        """The 16-byte key of a root; remembered, as most requests use the same few."""
        key = self._root_keys.get((salt, lora))
        if key is None:
            key = Root(salt=salt, lora=lora).key(self.digest)
            if len(self._root_keys) >= ROOT_KEYS_CACHED_MAX:
                self._root_keys.clear()
            self._root_keys[(salt, lora)] = key
        return key


class Namespaces:
    """The namespaces of one daemon. Equal descriptions share one entry."""

    def __init__(self) -> None:
        self._by_digest: dict[bytes, OpenNamespace] = {}
        self._ordinals: dict[bytes, int] = {}
        self._digests: list[bytes] = []
        self._by_ordinal: dict[int, OpenNamespace] = {}
        self._names: dict[tuple[str, str], OpenNamespace] = {}

    def __len__(self) -> int:
        return len(self._by_digest)

    def open(self, namespace: Namespace, name: str = "") -> OpenNamespace:
        """The entry for a description; ``name``, if given, is bound to it within its tenant.

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
        if name and bound is None and len(self._names) >= NAMES_MAX:
            raise BadInputError(f"{NAMES_MAX} namespace names are bound, the most a daemon keeps: use no name")
        digest = namespace.digest()
        entry = self._by_digest.get(digest)
        if entry is None:
            if len(self._by_digest) >= NAMESPACES_MAX:
                raise BadInputError(
                    f"{NAMESPACES_MAX} namespaces are open, the most a daemon keeps: "
                    f"use salts for what changes per request"
                )
            entry = OpenNamespace(namespace, digest, namespace.spec.block_bytes, self.ordinal(digest))
            self._by_digest[digest] = entry
            self._by_ordinal[entry.ordinal] = entry
        if name:
            self._names[(namespace.tenant, name)] = entry
        return entry

    def get(self, digest: bytes) -> OpenNamespace | None:
        """The open namespace with this digest."""
        return self._by_digest.get(digest)

    def ordinal(self, digest: bytes) -> int:
        """The number of a namespace in this daemon, given now if it has none; it need not be open."""
        ordinal = self._ordinals.setdefault(digest, len(self._ordinals))
        if ordinal == len(self._digests):
            self._digests.append(digest)
        return ordinal

    def digest(self, ordinal: int) -> bytes:
        """The digest of the namespace with this number, which must have been given."""
        return self._digests[ordinal]

    def by_ordinal(self, ordinal: int) -> OpenNamespace:
        """The open namespace with this number."""
        return self._by_ordinal[ordinal]
