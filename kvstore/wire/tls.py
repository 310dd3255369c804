"""What can be told of certificates and keys (PEM) before gRPC takes them, which does not say what is wrong."""

from __future__ import annotations

import contextlib
import os
import ssl
from collections.abc import Iterator

_MISMATCHES = ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH")


def load_pair(context: ssl.SSLContext, certificate: bytes, key: bytes) -> None:
    """Have ``context`` show this certificate. Raises ssl.SSLError."""
    with _as_file(certificate) as certificate_path, _as_file(key) as key_path:
        # A password that is given keeps it from asking on the terminal for that of an encrypted key.
        context.load_cert_chain(certificate_path, key_path, password="")


def belong_together(certificate: bytes, key: bytes) -> bool:
    """False if the key is certainly another certificate's. What else may be wrong with them is not looked for."""
    try:
        load_pair(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), certificate, key)
    except ssl.SSLError as error:
        return error.reason not in _MISMATCHES
    return True


@contextlib.contextmanager
def _as_file(content: bytes) -> Iterator[str]:
    """A path for what is in memory: keys are written to no disk."""
    with os.fdopen(os.memfd_create("kvstore-pem"), "wb") as file:
        file.write(content)
        file.flush()
        yield f"/proc/self/fd/{file.fileno()}"
