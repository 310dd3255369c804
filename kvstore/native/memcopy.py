"""Batched copies between raw addresses: streaming stores in C, or numpy where the C part is absent.

Both ways give the same bytes. ``KVSTORE_NATIVE=0`` in the environment chooses numpy.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import BadInputError
from kvstore.native.library import library
from kvstore.native.mapping import bytes_at

_LEVELS = ("portable", "avx2", "avx512")
_MEMCPY = -1
_THREAD_LEAST_BYTES = 256 << 10
"""Starting a thread costs tens of microseconds; a smaller batch than this per thread isn't split."""

Addresses = NDArray[np.uint64]


def _load() -> tuple[Callable[..., None] | None, int]:
    """The C copy function and the best level of this machine, or ``(None, 0)``."""
    loaded = library()
    if loaded is None:
        return None, 0
    try:
        function, best = loaded.kv_copy_batch, int(loaded.kv_level())
    except AttributeError:
        return None, 0
    pointer, size, number = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int
    function.argtypes = (pointer, pointer, pointer, size, ctypes.c_size_t, number, number)
    function.restype = None
    return function, best


_copy, _level = _load()


def backend() -> str:
    """What copies: ``avx512``, ``avx2``, ``portable`` (C, memcpy) or ``numpy``."""
    return _LEVELS[_level] if _copy is not None else "numpy"


def level() -> int:
    """The instructions that C copies with, as it wants to be told; see ``backend``."""
    return _level


def copy_batch(
    dst_addresses: Addresses,
    src_addresses: Addresses,
    sizes: NDArray[np.uint64] | int,
    threads: int = 1,
    streaming: bool = True,
) -> None:
    """Copy ``n`` blocks from one set of addresses to another.

    ``dst_addresses`` and ``src_addresses`` are uint64 ``[n]``; ``sizes`` is in bytes, one for all or
    uint64 ``[n]``, and may be 0. Any alignment works. ``threads`` OS threads share the bytes evenly.
    ``streaming=False`` leaves the destination in the cache: for bytes that are read again at once.

    Blocks without holding Python's lock. The caller answers for the addresses: every range must be
    mapped for the whole call, destinations writable, and no destination may overlap any other range.
    Raises BadInputError for arrays of another type or length, or a negative size.
    """
    dst, src = _addresses("dst_addresses", dst_addresses), _addresses("src_addresses", src_addresses)
    if dst.shape != src.shape:
        raise BadInputError(f"{len(dst)} destinations but {len(src)} sources; give one source for each")
    each: Addresses | None = None
    size_bytes = 0
    if isinstance(sizes, int | np.integer):
        size_bytes = int(sizes)
        if size_bytes < 0:
            raise BadInputError(f"a size is {size_bytes}; it must be 0 or more bytes")
        total_bytes = size_bytes * len(dst)
    else:
        each = _addresses("sizes", sizes)
        if each.shape != dst.shape:
            raise BadInputError(f"{len(each)} sizes for {len(dst)} blocks; give one for each, or a single number")
        total_bytes = int(each.sum())
    if threads < 1:
        raise BadInputError(f"threads is {threads}; it must be at least 1")
    threads = max(1, min(threads, total_bytes // _THREAD_LEAST_BYTES))
    if _copy is None:
        _copy_numpy(dst, src, each, size_bytes, threads)
        return
    pointer = each.ctypes.data if each is not None else None
    with_level = _level if streaming else _MEMCPY
    _copy(dst.ctypes.data, src.ctypes.data, pointer, size_bytes, len(dst), threads, with_level)


def _addresses(name: str, value: Any) -> Addresses:
    if not isinstance(value, np.ndarray) or value.dtype != np.uint64 or value.ndim != 1:
        raise BadInputError(f"{name} is {value!r:.80}; it must be a one-dimensional uint64 array")
    return np.ascontiguousarray(value)


def _copy_numpy(dst: Addresses, src: Addresses, each: Addresses | None, size_bytes: int, threads: int) -> None:
    """The same bytes as the C part; splits between blocks, not inside them."""
    sizes = each if each is not None else np.full(len(dst), size_bytes, dtype=np.uint64)

    def copy(part: slice) -> None:
        triples = zip(dst[part].tolist(), src[part].tolist(), sizes[part].tolist(), strict=True)
        for to_address, from_address, size in triples:
            if size:
                np.copyto(bytes_at(to_address, size), bytes_at(from_address, size))

    if threads == 1:
        copy(slice(None))
        return
    cuts = np.searchsorted(np.cumsum(sizes), np.linspace(0, int(sizes.sum()), threads + 1)[1:-1], "left").tolist()
    parts = [slice(a, b) for a, b in zip([0, *cuts], [*cuts, len(dst)], strict=True)]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(copy, parts))
