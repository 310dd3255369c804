"""Who may call: tokens from a file, each perhaps for one tenant only."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvstore.errors import BadInputError, ConfigError, DeniedError
from kvstore.logs import about
from kvstore.types import Namespace

TOKEN_CHARS_MIN = 16
TOKENS_MAX = 4096
FILE_BYTES_MAX = 1 << 20
_BEARER = "bearer "

Metadata = Iterable[tuple[str, str | bytes]]

log = logging.getLogger("kvstore.server.grpc")


@dataclass(frozen=True, slots=True)
class Caller:
    """Who a call comes from. ``tenant`` is the only one it may be, or None if it may be any."""

    owner: bytes
    """The same for all calls with one token."""
    tenant: str | None

    def as_tenant(self, asked: str) -> str:
        """The tenant that it gets for the one it asked for, "" for its own. Raises DeniedError for another's."""
        if self.tenant is None:
            return asked or "default"
        if asked not in ("", self.tenant):
            raise DeniedError(
                f"this token is for tenant {self.tenant!r}, not for {asked!r:.80}: use that tenant's token"
            )
        return self.tenant


class Everybody:
    """No token: the socket's own mode says who may connect."""

    def identify(self, metadata: Metadata) -> Caller:  # noqa: ARG002 - see ``TokenFile``
        """Everybody is the same caller."""
        return Caller(b"", None)


class TokenFile:
    """Tokens, one a line: ``token`` or ``token tenant``; empty lines and those that start with ``#`` say nothing.

    The file is read again once it has changed, so that tokens can be added and taken away while the daemon runs.
    What it then has that can't be used leaves things as they are, and is logged.
    """

    def __init__(self, path: Path) -> None:
        """Raises ConfigError for a file that can't be used, or that others may read."""
        self._path = path
        self._seen: tuple[int, ...] = ()
        self._callers: list[Caller] = []
        self._seen, self._callers = self._read()

    def identify(self, metadata: Metadata) -> Caller:
        """The caller with the token of these metadata. Raises DeniedError. Blocks for a look at the file's facts."""
        self._read_again()
        presented = _presented(metadata)
        if presented is None:
            raise DeniedError("no token: send the metadata authorization: Bearer TOKEN (Client(..., token=...))")
        digest, found = hashlib.sha256(presented).digest(), None
        for caller in self._callers:  # all of them: the time it takes says nothing
            if hmac.compare_digest(caller.owner, digest):
                found = caller
        if found is None:
            raise DeniedError("the token is unknown here: ask the operator of the daemon for a valid one")
        return found

    def _read_again(self) -> None:
        try:
            if _facts(self._path.stat()) == self._seen:
                return
            self._seen, self._callers = self._read()
            log.info(
                "%s was read again: %d tokens", self._path, len(self._callers),
                extra=about("grpc_tokens_read", path=str(self._path), tokens=len(self._callers)),
            )  # fmt: skip
        except (OSError, ConfigError) as error:
            log.error("the tokens stay as they were: %s", error, extra=about("grpc_tokens_kept", error=str(error)))

    def _read(self) -> tuple[tuple[int, ...], list[Caller]]:
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            with os.fdopen(fd, "rb") as file:
                facts = os.fstat(fd)
                self._must_be_private(facts)
                content = file.read(FILE_BYTES_MAX + 1)
        except OSError as error:
            raise ConfigError(
                f"the token file {self._path} can't be read: {error.strerror}; name another with --grpc-token-file",
                ("grpc.token_file",),
            ) from error
        return _facts(facts), self._parse(content)

    def _must_be_private(self, facts: os.stat_result) -> None:
        if not stat.S_ISREG(facts.st_mode):
            raise ConfigError(f"the token file {self._path} is not a file", ("grpc.token_file",))
        if facts.st_uid not in (os.getuid(), 0):
            raise ConfigError(
                f"the token file {self._path} belongs to user {facts.st_uid}: it must be the daemon's own",
                ("grpc.token_file",),
            )
        if facts.st_mode & 0o077:
            raise ConfigError(
                f"the token file {self._path} has mode {stat.S_IMODE(facts.st_mode):04o}, so that others may read or "
                f"change it: chmod 600 {self._path}",
                ("grpc.token_file",),
            )

    def _parse(self, content: bytes) -> list[Caller]:
        try:
            lines = content.decode().splitlines() if len(content) <= FILE_BYTES_MAX else None
        except UnicodeDecodeError:
            lines = None
        if lines is None:
            raise ConfigError(
                f"the token file {self._path} is no text of at most {FILE_BYTES_MAX} bytes", ("grpc.token_file",)
            )
        callers: dict[bytes, Caller] = {}
        for number, line in enumerate(lines, 1):
            words = line.split()
            if words and not words[0].startswith("#"):
                caller = self._caller(number, words)
                if caller.owner in callers:
                    raise self._wrong(number, "has a token for the second time: one token stands for one caller")
                callers[caller.owner] = caller
        if not 0 < len(callers) <= TOKENS_MAX:
            raise ConfigError(
                f"the token file {self._path} has {len(callers)} tokens; give 1 to {TOKENS_MAX}, one a line",
                ("grpc.token_file",),
            )
        return list(callers.values())

    def _caller(self, number: int, words: Sequence[str]) -> Caller:
        token, tenant = words[0], words[1] if len(words) > 1 else None
        if len(words) > 2:
            raise self._wrong(number, f"has {len(words)} words; it must be a token, or a token and its tenant")
        if len(token) < TOKEN_CHARS_MIN or not token.isascii() or not token.isprintable():
            raise self._wrong(
                number, f"has a token of {len(token)} characters; take {TOKEN_CHARS_MIN} or more of ASCII"
            )
        if tenant is not None:
            try:
                Namespace.check_tenant(tenant)
            except BadInputError as error:
                raise self._wrong(number, f"has no good tenant: {error}") from None
        return Caller(hashlib.sha256(token.encode()).digest(), tenant)

    def _wrong(self, number: int, what: str) -> ConfigError:
        return ConfigError(f"line {number} of the token file {self._path} {what}", ("grpc.token_file",))


def _presented(metadata: Metadata) -> bytes | None:
    for name, value in metadata:
        if name == "authorization" and isinstance(value, str) and value[: len(_BEARER)].lower() == _BEARER:
            return value[len(_BEARER) :].strip().encode()
    return None


def _facts(facts: os.stat_result) -> tuple[int, ...]:
    return facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_mode, facts.st_uid
