"""The client: put blocks in, find them by prefix, read them in place or copied.

A daemon that is down, slow or restarted makes misses, by the deadline, and never an exception from the
calls on the path of a request (match, lease, get_into, put, prefetch, persist). Wrong arguments always raise
BadInputError.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from kvstore.client.lease import Lease
from kvstore.client.namespace import NamespaceHandle
from kvstore.client.prompts import count
from kvstore.client.session import Session
from kvstore.config import check_socket_path, default_socket_path
from kvstore.errors import BadInputError, UnavailableError
from kvstore.types import Namespace
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.framing import Method


class Client:
    """A connection to the daemon of this machine. Usable from several threads; a context manager.

    ``timeout_s`` bounds every call; those that wait for a slower tier may take so much longer as they may wait.
    With ``required=False`` a daemon that is down at the start is no error:
    everything is a miss until it comes up. Raises UnavailableError otherwise. A forked child connects anew
    on its first call.
    """

    def __init__(
        self,
        socket_path: str | os.PathLike[str] | None = None,
        tenant: str = "default",
        timeout_s: float = 1.0,
        *,
        required: bool = True,
        name: str = "",
    ) -> None:
        Namespace.check_tenant(tenant)
        if not 0 < timeout_s < 86400:
            raise BadInputError(f"timeout_s is {timeout_s!r}; it must be a positive number of seconds")
        path = Path(socket_path) if socket_path is not None else default_socket_path()
        check_socket_path(path)
        self.tenant = tenant
        self._session = Session(path, tenant, name or Path(sys.argv[0] or "python").name, timeout_s, required=required)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def healthy(self) -> bool:
        """Whether the daemon answered last time; if not, calls are misses without waiting."""
        return self._session.healthy

    @property
    def server_version(self) -> str:
        """Version of the daemon last spoken to."""
        return self._session.server_version

    def wait_healthy(self, timeout_s: float) -> bool:
        """Block until the daemon answers (again), at most ``timeout_s``; False if it did not."""
        return self._session.wait_healthy(timeout_s)

    def open(self, namespace: Namespace, name: str = "") -> NamespaceHandle:
        """Use a namespace. ``name``, optional, is bound to this description within the tenant.

        Raises SpecMismatchError, naming the fields, if the name stands for another one. If the daemon is
        unreachable the namespace is opened with the first call that reaches it.
        """
        if not isinstance(namespace, Namespace):
            raise BadInputError(f"namespace is {namespace!r:.80}; give a kvstore.Namespace")
        if namespace.tenant != self.tenant:
            raise BadInputError(f"the namespace belongs to tenant {namespace.tenant!r}, this client to {self.tenant!r}")
        handle = NamespaceHandle(self._session, namespace, name)
        with contextlib.suppress(UnavailableError):
            handle.ensure_open()
        return handle

    def attach(self, lease_id: int, block_bytes: int) -> Lease:
        """Read through a lease that another client of this tenant took. Raises EndedError if it has ended.

        Both must release; the blocks stay until both have.
        """
        request = pb.AttachLeaseRequest(lease_id=count("lease_id", lease_id, 1 << 64))
        return self._session.granted(
            Method.ATTACH_LEASE,
            request,
            pb.LeaseReply,
            lambda reply: Lease(self._session, reply, block_bytes, _attached_first_block(reply)),
        )

    def stats(self) -> dict[str, float | str]:
        """Counters and gauges of the daemon by name. Raises UnavailableError if it can't be asked."""
        reply = self._session.call(Method.STATS, pb.StatsRequest(), pb.StatsReply)
        return {**reply.numbers, **reply.texts}

    def close(self) -> None:
        """End the session. Leases end; arrays that are still alive keep their slots until this process ends."""
        self._session.close()


def _attached_first_block(reply: pb.LeaseReply) -> int:
    n_held = len(reply.slots.ids) // 8
    return reply.n_blocks + (reply.partial_tokens > 0) - n_held
