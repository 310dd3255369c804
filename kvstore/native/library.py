"""The C part of this package, where it could be built."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from functools import cache


@cache
def library(name: str = "_streamcopy") -> ctypes.CDLL | None:
    """A shared object of this folder; None where there is none, or ``KVSTORE_NATIVE=0`` says to do without."""
    if os.environ.get("KVSTORE_NATIVE") == "0":
        return None
    try:
        spec = importlib.util.find_spec(f"kvstore.native.{name}")
        return ctypes.CDLL(spec.origin) if spec is not None and spec.origin is not None else None
    except OSError:
        return None
