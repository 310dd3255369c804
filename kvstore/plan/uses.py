"""Uses of stored KV for which a recommendation is worth a line: what engines typically do with it."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.plan.regime import Advisor, Case, Recommendation

PAGE_BYTES, BLOCK_BYTES = 16 << 10, 2 << 20
AMOUNT_BYTES = 1 << 30
DECODED_TOKENS = 256
"""As many are generated on a prefix, and each reads all of it."""


@dataclass(frozen=True, slots=True)
class Use:
    """``what`` is for people."""

    what: str
    case: Case


USES = (
    Use("prefix of a prompt, pages of 16 KiB", Case(AMOUNT_BYTES, PAGE_BYTES, reads_per_byte=DECODED_TOKENS)),
    Use("prefix of a prompt, blocks of 2 MiB", Case(AMOUNT_BYTES, BLOCK_BYTES, reads_per_byte=DECODED_TOKENS)),
    Use("pages of 16 KiB for one decode step", Case(AMOUNT_BYTES, PAGE_BYTES, reads_per_byte=1)),
    Use(
        "long context, no room in the GPU's memory",
        Case(AMOUNT_BYTES, PAGE_BYTES, reads_per_byte=DECODED_TOKENS, room_bytes=0),
    ),
)


def for_tokens(bytes_per_token: int) -> tuple[Use, ...]:
    """The same uses, as the KV of a prompt's first tokens, so that they can be compared with computing those."""
    tokens = max(1, AMOUNT_BYTES // bytes_per_token)
    return tuple(
        Use(
            use.what,
            Case(tokens * bytes_per_token, use.case.piece_bytes, use.case.reads_per_byte, use.case.room_bytes, tokens),
        )
        for use in USES
    )


def advice(advisor: Advisor, uses: tuple[Use, ...] = USES) -> list[tuple[Use, Recommendation]]:
    """What is recommended for each."""
    return [(use, advisor.recommend(use.case, use.what)) for use in uses]
