"""How the C library's allocator treats messages of megabytes."""

from __future__ import annotations

import functools

import numpy as np

_BYTES = 31 << 20
"""glibc learns from what it has mapped and is given back, up to 32 MiB."""


@functools.cache
def keep_freed_messages() -> None:
    """Have memory of freed messages used again, for this process. Costs nothing after the first call.

    A message of megabytes is given back to the system when it is freed, so that each next one is paged in anew: a fault
    per 4 KiB, a sixth of a client's time in a Read. glibc keeps blocks up to the size of the largest that it has seen
    freed (M_MMAP_THRESHOLD in mallopt(3)); it is shown one. No page of it is touched. Elsewhere this has no effect.
    """
    np.empty(_BYTES, np.uint8)
