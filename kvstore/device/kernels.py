"""The kernels of ``kernels.cu`` and their parameters; what every launch must keep to.

A test compares the table with the source. ``copy_kernels`` and ``page_kernels`` say what each kernel is for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from kvstore.device.seam import Argument
from kvstore.errors import BadInputError

SOURCE = Path(__file__).with_name("kernels.cu")

WARP_THREADS = 32
BLOCK_THREADS_MAX = 1024
GRID_MAX = (2**31 - 1, 65_535, 65_535)
SHARED_BYTES_MAX = 48 << 10
"""Of a block, on every device and without asking for more."""

Width = np.dtype[np.uint64] | np.dtype[np.int64] | np.dtype[np.uint32]

ADDRESS: Width = np.dtype(np.uint64)
BYTES: Width = np.dtype(np.int64)
COUNT: Width = np.dtype(np.uint32)


Dimensions = tuple[int, int, int]


class Launcher(Protocol):
    """What of a ``Device`` runs kernels."""

    def launch(
        self,
        kernel: str,
        grid: Dimensions,
        block: Dimensions,
        arguments: Sequence[Argument],
        stream: int,
        shared_bytes: int = 0,
    ) -> None:
        """See ``Device.launch``."""
        ...


class Parameter(NamedTuple):
    """One parameter of a kernel; addresses are ``ADDRESS``."""

    name: str
    dtype: Width


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel. One that ``has_barriers`` has threads that wait for each other, at a barrier or a shuffle."""

    name: str
    parameters: tuple[Parameter, ...]
    block_threads_max: int
    has_barriers: bool = False


_KINDS: Mapping[str, Width] = {"address": ADDRESS, "bytes": BYTES, "count": COUNT}


def _parameters(*groups: str) -> tuple[Parameter, ...]:
    """Of groups of a kind and the names of that kind that follow each other."""
    split = [group.split() for group in groups]
    return tuple(Parameter(name, _KINDS[kind]) for kind, *names in split for name in names)


VALUE_BYTES: Mapping[str, int] = {"float16": 2, "bfloat16": 2, "float32": 4}
"""The dtypes of keys that summaries and scores are made of, and their sizes."""

_COPY_RUNS = _parameters(
    "address to_planes from_planes to_offsets from_offsets sizes_bytes",
    "count n_planes n_runs pieces_of_run lanes access_bytes",
)
_COPY_PAGES = _parameters(
    "address to_planes to_starts",
    "bytes to_token_bytes to_head_bytes",
    "count to_page_tokens to_first_token",
    "address from_planes from_starts",
    "bytes from_token_bytes from_head_bytes",
    "count from_page_tokens from_first_token",
    "count n_planes n_tokens heads unit_bytes pieces_of_unit lanes access_bytes",
)
_PAGE_SUMMARY = _parameters(
    "address pages rows",
    "bytes token_bytes head_bytes",
    "address low high mean",
    "count n_pages heads head_dim channels_at_once",
)
_PAGE_SCORE = _parameters("address queries low high scores", "count n_pages group head_dim tile add")

KERNELS: Mapping[str, Kernel] = {
    kernel.name: kernel
    for kernel in (
        Kernel("kv_copy_runs", _COPY_RUNS, BLOCK_THREADS_MAX),
        Kernel("kv_copy_pages", _COPY_PAGES, BLOCK_THREADS_MAX),
        *(Kernel(f"kv_page_summary_{dtype}", _PAGE_SUMMARY, 256) for dtype in VALUE_BYTES),
        *(Kernel(f"kv_page_score_{dtype}", _PAGE_SCORE, 256, has_barriers=True) for dtype in VALUE_BYTES),
    )
}


def check_launch(
    name: str,
    grid: Dimensions,
    block: Dimensions,
    arguments: Sequence[Argument],
    shared_bytes: int,
) -> Kernel:
    """The kernel of that name. Raises BadInputError for what a device would refuse: unknown name, shape, arguments."""
    kernel = KERNELS.get(name)
    if kernel is None:
        raise BadInputError(f"there is no kernel {name!r}; there are {', '.join(KERNELS)}")
    threads = block[0] * block[1] * block[2]
    if min(block) < 1 or threads > kernel.block_threads_max:
        raise BadInputError(
            f"{name} has blocks of {block} threads; 1 to {kernel.block_threads_max} in all are possible"
        )
    if kernel.has_barriers and threads % WARP_THREADS:
        raise BadInputError(f"{name} has blocks of {threads} threads; it needs whole warps of {WARP_THREADS}")
    if min(grid) < 1 or any(size > most for size, most in zip(grid, GRID_MAX, strict=True)):
        raise BadInputError(f"{name} has a grid of {grid} blocks; 1 to {GRID_MAX} are possible")
    if not 0 <= shared_bytes <= SHARED_BYTES_MAX:
        raise BadInputError(f"{name} asks for {shared_bytes} bytes of shared memory; a block has {SHARED_BYTES_MAX}")
    given, wanted = [value.dtype for value in arguments], [each.dtype for each in kernel.parameters]
    if given != wanted:
        named = ", ".join(f"{each.name}: {each.dtype}" for each in kernel.parameters)
        raise BadInputError(f"{name} is given ({', '.join(map(str, given))}) but takes ({named})")
    return kernel


def launch(
    device: Launcher,
    name: str,
    grid: tuple[int, int],
    threads: int,
    values: Sequence[int],
    stream: int,
    shared_bytes: int = 0,
) -> None:
    """Launch a kernel with plain ints, each made as wide as its parameter. Raises BadInputError for one too large."""
    arguments = []
    for parameter, value in zip(KERNELS[name].parameters, values, strict=True):
        limits = np.iinfo(parameter.dtype)
        if not limits.min <= value <= limits.max:
            raise BadInputError(f"{name} takes {parameter.name} as {parameter.dtype}; {value} does not fit")
        arguments.append(parameter.dtype.type(value))
    device.launch(name, (*grid, 1), (threads, 1, 1), arguments, stream, shared_bytes)
