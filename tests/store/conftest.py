"""Stores for tests; see ``rig``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.store.rig import Rig


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
