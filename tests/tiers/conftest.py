"""The DRAM tier that most tests of this folder use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvstore.tiers.dram import DramTier
from tests.tiers.dram_scene import PAGE, open_files


@pytest.fixture
def tier() -> Iterator[DramTier]:
    """64 pages, regions of 16, starters of 4."""
    before = open_files()
    made = DramTier(64 * PAGE, region_bytes=16 * PAGE, starter_bytes=4 * PAGE, prefault=False)
    yield made
    made.check()
    made.close()
    made.close()
    assert open_files() == before
