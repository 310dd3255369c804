"""Hello: what is known of a client before it, and what it is answered with."""

from __future__ import annotations

import socket

from kvstore import __version__
from kvstore.config import DaemonConfig
from kvstore.errors import VersionError
from kvstore.server.session import Session
from kvstore.store.store import Store
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.framing import PROTOCOL_VERSION_MAX, PROTOCOL_VERSION_MIN

CLIENT_NAME_CHARS_MAX = 256


class Greeting:
    """What is known of a connection before its hello."""

    def __init__(self, sock: socket.socket, pid: int, deadline_s: float) -> None:
        self.sock = sock
        self.pid = pid
        self.deadline_s = deadline_s


def check_version(request: pb.HelloRequest) -> None:
    """Raises VersionError if client and daemon have no protocol version in common."""
    if min(request.version_max, PROTOCOL_VERSION_MAX) < max(request.version_min, PROTOCOL_VERSION_MIN):
        raise VersionError(
            f"the client speaks protocol versions {request.version_min}..{request.version_max}, "
            f"this daemon (kvstored {__version__}) {PROTOCOL_VERSION_MIN}..{PROTOCOL_VERSION_MAX}: "
            "install matching versions"
        )


def hello_reply(
    session: Session, request: pb.HelloRequest, epoch: int, config: DaemonConfig, store: Store
) -> pb.HelloReply:
    """What a client is told of its session."""
    return pb.HelloReply(
        version=min(request.version_max, PROTOCOL_VERSION_MAX),
        session_id=session.id,
        session_token=session.token,
        epoch=epoch,
        heartbeat_s=config.heartbeat_s,
        lease_s_max=config.lease_s_max,
        server_version=__version__,
        generations_bytes=0 if session.remote else store.dram.generations_bytes,
        can_wait=store.hierarchy is not None,
        hbm_uuid=store.hbm.device.facts.uuid if store.hbm is not None and not session.remote else "",
    )
