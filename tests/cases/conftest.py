"""Stores with an NVMe tier for the cases: each is checked and closed at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.store.two_tier import Settings, TwoTierRig


@pytest.fixture
def make_store(tmp_path: Path) -> Iterator[Callable[..., TwoTierRig]]:
    """``make_store(settings)``. What comes after a restart (``killed``, ``power_cut``) is the test's to close."""
    made: list[TwoTierRig] = []

    def make(settings: Settings | None = None) -> TwoTierRig:
        made.append(TwoTierRig(tmp_path / f"disk-{len(made)}", settings))
        return made[-1]

    yield make
    for rig in made:
        if not rig.ended:
            rig.close()


@pytest.fixture
def rig(make_store: Callable[..., TwoTierRig]) -> TwoTierRig:
    """32 blocks of 4 KiB in DRAM, 63 on NVMe."""
    return make_store()
