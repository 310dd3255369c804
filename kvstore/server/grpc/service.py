"""The calls of ``service KVStore``: sessions, and one call for each method of the handlers."""

from __future__ import annotations

import asyncio
import logging
import queue
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import grpc
from google.protobuf.message import Message

from kvstore.config import GrpcOptions
from kvstore.errors import DeniedError, KVStoreError, UnavailableError
from kvstore.logs import about
from kvstore.server.grpc.access import Caller, Everybody, TokenFile
from kvstore.server.grpc.gateway import Call, DeadlineError, Gateway, GoneError
from kvstore.server.grpc.places import Places
from kvstore.server.hello import check_version
from kvstore.server.remote import LOCAL, Host, RemoteSession, RemoteSessions
from kvstore.server.replies import Reply
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire import service_pb2 as spb
from kvstore.wire.framing import REPLIES, REQUESTS, Method, decode
from kvstore.wire.rpc import ERROR_KEY, SESSION_KEY, TENANT_KEY, rpc_name, status_of

EVENTS_QUEUED_MAX = 4096
"""A client that takes no events meanwhile is cut off."""
LAST_EVENTS_S = 5.0
"""How long a client may take for the events before the end of its session."""

log = logging.getLogger("kvstore.server.grpc")


class Service:
    """Behaviour of all calls. Their threads run it; what touches sessions or store hops to the loop."""

    def __init__(
        self,
        gateway: Gateway,
        host: Host,
        remotes: RemoteSessions,
        access: TokenFile | Everybody,
        options: GrpcOptions,
    ) -> None:
        self.gateway = gateway
        self.host = host
        self.remotes = remotes
        self.options = options
        self._access = access
        self._places = Places(options.calls_max, options.calls_per_token_max)

    # Calls -------------------------------------------------------------------------------------------

    def handlers(self) -> dict[str, grpc.RpcMethodHandler]:
        """A handler for each method that makes sense here, and for sessions."""
        unary = {
            rpc_name(method.name): grpc.unary_unary_rpc_method_handler(self._unary(method))
            for method in Method
            if method not in LOCAL and method in REPLIES
        }
        return {**unary, "Session": grpc.unary_stream_rpc_method_handler(self.session)}

    def _unary(self, method: Method) -> Callable[[bytes, grpc.ServicerContext], bytes]:
        kind = REQUESTS[method]

        def call(request: bytes, context: grpc.ServicerContext) -> bytes:
            with self.guarded(context) as call:
                remote = self.session_of(call)
                reply = self.ask(call, remote, method, decode(kind, request))
                serialized: bytes = reply.SerializeToString()
                return serialized
            raise AssertionError

        return call

    def ask(self, call: Call, remote: RemoteSession | None, method: int, request: Message) -> Any:
        """A request to the handlers, of a session or without one, and what they answer. Raises what they raise."""

        def begin() -> Any:
            if remote is None:
                tenant = call.caller.as_tenant(text_of(call, TENANT_KEY))
                return self.remotes.answer_alone(tenant, method, request)
            return self.remotes.answer(remote, method, request)

        def give_back(reply: Reply) -> None:
            if remote is not None:
                self.remotes.give_back(remote, reply.message)

        def keep(task: Any) -> None:
            if remote is not None:
                self.remotes.keep(remote, task)

        return self.gateway.ask(call, begin, give_back, keep).message

    def caller(self, context: grpc.ServicerContext) -> Caller:
        """Who calls. Raises DeniedError."""
        return self._access.identify(context.invocation_metadata())

    def session_of(self, call: Call) -> RemoteSession | None:
        """The session that a call names, None for one outside of any. Raises SessionEndedError."""
        for key, value in call.context.invocation_metadata():
            if key == SESSION_KEY:
                token = value if isinstance(value, bytes) else value.encode()
                return self.remotes.find(token, call.caller.owner)
        return None

    def guarded(self, context: grpc.ServicerContext, *, counted: bool = True, streams: bool = False) -> _Guard:
        """``with``: a call in its place, whose errors become statuses. With ``streams`` it is cut off in the end."""
        return _Guard(self, context, self._places if counted else None, streams)

    # Sessions ----------------------------------------------------------------------------------------

    def session(self, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        """A session: its hello, then its events, until either side ends it. Its thread waits for them."""
        outbox: queue.Queue[spb.SessionMessage | None] = queue.Queue(EVENTS_QUEUED_MAX)
        with self.guarded(context, counted=False) as call:
            hello = decode(pb.HelloRequest, request)
            check_version(hello)
            caller = call.caller
            tenant = caller.as_tenant(hello.tenant)

            def tell(event: pb.Event | None) -> None:
                try:
                    outbox.put_nowait(spb.SessionMessage(event=event) if event is not None else None)
                except queue.Full:
                    context.cancel()
                if event is None:  # one that takes nothing would keep its thread for ever
                    asyncio.get_running_loop().call_later(LAST_EVENTS_S, context.cancel)

            def open_session() -> tuple[RemoteSession, pb.HelloReply]:
                remote = self.remotes.open(caller.owner, tenant, hello.client_name, tell)
                return remote, self.host.hello_reply(remote.session, hello)

            remote, reply = self.gateway.get(call, open_session, lambda opened: self.remotes.end(opened[0]))

            def end() -> None:
                self.gateway.post(lambda: self.remotes.end(remote))

            if not context.add_callback(end):
                end()
            yield spb.SessionMessage(hello=reply, message_bytes_max=self.options.message_bytes_max).SerializeToString()
            while (message := outbox.get()) is not None:
                yield message.SerializeToString()


class _Guard:
    """See ``Service.guarded``."""

    def __init__(
        self,
        service: Service,
        context: grpc.ServicerContext,
        places: Places | None,
        streams: bool,
    ) -> None:
        self._service = service
        self._context = context
        self._places = places
        self._streams = streams
        self._call_off: Callable[[], None] | None = None
        self._owner = b""

    def __enter__(self) -> Call:
        try:
            caller = self._service.caller(self._context)
        except DeniedError as error:  # since the gate let it pass
            self._abort(status_of(error)[0], error)
        if self._places is not None:
            try:
                self._places.take(caller.owner)
            except UnavailableError as error:
                self._service.gateway.post(lambda: self._service.host.store.counters.add("grpc_refused_calls"))
                self._abort(grpc.StatusCode.RESOURCE_EXHAUSTED, error)
        self._owner = caller.owner
        call = Call(self._context, caller, self._service.options.deadline_s_max)
        if self._streams:
            counters = self._service.host.store.counters
            self._call_off = self._service.gateway.cut_off(call, lambda: counters.add("grpc_cut_calls"))
        return call

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._call_off is not None:
            self._call_off()
        if self._places is not None:
            self._places.give(self._owner)
        if not isinstance(error, Exception) or kind is Exception or isinstance(error, grpc.RpcError):
            return  # none, the end of a generator, the abort of a call, or the client's end of it
        if isinstance(error, GoneError):
            self._context.abort(grpc.StatusCode.CANCELLED, str(error))
        if isinstance(error, DeadlineError):
            self._context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, str(error))
        if not isinstance(error, KVStoreError):
            log.error("a call failed", exc_info=error, extra=about("grpc_call_failed"))
        self._abort(status_of(error)[0], error)

    def _abort(self, status: grpc.StatusCode, error: Exception) -> NoReturn:
        message = status_of(error)[1]
        self._context.set_trailing_metadata(((ERROR_KEY, message.SerializeToString()),))
        self._context.abort(status, message.message)
        raise AssertionError("abort does not return")


def text_of(call: Call, key: str) -> str:
    """The value of one of a call's metadata, "" if it is not there."""
    for name, value in call.context.invocation_metadata():
        if name == key and isinstance(value, str):
            return value
    return ""


def deny(error: DeniedError) -> grpc.RpcMethodHandler:
    """A handler that turns a call away."""

    def refuse(_request: bytes, context: grpc.ServicerContext) -> NoReturn:
        message = status_of(error)[1]
        context.set_trailing_metadata(((ERROR_KEY, message.SerializeToString()),))
        context.abort(grpc.StatusCode.UNAUTHENTICATED, message.message)
        raise AssertionError("abort does not return")

    return grpc.unary_unary_rpc_method_handler(refuse)
