"""What tests of embedded stores share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.embedded.scene import InUse


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Nothing that the test opened is there at its end: no thread, no descriptor, no mapping."""
    before = InUse()
    yield
    before.check()
