"""What became of the runs seen last, in a ring of bounded size."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.prefix_index.policies.hazard_model import Episodes
from kvstore.prefix_index.policies.hazard_runs import Runs

N_EPISODES = 1 << 16


class EpisodeLog:
    """The last ``N_EPISODES`` episodes that ended."""

    def __init__(self) -> None:
        self._strata = np.zeros(N_EPISODES, np.uint8)
        self._features = np.zeros(N_EPISODES, np.uint64)
        self._ages_s = np.zeros(N_EPISODES)
        self._blocks = np.zeros(N_EPISODES, np.uint32)
        self._hits = np.zeros(N_EPISODES, np.bool_)
        columns = (self._strata, self._features, self._ages_s, self._blocks, self._hits)
        self._cells = tuple(column.data for column in columns)
        self._n = 0

    def add(self, runs: Runs, run: int, n_blocks: int, now_s: float, *, hit: bool) -> None:
        """So many blocks of this run were used now (``hit``), or will not be watched any longer."""
        cells = runs.cells
        if not cells.counts[run]:
            return
        at = self._n % N_EPISODES
        self._n += 1
        strata, features, ages_s, blocks, hits = self._cells
        strata[at], features[at], blocks[at], hits[at] = cells.strata[run], cells.features[run], n_blocks, hit
        ages_s[at] = max(now_s - cells.used_s[run], 0.0)

    def with_runs(self, runs: Runs, now_s: float) -> Episodes:
        """All episodes, and the runs that have not ended as they stand now."""
        n = min(self._n, N_EPISODES)
        live = runs.until_now(now_s, N_EPISODES)
        hits: NDArray[np.bool_] = np.concatenate((self._hits[:n], live.hits))
        return Episodes(
            np.concatenate((self._strata[:n], live.strata)),
            np.concatenate((self._features[:n], live.features)),
            np.concatenate((self._ages_s[:n], live.ages_s)),
            np.concatenate((self._blocks[:n].astype(np.float64), live.blocks)),
            hits,
        )
