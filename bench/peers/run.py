"""Runs all systems side by side: at each block size all of them are ready at the same time and take turns."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from kvstore.bench.bandwidth_copy import BLOCK_TOKENS
from kvstore.bench.bandwidth_row import KIB, MIB
from kvstore.bench.peers.catalog import KEPT, Entry, Shape, Tier
from kvstore.bench.peers.driver import OPERATIONS, Setup
from kvstore.bench.peers.environments import Environment, Place, own_place
from kvstore.bench.peers.figures import Cell, PeersReport, Sample, Skipped
from kvstore.bench.peers.process import Driver
from kvstore.config import format_size
from kvstore.errors import BadInputError, KVStoreError, UnavailableError
from kvstore.types import KVSpec, Namespace

NAMESPACE_MODEL = "bench:peers"


class Daemon(Protocol):
    """A running daemon."""

    @property
    def socket_path(self) -> Path: ...
    @property
    def pid(self) -> int: ...


StartDaemon = Callable[[Sequence[str]], AbstractContextManager[Daemon]]
"""From the arguments of ``kvstore serve``."""

RoomFor = Callable[[int, Namespace], int]
"""Bytes to give to an NVMe tier for so many blocks of a namespace."""

GetEnvironment = Callable[[Environment], Place]
"""Makes an environment if need be; raises UnavailableError if it can't be had."""

Step = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class PeersOptions:
    """What to measure. ``batch_bytes`` one operation moves, or one block if that is larger; ``rounds`` turns."""

    block_sizes: tuple[int, ...] = (64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB)
    rounds: int = 21
    batch_bytes: int = 32 * MIB
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rounds < 3:
            raise BadInputError(f"rounds is {self.rounds}; it must be at least 3")
        if not self.block_sizes or any(size < 4 * KIB or size % (4 * KIB) for size in self.block_sizes):
            raise BadInputError(f"block_sizes is {self.block_sizes}; direct I/O needs multiples of 4096")
        if self.batch_bytes < 1:
            raise BadInputError(f"batch_bytes is {self.batch_bytes}; it must be at least 1")

    def shape(self, tier: Tier, block_bytes: int) -> Shape:
        """What is moved at one block size."""
        return Shape(block_bytes, max(1, self.batch_bytes // block_bytes), KEPT[tier])


@dataclass(frozen=True, slots=True)
class Tools:
    """What this needs of its caller. ``folder`` is on the disk that is measured, and kept."""

    start_daemon: StartDaemon
    room_for: RoomFor
    get_environment: GetEnvironment
    folder: Path
    step: Step = lambda _: None
    keep: Callable[[PeersReport], None] = lambda _: None
    """Told after each block size what has been measured so far: a run takes long and may be interrupted."""


def run_peers(options: PeersOptions, entries: Sequence[Entry], tools: Tools) -> PeersReport:
    """Measure all of the entries that can be had; blocks, for minutes.

    An entry that can't be set up or fails is left out from there on, with its reason in the report.
    """
    skipped: list[Skipped] = []
    places = _places(entries, tools, skipped)
    cells: list[Cell] = []
    versions: dict[str, str] = {}

    def so_far() -> PeersReport:
        return PeersReport(
            tuple(entries), tuple(cells), dict(versions), tuple(skipped), options.rounds, options.batch_bytes
        )

    for tier in KEPT:
        there = [entry for entry in entries if entry.tier == tier and entry.name in places]
        if all(entry.role == "limit" for entry in there):
            continue
        with _Drivers(places, tools.folder) as drivers:
            for block_bytes in options.block_sizes:
                with _Turns(options, options.shape(tier, block_bytes), there, drivers, tools) as turns:
                    cells += turns.measure()
                    skipped += turns.skipped
                    versions.update(turns.versions)
                tools.keep(so_far())
    return so_far()


def _places(entries: Sequence[Entry], tools: Tools, skipped: list[Skipped]) -> dict[str, Place]:
    """Where each entry runs, by name; those that can't are added to ``skipped``."""
    made: dict[str, Place | str] = {}
    places: dict[str, Place] = {}
    for entry in entries:
        if entry.environment is None:
            places[entry.name] = own_place()
            continue
        name = entry.environment.name
        if name not in made:
            tools.step(f"nothing yet: making the environment {name} if it isn't there (minutes the first time)")
            try:
                made[name] = tools.get_environment(entry.environment)
            except UnavailableError as error:
                made[name] = str(error)
        place = made[name]
        if isinstance(place, str):
            skipped.append(Skipped(entry.name, None, place))
        else:
            places[entry.name] = place
    return places


class _Drivers:
    """A process for each entry, started when it is first wanted and kept from one block size to the next, as loading
    what a system consists of can take long. A context manager.
    """

    def __init__(self, places: Mapping[str, Place], folder: Path) -> None:
        self._places = places
        self._folder = folder
        self._running: dict[str, Driver] = {}

    def of(self, entry: Entry) -> Driver:
        """Raises UnavailableError if it can't be started."""
        if entry.name not in self._running:
            log = self._folder / f"{entry.name}.log"
            self._running[entry.name] = Driver(entry.module, self._places[entry.name], log)
        return self._running[entry.name]

    def end(self, name: str) -> None:
        """Of one that failed; the next size gets a new one."""
        if (failed := self._running.pop(name, None)) is not None:
            failed.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with ExitStack() as stack:
            for each in self._running.values():
                stack.callback(each.close)


class _Turns:
    """All entries at one block size. A context manager."""

    def __init__(
        self, options: PeersOptions, shape: Shape, entries: Sequence[Entry], drivers: _Drivers, tools: Tools
    ) -> None:
        self.skipped: list[Skipped] = []
        self.versions: dict[str, str] = {}
        self._options, self._shape, self._entries, self._tools = options, shape, entries, tools
        self._all_drivers = drivers
        self._drivers: dict[str, Driver] = {}
        self._stack = ExitStack()
        try:
            for entry in entries:
                tools.step(f"blocks of {format_size(shape.block_bytes)}: setting up {entry.title}")
                self._set_up(entry)
        except BaseException:
            self._stack.close()
            raise

    def measure(self) -> list[Cell]:
        """Every operation of every entry, ``rounds`` times; an operation of all before the next one of any."""
        options, shape = self._options, self._shape
        self._tools.step(f"blocks of {format_size(shape.block_bytes)}")
        for _ in range(shape.batches + 2):  # until every store is full once, and all memory was touched
            for name in list(self._drivers):
                self._ask(name, "put")
        for operation in ("get", "lookup"):
            for name in self._who(operation):
                self._ask(name, operation)
        samples: dict[tuple[str, str], list[Sample]] = {}
        for turn in range(options.rounds):
            for operation in OPERATIONS:
                names = self._who(operation)
                at = turn % max(1, len(names))
                for name in names[at:] + names[:at]:
                    if (sample := self._ask(name, operation)) is not None:
                        samples.setdefault((name, operation), []).append(sample)
        return [
            Cell(name, operation, shape.block_bytes, shape.n_blocks, tuple(values))
            for (name, operation), values in samples.items()
            if name in self._drivers
        ]

    def _who(self, operation: str) -> list[str]:
        """Entries that are still there and have this operation."""
        return [entry.name for entry in self._entries if entry.name in self._drivers and operation in entry.operations]

    def _ask(self, name: str, operation: str) -> Sample | None:
        try:
            answer = self._drivers[name].ask(operation)
        except UnavailableError as error:
            self.skipped.append(Skipped(name, self._shape.block_bytes, str(error)))
            del self._drivers[name]
            self._all_drivers.end(name)
            return None
        return Sample(answer["seconds"], answer["cpu_s"], answer.get("wrong", 0))

    def _set_up(self, entry: Entry) -> None:
        shape = self._shape
        # In memory's tier it holds sockets, whose paths must be short.
        place = self._tools.folder if entry.on_disk else None
        folder = self._stack.enter_context(
            tempfile.TemporaryDirectory(prefix=f"{entry.name}-", dir=place, ignore_cleanup_errors=True)
        )
        try:
            options = {
                **entry.options,
                "block_tokens": BLOCK_TOKENS,
                "dram_bytes": shape.dram_bytes,
                **self._daemon_options(entry, folder),
            }
            setup = Setup(shape.block_bytes, shape.n_blocks, shape.kept, folder, options, self._options.seed)
            driver = self._all_drivers.of(entry)
            self.versions[entry.name] = driver.set_up(setup)
            self._stack.callback(self._end, entry.name)
        except KVStoreError as error:
            self.skipped.append(Skipped(entry.name, shape.block_bytes, str(error)))
            self._all_drivers.end(entry.name)
            return
        self._drivers[entry.name] = driver

    def _end(self, name: str) -> None:
        """Before its daemon and its folder go."""
        try:
            if name in self._drivers:
                self._drivers[name].end_system()
        except UnavailableError:
            self._all_drivers.end(name)

    def _daemon_options(self, entry: Entry, folder: str) -> dict[str, Any]:
        """Start the entry's daemon, if it has one; where to find it."""
        if entry.daemon is None:
            return {}
        shape, arguments = self._shape, entry.daemon(self._shape)
        listen = f"unix:{folder}/g.sock"
        if entry.by_grpc:
            arguments += ["--grpc-listen", listen]
        if entry.on_disk:
            namespace = Namespace(NAMESPACE_MODEL, KVSpec.opaque(BLOCK_TOKENS, shape.block_bytes))
            n_bytes = self._tools.room_for(shape.batches * shape.n_blocks, namespace)
            arguments += ["--nvme-dir", f"{folder}/nvme", "--nvme", str(n_bytes)]
        daemon = self._stack.enter_context(self._tools.start_daemon(arguments))
        return {"connect": f"grpc+{listen}" if entry.by_grpc else str(daemon.socket_path), "pids": [daemon.pid]}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
