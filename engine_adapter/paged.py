"""An engine with paged KV on top of the store: look up a batch, load it layer by layer, save what it computes.

Engine-neutral: the engine's memory is an ``EngineKV``, its page tables are ``PageTable``s. Nothing here raises because
of the daemon, nor from a thread: rows that could not be had count as misses, exactly those, and ``reason`` says why.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvstore.client import NamespaceHandle, Wait
from kvstore.engine_adapter.block_layout import BlockLayout
from kvstore.engine_adapter.block_writer import BlockWriter, Plane, Tokens
from kvstore.engine_adapter.counters import SharedCounters
from kvstore.engine_adapter.engine_layout import EngineKV
from kvstore.engine_adapter.jobs import Job, Workers
from kvstore.engine_adapter.moving import Copy, HostMover, Mover, Moves
from kvstore.engine_adapter.page_table import PageTable
from kvstore.engine_adapter.parts import Handle
from kvstore.engine_adapter.runs import Runs, plan_runs
from kvstore.engine_adapter.stored_prefix import StoredPrefix
from kvstore.errors import BadInputError, DeviceError
from kvstore.tokens import token_array
from kvstore.types import ExtraKey, Root

DEFAULT_ROOT = Root()


@dataclass(frozen=True, slots=True)
class RowRequest:
    """A row of a batch: its tokens, and what else its identity is made of."""

    tokens: ArrayLike
    root: Root = DEFAULT_ROOT
    extras: Sequence[ExtraKey] = ()


class LoadJob(Job):
    """Stored prefixes of a batch on their way into the engine's pages."""

    def __init__(self, n_rows: int, n_layers: int, deadline_s: float) -> None:
        super().__init__(n_layers, deadline_s)
        self.row_reasons = [""] * n_rows
        """Why a row can't be loaded although others can; final once a layer is complete."""

    def failed_rows(self) -> list[int]:
        """The rows whose pages must not be used: all of them if the job did not succeed. Known once it is over."""
        return [row for row, reason in enumerate(self.row_reasons) if reason or self.reason or not self.over]


class SaveJob(Job):
    """One pass of a batch on its way into the store; ``layer_ready`` says what the engine has computed."""

    def __init__(self, n_layers: int, deadline_s: float) -> None:
        super().__init__(n_layers, deadline_s)
        self._n_ready = 0

    def layer_ready(self, layer: int, stream: int | None = None) -> None:
        """This layer, and those before it, hold the pass's KV now; with ``stream``, of a device, when all is over that
        the engine's stream was given until now. Returns at once."""
        try:
            self._moves.after(stream)
        except DeviceError as error:
            self.cancel(str(error))
        with self._state:
            self._n_ready = max(self._n_ready, layer + 1)
            self._state.notify_all()

    def wait_ready(self, layer: int) -> bool:
        """Block until the engine has computed a layer; False if it has not by the deadline, or the job is over."""
        with self._state:
            rest_s = max(self._deadline_s - time.monotonic(), 0.0)
            return self._state.wait_for(lambda: self._n_ready > layer or self._over, rest_s) and not self._over


class PagedStore:
    """See the module. Calls may come from several threads; each row's writer is used by one job at a time.

    ``granularity_tokens``: a hit is cut to a multiple of it (an engine that needs whole pages says so). ``mover``: what
    copies, a ``gpu.mover.DeviceMover`` if the engine's memory is a device's; the caller closes it.
    Raises BadInputError if the engine's memory is not what the namespace says, or not where the mover copies.
    """

    def __init__(
        self,
        handle: Handle,
        engine: EngineKV,
        *,
        granularity_tokens: int = 1,
        copy_threads: int = 1,
        workers: int = 2,
        waiting_max: int = 64,
        counters: SharedCounters | None = None,
        mover: Mover | None = None,
    ) -> None:
        self.counters = counters or SharedCounters()
        self._mover = mover or HostMover(copy_threads)
        if self._mover.on_device != engine.on_device:
            there, here = ("a device's memory", "host memory")[:: 1 if engine.on_device else -1]
            raise BadInputError(
                f"the engine's tensors are in {there}, the mover copies to {here}; give one for {there}"
            )
        self.layout = BlockLayout.by_part(handle.namespace.spec)
        engine.check(self.layout)
        if granularity_tokens < 1:
            raise BadInputError(f"granularity_tokens is {granularity_tokens}; it must be 1 or more")
        self._handle, self._engine = handle, engine
        self._granularity_tokens = granularity_tokens
        # Loads and saves don't wait for each other: a save waits for the engine's layers.
        self._loads = Workers(workers, waiting_max, self.counters)
        self._saves = Workers(workers, waiting_max, self.counters)

    def find(self, rows: Sequence[RowRequest], *, wait: Wait = "wait") -> list[StoredPrefix]:
        """What is stored of each row but its last token, which is left to compute. See ``StoredPrefix.find``.

        Blocks in HBM are read there if the client does (``Client.use_hbm``), with the device that copies.
        """
        found = []
        hbm = isinstance(self._handle, NamespaceHandle) and self._mover.reads_hbm(self._handle.hbm_device)
        for row in rows:
            tokens = token_array(row.tokens)[:-1]
            prefix = StoredPrefix.find(
                self._handle, self.layout, tokens, root=row.root, extras=row.extras, wait=wait, hbm=hbm,
                counters=self.counters,
            )  # fmt: skip
            prefix.shorten(prefix.n_tokens // self._granularity_tokens * self._granularity_tokens)
            found.append(prefix)
        return found

    def load(
        self,
        found: Sequence[StoredPrefix],
        table: PageTable,
        *,
        deadline_s: float,
        first_tokens: Sequence[int] | None = None,
        stream: int | None = None,
    ) -> LoadJob:
        """Bring each row's stored tokens, from ``first_tokens`` on, into its pages. Returns at once.

        On a device that begins when all is over that the engine's ``stream`` was given until now. A layer may be used
        after ``wait_layer``, or on a stream after ``let_wait``.

        Page 0 of a row holds its token 0. Of layers with a window only the blocks of the window before the end of the
        hit come, if the namespace is hybrid. The pages are the job's until it is over or cancelled; none may be in
        two rows on a device.
        """
        firsts = list(first_tokens) if first_tokens is not None else [0] * len(found)
        job = LoadJob(len(found), len(self._engine.layers), deadline_s)
        if not len(table) == len(found) == len(firsts):
            job.cancel(f"{len(found)} rows were found, but {len(table)} have pages and {len(firsts)} a first token")
            return job
        moves = self._moves(job, self._mover.loading, stream)
        if moves is not None:
            self._loads.start(job, lambda: self._load(job, moves, found, table, firsts))
        return job

    def writer(self, row: RowRequest, prefix: StoredPrefix) -> BlockWriter:
        """What stores a row from the end of its prefix on, pass by pass."""
        known: Tokens = token_array(row.tokens)[: prefix.n_tokens]
        return BlockWriter(
            self._handle, self.layout, known, tails=prefix.last_blocks(),
            root=row.root, extras=row.extras, counters=self.counters,
        )  # fmt: skip

    def save(
        self, writers: Sequence[BlockWriter], tokens: Sequence[ArrayLike], table: PageTable, *, deadline_s: float
    ) -> SaveJob:
        """Store a pass: ``tokens[i]`` come next in row i, whose pages ``table`` has. Returns at once.

        Call ``layer_ready`` as the engine computes; pages must stay as they are until ``wait_copied``. What the pass
        completes is visible when the job is over. A pass of a writer must be over before its next begins.
        """
        job = SaveJob(len(self._engine.layers), deadline_s)
        if not len(writers) == len(tokens) == len(table):
            job.cancel(f"{len(writers)} writers, {len(tokens)} rows of tokens and {len(table)} of pages were given")
            return job
        moves = self._moves(job, self._mover.storing, None)
        if moves is not None:
            self._saves.start(job, lambda: self._save(job, moves, writers, tokens, table))
        return job

    def close(self) -> None:
        """Wait for the jobs under way, each of which ends by its deadline."""
        self._loads.close()
        self._saves.close()

    def _moves(self, job: Job, begin: Callable[[], Moves], stream: int | None) -> Moves | None:
        """What makes the job's copies; None if the device failed, which ends it."""
        try:
            moves = begin()
            moves.after(stream)
        except DeviceError as error:
            job.cancel(str(error))
            return None
        job.use(moves)
        return moves

    def _load(
        self, job: LoadJob, moves: Moves, found: Sequence[StoredPrefix], table: PageTable, firsts: Sequence[int]
    ) -> None:
        plans: dict[tuple[object, ...], Runs] = {}
        moves.keep(*found)
        for held in (held for prefix in found for held in prefix.hbm):
            moves.keep_hbm(held)
        for layer in range(len(self._engine.layers)):
            if not job.step(partial(self._load_layer, job, layer, moves, found, table, firsts, plans)):
                return
            job.complete(ahead=1)
        job.complete()
        if not all(prefix.vouched() for prefix in found):
            self.counters.add("unvouched_reads")
            job.finish("the daemon's HBM ended, or a slot changed, while it was read")
            return
        n_tokens = sum(
            prefix.n_tokens - first
            for prefix, first, reason in zip(found, firsts, job.row_reasons, strict=True)
            if not reason
        )
        self.counters.add("loaded_tokens", n_tokens)
        job.finish()

    def _load_layer(
        self,
        job: LoadJob,
        layer: int,
        moves: Moves,
        found: Sequence[StoredPrefix],
        table: PageTable,
        firsts: Sequence[int],
        plans: dict[tuple[object, ...], Runs],
    ) -> bool:
        place, mine = self.layout.layers[layer], self._engine.layers[layer]
        copies = []
        for row, prefix in enumerate(found):
            first_token = max(firsts[row], prefix.first_token(layer))
            if job.row_reasons[row] or prefix.n_tokens <= first_token:
                continue
            for number, (plane, offset) in enumerate(zip(mine.planes, place.planes, strict=True)):
                key = (row, place.alike, plane.page_bytes, plane.strides)
                try:
                    if key not in plans:
                        plans[key] = self._plan(layer, number, prefix, table.row(row), first_token)
                except BadInputError as error:
                    self.counters.add("load_failed_rows")
                    job.row_reasons[row] = str(error)
                    break
                copies.append(Copy(plans[key], plane.address, offset))
        return moves.copy(copies, lambda: not job.ending)

    def _plan(self, layer: int, plane: int, prefix: StoredPrefix, pages: NDArray[np.int64], first_token: int) -> Runs:
        place = self.layout.layers[layer]
        return plan_runs(
            self._engine.pages(layer, plane, pages, first_token, place.token_step),
            prefix.pages(layer, first_token),
            self.layout.units(layer, prefix.n_tokens - first_token),
            place.heads,
            place.unit_bytes,
        )

    def _save(
        self, job: SaveJob, moves: Moves, writers: Sequence[BlockWriter], tokens: Sequence[ArrayLike], table: PageTable
    ) -> None:
        try:
            firsts = [writer.n_tokens for writer in writers]
            for writer, each in zip(writers, tokens, strict=True):
                writer.begin(token_array(each), moves)
            for layer in range(len(self._engine.layers)):
                if not job.wait_ready(layer):
                    job.cancel(f"layer {layer} was not computed by the deadline")
                if not job.step(partial(self._save_layer, layer, writers, firsts, table)):
                    break
                job.complete()
            else:
                for writer in writers:
                    writer.end()
                job.finish(next((writer.reason for writer in writers if writer.reason), ""))
        finally:
            # An error counts as the end of all rows: what they have half of is not stored.
            for writer in writers:
                if writer.in_pass:
                    writer.stop(job.reason or "an error ended the pass")

    def _save_layer(self, layer: int, writers: Sequence[BlockWriter], firsts: Sequence[int], table: PageTable) -> None:
        step = self.layout.layers[layer].token_step
        for row, writer in enumerate(writers):
            planes = [
                Plane(plane.address, self._engine.pages(layer, number, table.row(row), firsts[row], step))
                for number, plane in enumerate(self._engine.layers[layer].planes)
            ]
            try:
                writer.write(layer, planes)
            except BadInputError as error:
                writer.stop(str(error))
