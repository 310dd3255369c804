"""The C part of this package, where it could be built."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from functools import cache


@cache
def library() -> ctypes.CDLL | None:
    """The shared object; None where there is none, or ``KVSTORE_NATIVE=0`` says to do without."""
    if os.environ.get("KVSTORE_NATIVE") == "0":
        return None
    try:
        spec = importlib.util.find_spec("kvstore.native._streamcopy")
        return ctypes.CDLL(spec.origin) if spec is not None and spec.origin is not None else None
    except OSError:
        return None
