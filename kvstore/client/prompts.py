"""A caller's arguments as messages, with everything checked that needs no daemon."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvstore.errors import BadInputError
from kvstore.hints import Hints
from kvstore.tokens import hash_array, token_array
from kvstore.types import ExtraKey, Namespace, Root, RowKind
from kvstore.wire import kvstore_pb2 as pb

DEFAULT_ROOT = Root()


def rows_of_prompt(namespace: Namespace, tokens: ArrayLike, n_blocks: int | None = None) -> NDArray[np.generic]:
    """The rows of a prompt, or of its first ``n_blocks``: uint32 token ids [n] or hashes uint8 [n, hash_bytes]."""
    if namespace.row_kind is RowKind.HASHES:
        return hash_array(tokens, namespace.hash_bytes)[:n_blocks]
    array = token_array(tokens)
    return array if n_blocks is None else array[: n_blocks * namespace.spec.block_tokens]


def fill_prompt(
    prompt: pb.Prompt,
    rows: NDArray[np.generic],
    root: Root,
    extras: Sequence[ExtraKey],
    policy_time_s: float | None = None,
    category: int = 0,
) -> None:
    """Set all fields but the namespace."""
    prompt.rows = rows.tobytes()
    if root is not DEFAULT_ROOT:
        if not isinstance(root, Root):
            raise BadInputError(f"root is {root!r:.80}; give a kvstore.Root")
        prompt.salt, prompt.lora = root.salt, root.lora
    for extra in extras or ():
        prompt.extras.add(start_token=extra.start_token, n_tokens=extra.n_tokens, digest=extra.digest)
    if policy_time_s is not None:
        prompt.policy_time_s = seconds("policy_time_s", policy_time_s)
    if category:
        prompt.category = count("category", category, 256)


def fill_hints(prompt: pb.Prompt, hints: Hints) -> None:
    """Say what the caller knows about it."""
    if not isinstance(hints, Hints):
        raise BadInputError(f"hints is {hints!r:.80}; give a kvstore.Hints")
    prompt.hints.MergeFrom(pb.Hints(**hints.to_dict()))  # type: ignore[arg-type]


def tokens_asked_for(namespace: Namespace, prompt: pb.Prompt, first_block: int, max_blocks: int) -> int:
    """Tokens of a prompt from ``first_block`` on, of at most ``max_blocks`` blocks (0: all)."""
    block_tokens = namespace.spec.block_tokens
    if namespace.row_kind is RowKind.HASHES:
        n_tokens = len(prompt.rows) // namespace.hash_bytes * block_tokens
    else:
        n_tokens = len(prompt.rows) // 4
    end = min(n_tokens, max_blocks * block_tokens) if max_blocks else n_tokens
    return max(end - first_block * block_tokens, 0)


def seconds(name: str, value: float | None) -> float:
    """A number of seconds as a float, 0 for None; raises BadInputError. Its range is the daemon's to check."""
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise BadInputError(f"{name} is {value!r:.80}; it must be a number of seconds")
    return float(value)


def count(name: str, value: int, end: int = 1 << 31) -> int:
    """A whole number from 0 to ``end - 1``; raises BadInputError."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 0 <= value < end:
        raise BadInputError(f"{name} is {value!r}; it must be a whole number, 0 or more")
    return int(value)
