"""Compiled kernels, kept in the user's cache under names that say what they were compiled from."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

from kvstore.errors import DeviceError


def digest_of(*parts: bytes) -> str:
    """A name for what was made of these parts."""
    digest = blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def kept(name: str, make: Callable[[Path], object]) -> Path:
    """The file of that name; where there is none, ``make`` writes it to the path that it is given.

    It is written beside, then renamed: processes that do the same at once get the same. Raises DeviceError where there
    is no folder for it (``$XDG_CACHE_HOME``), and what ``make`` raises.
    """
    target = _folder() / name
    if not target.exists():
        handle, beside = tempfile.mkstemp(prefix=target.stem, suffix=".part", dir=target.parent)
        os.close(handle)
        try:
            make(Path(beside))
            Path(beside).chmod(0o700)
            Path(beside).replace(target)
        finally:
            Path(beside).unlink(missing_ok=True)
    return target


def _folder() -> Path:
    """Below ``$XDG_CACHE_HOME``; nobody else may write there, as its files are run."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        folder = (Path(base) if base else Path.home() / ".cache") / "kvstore" / "kernels"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = folder.stat()
    except (OSError, RuntimeError) as error:
        raise DeviceError(f"there is no folder for the compiled kernels: {error}; set XDG_CACHE_HOME to one") from error
    if facts.st_uid != os.geteuid() or facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise DeviceError(
            f"others than this user can write to {folder}, so compiled kernels in it can't be trusted; make it this "
            "user's alone (chmod 700), or set XDG_CACHE_HOME to a folder that is"
        )
    return folder
