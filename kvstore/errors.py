"""One tree of errors. A cache miss is a value, never one of these.

    KVStoreError
    +-- BadInputError           the caller's fault: value, type, size, option
    |   +-- ConfigError         a setting that can't be used
    |   |   +-- InUseError      what it names is another process's just now
    |   +-- SpecMismatchError   the same namespace name with another description
    |   +-- TraceError          a trace file that can't be read
    +-- ProtocolError           malformed, oversized or unknown bytes on the wire
    |   +-- VersionError        peers share no protocol version
    +-- UnavailableError        the daemon can't be reached, or not in time
    |   +-- SocketInUseError    another daemon already serves this socket
    +-- EndedError              a lease or reservation whose right has ended
    |   +-- SessionEndedError   the whole session was cut off; say hello again
    +-- DeniedError             this token, certificate or tenant may not do that
    +-- DeviceError             a GPU, its driver or a library for it is missing or failed
    |   +-- DeviceMemoryError   the GPU has no room
    +-- IntegrityError          bytes or structures that contradict each other

Every message says what was wrong, with which value, and what to do about it.
"""

from __future__ import annotations


class KVStoreError(Exception):
    """Base of all errors raised by this package. ``logged``: who reads the log has been told of it already."""

    logged = False


class BadInputError(KVStoreError, ValueError):
    """A value given by the caller can't be used; nothing was changed."""


class ConfigError(BadInputError):
    """A setting is unknown, of the wrong type or out of range; ``settings`` names the fields, where that is known."""

    def __init__(self, message: str, settings: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.settings = settings


class InUseError(ConfigError):
    """A setting names a directory or an address that another process uses: later it may be free."""


class SpecMismatchError(BadInputError):
    """A namespace name is bound to another model, spec or shard already."""


class TraceError(BadInputError):
    """A trace file is missing, malformed or inconsistent."""


class ProtocolError(KVStoreError):
    """The peer sent bytes that are not a valid message of this protocol."""


class VersionError(ProtocolError):
    """Client and daemon have no protocol version in common."""


class UnavailableError(KVStoreError):
    """The daemon is down, does not answer in time, or is not a kvstore daemon."""


class SocketInUseError(UnavailableError):
    """Another process serves the socket already."""


class EndedError(KVStoreError):
    """The lease or reservation ended (deadline, release, revocation or a daemon restart)."""


class SessionEndedError(EndedError):
    """The session was cut off (no heartbeat for too long) or never was."""


class DeniedError(KVStoreError):
    """The daemon does not let this client in, or not as this tenant: no token, a wrong one, another's.

    What keeps a client out altogether is raised as an UnavailableError, too, and makes misses as that does.
    """


class IntegrityError(KVStoreError):
    """An internal invariant does not hold; raised by ``check()`` and by verification."""


class DeviceError(KVStoreError):
    """No usable GPU, driver or library for it, or a call to one failed."""


class DeviceMemoryError(DeviceError):
    """The GPU has no room for what was asked."""
