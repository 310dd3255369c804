"""Which pages of the engine hold which tokens: a batch of rows, as engines have it (indptr and indices)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import BadInputError


@dataclass(frozen=True, slots=True)
class PageTable:
    """Row r has the pages ``indices[indptr[r] : indptr[r + 1]]``, in the order of its tokens; both int64."""

    indptr: NDArray[np.int64]
    indices: NDArray[np.int64]

    @classmethod
    def of(cls, indptr: Any, indices: Any, n_pages: int) -> PageTable:
        """Checked: raises BadInputError for other types, rows out of order, and pages that the engine doesn't have."""
        starts, pages = _integers("indptr", indptr), _integers("indices", indices)
        if not len(starts) or starts[0] != 0 or starts[-1] != len(pages) or (np.diff(starts) < 0).any():
            raise BadInputError(f"indptr is {starts!r:.80}; it must rise from 0 to the number of indices, {len(pages)}")
        if len(pages) and not (int(pages.min()) >= 0 and int(pages.max()) < n_pages):
            wrong = int(pages.min()) if int(pages.min()) < 0 else int(pages.max())
            raise BadInputError(f"page {wrong} is not one of the engine's {n_pages}")
        return cls(starts, pages)

    def __len__(self) -> int:
        return len(self.indptr) - 1

    def row(self, r: int) -> NDArray[np.int64]:
        """The pages of one row, int64 [n]."""
        return self.indices[self.indptr[r] : self.indptr[r + 1]]


def _integers(name: str, given: Any) -> NDArray[np.int64]:
    array = np.asarray(given)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise BadInputError(f"{name} is {array.dtype} of shape {array.shape}; give integers in one dimension")
    return array.astype(np.int64)
