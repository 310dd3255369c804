"""Stores for tests; see ``rig``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvstore.offload import WritePolicy
from kvstore.store.hierarchy import WriteBehind
from tests.store.rig import Rig
from tests.store.three_tier import ThreeTierRig
from tests.store.two_tier import Settings, Sizes, TwoTierRig


@pytest.fixture
def make_rig() -> Iterator[Callable[..., Rig]]:
    """``make_rig(**settings of Rig)``; each is checked and closed at the end of the test."""
    with ExitStack() as stack:

        def make(**settings: Any) -> Rig:
            rig = Rig(**settings)
            stack.callback(rig.close)
            return rig

        yield make


@pytest.fixture
def rig(make_rig: Callable[..., Rig]) -> Rig:
    """32 slots of 4 KiB in regions of at most 8."""
    return make_rig()


@pytest.fixture(scope="session")
def rig_class() -> type[Rig]:
    """For tests that make and close many."""
    return Rig


@pytest.fixture
def two_tiers(tmp_path: Path) -> Iterator[Callable[..., TwoTierRig]]:
    """``two_tiers(policy, queue_bytes)``: each is checked and closed at the end, unless it has ended."""
    made: list[TwoTierRig] = []

    def make(policy: WritePolicy = WritePolicy.THROUGH, queue_bytes: int = 1 << 20, **sizes: Any) -> TwoTierRig:
        settings = Settings(Sizes(**sizes), WriteBehind(policy, queue_bytes_max=queue_bytes))
        made.append(TwoTierRig(tmp_path / str(len(made)), settings))
        return made[-1]

    yield make
    for rig in made:
        if not rig.ended:
            rig.settle()
            rig.close()


@pytest.fixture
def three_tiers(tmp_path: Path) -> Iterator[ThreeTierRig]:
    """16 blocks fit in HBM, 32 in DRAM; closed at the end."""
    made = ThreeTierRig(tmp_path / "nvme")
    yield made
    made.close()
