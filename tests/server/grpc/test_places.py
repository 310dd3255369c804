"""Places for calls: so many in all, so many with one token, and all of them free again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvstore.config import GrpcOptions
from kvstore.errors import UnavailableError
from kvstore.server.grpc.places import Places
from tests.server.grpc.conftest import Bare, refused
from tests.server.grpc.test_calls import watch

BUSY, OTHER = "a-token-of-somebody-busy", "a-token-of-somebody-else"


def test_a_place_each_up_to_both_bounds() -> None:
    places = Places(calls_max=4, calls_per_token_max=2)
    for owner in (b"a", b"a", b"b"):
        places.take(owner)
    with pytest.raises(UnavailableError, match="2 calls with this token run already"):
        places.take(b"a")
    places.take(b"b")
    with pytest.raises(UnavailableError, match="4 calls run already"):
        places.take(b"c")
    places.give(b"a")
    places.take(b"c")
    for owner in (b"a", b"b", b"b", b"c"):
        places.give(owner)
    for _ in range(4):
        places.take(b"")  # nobody has a token: the bound of one is none


def test_one_token_can_not_take_all_places(
    start_daemon: Callable[..., Any], options: GrpcOptions, tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    tokens = tmp_path / "tokens"
    tokens.touch(mode=0o600)
    tokens.write_text(f"{BUSY}\n{OTHER}\n")
    start_daemon(grpc=replace(options, token_file=tokens, calls_max=4))
    with grpc.insecure_channel(options.listen) as channel:
        busy, other = (Bare(channel, (("authorization", f"Bearer {token}"),)) for token in (BUSY, OTHER))
        held = [watch(busy), watch(busy)]  # half of all: they wait for events that do not come

        def is_refused() -> bool:
            try:
                busy.stats()
            except grpc.RpcError as error:
                return bool(error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED)
            held[:] = [watch(busy) if call.done() else call for call in held]
            return False

        wait_until(is_refused, "two calls of one token run")
        status, error = refused(busy.stats)
        assert (status, type(error)) == (grpc.StatusCode.RESOURCE_EXHAUSTED, UnavailableError)
        assert "--grpc-calls-per-token" in str(error)
        assert other.stats()["grpc_refused_calls"] >= 1
        for call in held:
            call.cancel()
        wait_until(lambda: not is_refused(), "there is room again")
