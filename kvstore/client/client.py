"""The client: put blocks in, find them by prefix, read them in place or copied.

A daemon that is down, slow or restarted makes misses, by the deadline, and never an exception from the
calls on the path of a request (match, lease, get_into, put, prefetch, persist). Wrong arguments always raise
BadInputError.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from kvstore.client.address import Address, UnixAddress
from kvstore.client.admin import AdminCalls
from kvstore.client.family import FamilyHandle, must_be_family
from kvstore.client.greeting import SocketLink
from kvstore.client.hbm import IpcDevice
from kvstore.client.hybrid import HybridHandle
from kvstore.client.lease import Lease
from kvstore.client.link import Link
from kvstore.client.mapping import MappingListener
from kvstore.client.namespace import NamespaceHandle, Stored
from kvstore.client.prompts import count, seconds
from kvstore.client.remote import remote_link
from kvstore.client.remote.shown import Shown
from kvstore.client.remote.target import Pem, is_remote
from kvstore.client.session import Session
from kvstore.config import default_address
from kvstore.errors import BadInputError, DeniedError, UnavailableError
from kvstore.hybrid import parts_of
from kvstore.types import Namespace
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.framing import Method


class Client(AdminCalls):
    """A connection to a daemon. Usable from several threads; a context manager.

    ``address`` is the path of its Unix socket on this machine (by default ``$KVSTORE_SOCKET``, else the usual one), or
    says where it serves gRPC: ``grpcs://host:port`` or ``grpc+unix:/path``. Over gRPC blocks are copied instead of
    mapped, when they are looked at. ``token`` is what the daemon lets this client in with; ``root_certificates`` (PEM,
    a path or bytes; by default those of gRPC) are whom it trusts, ``client_certificate`` (certificate, key) what it
    shows.

    ``timeout_s`` bounds every call; those that wait for a slower tier may take so much longer as they may wait.
    With ``required=False`` a daemon that is down at the start, or does not let this client in, is no error:
    everything is a miss until it does. Otherwise raises UnavailableError, or DeniedError. A forked child connects anew
    on its first call, over the Unix socket: gRPC does not survive a fork.
    """

    def __init__(
        self,
        address: str | os.PathLike[str] | Address | None = None,
        tenant: str = "default",
        timeout_s: float = 1.0,
        *,
        required: bool = True,
        name: str = "",
        token: str | None = None,
        root_certificates: Pem | None = None,
        client_certificate: tuple[Pem, Pem] | None = None,
    ) -> None:
        Namespace.check_tenant(tenant)
        if not 0 < seconds("timeout_s", timeout_s) < 86400:
            raise BadInputError(f"timeout_s is {timeout_s!r}; it must be a positive number of seconds")
        self.tenant = tenant
        client_name = name or Path(sys.argv[0] or "python").name
        self._required = required
        link = link_to(address, token, root_certificates, client_certificate)
        self._session = Session(link, tenant, client_name, timeout_s, required=required)

    def __repr__(self) -> str:
        state = "closed" if self._session.closed else "healthy" if self.healthy else "not healthy"
        return f"<{type(self).__name__} of {self._session}, tenant {self.tenant!r}, {state}>"

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

    @property
    def timeout_s(self) -> float:
        """The bound of every call."""
        return self._session.timeout_s

    @property
    def can_wait(self) -> bool:
        """Whether the store has a slower tier than memory, for which calls may wait."""
        return self._session.can_wait

    def wait_healthy(self, timeout_s: float) -> bool:
        """Block until the daemon answers (again), at most ``timeout_s``; False if it did not."""
        return self._session.wait_healthy(timeout_s)

    def open(
        self, namespace: Namespace, name: str = "", *, store: Stored = "all", attention_doubling_tokens: float = 0.0
    ) -> NamespaceHandle:
        """Use a namespace. ``name``, optional, is bound to this description within the tenant.

        ``store="prompt"``: what is put with ``n_prompt_tokens`` is stored only as far as no token was generated.
        ``attention_doubling_tokens``: the position at which attention costs the model as much as all the rest of a
        token (see ``kvstore.recompute``), so that what is dear to compute again is kept longer; 0 if unknown.
        Raises SpecMismatchError, naming the fields, if the name stands for another one, and DeniedError if the
        daemon does not let this client in any more and it was made with ``required``. If the daemon is unreachable
        the namespace is opened with the first call that reaches it.
        """
        self._check_namespace(namespace)
        if parts_of(namespace.spec):
            raise BadInputError("the spec is hybrid: its groups are stored each by itself, use open_hybrid")
        handle = NamespaceHandle(self._session, namespace, name, store, attention_doubling_tokens)
        self._open_now(handle)
        return handle

    def open_hybrid(
        self, namespace: Namespace, name: str = "", *, store: Stored = "all", attention_doubling_tokens: float = 0.0
    ) -> HybridHandle:
        """As ``open``, for a spec with sliding or state groups besides others: each group is stored by itself."""
        self._check_namespace(namespace)
        handle = HybridHandle(self._session, namespace, name, store, attention_doubling_tokens)
        self._open_now(handle)
        return handle

    def open_family(self, namespaces: Sequence[Namespace], *, attention_doubling_tokens: float = 0.0) -> FamilyHandle:
        """Use the namespaces of several ranks of one model together: what is found is what every one of them has.

        They may differ in the rank in ``shard``, and in ``spec`` but for ``block_tokens``; raises BadInputError that
        names another field in which they do. Ranks that hold the same KV share one namespace, given once.
        """
        must_be_family(namespaces)
        told = attention_doubling_tokens
        handles = [self.open(namespace, attention_doubling_tokens=told) for namespace in namespaces]
        return FamilyHandle(self._session, handles)

    def attach(
        self,
        lease_id: int,
        block_bytes: int = 0,
        *,
        namespace: Namespace | None = None,
        shard: Namespace | None = None,
    ) -> Lease:
        """Read through a lease that another client of this tenant took. Raises EndedError if it has ended.

        ``namespace`` is the one it was taken in. Of a lease over a family it gives the blocks of one ``shard``, and
        maps no others. Raises BadInputError if the lease is over something else. Who knows only how large a block is
        gives ``block_bytes``: that much is checked. Both clients must release; the blocks stay until both have.
        """
        if [namespace is not None, shard is not None, block_bytes != 0].count(True) != 1:
            raise BadInputError("give block_bytes, or the namespace, or of a lease over a family that of one shard")
        request = pb.AttachLeaseRequest(lease_id=count("lease_id", lease_id, 1 << 64))
        named: object = shard if namespace is None else namespace
        if named is not None:
            if not isinstance(named, Namespace):
                what = "a kvstore.Namespace" if shard is None else "the kvstore.Namespace of one rank"
                raise BadInputError(f"{'namespace' if shard is None else 'shard'} is {named!r:.80}; give {what}")
            if parts_of(named.spec):
                raise BadInputError("the spec is hybrid: its groups are held each by itself, attach with open_hybrid")
            block_bytes = named.spec.block_bytes
            if shard is None:
                request.namespace = named.digest()
            else:
                request.shards = named.digest()
        else:
            request.block_bytes = count("block_bytes", block_bytes, 1 << 64)
        return self._session.granted(
            Method.ATTACH_LEASE,
            request,
            pb.LeaseReply,
            lambda reply: Lease(self._session, reply, block_bytes, reply.first_block),
        )

    def use_hbm(self, device: IpcDevice) -> None:
        """Let leases with ``hbm=True`` read what the daemon has in HBM, with a device that this process has open.

        It must be the daemon's, and stay open until this client is closed and its leases are released. Raises
        BadInputError for another one, or if the daemon has no HBM tier, or not for clients of other machines.
        """
        facts = getattr(device, "facts", None)
        if not hasattr(facts, "uuid"):
            raise BadInputError(f"{device!r:.80} is no device: give an open one, as of kvstore.device.open_device")
        uuid = self._session.hbm_uuid
        if not uuid:
            raise BadInputError(f"the daemon at {self._session} has no HBM tier for this client (--hbm-device, --hbm)")
        if device.facts.uuid != uuid:
            raise BadInputError(
                f"the daemon's HBM is on device {uuid}, this one is {device.facts.uuid}: open the same device"
            )
        self._session.use_hbm(device)

    @property
    def hbm_failure(self) -> str:
        """Why the daemon's HBM could not be opened, after which leases are of DRAM; empty if it could."""
        return self._session.hbm.failure if self._session.hbm is not None else ""

    def watch_mappings(self, listener: MappingListener) -> None:
        """Tell ``listener`` what of the daemon's memory this process maps, so far and from now on."""
        self._session.watch_mappings(listener)

    def unwatch_mappings(self, listener: MappingListener) -> None:
        """Undo ``watch_mappings``; the listener hears no more, also not of what it still keeps."""
        self._session.unwatch_mappings(listener)

    def stats(self) -> dict[str, float | str]:
        """Counters and gauges of the daemon by name. Raises UnavailableError if it can't be asked."""
        reply = self._session.call(Method.STATS, pb.StatsRequest(), pb.StatsReply)
        return {**reply.numbers, **reply.texts}

    def _open_now(self, handle: NamespaceHandle | HybridHandle) -> None:
        try:
            handle.ensure_open()
        except UnavailableError as error:
            if self._session.closed:
                raise UnavailableError(f"{self!r}: nothing can be opened with it any more, make another") from error
            if self._required and isinstance(error, DeniedError):
                raise

    def _check_namespace(self, namespace: Namespace) -> None:
        if not isinstance(namespace, Namespace):
            raise BadInputError(f"namespace is {namespace!r:.80}; give a kvstore.Namespace")
        if namespace.tenant != self.tenant:
            raise BadInputError(
                f"the namespace belongs to tenant {namespace.tenant!r}, this client to {self.tenant!r}: "
                f"give both the same, as in Namespace(..., tenant={self.tenant!r})"
            )

    def close(self) -> None:
        """End the session. Leases end; arrays that are still alive keep their slots until this process ends."""
        self._session.close()


def link_to(
    address: str | os.PathLike[str] | Address | None,
    token: str | None,
    root_certificates: Pem | None,
    client_certificate: tuple[Pem, Pem] | None,
) -> Link:
    """The way to a daemon. Where the environment says where it is, it may say what to show there, too."""
    if address is None:
        address = default_address()
        if is_remote(address):
            shown = Shown.of(os.environ)
            token = shown.token if token is None else token
            root_certificates = root_certificates or shown.root_certificates
            client_certificate = client_certificate or shown.client_certificate
    if is_remote(address):
        return remote_link(str(address), token, root_certificates, client_certificate)
    if token is not None or root_certificates is not None or client_certificate is not None:
        raise BadInputError("a token and certificates go with a gRPC address (grpcs://host:port) only")
    return SocketLink(UnixAddress.of(address) if isinstance(address, str | os.PathLike) else address)
