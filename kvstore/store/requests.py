"""What a store is asked with, and what it answers a commit with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import BadInputError
from kvstore.hints import Hints
from kvstore.prefix_index.policy import Use
from kvstore.prefix_index.rows import RowPath
from kvstore.store.namespaces import OpenNamespace
from kvstore.types import RowKind


class Prompt(NamedTuple):
    """One prompt below one root, as every call needs it. ``time_s`` is what policies see."""

    namespace: OpenNamespace
    root_key: bytes
    path: RowPath
    time_s: float
    category: int = 0
    part: int = 0
    """What is to be stored of the blocks: see ``OpenNamespace.parts``."""
    root: tuple[str, str] = ("", "")
    """Salt and LoRA identity, of which ``root_key`` is made."""
    hints: Hints | None = None
    n_prompt_tokens: int | None = None
    """The tokens behind so many were generated; None: none was."""
    prompt_only: bool = False
    """The caller wants no blocks stored that hold a generated token."""
    ahead: bool = False
    """With ``part``: the blocks that these are parts of will be stored before the commit."""

    @property
    def n_prompt_rows(self) -> int:
        """Leading rows of the path without a generated token; a short last one if all of it is prompt."""
        if self.n_prompt_tokens is None or self.n_prompt_tokens >= self.n_tokens:
            return self.path.n_rows
        return self.n_prompt_tokens // self.namespace.namespace.spec.block_tokens

    @property
    def n_tokens(self) -> int:
        """Tokens that the rows stand for, generated ones included; of hashes each counts as a whole block."""
        return self.path.n_full_rows * self.namespace.namespace.spec.block_tokens + self.path.tail_tokens

    def use(self, namespace: int | None = None) -> Use:
        """What policies see of the request. ``namespace``: the number of what is used, if not of whole blocks."""
        n_tokens, opened = self.n_tokens, self.namespace
        n_prompt = n_tokens if self.n_prompt_tokens is None else min(self.n_prompt_tokens, n_tokens)
        n_output = self.hints.output_tokens if self.hints is not None else 0
        n_behind = n_tokens - n_prompt
        if opened.namespace.row_kind is RowKind.HASHES and n_behind < opened.namespace.spec.block_tokens:
            n_behind = 0  # the last hash stands for a short block
        return Use(
            self.time_s, n_prompt, n_output or n_behind, self.hints,
            opened.ordinal if namespace is None else namespace,
            opened.tenant, opened.namespace.spec.block_tokens, self.category,
            attention_doubling_tokens=opened.attention_doubling_tokens,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class LeaseLimits:
    """Default and longest life of leases, reservations and pins."""

    default_s: float = 30.0
    max_s: float = 600.0

    def ttl_s(self, asked_s: float) -> float:
        """The life granted for the one asked for; 0 asks for the default."""
        if not 0 <= asked_s < float("inf"):
            raise BadInputError(f"ttl_s is {asked_s!r}; it must be 0 (for the default) or a positive number of seconds")
        return min(asked_s or self.default_s, self.max_s)


@dataclass(frozen=True, slots=True)
class Commit:
    """Outcome of a commit: blocks that are now stored, and those somebody else had stored first."""

    n_committed: int
    n_duplicate: int


class Reach(NamedTuple):
    """How far a prompt is stored, within what was asked for; ``wanted`` starts at the first block asked for."""

    ids: NDArray[np.intp]
    wanted: NDArray[np.intp]
    n_blocks: int
    partial_tokens: int
