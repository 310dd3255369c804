"""Whether GPUs share what feeds them: loads by all at once beside loads by each alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvstore.bench.measure import Team
from kvstore.device import Device, PinnedBuffer, open_device
from kvstore.errors import BadInputError

CONTENDED_SHARE = 0.9
LOAD_BYTES, REPEATS = 256 << 20, 5


@dataclass(frozen=True, slots=True)
class Together:
    """Rates of large pinned copies to each device, in their order; and of all at once, summed."""

    alone_gb_per_s: tuple[float, ...]
    together_gb_per_s: float

    @property
    def share(self) -> float:
        """What is left of the sum of what each reaches alone."""
        return self.together_gb_per_s / sum(self.alone_gb_per_s)

    @property
    def note(self) -> str:
        """For people, if it matters."""
        if self.share >= CONTENDED_SHARE:
            return ""
        n = len(self.alone_gb_per_s)
        return f"{n} GPUs that load at once reach {self.share:.0%} of what they reach one by one: plan for that"

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "alone_gb_per_s": list(self.alone_gb_per_s),
            "together_gb_per_s": self.together_gb_per_s,
            "share": self.share,
        }


def measure_all(names: Sequence[str], n_bytes: int = LOAD_BYTES, repeats: int = REPEATS) -> Together:
    """``measure_together`` of devices by their names, which are opened for it."""
    with ExitStack() as stack:
        devices = []
        for name in names:
            devices.append(open_device(name))
            stack.callback(devices[-1].close)
        return measure_together(devices, n_bytes, repeats)


def measure_together(devices: Sequence[Device], n_bytes: int, repeats: int) -> Together:
    """Copy ``n_bytes`` to each device, ``repeats`` times alone and all at once, in turn; medians. Blocks.

    Raises BadInputError for less than two devices.
    """
    if len(devices) < 2:
        raise BadInputError(f"{len(devices)} devices can't be together; give two or more")
    with ExitStack() as stack:
        loads = [_load(stack, device, n_bytes) for device in devices]
        team = stack.enter_context(Team(len(devices)))
        one = stack.enter_context(Team(1))
        alone: list[list[float]] = [[] for _ in devices]
        together = []
        for _ in range(repeats + 1):
            together.append(team.time_s(loads))
            for seconds, load in zip(alone, loads, strict=True):
                seconds.append(one.time_s([load]))
    rates = tuple(n_bytes / float(np.median(seconds[1:])) / 1e9 for seconds in alone)
    return Together(rates, len(devices) * n_bytes / float(np.median(together[1:])) / 1e9)


def _load(stack: ExitStack, device: Device, n_bytes: int) -> Callable[[], None]:
    buffer = stack.enter_context(PinnedBuffer(device, n_bytes))
    memory, stream = device.malloc(n_bytes), device.stream()
    stack.callback(device.free, memory)
    stack.callback(device.free_stream, stream)

    def load() -> None:
        device.copy(memory, buffer.address, n_bytes, stream)
        device.sync_stream(stream)

    return load
