"""The scheduler's side: what each request can load and should save, told to the workers step by step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from kvstore.client import Client
from kvstore.clock import Clock
from kvstore.engine_adapter.counters import SharedCounters
from kvstore.engine_adapter.near_misses import near_misses
from kvstore.engine_adapter.vllm.events import Events
from kvstore.engine_adapter.vllm.guard import Guard, logger
from kvstore.engine_adapter.vllm.lookups import Asked, Lookups, Pending, PromptLease
from kvstore.engine_adapter.vllm.loras import LoraIdentities
from kvstore.engine_adapter.vllm.options import Options
from kvstore.engine_adapter.vllm.orders import BlockIds, LoadOrder, SaveOrder, StepOrders, WorkerReport
from kvstore.engine_adapter.vllm.prompts import RequestPrompt
from kvstore.hybrid import parts_of
from kvstore.types import Namespace


@dataclass(slots=True)
class _Tracked:
    """What is known of a request from its first question to its end."""

    request: Any
    prompt: RequestPrompt
    asked: Asked = field(default_factory=Asked)
    served_at: int = -1
    """How often it had been preempted when it got its offer: there is one offer for each time it is admitted."""
    loading: PromptLease | None = None
    loading_step: int = 0
    n_disk_tokens: int = 0
    saved_blocks: int = 0
    """Blocks that need no further save order."""
    told_blocks: int = 0
    """Blocks that an event has been made for."""
    saves_open: int = 0
    """Orders that workers may still read blocks for, one for each worker."""


class SchedulerSide:
    """See the module. For one thread, the engine's."""

    def __init__(
        self,
        options: Options,
        revision: str,
        block_tokens: int,
        n_workers: int,
        *,
        recycles: bool,
        loads: bool,
        saves: bool,
        guard: Guard,
        counters: SharedCounters,
        events: Events,
        clock: Clock,
    ) -> None:
        self._options, self._revision, self._block_tokens = options, revision, block_tokens
        self._n_workers, self._recycles = n_workers, recycles
        self._may_load, self._may_save = loads, saves
        self._counters, self._events, self._clock = counters, events, clock
        self._loras = LoraIdentities(guard)
        self._client = Client(
            options.socket or None, options.tenant, options.lookup_timeout_s, required=False, name="vllm scheduler"
        )
        self._lookups: Lookups | None = None
        self._shards: list[Namespace] = []
        self._whole_blocks = True
        """Whether blocks are stored with all groups of layers in one piece."""
        self._tracked: dict[str, _Tracked] = {}
        self._orphans: dict[str, PromptLease] = {}
        """Leases of loads whose requests ended meanwhile."""
        self._step = 0
        self._processed_step = 0
        self._loads: list[LoadOrder] = []
        self._ended: set[str] = set()

    def use(self, shards: Iterable[Namespace]) -> None:
        """The workers have said what they read and write; nothing is found or stored before."""
        self._shards = list({shard.shard: shard for shard in shards}.values())
        self._reopen()
        for line in near_misses(self._client, self._namespaces()[0]) if self._shards else ():
            logger.info(
                "kvstore: nothing is stored for this engine yet. Of the same model, but not the same, are %s", line
            )

    def _namespaces(self) -> list[Namespace]:
        return [replace(shard, revision=self._revision) for shard in self._shards]

    def _reopen(self) -> None:
        if self._shards:
            shards = self._namespaces()
            hybrid = bool(parts_of(shards[0].spec))
            family = self._client.open_hybrid(shards[0]) if hybrid else self._client.open_family(shards)
            self._whole_blocks = not hybrid
            self._lookups = Lookups(family, self._options, self._clock, self._counters)

    def reset(self, revision: str) -> None:
        """From here on nothing is found that was stored before: the weights may be others now."""
        self._revision = revision
        for tracked in self._tracked.values():
            tracked.asked.drop()
            tracked.saved_blocks = 0
        self._reopen()

    def matched(self, request: Any, n_computed: int) -> tuple[int | None, bool]:
        """Tokens that can be loaded behind the ``n_computed`` that the engine has; None: ask again later."""
        if self._lookups is None or not self._may_load:
            return 0, False
        tracked = self._track(request)
        if request.skip_reading_prefix_cache or not tracked.prompt.cacheable:
            return 0, False
        if tracked.served_at == request.num_preemptions:
            return 0, False  # its load failed: now it is computed
        first_block, inside = divmod(n_computed, self._block_tokens)
        end_block = (request.num_tokens - 1) // self._block_tokens  # at least one token is left to compute
        if inside or end_block <= first_block:
            return 0, False
        offer = self._lookups.find(tracked.asked, tracked.prompt, first_block, end_block)
        if isinstance(offer, Pending):
            return None, False
        if offer is None:
            return 0, False
        return offer.n_blocks * self._block_tokens, self._options.load_async

    def allocated(self, request: Any, block_ids: BlockIds, n_external: int) -> None:
        """The engine has room for the request, and for ``n_external`` tokens that it was offered."""
        tracked = self._track(request)
        offer, tracked.asked.offer = tracked.asked.offer, None
        if n_external == 0:
            if offer is not None:
                offer.lease.release()
            return
        tracked.served_at = request.num_preemptions
        if offer is None:
            self.lose(request.request_id, block_ids)
            return
        end = offer.first_block + n_external // self._block_tokens
        tracked.saved_blocks = end  # what was found is stored, and all before it
        ids = tuple(tuple(group[offer.first_block : end]) for group in block_ids)
        self._loads.append(LoadOrder(request.request_id, offer.lease.id, offer.first_block, ids))
        tracked.loading, tracked.loading_step = offer.lease, self._step + 1
        tracked.n_disk_tokens = min(offer.n_disk * self._block_tokens, n_external)

    def disk_tokens(self, request: Any) -> int:
        """How many of the tokens just promised had to come from NVMe."""
        tracked = self._tracked.get(request.request_id)
        return tracked.n_disk_tokens if tracked is not None else 0

    def lose(self, request_id: str, block_ids: BlockIds) -> None:
        """A load was promised and can't be ordered: the workers report it as failed, all of the request's blocks."""
        if all(order.request_id != request_id for order in self._loads):
            self._loads.append(LoadOrder(request_id, 0, 0, tuple(tuple(group) for group in block_ids)))

    def orders(self) -> StepOrders:
        """The orders of the next step, but for saves. What was collected for it is taken."""
        self._step += 1
        orders = StepOrders(self._step, self._processed_step, self._revision, self._options.load_async, self._loads)
        orders.ended = frozenset(self._ended)
        self._loads, self._ended = [], set()
        return orders

    def add_saves(self, orders: StepOrders, output: Any) -> None:
        """Orders for the blocks that this step completes. ``output``: the engine's SchedulerOutput."""
        preempted = frozenset(output.preempted_req_ids or ())
        orders.preempted = preempted
        for request_id in preempted:
            if (tracked := self._tracked.get(request_id)) is not None:
                tracked.saved_blocks = 0
        if self._lookups is None or not self._may_save:
            return
        for request_id, n_scheduled in output.num_scheduled_tokens.items():
            tracked = self._tracked.get(request_id)
            if tracked is not None and tracked.prompt.cacheable:
                self._add_save(orders, tracked, n_scheduled, output.kv_connector_block_state)

    def _add_save(self, orders: StepOrders, tracked: _Tracked, n_scheduled: int, tables: Any) -> None:
        request = tracked.request
        # Tokens behind the known ones are guesses that may be taken back.
        n_known = request.num_tokens if self._options.save_generated else request.num_prompt_tokens
        end = min(request.num_computed_tokens + n_scheduled, n_known, request.num_tokens) // self._block_tokens
        if end <= tracked.saved_blocks:
            return
        table = tables.get_block_ids(request.request_id)
        if table is None:
            return
        # The first order has all blocks from the begin on: what the engine has in its own cache may not be stored.
        first = tracked.saved_blocks
        if self._recycles and self._whole_blocks and first == 0:
            first = _first_whole(table, end)
        tracked.saved_blocks = end
        if end <= first:
            return
        tracked.saves_open += self._n_workers
        orders.saves.append(
            SaveOrder(
                request.request_id,
                tracked.prompt.tokens(end * self._block_tokens),
                tracked.prompt.root,
                tracked.prompt.extras,
                first,
                tuple(tuple(group[first:end]) for group in table),
                frozenset() if self._options.load_async else frozenset(table[0][:end]),
            )
        )

    def heard(self, output: Any) -> None:
        """What the workers report of a step. ``output``: the engine's KVConnectorOutput."""
        for request_id in output.finished_recving or ():
            self._loaded(request_id)
        report = output.kv_connector_worker_meta
        if isinstance(report, WorkerReport):
            self._processed_step = max(self._processed_step, report.step)
            for request_id, n in report.saves_done.items():
                if (tracked := self._tracked.get(request_id)) is not None:
                    tracked.saves_open -= n
            for request_id, n_tokens in report.saved_until.items():
                if (tracked := self._tracked.get(request_id)) is not None:
                    end = n_tokens // self._block_tokens
                    self._events.stored(tracked.request, tracked.told_blocks, end)
                    tracked.told_blocks = max(tracked.told_blocks, end)
            if not self._options.load_async:
                self._sync_loads_are_done(report.step)
        for request_id in output.failed_recving or ():
            if (tracked := self._tracked.get(request_id)) is not None:
                tracked.saved_blocks = 0
        if output.invalid_block_ids:
            # Nobody knows which requests that concerns; what is stored already costs them no more than a question.
            for tracked in self._tracked.values():
                tracked.saved_blocks = 0

    def _loaded(self, request_id: str) -> None:
        lease = self._orphans.pop(request_id, None)
        if (tracked := self._tracked.get(request_id)) is not None:
            lease, tracked.loading = tracked.loading, None
        if lease is not None:
            lease.release()

    def _sync_loads_are_done(self, step: int) -> None:
        for request_id, tracked in self._tracked.items():
            if tracked.loading is not None and tracked.loading_step <= step:
                self._loaded(request_id)

    def finished(self, request_id: str) -> bool:
        """The request has ended; whether its blocks must stay until a worker says that it no longer reads them."""
        tracked = self._tracked.pop(request_id, None)
        if tracked is None:
            return False
        tracked.asked.drop()
        if tracked.loading is not None:
            if self._options.load_async:
                self._orphans[request_id] = tracked.loading
                return False  # the engine itself waits for the load, and the workers end it after the saves
            tracked.loading.release()
        return tracked.saves_open > 0 and self.hold(request_id)

    def hold(self, request_id: str) -> bool:
        """Have the workers say when no save reads the blocks of a finished request: at once, if none does."""
        self._ended.add(request_id)
        return True

    def close(self) -> None:
        """Let go of everything."""
        for tracked in self._tracked.values():
            tracked.asked.drop()
        self._client.close()

    def _track(self, request: Any) -> _Tracked:
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.request is not request:
            prompt = RequestPrompt(request, self._block_tokens, self._loras)
            tracked = self._tracked[request.request_id] = _Tracked(request, prompt)
        return tracked


def _first_whole(table: tuple[list[int], ...], end: int) -> int:
    """The first block from which on every group still has its block: windows have let go of those before."""
    first = 0
    for group in table:
        gone = [i for i, block_id in enumerate(group[:end]) if block_id == 0]
        first = max(first, gone[-1] + 1 if gone else 0)
    return first
