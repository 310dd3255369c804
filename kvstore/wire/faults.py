"""Errors as messages, and back."""

from __future__ import annotations

from kvstore.errors import (
    BadInputError,
    DeniedError,
    EndedError,
    KVStoreError,
    ProtocolError,
    SessionEndedError,
    SpecMismatchError,
    UnavailableError,
    VersionError,
)
from kvstore.wire import kvstore_pb2 as pb

_CODES: tuple[tuple[type[KVStoreError], pb.Code], ...] = (
    # The most special class first: the first that fits is taken.
    (SpecMismatchError, pb.SPEC_MISMATCH),
    (VersionError, pb.VERSION),
    (SessionEndedError, pb.SESSION_ENDED),
    (EndedError, pb.ENDED),
    (BadInputError, pb.BAD_INPUT),
    (UnavailableError, pb.UNAVAILABLE),
    (DeniedError, pb.DENIED),
    (ProtocolError, pb.BAD_INPUT),
)
_CLASSES: dict[int, type[KVStoreError]] = {
    pb.BAD_INPUT: BadInputError,
    pb.SPEC_MISMATCH: SpecMismatchError,
    pb.VERSION: VersionError,
    pb.SESSION_ENDED: SessionEndedError,
    pb.ENDED: EndedError,
    pb.UNAVAILABLE: UnavailableError,
    pb.DENIED: DeniedError,
}


TEXT_CHARS_MAX = 4096
"""A message quotes what a client sent, which may be long."""


def to_message(error: Exception) -> pb.Error:
    """The message for an error; anything that is not one of ours is INTERNAL and its text stays here."""
    for kind, code in _CODES:
        if isinstance(error, kind):
            return pb.Error(code=code, message=_sendable(str(error)))
    return pb.Error(code=pb.INTERNAL, message=f"the daemon failed with {type(error).__name__}; its log has the details")


def to_exception(message: pb.Error) -> KVStoreError:
    """The exception for an error message; an unknown code becomes a plain KVStoreError."""
    return _CLASSES.get(message.code, KVStoreError)(message.message)


def _sendable(text: str) -> str:
    """Short enough, and without the lone surrogates that JSON allows and UTF-8 does not."""
    if len(text) > TEXT_CHARS_MAX:
        text = f"{text[: TEXT_CHARS_MAX - 3]}..."
    return text.encode("utf-8", "backslashreplace").decode()
