"""Requests on their way through the loop: answered, given up, given back, once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from kvstore.server.grpc.access import Caller
from kvstore.server.grpc.gateway import Call, DeadlineError, Gateway, GoneError
from kvstore.server.replies import Reply
from kvstore.wire import kvstore_pb2 as pb

ANYBODY = Caller(b"", None)

REPLY = Reply(pb.ReleaseReply(found=True))


class Context:
    """What a ``Call`` looks at of gRPC's own context."""

    def __init__(self, left_s: float | None = None) -> None:
        self.left_s = left_s
        self.ended: list[Callable[[], None]] = []
        self.over = False

    def time_remaining(self) -> float | None:
        return self.left_s

    def add_callback(self, callback: Callable[[], None]) -> bool:
        self.ended.append(callback)
        return not self.over

    def end(self) -> None:
        """The client has given up."""
        self.over = True
        for callback in self.ended:
            callback()


class Scene:
    def __init__(self) -> None:
        self.context = Context()
        self.given_back: list[Reply] = []
        self.n_after = 0

    async def ask(self, begin: Callable[[], Any], deadline_s_max: float = 20.0) -> Reply:
        """As a call's thread does."""
        gateway = Gateway(asyncio.get_running_loop(), self.after)
        return await asyncio.to_thread(self._ask, gateway, begin, deadline_s_max)

    def _ask(self, gateway: Gateway, begin: Callable[[], Any], deadline_s_max: float) -> Reply:
        call = Call(self.context, ANYBODY, deadline_s_max)
        return gateway.ask(call, begin, self.given_back.append, lambda _: None)

    def after(self) -> None:
        self.n_after += 1


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_an_answer_comes_back(scene: Scene) -> None:
    async def slowly() -> Reply:
        await asyncio.sleep(0)
        return REPLY

    assert asyncio.run(scene.ask(lambda: REPLY)) is REPLY
    assert asyncio.run(scene.ask(slowly)) is REPLY
    assert scene.given_back == []
    assert scene.n_after >= 2


@pytest.mark.parametrize("slowly", [False, True])
def test_what_a_handler_raises_is_raised(scene: Scene, slowly: bool) -> None:
    async def fail() -> Reply:
        raise KeyError("x")

    def fail_now() -> Reply:
        raise KeyError("x")

    with pytest.raises(KeyError):
        asyncio.run(scene.ask(fail if slowly else fail_now))


def test_what_is_granted_while_the_client_gives_up_is_given_back(scene: Scene) -> None:
    def begin() -> Reply:
        scene.context.end()
        return REPLY

    async def run() -> None:
        with pytest.raises(GoneError):
            await scene.ask(begin)
        await asyncio.sleep(0)  # it is given back on the loop

    asyncio.run(run())
    assert scene.given_back == [REPLY]


def test_a_client_that_has_gone_before_gets_nothing_begun(scene: Scene) -> None:
    scene.context.over = True
    begun: list[int] = []

    def begin() -> Reply:
        begun.append(1)
        return REPLY

    with pytest.raises(GoneError):
        asyncio.run(scene.ask(begin))
    assert begun == []


@pytest.mark.parametrize("why", ["gone", "late"])
def test_work_that_nobody_waits_for_is_cancelled_after_its_first_step(scene: Scene, why: str) -> None:
    held: list[str] = []

    async def work() -> Reply:
        held.append("begun")
        try:
            if why == "gone":
                scene.context.end()
            await asyncio.Event().wait()
        finally:
            held.append("given back")
        return REPLY

    async def run() -> None:
        with pytest.raises(GoneError if why == "gone" else DeadlineError):
            await scene.ask(work, deadline_s_max=20.0 if why == "gone" else 0.05)
        for _ in range(1000):
            if len(held) == 2:
                return
            await asyncio.sleep(0.01)

    asyncio.run(run())
    assert held == ["begun", "given back"]


def test_the_shorter_deadline_counts() -> None:
    for left_s, most_s, expected in ((None, 5.0, 5.0), (2.0, 5.0, 2.0), (9.0, 5.0, 5.0), (float("inf"), 5.0, 5.0)):
        call = Call(Context(left_s), ANYBODY, most_s)
        assert expected - 1 < call.left_s <= expected
    with pytest.raises(DeadlineError):
        Call(Context(0.0), ANYBODY, 5.0).must_go_on()
