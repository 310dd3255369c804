"""The connector that vLLM loads: both sides behind one class, and nothing that goes wrong gets past it."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvstore.clock import SystemClock
from kvstore.engine_adapter.attention_cost import doubling_tokens_of_config
from kvstore.engine_adapter.counters import SharedCounters
from kvstore.engine_adapter.vllm.events import Events
from kvstore.engine_adapter.vllm.guard import Guard, logger
from kvstore.engine_adapter.vllm.options import Options
from kvstore.engine_adapter.vllm.orders import Handshake, StepOrders
from kvstore.engine_adapter.vllm.revision import model_name, revision_of
from kvstore.engine_adapter.vllm.scheduler import SchedulerSide
from kvstore.engine_adapter.vllm.shapes import (
    GroupShape,
    check_prefixes,
    group_shapes,
    layer_pages,
    namespace_of,
    stored_as,
)
from kvstore.engine_adapter.vllm.stats import KVStorePromMetrics, KVStoreStats, Reporter
from kvstore.engine_adapter.vllm.worker import WorkerSide
from kvstore.types import Namespace, Shard


class KVStoreConnector(base.KVConnectorBase_V1, base.SupportsHMA):  # type: ignore[misc]
    """Finds, loads and saves the KV of prompts in the kvstore daemon of this machine.

    Use it with ``--kv-transfer-config``, see docs/engines/vllm.md. What can't work at all (an option that does not
    exist, weights without identity, layers that can't be stored) raises as the engine starts; after that nothing does.
    """

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: Any, role: base.KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        options = Options.of(transfer.kv_connector_extra_config)
        check_prefixes(vllm_config)
        self._groups: tuple[GroupShape, ...] = group_shapes(kv_cache_config, vllm_config.parallel_config)
        if len(self._groups) > 1 and not options.load_async:
            # The engine has no way to hear that a load inside of the batch failed for one of several groups.
            logger.warning("kvstore: load_async is on, as models with several groups of layers need it")
            options = replace(options, load_async=True)
        self._options = options
        self._counters = SharedCounters()
        self._guard = Guard(self._counters)
        self._reporter = Reporter()
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._namespace: Namespace | None = None
        if role is base.KVConnectorRole.SCHEDULER:
            self._make_scheduler(vllm_config)
            # Read by the scheduler after this: a cache that fails should cost time, not requests.
            if transfer.kv_load_failure_policy != options.on_load_failure:
                logger.info("kvstore: kv_load_failure_policy is now %r, see on_load_failure", options.on_load_failure)
                transfer.kv_load_failure_policy = options.on_load_failure

    def _make_scheduler(self, vllm_config: Any) -> None:
        options, cache = self._options, vllm_config.cache_config
        transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
        self._revision = revision_of(vllm_config, options.weights_id)
        events = vllm_config.kv_events_config
        self._events = Events(
            cache.block_size,
            getattr(self._kv_cache_config, "hash_block_size", None) or cache.block_size,
            enabled=events is not None and events.enable_kv_cache_events,
        )
        self._scheduler = SchedulerSide(
            options,
            self._revision,
            cache.block_size,
            parallel.world_size,
            recycles=any(group.recycles for group in self._groups),
            loads=transfer.is_kv_consumer,
            saves=transfer.is_kv_producer,
            guard=self._guard,
            counters=self._counters,
            events=self._events,
            clock=SystemClock(),
        )

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is lost is a miss later."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Loads layer by layer need the engine to call between layers."""
        return not extra_config.get("load_async", True)

    # Workers ------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Raises BadInputError for memory that can't be read as blocks: then the engine does not start."""
        tp, pp = get_tp_group(), get_pp_group()
        replicas = getattr(self._kv_cache_config, "kv_tp_replicas", 1)
        shard = Shard(tp.rank_in_group // replicas, tp.world_size // replicas, pp.rank_in_group, pp.world_size)
        pages = layer_pages(self._groups, self._kv_cache_config, kv_caches)
        spec, layers = stored_as(self._vllm_config.cache_config.block_size, self._groups, pages, shard)
        self._namespace = namespace_of(
            self._vllm_config,
            self._groups,
            layers,
            spec,
            model=self._options.model or model_name(self._vllm_config),
            tenant=self._options.tenant,
            shard=shard,
        )
        numbers = {name: number for number, layer in enumerate(layers) for name in layer.names}
        recycles = any(group.recycles for group in self._groups)
        self._worker = WorkerSide(
            self._options,
            self._namespace,
            layers,
            numbers,
            saves=tp.rank_in_group % replicas == 0,
            block_level_failures=len(self._kv_cache_config.kv_cache_groups) == 1,
            waits_for_saves=recycles,
            counters=self._counters,
            attention_doubling_tokens=doubling_tokens_of_config(self._vllm_config.model_config.hf_text_config),
        )

    def get_handshake_metadata(self) -> base.KVConnectorHandshakeMetadata | None:
        """What this worker reads and writes, for the scheduler's side."""
        return Handshake(self._namespace.to_dict()) if self._namespace is not None else None

    def handle_preemptions(self, kv_connector_metadata: base.KVConnectorMetadata) -> None:
        with self._guard("handle_preemptions"):
            if self._worker is not None and isinstance(kv_connector_metadata, StepOrders):
                self._worker.preempt(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: base.KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None and isinstance(connector_metadata, StepOrders):
            self._worker.orders = connector_metadata

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002 - the engine's signature
        with self._guard("start_load_kv"):
            if self._worker is not None:
                self._worker.start_loads()

    def wait_for_layer_load(self, layer_name: str) -> None:
        with self._guard("wait_for_layer_load"):
            if self._worker is not None:
                self._worker.wait_layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Blocks are saved when the step that completes them is done, behind the next one."""

    def wait_for_save(self) -> None:
        with self._guard("wait_for_save"):
            if self._worker is not None:
                self._worker.start_saves()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending, results.finished_recving

    def get_transfer_results(self, finished_req_ids: set[str]) -> base.KVConnectorTransferResults:  # noqa: ARG002
        with self._guard("get_transfer_results"):
            if self._worker is not None:
                sent, received, failed = self._worker.results()
                return base.KVConnectorTransferResults(sent, received, failed)
        return base.KVConnectorTransferResults()

    def get_block_ids_with_load_errors(self) -> set[int]:
        with self._guard("get_block_ids_with_load_errors"):
            if self._worker is not None:
                return self._worker.take_failed_blocks()
        return set()

    def build_connector_worker_meta(self) -> base.KVConnectorWorkerMetadata | None:
        with self._guard("build_connector_worker_meta"):
            if self._worker is not None:
                return self._worker.take_report()
        return None

    # Scheduler ----------------------------------------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Raises BadInputError if the workers do not make up one model."""
        handshakes = [each for _, each in sorted(metadata.items()) if isinstance(each, Handshake)]
        shards = [Namespace.from_dict(each.namespace) for each in handshakes]
        if self._scheduler is not None:
            self._scheduler.use(shards)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        with self._guard("get_num_new_matched_tokens"):
            if self._scheduler is not None:
                return self._scheduler.matched(request, num_computed_tokens)
        return 0, False

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[CacheHitSource, int]:
        with self._guard("get_external_cache_hit_sources"):
            n_disk = self._scheduler.disk_tokens(request) if self._scheduler is not None else 0
            parts = {CacheHitSource.HOST: num_external_tokens - n_disk, CacheHitSource.DISK: n_disk}
            return {source: n for source, n in parts.items() if n}
        return {CacheHitSource.HOST: num_external_tokens} if num_external_tokens else {}

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._scheduler is None:
            return
        with self._guard("update_state_after_alloc"):
            self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)
            return
        if num_external_tokens:
            self._scheduler.lose(request.request_id, blocks.get_block_ids())

    def build_connector_meta(self, scheduler_output: Any) -> base.KVConnectorMetadata:
        if self._scheduler is None:
            return base.KVConnectorMetadata()
        orders = self._scheduler.orders()
        with self._guard("build_connector_meta"):
            self._scheduler.add_saves(orders, scheduler_output)
        return orders

    def update_connector_output(self, connector_output: Any) -> None:
        with self._guard("update_connector_output"):
            if self._scheduler is not None:
                self._scheduler.heard(connector_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self,
        request: Any,
        block_ids: tuple[list[int], ...],  # noqa: ARG002 - the engine's signature
    ) -> tuple[bool, dict[str, Any] | None]:
        with self._guard("request_finished"):
            if self._scheduler is not None:
                return self._scheduler.finished(request.request_id), None
        return self._scheduler is not None and self._scheduler.hold(request.request_id), None

    def take_events(self) -> Iterable[Any]:
        with self._guard("take_events"):
            if self._scheduler is not None:
                return self._events.take()
        return ()

    def reset_cache(self) -> bool | None:
        """What is stored is not found by this engine any more, nor by others what it stores from now on: its weights
        may have been replaced. Evicted in time; other engines go on with it."""
        with self._guard("reset_cache"):
            if self._scheduler is not None:
                self._scheduler.reset(f"{self._revision} since {uuid.uuid4().hex}")
                self._events.cleared()
                return True
        return False

    # Both ---------------------------------------------------------------------------------------

    def counted(self) -> dict[str, float]:
        """What this side has counted since the engine's start, by the names of ``stats.COUNTERS``."""
        return self._counters.snapshot()

    def get_kv_connector_stats(self) -> KVStoreStats | None:
        with self._guard("get_kv_connector_stats"):
            return self._reporter.since(self.counted())
        return None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVStoreStats:
        return KVStoreStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVStorePromMetrics:
        return KVStorePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        with self._guard("shutdown"):
            if self._scheduler is not None:
                self._scheduler.close()
            if self._worker is not None:
                self._worker.close()
