"""A policy that fails in the middle of a commit: what is found afterwards has the bytes that were stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvstore.prefix_index.index import PrefixIndex
from kvstore.prefix_index.policies.hazard import HazardPolicy
from kvstore.prefix_index.policy import Newcomers, Use
from kvstore.prefix_index.rows import RowPath
from tests.store.rig import Rig

ROOT = b"r" * 16


@pytest.mark.parametrize("hook", ["inserted", "entered", "accessed"])
def test_slots_of_blocks_that_are_found_are_not_given_to_others(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, hook: str
) -> None:
    rig = make_rig()
    prompt = rig.rows(4, tag=1)
    reservation = rig.reserve(1, prompt)
    rig.map_regions(1, reservation.slots, writable=True)
    rig.fill(reservation, prompt)
    wanted = rig.bytes_at(reservation.slots)

    as_it_is = getattr(rig.store.index.policy, hook)

    def fail(ids: Any, what: Any) -> Any:
        """Of accesses that after the insertion, when the blocks are committed."""
        if hook == "accessed" and not what.is_again:
            return as_it_is(ids, what)
        raise ValueError("a fault of the policy")

    with monkeypatch.context() as patch:
        patch.setattr(rig.store.index.policy, hook, fail)
        with pytest.raises(ValueError, match="a fault of the policy"):
            rig.store.commit(1, reservation.id)
    rig.store.abort(1, reservation.id)  # as a client does that is told of an error
    rig.store.check()
    lease = rig.store.lease(1, prompt)
    assert lease.n_blocks == 4
    for tag in range(2, 16):  # more than there is room for
        rig.put(1, rig.rows(3, tag=tag))
    assert rig.bytes_at(rig.slots_of(lease)) == wanted
    rig.store.release(1, lease.id)


def test_an_arrival_that_was_not_the_one_weighed_is_taken_for_what_it_is() -> None:
    """Two requests begin alike; the one that was weighed last and in part is not the one that comes."""
    policy = HazardPolicy()
    index = PrefixIndex(policy, reserve_blocks=16)
    path = RowPath.from_tokens(np.arange(12, dtype=np.uint32), 2)
    keys = path.chain(ROOT, 0, path.n_rows)
    use = Use(1.0, 12, block_tokens=2)
    policy.declined(Newcomers(keys[:5], 0xFFFFFFFF, use), 4)
    policy.declined(Newcomers(keys[:3], 0xFFFFFFFF, Use(1.0, 5, block_tokens=2)), 2)
    stored = index.insert(ROOT, path, 0, np.arange(6), 1, use)
    index.check()
    assert stored.is_new.all()
    assert index.evict(6).ids.tolist() == stored.ids.tolist()[::-1]
