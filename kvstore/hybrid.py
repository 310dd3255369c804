"""How the blocks of a hybrid model are cut: into what every hit needs and what only the end of a hit needs.

Full and MLA groups are needed for every block of a prompt; together they are the block itself, part 0. A sliding
or state group is needed for the last blocks of a hit only: each is a part of its own, numbered from 1 on in the
order of the spec. Parts are stored, leased, moved and evicted each by itself.

A spec with one group, or with full and MLA groups only, is not hybrid: its blocks are one piece. A hybrid spec
without any full or MLA group has a mark of ``MARK_BYTES`` zeros as part 0: something must say that the block is there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from kvstore.errors import BadInputError
from kvstore.types import GroupKind, KVSpec, canonical_digest

MARK_BYTES = 64
PARTS_MAX = 15
"""Most sliding and state groups of a spec."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part of every block. ``groups``: which of the whole spec's groups it has, in order; ``spec``: only those.

    ``window_blocks``: of how many last blocks a hit needs it, 0 for all. ``is_state``: of the last one, and only as
    it is at its end.
    """

    number: int
    groups: tuple[int, ...]
    spec: KVSpec
    window_blocks: int = 0
    is_state: bool = False

    @property
    def block_bytes(self) -> int:
        """Bytes of this part of a block."""
        return self.spec.block_bytes

    def digest(self, namespace_digest: bytes) -> bytes:
        """16 bytes that stand for this part of a namespace's blocks; no namespace has the same."""
        return canonical_digest("kvstore.part.1", [namespace_digest.hex(), self.number])


@lru_cache(maxsize=256)
def parts_of(spec: KVSpec) -> tuple[Part, ...]:
    """Part 0 and the others; empty for a spec that isn't hybrid.

    Raises BadInputError for one with more than ``PARTS_MAX`` sliding and state groups.
    """
    short = [i for i, group in enumerate(spec.groups) if group.kind in (GroupKind.SLIDING, GroupKind.STATE)]
    if len(spec.groups) == 1 or not short:
        return ()
    if len(short) > PARTS_MAX:
        raise BadInputError(
            f"the spec has {len(short)} sliding and state groups, the most is {PARTS_MAX}: "
            "put layers of the same shape and window into one group"
        )
    rest = tuple(i for i in range(len(spec.groups)) if i not in short)
    base = _only(spec, rest) if rest else KVSpec.opaque(spec.block_tokens, MARK_BYTES)
    parts = [Part(0, rest, base)]
    for number, i in enumerate(short, 1):
        window_tokens = spec.groups[i].window_tokens or spec.block_tokens
        window_blocks = -(-window_tokens // spec.block_tokens)
        parts.append(Part(number, (i,), _only(spec, (i,)), window_blocks, spec.groups[i].kind is GroupKind.STATE))
    return tuple(parts)


def place_of(spec: KVSpec, group: int) -> tuple[Part, int, int]:
    """Where one group's bytes of a block are: its part, their offset there, and how many they are."""
    for part in parts_of(spec):
        if group in part.groups:
            at = part.groups.index(group)
            sizes = [_only(spec, (i,)).block_bytes for i in part.groups]
            return part, sum(sizes[:at]), sizes[at]
    raise BadInputError(f"group {group!r} is not there; a hybrid spec of {len(spec.groups)} groups has 0 and up")


def _only(spec: KVSpec, groups: tuple[int, ...]) -> KVSpec:
    return KVSpec(spec.block_tokens, tuple(spec.groups[i] for i in groups), spec.page_tokens)
