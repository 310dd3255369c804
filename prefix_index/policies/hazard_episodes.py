"""What became of the runs seen last, in a ring of bounded size."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.prefix_index.policies.hazard_ages import Ints
from kvstore.prefix_index.policies.hazard_features import N_FEATURES
from kvstore.prefix_index.policies.hazard_model import Episodes
from kvstore.prefix_index.policies.hazard_runs import Runs

N_EPISODES = 1 << 16


class EpisodeLog:
    """The last ``N_EPISODES`` episodes that ended."""

    def __init__(self) -> None:
        self._strata = np.zeros(N_EPISODES, np.uint8)
        self._features = np.zeros((N_EPISODES, N_FEATURES), np.uint8)
        self._ages_s = np.zeros(N_EPISODES)
        self._blocks = np.zeros(N_EPISODES, np.uint32)
        self._hits = np.zeros(N_EPISODES, np.bool_)
        self._n = 0

    def add(self, runs: Runs, at: Ints, n_blocks: Ints, now_s: float, *, hit: bool) -> None:
        """So many blocks of these runs were used now (``hit``), or will not be watched any longer."""
        which = runs.counts[at]
        if not which.all():
            at, n_blocks = at[which], n_blocks[which]
        if len(at) > N_EPISODES:
            at, n_blocks = at[-N_EPISODES:], n_blocks[-N_EPISODES:]
        to = np.arange(self._n, self._n + len(at)) % N_EPISODES
        self._strata[to] = runs.strata[at]
        self._features[to] = runs.features[at]
        self._ages_s[to] = np.maximum(now_s - runs.used_s[at], 0.0)
        self._blocks[to] = n_blocks
        self._hits[to] = hit
        self._n += len(at)

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
