"""What a client shows to a gRPC server, and whom it trusts, from files that are named or in the environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvstore.client.remote.target import Pem
from kvstore.errors import BadInputError

TOKEN_FILE_VARIABLE = "KVSTORE_CLIENT_TOKEN_FILE"  # noqa: S105 - where it is, not what
ROOTS_VARIABLE = "KVSTORE_ROOT_CERTIFICATES"
CERTIFICATE_VARIABLE = "KVSTORE_CLIENT_CERTIFICATE"
KEY_VARIABLE = "KVSTORE_CLIENT_KEY"

TOKEN_FILE_BYTES_MAX = 64 << 10


@dataclass(frozen=True, slots=True)
class Shown:
    """Arguments of ``Client`` by these names."""

    token: str | None = None
    root_certificates: Pem | None = None
    client_certificate: tuple[Pem, Pem] | None = None

    @classmethod
    def of(
        cls,
        environment: Mapping[str, str],
        token_file: str | None = None,
        root_certificates: str | None = None,
        certificate: str | None = None,
        key: str | None = None,
    ) -> Shown:
        """From these files; what is None, from those that variables name. Raises BadInputError for what can't be."""
        token_file = token_file or environment.get(TOKEN_FILE_VARIABLE)
        certificate = certificate or environment.get(CERTIFICATE_VARIABLE)
        key = key or environment.get(KEY_VARIABLE)
        pair: tuple[Pem, Pem] | None = None
        if certificate and key:
            pair = certificate, key
        elif certificate or key:
            given, lacking = ("certificate", "key") if certificate else ("key", "certificate")
            raise BadInputError(
                f"there is a client's {given} and no {lacking}: give both --client-certificate and --client-key "
                f"(${CERTIFICATE_VARIABLE}, ${KEY_VARIABLE})"
            )
        return cls(
            token_in(Path(token_file)) if token_file else None,
            root_certificates or environment.get(ROOTS_VARIABLE) or None,
            pair,
        )


def token_in(path: Path) -> str:
    """The one token of a file, as a daemon's has it: lines that are empty or start with ``#`` say nothing.

    A tenant behind it is left out. Raises BadInputError, without a word of what is in the file.
    """
    try:
        with path.open("rb") as file:
            text = file.read(TOKEN_FILE_BYTES_MAX).decode("ascii")
    except OSError as error:
        raise BadInputError(f"the token file {path} can't be read: {error.strerror}; name another") from error
    except UnicodeDecodeError:
        raise BadInputError(f"the token file {path} has other characters than ASCII: give one with the token") from None
    lines = [words for words in map(str.split, text.splitlines()) if words and not words[0].startswith("#")]
    if len(lines) != 1:
        raise BadInputError(f"the token file {path} has {len(lines)} tokens: give one with the client's own only")
    return lines[0][0]
