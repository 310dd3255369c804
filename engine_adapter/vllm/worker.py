"""A worker's side: copies what the scheduler's side ordered, on threads, and reports what became of it."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from functools import partial

from kvstore.client import Client, HybridHandle, Lease
from kvstore.engine_adapter.block_layout import BlockLayout
from kvstore.engine_adapter.counters import SharedCounters
from kvstore.engine_adapter.jobs import Workers
from kvstore.engine_adapter.parts import Handle, open_namespace
from kvstore.engine_adapter.vllm.jobs import BlocksJob, LoadJob, SaveJob
from kvstore.engine_adapter.vllm.options import Options
from kvstore.engine_adapter.vllm.orders import StepOrders, WorkerReport
from kvstore.engine_adapter.vllm.paged import device_mover, paged
from kvstore.engine_adapter.vllm.shapes import LayerPages
from kvstore.errors import EndedError
from kvstore.types import Namespace

PREEMPTED_WAIT_S = 0.05
"""How long the engine waits for a save of a request that it takes the blocks from, before the save is given up."""

LOADS_MAX = 1024
CLOSE_S = 2.0


class WorkerSide:
    """See the module. Calls come from the engine's thread."""

    def __init__(
        self,
        options: Options,
        namespace: Namespace,
        layers: list[LayerPages],
        layer_numbers: dict[str, int],
        *,
        saves: bool,
        block_level_failures: bool,
        waits_for_saves: bool,
        counters: SharedCounters,
        attention_doubling_tokens: float = 0.0,
    ) -> None:
        self._options, self._namespace, self._layers = options, namespace, layers
        self._layer_numbers = layer_numbers
        self._may_save, self._waits_for_saves = saves, waits_for_saves
        self._block_level_failures = block_level_failures
        self._counters = counters
        # Two clients, as one call at a time is under way in each: loads don't stand behind saves.
        self._loader = self._connect("vllm loads")
        self._saver = self._connect("vllm saves")
        self._mover = device_mover(layers[0].tensor, (self._loader, self._saver), counters)
        self._paged = paged(layers, BlockLayout.by_part(namespace.spec), options.copy_threads, self._mover)
        self._load_from, self._save_to = (
            _Opened(client, namespace, attention_doubling_tokens) for client in (self._loader, self._saver)
        )
        # One thread each: a prompt's blocks are stored in their order.
        self._load_thread = Workers(1, LOADS_MAX, counters)
        self._save_thread = Workers(1, options.save_queue_max, counters)
        self.orders: StepOrders | None = None
        """Of the step that is under way; the connector sets them."""
        self._async_loads: dict[str, LoadJob] = {}
        self._sync_loads: list[LoadJob] = []
        self._saves: dict[str, list[SaveJob]] = {}
        self._ended: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._bad_blocks: dict[int, int] = {}
        """Blocks whose load failed, and in which step: nothing computed from them is stored."""
        self._report = WorkerReport(0)

    def _connect(self, name: str) -> Client:
        options = self._options
        return Client(options.socket or None, options.tenant, options.transfer_timeout_s, required=False, name=name)

    # What the engine calls in every step --------------------------------------------------------

    def preempt(self, orders: StepOrders) -> None:
        """The engine is about to use blocks of these requests for others."""
        deadline_s = time.monotonic() + PREEMPTED_WAIT_S
        for request_id in orders.preempted:
            for job in self._saves.get(request_id, ()):
                if not job.wait_copied(deadline_s):
                    job.cancel("its request was preempted")

    def start_loads(self) -> None:
        """The loads of this step begin."""
        orders = self.orders
        while orders is not None and orders.loads:
            job = self._load_job(orders)
            self._load_thread.start(job, partial(self._load, job))
            self._watch_load(job, orders)

    def _load_job(self, orders: StepOrders) -> LoadJob:
        seconds = self._options.load_timeout_s
        return LoadJob(orders.loads[0], orders.revision, self._layers, seconds, self._paged.loading())

    def _watch_load(self, job: LoadJob, orders: StepOrders) -> None:
        """From here on its end is reported. Orders leave the list only here: those that are left never began."""
        if orders.load_async:
            self._async_loads[job.request_id] = job
        else:
            self._sync_loads.append(job)
        orders.loads.remove(job.order)

    def wait_layer(self, layer_name: str) -> None:
        """Block until a layer of this step's loads is there, or on its way to where the engine's stream will wait for
        it, or they have failed."""
        number = self._layer_numbers.get(layer_name)
        if number is None:
            return
        stream = self._paged.stream()
        for job in self._sync_loads:
            if stream is None:
                there = job.wait_layer(number, job.deadline_s)
            else:
                there = job.let_wait(number, stream, job.deadline_s)
            if not there:
                job.cancel("it took too long")

    def end_loads(self) -> None:
        """The step's forward is done: what of its loads is not verified by now has failed. Idempotent."""
        orders = self.orders
        if orders is None:
            return
        self._bad_blocks = {block: step for block, step in self._bad_blocks.items() if step > orders.processed_step}
        while orders.loads:
            lost = self._load_job(orders)
            lost.cancel("it never began")
            self._watch_load(lost, orders)
        jobs, self._sync_loads = self._sync_loads, []
        for job in jobs:
            if not job.wait(job.deadline_s):
                job.cancel("it took too long")
            self._count_load(job)
            if job.reason:
                bad = {block for group in job.order.block_ids for block in group if block}
                self._failed_blocks |= bad
                self._bad_blocks.update(dict.fromkeys(bad, orders.step))

    def start_saves(self) -> None:
        """The blocks that this step completed go to the store."""
        self.end_loads()
        orders = self.orders
        if orders is None:
            return
        saves, orders.saves = orders.saves, []
        started = []
        for order in saves:
            job = SaveJob(order, orders.revision, self._layers, self._paged.saving())
            self._saves.setdefault(order.request_id, []).append(job)
            if not self._may_save:
                job.cancel("another worker stores the same")
            elif not self._bad_blocks.keys().isdisjoint(order.context):
                job.cancel("it was computed from blocks that could not be loaded")
            else:
                self._save_thread.start(job, partial(self._save, job))
                started.append(job)
        if self._waits_for_saves:
            deadline_s = time.monotonic() + self._options.transfer_timeout_s
            for job in started:
                if not job.wait_copied(deadline_s):
                    job.cancel("the engine could not wait for it")

    def results(self) -> tuple[set[str], set[str], set[str]]:
        """Requests whose saves are over, if they have ended; whose loads are over; and those of which failed."""
        self.end_loads()
        self._collect_saves()
        if self.orders is not None:
            ended, self.orders.ended = self.orders.ended, frozenset()
            self._ended |= ended
        sent = {request_id for request_id in self._ended if request_id not in self._saves}
        self._ended -= sent
        received: set[str] = set()
        failed: set[str] = set()
        for request_id, job in [*self._async_loads.items()]:
            if not job.over and time.monotonic() > job.deadline_s:
                job.cancel("it took too long")
            if not job.over or request_id in self._saves:
                continue
            del self._async_loads[request_id]
            self._count_load(job)
            received.add(request_id)
            if job.reason:
                if self._block_level_failures:
                    self._failed_blocks.update(job.order.block_ids[0])
                else:
                    failed.add(request_id)
        return sent, received, failed

    def take_failed_blocks(self) -> set[int]:
        """The engine's blocks whose load failed since the last call."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_report(self) -> WorkerReport:
        """What became of orders since the last call."""
        self._collect_saves()
        report, self._report = self._report, WorkerReport(0)
        report.step = self.orders.step if self.orders is not None else 0
        return report

    def close(self) -> None:
        """Stop all that is under way and end the sessions. Blocks for a few seconds at most."""
        saves = [job for jobs in self._saves.values() for job in jobs]
        deadline_s = time.monotonic() + CLOSE_S
        for save in saves:
            save.wait(deadline_s)
        jobs: list[BlocksJob] = [*self._async_loads.values(), *self._sync_loads, *saves]
        for job in jobs:
            job.cancel("the engine shuts down")
        for thread in (self._load_thread, self._save_thread):
            thread.close()
        if self._mover is not None:
            self._mover.close()
            self._mover.device.close()
        self._loader.close()
        self._saver.close()

    # Bookkeeping --------------------------------------------------------------------------------

    def _collect_saves(self) -> None:
        for request_id, jobs in [*self._saves.items()]:
            over = [job for job in jobs if job.over]
            if not over:
                continue
            if len(over) == len(jobs):
                del self._saves[request_id]
            else:
                self._saves[request_id] = [job for job in jobs if job not in over]
            self._report.saves_done[request_id] = self._report.saves_done.get(request_id, 0) + len(over)
            self._count_saves(over)
            for job in over:
                if not job.reason:
                    self._report.saved_until[request_id] = len(job.order.tokens)

    def _count_load(self, job: LoadJob) -> None:
        add = self._counters.add
        if job.reason:
            add("loads_failed")
            add("load_failed_blocks", job.order.n_blocks)
            return
        add("loads")
        add("load_blocks", job.order.n_blocks)
        add("load_bytes", job.n_bytes)
        add("load_seconds", job.took_s)

    def _count_saves(self, jobs: Iterable[SaveJob]) -> None:
        add = self._counters.add
        for job in jobs:
            if job.reason and not job.n_stored:
                add("saves_failed")
                add("save_skipped_blocks", job.order.n_blocks - job.n_present)
                continue
            add("saves")
            add("save_present_blocks", job.n_present)
            add("save_blocks", job.n_stored)
            add("save_bytes", job.n_bytes)
            add("save_seconds", job.took_s)
            if job.n_skipped:
                add("save_skipped_blocks", job.n_skipped)

    # On the threads ----------------------------------------------------------------------

    def _load(self, job: LoadJob) -> None:
        def attach(lease_id: int) -> Lease:
            if not lease_id:
                raise EndedError("it was promised, and is not there")
            handle = self._load_from.at(job.revision)
            if isinstance(handle, HybridHandle):
                return handle.attach(lease_id)
            return self._loader.attach(lease_id, shard=handle.namespace)

        job.run(attach, self._paged)

    def _save(self, job: SaveJob) -> None:
        job.run(self._save_to.at, self._paged, self._options.lease_s)


class _Opened:
    """A worker's namespace as one client sees it, with the revision that is in use. For one thread."""

    def __init__(self, client: Client, namespace: Namespace, attention_doubling_tokens: float) -> None:
        self._client, self._namespace = client, namespace
        self._doubling_tokens = attention_doubling_tokens
        self._handle: Handle | None = None

    def at(self, revision: str) -> Handle:
        """The handle; asks the daemon nothing."""
        if self._handle is None or self._handle.namespace.revision != revision:
            namespace = replace(self._namespace, revision=revision)
            self._handle = open_namespace(self._client, namespace, self._doubling_tokens)
        return self._handle
