"""xxh3_64 of many pieces of raw memory, without Python's lock.

``xxhash.xxh3_64_intdigest`` keeps the lock for pieces of up to 64 KiB (measured with 4.1). Called in a loop over
page groups of 16 KiB it makes every other thread wait for it: an echo by the loop's thread took 8 ms instead of
0.03. The library's own C function is therefore called through ctypes, which lets go of the lock each time:
1.2 to 1.3 x the time of one hash over the same memory at 16 KiB a piece. Where the C part of this package has
``kv_hash_batch``, one call does the whole batch: 1.0 x.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvstore.errors import BadInputError
from kvstore.native.library import library

Hashes = NDArray[np.uint64]

_SYMBOLS = ("XXH3_64bits_dispatch", "XXH3_64bits")
"""The first chooses its instructions at run time and exists on x86 only, where the second means SSE2."""

_TRIALS = (0, 1, 16, 100, 240, 1000, 5000)


def _view() -> Callable[[int, int, int], memoryview]:
    function = ctypes.pythonapi.PyMemoryView_FromMemory
    function.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
    function.restype = ctypes.py_object
    return function


_memory_view = _view()
_READ_ONLY = 0x100


def memory_at(address: int, length_bytes: int) -> memoryview:
    """Memory at an address, read-only; the caller answers for it being mapped."""
    return _memory_view(address, length_bytes, _READ_ONLY)


def _hash_in_python(address: int, size_bytes: int) -> int:
    return xxhash.xxh3_64_intdigest(memory_at(address, size_bytes))


@cache
def xxhash_library() -> ctypes.CDLL | None:
    """The library behind the ``xxhash`` module, or None where it can't be loaded by itself."""
    try:
        return ctypes.CDLL(importlib.import_module("xxhash._xxhash").__file__)
    except (AttributeError, ImportError, OSError):
        return None


def either(loaded: ctypes.CDLL, *names: str) -> Any:
    """The first of these functions that there is. Raises AttributeError."""
    for name in names:
        if hasattr(loaded, name):
            return getattr(loaded, name)
    raise AttributeError(f"xxhash has none of {', '.join(names)}")


@cache
def hash_function() -> Any:
    """The C function behind the ``xxhash`` module, or None where the module hides it or it hashes otherwise."""
    loaded = xxhash_library()
    try:
        function = either(loaded, *_SYMBOLS) if loaded is not None else None
    except AttributeError:
        function = None
    if function is None:
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    function.restype = ctypes.c_uint64
    trial = np.arange(max(_TRIALS), dtype=np.uint8)
    data = trial.tobytes()
    same = all(function(trial.ctypes.data, n) == xxhash.xxh3_64_intdigest(data[:n]) for n in _TRIALS)
    return function if same else None


def _batch(hash_one: Any) -> Any:
    """``kv_hash_batch`` of this package's C part, or None."""
    loaded = library()
    if hash_one is None or loaded is None or not hasattr(loaded, "kv_hash_batch"):
        return None
    function = loaded.kv_hash_batch
    function.argtypes = (*(ctypes.c_void_p,) * 4, ctypes.c_size_t)
    function.restype = None
    return function


_hash_one = hash_function()
_hash_batch = _batch(_hash_one)


def backend() -> str:
    """What hashes: ``batch`` (one call into C), ``single`` (a call into C per piece) or ``python``."""
    if _hash_one is None:
        return "python"
    return "single" if _hash_batch is None else "batch"


def checksums(addresses: Hashes, sizes_bytes: Hashes) -> Hashes:
    """xxh3_64 (seed 0) of ``n`` pieces of memory; uint64 ``[n]`` in, uint64 ``[n]`` out.

    Blocks; without Python's lock except in the ``python`` backend. The caller answers for every piece being
    mapped for the whole call. Raises BadInputError for arrays of another type or shape.
    """
    for name, array in (("addresses", addresses), ("sizes_bytes", sizes_bytes)):
        if array.dtype != np.uint64 or array.ndim != 1 or len(array) != len(addresses):
            raise BadInputError(f"{name} is {array.dtype} {array.shape}; give uint64 [n], as many sizes as addresses")
    if _hash_one is None or _hash_batch is None:
        each = _hash_in_python if _hash_one is None else _hash_one
        return np.fromiter(map(each, addresses.tolist(), sizes_bytes.tolist()), np.uint64, len(addresses))
    addresses, sizes_bytes = np.ascontiguousarray(addresses), np.ascontiguousarray(sizes_bytes)
    out = np.empty(len(addresses), np.uint64)
    pointer = ctypes.cast(_hash_one, ctypes.c_void_p)
    _hash_batch(pointer, addresses.ctypes.data, sizes_bytes.ctypes.data, out.ctypes.data, len(out))
    return out
