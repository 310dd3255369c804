"""What an adapter needs beside this package, said clearly where it is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needs(adapter: str, packages: tuple[str, ...], remedy: str) -> Iterator[None]:
    """Around an adapter's imports: turns the failure to find one of ``packages`` into an ImportError with a way out."""
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in packages:
            raise
        raise ImportError(f"{adapter} needs {missing}, which is not installed: {remedy}", name=error.name) from error
