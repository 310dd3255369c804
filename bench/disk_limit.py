"""What the disk itself can do: fio, or a plain loop of direct I/O where fio is not installed.

One file, written once from end to end so that reads meet data and writes meet allocated blocks. Each
measurement moves on to the next part of it.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np

from kvstore.errors import BadInputError, KVStoreError

_FILL_BYTES = 8 << 20
_ENGINES = ("io_uring", "libaio", "psync")
_FIO_S_MAX = 300.0


class DiskLimit(Protocol):
    """A yardstick: seconds for moving ``n_bytes`` in blocks of ``block_bytes``, in file order, past the page cache."""

    @property
    def name(self) -> str:
        """What was measured with, for people."""
        ...

    def write_s(self, n_bytes: int, block_bytes: int) -> float:
        """Written and durable."""
        ...

    def read_s(self, n_bytes: int, block_bytes: int) -> float:
        """Read."""
        ...


class LimitFile:
    """The file that is measured on. A context manager; removed at the end."""

    def __init__(self, folder: Path, n_bytes: int) -> None:
        """Blocks until all of it is written. Raises BadInputError where direct I/O isn't to be had."""
        self.path = folder / "disk-limit.dat"
        self.n_bytes = n_bytes // _FILL_BYTES * _FILL_BYTES
        self._next = 0
        try:
            self._fill()
        except OSError as error:
            self.close()
            why = "no direct I/O there" if error.errno == errno.EINVAL else error.strerror or str(error)
            raise BadInputError(
                f"{folder}: {n_bytes} bytes can't be measured on ({why}); choose another --nvme-dir"
            ) from error
        except BaseException:
            self.close()
            raise

    def part(self, n_bytes: int) -> int:
        """Where the next ``n_bytes`` to be measured on begin: a part that was not touched for longest."""
        if n_bytes > self.n_bytes:
            raise BadInputError(f"{n_bytes} bytes at once need a larger file than {self.n_bytes} bytes")
        at = self._next if self._next + n_bytes <= self.n_bytes else 0
        self._next = at + n_bytes
        return at

    def close(self) -> None:
        """Remove it."""
        self.path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _fill(self) -> None:
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
        try:
            os.posix_fallocate(handle, 0, self.n_bytes)
            with mmap.mmap(-1, _FILL_BYTES) as memory:
                memory.write(np.random.default_rng(0).bytes(_FILL_BYTES))
                for offset in range(0, self.n_bytes, _FILL_BYTES):
                    if os.pwrite(handle, memory, offset) != _FILL_BYTES:
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(handle)
        finally:
            os.close(handle)


class Fio:
    """fio with direct I/O. ``depth`` requests are on their way; ``sync_bytes`` lie between two fdatasyncs."""

    def __init__(self, program: str, file: LimitFile, depth: int, sync_bytes: int) -> None:
        """Raises KVStoreError if none of its engines works here."""
        self._program = program
        self._file = file
        self._depth = depth
        self._sync_bytes = sync_bytes
        self._engine = self._usable_engine()
        version = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)  # noqa: S603
        depth_words = f"depth {depth}" if self._engine != "psync" else "depth 1"
        self._name = f"{version.stdout.strip() or 'fio'}, {self._engine}, {depth_words}"

    @property
    def name(self) -> str:
        return self._name

    def write_s(self, n_bytes: int, block_bytes: int) -> float:
        every = max(1, self._sync_bytes // block_bytes)
        return self._run_s(self._engine, "write", n_bytes, block_bytes, f"--fdatasync={every}", "--end_fsync=1")

    def read_s(self, n_bytes: int, block_bytes: int) -> float:
        return self._run_s(self._engine, "read", n_bytes, block_bytes)

    def _usable_engine(self) -> str:
        failures = []
        for engine in _ENGINES:
            try:
                self._run_s(engine, "read", _FILL_BYTES, 64 << 10)
            except KVStoreError as error:
                failures.append(str(error))
            else:
                return engine
        raise KVStoreError(f"fio can't be used here: {'; '.join(failures)}")

    def _run_s(self, engine: str, direction: str, n_bytes: int, block_bytes: int, *more: str) -> float:
        command = [
            self._program, "--name=limit", f"--filename={self._file.path}", f"--rw={direction}", f"--bs={block_bytes}",
            f"--offset={self._file.part(n_bytes)}", f"--size={n_bytes}", "--direct=1", f"--ioengine={engine}",
            f"--iodepth={self._depth}", "--thread", "--output-format=json", *more,
        ]  # fmt: skip
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_FIO_S_MAX, check=False)  # noqa: S603
            figures = _figures(done.stdout, direction)
        except (OSError, subprocess.TimeoutExpired, ValueError, LookupError) as error:
            raise KVStoreError(f"fio, {engine}: {error!r:.200}") from error
        if done.returncode or figures["io_bytes"] != n_bytes:
            raise KVStoreError(f"fio, {engine}: moved {figures['io_bytes']} of {n_bytes} bytes: {done.stderr:.200}")
        return n_bytes / float(figures["bw_bytes"])


class PlainLoop:
    """preadv and pwritev with O_DIRECT, a block each, on ``depth`` threads."""

    def __init__(self, file: LimitFile, depth: int, sync_bytes: int) -> None:
        self._file = file
        self._depth = depth
        self._sync_bytes = sync_bytes

    @property
    def name(self) -> str:
        return f"plain O_DIRECT loop, {self._depth} threads (fio is not installed)"

    def write_s(self, n_bytes: int, block_bytes: int) -> float:
        return self._run_s(n_bytes, block_bytes, os.pwritev, sync=True)

    def read_s(self, n_bytes: int, block_bytes: int) -> float:
        return self._run_s(n_bytes, block_bytes, os.preadv, sync=False)

    def _run_s(self, n_bytes: int, block_bytes: int, call: Callable[..., int], *, sync: bool) -> float:
        first = self._file.part(n_bytes)
        handle = os.open(self._file.path, os.O_RDWR | os.O_DIRECT)
        memory = [mmap.mmap(-1, block_bytes) for _ in range(self._depth)]
        for number, each in enumerate(memory):
            each.write(np.random.default_rng(number).bytes(block_bytes))
        step = max(block_bytes, self._sync_bytes // block_bytes * block_bytes) if sync else n_bytes

        def work(part: tuple[int, int]) -> None:
            number, start = part
            end = min(start + step, first + n_bytes)
            for offset in range(start + number * block_bytes, end, self._depth * block_bytes):
                if call(handle, [memory[number]], offset) != block_bytes:
                    raise KVStoreError(f"{self._file.path}: a direct transfer at {offset} was cut short")

        try:
            with ThreadPoolExecutor(self._depth) as pool:
                begin = time.perf_counter()
                for start in range(first, first + n_bytes, step):
                    list(pool.map(work, [(number, start) for number in range(self._depth)]))
                    if sync:
                        os.fdatasync(handle)
                return time.perf_counter() - begin
        finally:
            os.close(handle)
            for each in memory:
                each.close()


def disk_limit(file: LimitFile, depth: int, sync_bytes: int) -> DiskLimit:
    """fio if it is installed, else the plain loop."""
    program = shutil.which("fio")
    return PlainLoop(file, depth, sync_bytes) if program is None else Fio(program, file, depth, sync_bytes)


def _figures(output: str, direction: str) -> dict[str, Any]:
    """The numbers of one direction; notes may stand before the JSON object."""
    figures: dict[str, Any] = json.loads(output[output.index("{") :])["jobs"][0][direction]
    return figures
