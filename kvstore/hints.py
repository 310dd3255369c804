"""What a caller may say about a request and the further use of its blocks."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from kvstore.errors import BadInputError

REQUEST_TYPE_CHARS_MAX = 64
SESSION_ID_CHARS_MAX = 256
TURN_MAX = (1 << 16) - 1
PRIORITY_MAX = 100
EXPECTED_REUSE_MAX = 1e6
OUTPUT_TOKENS_MAX = (1 << 31) - 1
TTL_S_MAX = 10 * 366 * 86400.0


@dataclass(frozen=True, slots=True)
class Hints:
    """Hints of one request; a field left at its default says nothing.

    ``request_type``: what kind of request it is, a word of the caller's ("chat", "agent", "batch").
    ``turn``: of a conversation, the first is 1.
    ``session_id``: the conversation or agent run it belongs to; see ``NamespaceHandle.end_session``.
    ``expected_reuse``: how often the blocks will be used again, as a guess.
    ``ttl_s``: blocks stored with it are misses after so many seconds, and are given up first, unless they are stored
    again; a longer time, or none, given by anybody who stores them wins.
    ``priority``: -100 to 100, higher is kept longer.
    ``no_reuse``: the blocks will not be used again.
    ``output_tokens``: how many the request has generated, best said with the last put, when that is known.

    They are advice: they decide what goes first, never what the bytes are. Raises BadInputError for what can't be.
    """

    request_type: str = ""
    turn: int = 0
    session_id: str = ""
    expected_reuse: float = 0.0
    ttl_s: float = 0.0
    priority: int = 0
    no_reuse: bool = False
    output_tokens: int = 0

    def __post_init__(self) -> None:
        _check_text("request_type", self.request_type, REQUEST_TYPE_CHARS_MAX)
        _check_text("session_id", self.session_id, SESSION_ID_CHARS_MAX)
        _check_whole("turn", self.turn, 0, TURN_MAX)
        _check_whole("output_tokens", self.output_tokens, 0, OUTPUT_TOKENS_MAX)
        _check_whole("priority", self.priority, -PRIORITY_MAX, PRIORITY_MAX)
        _check_number("expected_reuse", self.expected_reuse, EXPECTED_REUSE_MAX)
        _check_number("ttl_s", self.ttl_s, TTL_S_MAX)
        if not isinstance(self.no_reuse, bool):
            raise BadInputError(f"Hints.no_reuse is {self.no_reuse!r:.80}; it must be True or False")
        if self.no_reuse and self.expected_reuse:
            raise BadInputError(
                f"Hints.no_reuse contradicts expected_reuse {self.expected_reuse!r}: give one of the two"
            )

    def to_dict(self) -> dict[str, str | int | float | bool]:
        """The fields that say something, by name."""
        given = ((each.name, getattr(self, each.name)) for each in fields(self))
        return {name: value for name, value in given if value}


def check_session_id(session_id: object) -> None:
    """Raises BadInputError unless it names a session."""
    _check_text("session_id", session_id, SESSION_ID_CHARS_MAX)
    if not session_id:
        raise BadInputError("session_id is empty; give the one that was in the hints")


def _check_text(name: str, value: object, most: int) -> None:
    if not isinstance(value, str) or len(value) > most:
        raise BadInputError(f"Hints.{name} is {value!r:.80}; it must be a text of at most {most} characters")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise BadInputError(f"Hints.{name} is {value!r:.80}; it has half a surrogate pair, which is no text") from None


def _check_whole(name: str, value: object, least: int, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise BadInputError(f"Hints.{name} is {value!r:.80}; it must be a whole number from {least} to {most}")


def _check_number(name: str, value: object, most: float) -> None:
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not (math.isfinite(value) and 0 <= value <= most)
    ):
        raise BadInputError(f"Hints.{name} is {value!r:.80}; it must be a number from 0 (says nothing) to {most:.0f}")
