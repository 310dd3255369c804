"""Run with AddressSanitizer: all kernels on memory of just the size that they should touch.

``python -m tests.device.kernels.sanitized [PLANT]``; with the name of a plant, something is a little too short. Writes
``clean`` at the end, which a plant must not let happen.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.device.copy_kernels import PageSide, copy, table_of_pages, table_of_runs
from kvstore.device.kernels import Dimensions
from kvstore.device.on_cpu import load_kernels
from kvstore.device.page_kernels import KeyPages, PageSummaries, score_pages, summarize_pages
from kvstore.device.seam import Argument

_libc = ctypes.CDLL(None)
_libc.posix_memalign.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t)

PLANTS = {"keys", "rows", "table", "target", "shared", "scores"}


class OnCpu:
    """Runs kernels at once."""

    def launch(
        self,
        kernel: str,
        grid: Dimensions,
        block: Dimensions,
        arguments: Sequence[Argument],
        stream: int,
        shared_bytes: int = 0,
    ) -> None:
        assert stream == 0
        if plant == "shared":
            shared_bytes -= min(shared_bytes, 4)
        load_kernels(sanitize=True).launch(kernel, grid, block, arguments, shared_bytes)


def exactly(array: NDArray[Any], *, shorter_bytes: int = 0) -> int:
    """The address of a copy of an array with nothing behind it. numpy keeps small memory for itself: so malloc's."""
    data = np.ascontiguousarray(array).tobytes()
    data = data[: len(data) - shorter_bytes]
    address = np.zeros(1, np.uint64)
    assert _libc.posix_memalign(address.ctypes.data, 16, len(data)) == 0
    ctypes.memmove(int(address[0]), data, len(data))
    return int(address[0])


def short(name: str, size_bytes: int) -> int:
    return size_bytes if plant == name else 0


def copies(unit: int, heads: int) -> None:
    source = exactly(np.zeros((2, 3, heads, 4, unit), np.uint8))
    target = exactly(np.zeros((2, 12, heads, unit), np.uint8), shorter_bytes=short("target", 1))
    planes, plane_bytes = np.arange(2, dtype=np.uint64), np.uint64(12 * heads * unit)
    to = PageSide(planes * plane_bytes + np.uint64(target), np.zeros(1, np.int64), 12, heads * unit, unit)
    starts = np.arange(3) * 4 * heads * unit
    come_from = PageSide(planes * plane_bytes + np.uint64(source), starts, 4, unit, 4 * unit)
    for table in (
        table_of_pages(to, come_from, 12, heads, unit),
        table_of_runs(to.planes, come_from.planes, starts, starts, np.full(3, 4 * heads * unit, np.uint64)),
    ):
        copy(device, table, exactly(table.words, shorter_bytes=short("table", 8)), 0)


def pages(dtype: str, heads: int, group: int, dim: int) -> None:
    size = 4 if dtype == "float32" else 2
    rows = np.array([4, 4, 3], np.uint32)
    keys = [exactly(np.zeros(n * heads * dim * size, np.uint8), shorter_bytes=short("keys", 1)) for n in rows.tolist()]
    shape = (3, heads, dim * size)
    low, high, mean = (exactly(np.zeros(shape, np.uint8)) for _ in range(3))
    described = KeyPages(
        exactly(np.array(keys, np.uint64)),
        exactly(rows, shorter_bytes=short("rows", 4)),
        3,
        heads,
        dim,
        dtype,
        heads * dim * size,
        dim * size,
    )
    summarize_pages(device, described, 0, low=low, high=high, mean=mean)
    queries = exactly(np.zeros((heads * group, dim * size), np.uint8))
    scores = exactly(np.zeros((heads, 3), np.float32), shorter_bytes=short("scores", 4))
    score_pages(device, PageSummaries(low, high, 3, heads, dim, dtype), queries, group, scores, 0)


plant = sys.argv[1] if len(sys.argv) > 1 else None
assert plant is None or plant in PLANTS, plant
device = OnCpu()
for unit, heads in itertools.product((1152, 128, 160, 7), (1, 4)):
    copies(unit, heads)
for dtype, (heads, group, dim) in itertools.product(
    ("float16", "bfloat16", "float32"), ((2, 3, 80), (1, 16, 64), (1, 2, 576), (2, 1, 5))
):
    pages(dtype, heads, group, dim)
sys.stdout.write("clean\n")
