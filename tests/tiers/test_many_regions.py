"""A tier of hundreds of regions counts its slots as one of a few does."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.tiers.dram import DramTier, SlotState

PAGE = 4096


@pytest.mark.parametrize("n_regions", [85, 86, 127, 128, 129, 256, 300])
def test_states_are_counted_whatever_the_number_of_regions(n_regions: int) -> None:
    """Arrays of slot states are narrow: what is worked out with them must not be."""
    tier = DramTier(n_regions * 2 * PAGE, region_bytes=2 * PAGE, starter_bytes=2 * PAGE, prefault=False)
    try:
        slots = np.concatenate([tier.allocate(writer, "a", PAGE, 2) for writer in range(1, n_regions + 1)])
        assert len(tier.regions) == n_regions
        tier.check()
        tier.commit(slots, np.arange(len(slots)))
        tier.check()
        tier.quarantine(slots[::2])
        tier.check()
        tier.free(slots)
        tier.check()
        assert (tier.states(slots) == SlotState.FREE).all()
        facts = tier.stats()
        assert (facts["used_bytes"], facts["reserved_bytes"], facts["quarantined_bytes"]) == (0, 0, 0)
    finally:
        tier.close()
