"""A device for each test of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine_adapter.gpu.scene import Scene, scene


@pytest.fixture
def on_device() -> Iterator[Scene]:
    with scene() as made:
        yield made
