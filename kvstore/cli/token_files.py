"""Prompts in files: JSON lines, numpy arrays, raw token ids."""

from __future__ import annotations

import itertools
import json
from collections.abc import Generator, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import BadInputError
from kvstore.tokens import token_array

LINE_BYTES_MAX = 256 << 20

Tokens = NDArray[np.uint32]


def read_prompts(path: Path) -> Generator[Tokens, None, None]:
    """The prompts of a file, one after the other, uint32 [n]. Raises BadInputError that says what is wrong where.

    ``.jsonl`` and ``.json``: a list of token ids per line, or an object with one as ``tokens``. ``.npy``: integers, one
    prompt, or one per row. Anything else: little-endian unsigned 32-bit ids, one prompt.
    """
    try:
        if path.suffix in (".jsonl", ".json"):
            yield from _json_lines(path)
        elif path.suffix == ".npy":
            yield from _numpy(path)
        else:
            yield _raw(path)
    except OSError as error:
        raise BadInputError(f"{path} can't be read: {error.strerror or error}") from error


def read_prompt(path: Path, number: int = 0) -> Tokens:
    """Prompt ``number`` of a file, counted from 0. Raises BadInputError, also if there are fewer."""
    for tokens in itertools.islice(read_prompts(path), number, None):
        return tokens
    raise BadInputError(f"{path} has no prompt number {number}; they count from 0")


def _json_lines(path: Path) -> Iterator[Tokens]:
    with path.open("rb") as file:
        for number in itertools.count(1):
            line = file.readline(LINE_BYTES_MAX + 1)
            if not line:
                return
            if len(line) > LINE_BYTES_MAX:
                raise BadInputError(f"{path}, line {number}: longer than {LINE_BYTES_MAX} bytes")
            if line.strip():
                yield _from_json(line, f"{path}, line {number}")


def _from_json(line: bytes, where: str) -> Tokens:
    try:
        plain = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadInputError(f"{where}: not JSON ({error})") from None
    if isinstance(plain, dict):
        if "tokens" not in plain:
            raise BadInputError(f"{where}: an object without 'tokens'")
        plain = plain["tokens"]
    if not isinstance(plain, list):
        raise BadInputError(f"{where}: {str(plain)[:40]!r} is no list of token ids")
    return _checked(plain, where)


def _numpy(path: Path) -> Iterator[Tokens]:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise BadInputError(f"{path} is no numpy array: {error}") from None
    if not isinstance(array, np.ndarray) or array.ndim not in (1, 2):
        shape = getattr(array, "shape", "several arrays")
        raise BadInputError(f"{path} holds {shape}; give an array of one prompt, or of one per row")
    for number, row in enumerate(array if array.ndim == 2 else [array]):
        yield _checked(np.array(row), f"{path}, row {number}")


def _raw(path: Path) -> Tokens:
    data = path.read_bytes()
    if len(data) % 4:
        raise BadInputError(f"{path} has {len(data)} bytes; token ids have 4 bytes each, little-endian")
    ids = np.frombuffer(data, "<u4").astype(np.uint32, copy=False)
    if len(ids) >= 4 and len(ids) % 2 == 0 and ids[::2].any() and not ids[1::2].any():
        raise BadInputError(
            f"{path} seems to have ids of 8 bytes, as every second one of 4 bytes is 0: write uint32, or .npy"
        )
    return ids


def _checked(tokens: object, where: str) -> Tokens:
    try:
        return token_array(tokens)
    except BadInputError as error:
        raise BadInputError(f"{where}: {error}") from None
