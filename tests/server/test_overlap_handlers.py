"""Requests of routers: many prompts don't keep the loop from others, and there are bounds."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator

import numpy as np
import pytest

from kvstore.errors import BadInputError, EndedError
from kvstore.server.overlap_handlers import PROMPTS_MAX, SLICE_S, OverlapHandlers
from kvstore.server.prompts import PromptReader
from kvstore.server.replies import Reply
from kvstore.server.session import Session
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.packing import F64, U64, unpack
from tests.store.rig import Rig


class Scene:
    """Handlers whose clock a test moves: each look at it takes ``look_s``."""

    def __init__(self, look_s: float) -> None:
        self.rig = Rig()
        self.looks = 0
        self._look_s = look_s
        self.handlers = OverlapHandlers(self.rig.store, PromptReader(self.rig.store, False), self._now_s)
        self.session = Session(1, "default", "router", 0, -1, 0.0)
        self.opened = self.rig.namespace()
        self.rig.put(1, self.rig.rows(2, tag=1))

    def _now_s(self) -> float:
        self.looks += 1
        return self.looks * self._look_s

    def request(self, tags: Iterator[int] | range, namespace: bytes = b"") -> pb.OverlapRequest:
        rows = (np.arange(4, dtype="<u4") + tag * 1000 for tag in tags)
        return pb.OverlapRequest(
            prompts=[pb.Prompt(namespace=namespace or self.opened.digest, rows=each.tobytes()) for each in rows]
        )


def test_what_fits_one_slice_is_answered_at_once() -> None:
    scene = Scene(0.0)
    reply = scene.handlers.overlap(scene.session, scene.request(range(3)))
    assert isinstance(reply, Reply)
    assert unpack("n_tokens", reply.message.n_tokens, U64).tolist() == [0, 4, 0]  # type: ignore[attr-defined]
    assert len(unpack("load_s", reply.message.load_s, F64)) == 3  # type: ignore[attr-defined]
    nothing = scene.handlers.overlap(scene.session, pb.OverlapRequest())
    assert isinstance(nothing, Reply)
    assert not nothing.message.n_tokens  # type: ignore[attr-defined]


def test_more_gives_others_their_turn_between_slices() -> None:
    scene = Scene(SLICE_S / 4)

    async def answer() -> tuple[Reply, int]:
        result = scene.handlers.overlap(scene.session, scene.request(range(40)))
        assert isinstance(result, Awaitable)
        coming = asyncio.ensure_future(result)
        turns = 0
        while not coming.done():
            turns += 1
            await asyncio.sleep(0)
        return coming.result(), turns

    reply, turns = asyncio.run(answer())
    assert unpack("n_tokens", reply.message.n_tokens, U64).tolist() == [0, 4, *[0] * 38]  # type: ignore[attr-defined]
    assert turns >= 40 / 5  # five looks at the clock, so at most five prompts, in a slice


def test_too_many_prompts_and_namespaces_that_are_not_open_are_refused() -> None:
    scene = Scene(0.0)
    with pytest.raises(BadInputError, match=f"{PROMPTS_MAX + 1} prompts in one request"):
        scene.handlers.overlap(scene.session, scene.request(range(PROMPTS_MAX + 1)))
    with pytest.raises(EndedError, match="is not open here"):
        scene.handlers.overlap(scene.session, scene.request(range(2), namespace=b"x" * 16))
