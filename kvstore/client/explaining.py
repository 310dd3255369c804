"""Why a prompt is no hit, or not as far as it could be: a question of a handle of one namespace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from numpy.typing import ArrayLike

from kvstore.client.admin import Inspecting
from kvstore.client.prompts import DEFAULT_ROOT
from kvstore.facts import NearRoot
from kvstore.types import ExtraKey, Root
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.framing import Method


@dataclass(frozen=True, slots=True)
class NearNamespace:
    """Another namespace of the tenant's. ``differences``: what the prompt's has other, as ``path: here != there``.

    It has ``n_matching`` blocks of the prompt and ``n_blocks`` in all.
    """

    digest: bytes
    differences: tuple[str, ...]
    n_matching: int
    n_blocks: int


@dataclass(frozen=True, slots=True)
class Explanation:
    """How far a prompt can be used now, and why no further.

    ``n_blocks`` whole blocks and ``partial_tokens`` more tokens can be used; the first ``n_dram_blocks`` at once,
    ``n_nvme_blocks`` are on NVMe and not in DRAM, ``n_hbm_blocks`` have a copy in HBM, too. Number ``block`` is the
    first that is missing, and ``reason`` why: ``stored``
    (none is), ``being_written``, ``evicted``, ``unwanted`` (evicted after a request said it was not used again),
    ``expired``, ``corrupt``, ``cleared``, ``no_room`` (not stored: the tier was full of blocks in use), ``quota`` (or
    its tenant's part of it was), ``too_large`` or ``too_long``, ``declined`` by the policy, ``generated`` (not to
    be stored), ``uncommitted`` (reserved, and not committed) or ``never_stored`` as far as is known. Of a block
    that left: from which ``tier``, by which ``policy``, ``left_ago_s`` ago, after it had been unused for ``unused_s``,
    and why it was not written to NVMe (``queue_full``, ``suspended``, ``unsuitable``, or empty); None or empty where
    that is not known. ``groups``: of a hybrid namespace, those of which the part is missing, not the block.

    ``missing`` counts the first 256 missing blocks by reason, also ``unreachable`` ones, stored behind a missing one.
    ``differs_at_token`` is the first token of the prompt for which the closest stored block has another; the tokens are
    ``here_token`` and ``stored_token``. ``content``: the same tokens are stored with an ``other`` image or sound behind
    them, with ``none``, or with ``some`` where the prompt has none. ``namespaces`` and ``roots`` come near where
    nothing can be used.

    What left in the last ``remembered_s`` seconds is known; None: nothing is. What left before was forgotten if
    ``forgot``; else the daemon began then. The namespace was cleared ``cleared_ago_s`` ago with ``n_cleared_blocks``.
    ``lines`` says all of it, ``advice`` what to do about it, in words.
    """

    n_rows: int
    n_blocks: int
    partial_tokens: int
    n_dram_blocks: int
    n_nvme_blocks: int
    n_hbm_blocks: int
    block: int | None
    reason: str
    tier: str
    policy: str
    left_ago_s: float | None
    unused_s: float | None
    unwritten: str
    groups: tuple[int, ...]
    missing: dict[str, int]
    differs_at_token: int | None
    here_token: int | None
    stored_token: int | None
    content: str
    namespaces: tuple[NearNamespace, ...]
    roots: tuple[NearRoot, ...]
    remembered_s: float | None
    forgot: bool
    cleared_ago_s: float | None
    n_cleared_blocks: int
    lines: tuple[str, ...]
    advice: tuple[str, ...]


class Explaining(Inspecting):
    """What a handle of one namespace can tell of a prompt."""

    def explain(
        self,
        tokens: ArrayLike,
        *,
        root: Root = DEFAULT_ROOT,
        extras: Sequence[ExtraKey] = (),
        other_salts: bool = False,
    ) -> Explanation:
        """How much of a prompt can be used, and why no more: what became of the first block that is missing.

        Blocks for one answer. Raises UnavailableError; counts as no use. Of other tenants nothing is told. With
        ``other_salts`` it is said whether the prompt is stored below another salt (not which): only over the daemon's
        own socket, raises DeniedError elsewhere. What the daemon remembers ends with it.
        """
        request = pb.ExplainRequest(other_salts=other_salts)
        self._fill(request.prompt, tokens, root, extras)
        self._name(request.prompt)
        return _explanation(self._session.call(Method.EXPLAIN, request, pb.ExplainReply))


def _explanation(reply: pb.ExplainReply) -> Explanation:
    def known(value: float) -> float | None:
        return None if value < 0 else value

    def token(value: int) -> int | None:
        return None if value < 0 else value

    return Explanation(
        n_rows=reply.n_rows,
        n_blocks=reply.n_blocks,
        partial_tokens=reply.partial_tokens,
        n_dram_blocks=reply.n_dram_blocks,
        n_nvme_blocks=reply.n_nvme_blocks,
        n_hbm_blocks=reply.n_hbm_blocks,
        block=None if reply.reason == "stored" else reply.block,
        reason=reply.reason,
        tier=reply.tier,
        policy=reply.policy,
        left_ago_s=known(reply.left_ago_s),
        unused_s=known(reply.unused_s),
        unwritten=reply.unwritten,
        groups=tuple(reply.groups),
        missing={each.reason: each.n for each in reply.missing},
        differs_at_token=token(reply.differs_at_token),
        here_token=token(reply.here_token),
        stored_token=token(reply.stored_token),
        content=reply.content,
        namespaces=tuple(
            NearNamespace(each.digest, tuple(each.differences), each.n_matching, each.n_blocks)
            for each in reply.namespaces
        ),
        roots=tuple(NearRoot(each.salt_differs, each.lora_differs, each.lora, each.n_matching) for each in reply.roots),
        remembered_s=known(reply.remembered_s),
        forgot=reply.forgot,
        cleared_ago_s=known(reply.cleared_ago_s),
        n_cleared_blocks=reply.n_cleared_blocks,
        lines=tuple(reply.lines),
        advice=tuple(reply.advice),
    )
