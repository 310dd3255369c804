"""Prompts as requests carry them, turned into what the store is asked with."""

from __future__ import annotations

from kvstore.errors import BadInputError, EndedError
from kvstore.hints import Hints
from kvstore.prefix_index.rows import RowPath
from kvstore.server.session import Session
from kvstore.shards import SHARDS_MAX, check_family
from kvstore.store.family import FamilyPrompt
from kvstore.store.namespaces import OpenNamespace
from kvstore.store.requests import Prompt
from kvstore.store.store import Store
from kvstore.types import KEY_BYTES, ExtraKey, Namespace, RowKind
from kvstore.wire import kvstore_pb2 as pb

EXTRAS_MAX = 4096
POLICY_TIME_S_MAX = 1e12
FAMILIES_CHECKED_MAX = 1024
"""Families that are remembered as such."""


class PromptReader:
    """Checks prompts and finds their namespaces in one store."""

    def __init__(self, store: Store, client_policy_clock: bool) -> None:
        self._store = store
        self._client_policy_clock = client_policy_clock
        self._families: set[bytes] = set()

    def read(self, session: Session, message: pb.Prompt) -> Prompt:
        """A prompt of one namespace of the session's tenant.

        Raises EndedError for a namespace that is not open here, BadInputError for what can't be a prompt.
        """
        if message.shards:
            raise BadInputError("the shards of a family can't be asked together here: name one namespace")
        opened = self.opened(session, message.namespace)
        return self._prompt(opened, _path(message, opened.namespace), message)

    def read_family(self, session: Session, message: pb.Prompt) -> FamilyPrompt:
        """A prompt of all shards that it names, which must be a family. Raises as ``read``."""
        spaces = [self.opened(session, digest) for digest in digests_of(message.shards)]
        if any(opened.parts for opened in spaces):
            raise BadInputError("hybrid namespaces can't be asked together as a family: ask each shard, take the least")
        if message.shards not in self._families:
            check_family([opened.namespace for opened in spaces])
            if len(self._families) >= FAMILIES_CHECKED_MAX:
                self._families.clear()
            self._families.add(message.shards)
        path = _path(message, spaces[0].namespace)
        return FamilyPrompt(tuple(self._prompt(opened, path, message) for opened in spaces))

    def opened(self, session: Session, digest: bytes) -> OpenNamespace:
        """The open namespace with this digest. Raises EndedError if the session's tenant has none such."""
        opened = self._store.namespaces.get(digest)
        if opened is None or opened.namespace.tenant != session.tenant:
            raise EndedError(f"namespace {digest.hex()!r:.40} is not open here: open the namespace again")
        return opened

    def _prompt(self, opened: OpenNamespace, path: RowPath, message: pb.Prompt) -> Prompt:
        time_s = message.policy_time_s if self._client_policy_clock else self._store.clock.now_s()
        if not -POLICY_TIME_S_MAX <= time_s <= POLICY_TIME_S_MAX:
            raise BadInputError(
                f"policy_time_s is {time_s!r}; it must be seconds, at most {POLICY_TIME_S_MAX:.0e} either way"
            )
        if message.part >= len(opened.stored):
            n_parts = len(opened.stored)
            raise BadInputError(f"part is {message.part}; blocks of this namespace have parts below {n_parts}")
        return Prompt(
            opened,
            opened.root_key(message.salt, message.lora),
            path,
            time_s,
            message.category & 0xFF,
            message.part,
            root=(message.salt, message.lora),
            hints=_hints(message.hints) if message.HasField("hints") else None,
            n_prompt_tokens=message.n_prompt_tokens if message.HasField("n_prompt_tokens") else None,
            prompt_only=message.prompt_only,
            ahead=message.ahead,
        )


def _hints(message: pb.Hints) -> Hints:
    """Raises BadInputError for values that can't be."""
    return Hints(
        message.request_type, message.turn, message.session_id, message.expected_reuse, message.ttl_s,
        message.priority, message.no_reuse, message.output_tokens,
    )  # fmt: skip


def digests_of(packed: bytes) -> tuple[bytes, ...]:
    """The namespace digests in a packed array of them. Raises BadInputError for a length that can't be."""
    if len(packed) % KEY_BYTES or len(packed) > KEY_BYTES * SHARDS_MAX:
        raise BadInputError(
            f"shards has {len(packed)} bytes; it must be digests of {KEY_BYTES} bytes, at most {SHARDS_MAX} of them"
        )
    return tuple(packed[start : start + KEY_BYTES] for start in range(0, len(packed), KEY_BYTES))


def _path(message: pb.Prompt, namespace: Namespace) -> RowPath:
    if namespace.row_kind is RowKind.HASHES:
        if message.extras:
            raise BadInputError("extra keys go with token rows only; an engine's hash covers its own extras")
        return RowPath.from_hashes(message.rows, namespace.hash_bytes)
    if len(message.extras) > EXTRAS_MAX:
        raise BadInputError(f"{len(message.extras)} extra keys in one prompt; the most is {EXTRAS_MAX}")
    extras = [ExtraKey(extra.start_token, extra.n_tokens, extra.digest) for extra in message.extras]
    return RowPath.from_tokens(message.rows, namespace.spec.block_tokens, extras)
