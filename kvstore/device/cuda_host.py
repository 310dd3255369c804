"""Host memory registered with CUDA once in a process, for all GPUs that use it: CUDA takes a range no second time.

It is registered for all contexts (``cudaHostRegisterPortable``), so that a second GPU just asks for its address.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class _Range:
    size_bytes: int
    read_only: bool
    n_devices: int = 0


class HostRanges:
    """Which ranges are registered, and for how many devices. Any thread; one registers at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ranges: dict[int, _Range] = {}

    def take(self, address: int, size_bytes: int, read_only: bool, register: Callable[[], object]) -> None:
        """One more device uses a range; ``register`` is called unless another has exactly this one.

        Raises what that does, as for a range that overlaps others: then nothing is taken.
        """
        with self._lock:
            known = self._ranges.get(address)
            if known is None or (known.size_bytes, known.read_only) != (size_bytes, read_only):
                register()
                known = self._ranges[address] = _Range(size_bytes, read_only)
            known.n_devices += 1

    def give_back(self, address: int, unregister: Callable[[], object]) -> None:
        """A device that took a range is done with it; ``unregister`` is called for the last. Raises what that does."""
        with self._lock:
            known = self._ranges[address]
            known.n_devices -= 1
            if not known.n_devices:
                del self._ranges[address]
                unregister()


RANGES = HostRanges()
"""Of this process."""
