"""With ``--policy-clock client`` requests say when they are: what no clock says is refused, and does no harm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvstore.client import Client
from kvstore.errors import BadInputError
from kvstore.types import Namespace
from tests.client.scene import blocks_of, spec_of, tokens_of


@pytest.mark.parametrize("time_s", [1e308, -1e308, 1e13])
def test_times_that_no_clock_says_are_refused(start_daemon: Callable[..., Any], time_s: float) -> None:
    daemon = start_daemon(None, policy_clock="client")
    with Client(daemon.config.socket_path, timeout_s=5.0) as client:
        ns = client.open(Namespace("model", spec_of()))
        ns.put(tokens_of(3), blocks_of(3), policy_time_s=1.0)
        with pytest.raises(BadInputError, match=r"policy_time_s is .* at most 1e\+12 either way"):
            ns.lease(tokens_of(3), policy_time_s=time_s)
        with ns.lease(tokens_of(3), policy_time_s=2.0) as lease:
            assert lease.n_blocks == 3
