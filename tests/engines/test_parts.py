"""The connector's parts by themselves: options, prompts, copies, jobs, the breaker, what is counted and told."""

from __future__ import annotations

import dataclasses
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvstore.clock import ManualClock
from kvstore.device.pinned import PinnedBuffer
from kvstore.device.simulated import SimulatedDevice
from kvstore.engine_adapter.block_layout import BlockLayout
from kvstore.engine_adapter.counters import SharedCounters
from kvstore.engine_adapter.gpu.choice import Choice, Route, unmeasured
from kvstore.engine_adapter.gpu.mover import DeviceMover
from kvstore.engine_adapter.moving import Moves
from kvstore.engine_adapter.vllm.breaker import SLOW_MAX, Breaker
from kvstore.engine_adapter.vllm.guard import Guard
from kvstore.engine_adapter.vllm.jobs import LoadJob, SaveJob
from kvstore.engine_adapter.vllm.loras import LoraIdentities
from kvstore.engine_adapter.vllm.options import Options
from kvstore.engine_adapter.vllm.orders import LoadOrder, SaveOrder, WorkerReport
from kvstore.engine_adapter.vllm.paged import DevicePaged, MoverPaged, Paged, paged
from kvstore.engine_adapter.vllm.prompts import RequestPrompt
from kvstore.engine_adapter.vllm.shapes import LayerPages, layer_pages
from kvstore.engine_adapter.vllm.stats import COUNTERS, KVStoreStats, Reporter
from kvstore.errors import BadInputError, ConfigError
from kvstore.native.mapping import bytes_at
from kvstore.types import ExtraKey, KVGroup, KVSpec, Namespace, Root
from tests.engines.conftest import DaemonProcess, tokens

FOLDER = Path(__file__).parents[2] / "engine_adapter" / "vllm"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"sokcet": "x"}, "'sokcet'.*socket"),
        ({"socket": "grpc://host:1"}, "Unix socket"),
        ({"load_async": 1}, "load_async is 1"),
        ({"min_hit_blocks": 0}, "min_hit_blocks is 0"),
        ({"save_queue_max": True}, "save_queue_max is True"),
        ({"lookup_timeout_s": 0}, "lookup_timeout_s is 0"),
        ({"lease_s": "30"}, "lease_s is '30'"),
        ({"on_load_failure": "retry"}, "'recompute' or 'fail'"),
        ({"weights_id": 7}, "weights_id is 7"),
    ],
)
def test_options_that_can_not_be_used(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Options.of(given)


def test_options_have_defaults() -> None:
    assert Options.of({}) == Options()
    assert Options.of({"pending_wait_s": 0, "lease_s": 5}).pending_wait_s == 0


def test_every_option_and_counter_is_in_the_documentation() -> None:
    text = (FOLDER.parents[1] / "docs" / "engines" / "vllm.md").read_text()
    missing = [field.name for field in dataclasses.fields(Options) if f"`{field.name}`" not in text]
    missing += [name for name in COUNTERS if f"`{name}`" not in text]
    assert not missing


def test_every_counter_that_is_raised_is_a_metric() -> None:
    raised = set()
    for file in (*FOLDER.glob("*.py"), FOLDER.with_name("jobs.py")):
        raised |= set(re.findall(r"""\badd\(\s*"([a-z_]+)"[,)]""", file.read_text()))
    assert raised == set(COUNTERS)


# Prompts -----------------------------------------------------------------------------------------


def request_of(n: int = 100, **facts: Any) -> SimpleNamespace:
    plain: dict[str, Any] = {"all_token_ids": tokens(n, 1), "mm_features": []}
    missing = dict.fromkeys(("cache_salt", "lora_request", "prompt_embeds"))
    return SimpleNamespace(**{**missing, **plain, **facts})


def image(start: int, n: int, name: str) -> SimpleNamespace:
    return SimpleNamespace(modality="image", identifier=name, mm_position=SimpleNamespace(offset=start, length=n))


def prompt_of(request: Any) -> RequestPrompt:
    return RequestPrompt(request, 32, LoraIdentities(Guard(SharedCounters())))


def test_a_prompt_grows_with_what_is_generated() -> None:
    request = request_of(70)
    prompt = prompt_of(request)
    assert prompt.tokens(64).tolist() == request.all_token_ids[:64]
    request.all_token_ids = [*request.all_token_ids, 7, 8]
    assert prompt.tokens(72).tolist() == request.all_token_ids
    assert (prompt.root, prompt.extras, prompt.cacheable) == (Root(), (), True)
    assert not prompt_of(request_of(resumable=True)).cacheable


def test_images_are_told_apart_by_content_place_and_kind() -> None:
    def extras(*features: Any) -> tuple[ExtraKey, ...]:
        return prompt_of(request_of(mm_features=[*features])).extras

    one = extras(image(5, 20, "a"))
    assert one == extras(image(5, 20, "a"))
    assert [(key.start_token, key.n_tokens) for key in one] == [(5, 20)]
    sound = image(5, 20, "a")
    sound.modality = "audio"
    others = [extras(image(6, 20, "a")), extras(image(5, 21, "a")), extras(image(5, 20, "b")), extras(sound)]
    assert len({one, *others}) == 5
    # Of a video and its sound over the same tokens.
    both = extras(image(5, 20, "a"), image(10, 30, "b"))
    assert [(key.start_token, key.n_tokens) for key in both] == [(5, 35)]
    assert both != extras(image(5, 20, "b"), image(10, 30, "a"))


def test_an_image_decides_whether_a_prompt_hits(daemon: DaemonProcess) -> None:
    """Through the daemon: blocks before the image are common, those from it on are not."""
    namespace = Namespace("m", KVSpec.opaque(32, 64))
    with daemon.client() as client:
        handle = client.open(namespace)
        stored = prompt_of(request_of(128, mm_features=[image(40, 50, "a")]))
        handle.put(stored.tokens(128), np.zeros((4, 64), np.uint8), root=stored.root, extras=stored.extras)
        for name, n_blocks in (("a", 4), ("b", 1)):
            asked = prompt_of(request_of(128, mm_features=[image(40, 50, name)]))
            match = handle.match(asked.tokens(128), root=asked.root, extras=asked.extras)
            assert match.n_blocks == n_blocks
        # A shorter prompt is stored and asked with the extras of the whole one.
        assert handle.match(stored.tokens(64), root=stored.root, extras=stored.extras).n_blocks == 2


def test_embeddings_are_told_apart_block_by_block() -> None:
    embeds = torch.arange(70 * 4, dtype=torch.float32).reshape(70, 4)
    one = prompt_of(request_of(70, prompt_embeds=embeds)).extras
    changed = embeds.clone()
    changed[40, 1] += 1
    two = prompt_of(request_of(70, prompt_embeds=changed)).extras
    assert [a == b for a, b in zip(one, two, strict=True)] == [True, False, True]
    half = prompt_of(request_of(70, prompt_embeds=embeds.to(torch.bfloat16))).extras
    assert not set(one) & set(half)


# Copies and jobs ---------------------------------------------------------------------------------

N_BLOCKS, HEADS, BLOCK_TOKENS, DIM = 12, 2, 8, 16
PAGE_BYTES = HEADS * BLOCK_TOKENS * DIM * 4


def layers_of(order: str, device: str = "cpu") -> list[LayerPages]:
    """Three layers in one of the engine's layouts, as it registers them: logical [B, H, N, C]."""
    sizes = {"L": 3, "B": N_BLOCKS, "H": HEADS, "N": BLOCK_TOKENS, "C": DIM}
    memory = torch.randn([sizes[axis] for axis in order], device=device)
    whole = memory.permute([order.index(axis) for axis in "LBHNC"])
    caches = {f"layer{i}": whole[i] for i in range(3)}
    groups: Any = (SimpleNamespace(layers=tuple(caches)),)
    return layer_pages(groups, SimpleNamespace(num_blocks=N_BLOCKS), caches)


def layout_of(layers: list[LayerPages]) -> BlockLayout:
    groups = tuple(KVGroup(1, dtype="float32", layout="opaque", page_bytes=layer.page_bytes) for layer in layers)
    return BlockLayout.of(KVSpec(BLOCK_TOKENS, groups))


def going() -> bool:
    return True


def on_host(layers: list[LayerPages]) -> Paged:
    return paged(layers, layout_of(layers), 1, None)


class OnSimulatedDevice(MoverPaged):
    """Copies to and from pages on the simulated device, which go up before each job and come back after it."""

    def __init__(self, layers: list[LayerPages], layout: BlockLayout) -> None:
        self._device = SimulatedDevice(total_bytes=64 << 20)
        self._tensors = [layer.tensor for layer in layers]
        whole = [tensor.untyped_storage() for tensor in self._tensors]
        self._memory = {
            storage.data_ptr(): (self._device.malloc(storage.nbytes()), storage.nbytes()) for storage in whole
        }
        moved = []
        for layer, storage in zip(layers, whole, strict=True):
            there, _ = self._memory[storage.data_ptr()]
            moved.append(dataclasses.replace(layer, address=layer.address - storage.data_ptr() + there))
        self._engine = self._device.stream()
        self._buffers: list[PinnedBuffer] = []
        super().__init__(moved, layout, DeviceMover(self._device, choice=only_direct()), lambda: self._engine)

    def move(self, *, up: bool) -> None:
        """All the memory, on the engine's stream; nobody waits for it on the way up."""
        for here, (there, n_bytes) in self._memory.items():
            buffer = PinnedBuffer(self._device, n_bytes)
            self._buffers.append(buffer)  # which what is queued goes on using
            torch_bytes = bytes_at(here, n_bytes)
            if up:
                buffer.array[:] = torch_bytes
                self._device.copy(there, buffer.address, n_bytes, self._engine)
                continue
            self._device.copy(buffer.address, there, n_bytes, self._engine)
            self._device.sync_stream(self._engine)
            torch_bytes[:] = buffer.array


def only_direct() -> Choice:
    return dataclasses.replace(unmeasured(), only=(Route.DIRECT,))


def on_torch_device(layers: list[LayerPages]) -> Paged:
    return DevicePaged(layers, layout_of(layers), 1)


def on_simulated_device(layers: list[LayerPages]) -> Paged:
    return OnSimulatedDevice(layers, layout_of(layers))


@pytest.mark.parametrize("kind", [on_host, on_torch_device, on_simulated_device])
@pytest.mark.parametrize("order", ["LBHNC", "LBNHC", "BLHNC", "BLNHC"])
def test_pages_go_to_the_store_and_back_into_other_blocks(order: str, kind: Any) -> None:
    layers = layers_of(order)
    layout = layout_of(layers)
    paged = kind(layers)
    before = [layer.tensor.clone() for layer in layers]
    store = np.zeros((4, layout.parts[0].block_bytes), np.uint8)
    slots = np.int64(store.ctypes.data) + np.arange(4) * layout.parts[0].block_bytes
    taken, given = np.array([7, 2, 3, 11]), np.array([5, 6, 0, 9])
    if isinstance(paged, OnSimulatedDevice):
        paged.move(up=True)
    moves = paged.saving()
    for number in range(3):
        assert paged.save(number, slots, taken, moves, going)
    moves.settle()
    # A block of the store has layer after layer, and a page in it the order of the engine's memory.
    axes = [axis for axis in order if axis not in "LB"]
    for i, block in enumerate(taken):
        for number, tensor in enumerate(before):
            page = tensor[block].permute(["HNC".index(axis) for axis in axes]).contiguous()
            assert (store[i].reshape(3, -1)[number] == page.numpy().view(np.uint8).reshape(-1)).all()
    moves = paged.loading()
    for number in range(3):
        assert paged.load(number, slots, given, moves, going)
    moves.settle()
    if isinstance(paged, OnSimulatedDevice):
        paged.move(up=False)
    for layer, tensor in zip(layers, before, strict=True):
        expected = tensor.clone()
        expected[torch.from_numpy(given)] = tensor[torch.from_numpy(taken)]
        assert torch.equal(layer.tensor, expected)


@pytest.mark.parametrize("order", ["LHBNC", "BHLNC"])
def test_layouts_that_cut_a_block_into_pieces_are_refused(order: str) -> None:
    with pytest.raises(BadInputError, match=r"not one run of bytes.*LBHNC"):
        layers_of(order)


class Gate:
    """Copies that stop at a gate: for tests of what happens meanwhile."""

    def __init__(self, paged: Paged, layer: int) -> None:
        self._paged, self._layer = paged, layer
        self.reached, self.opened = threading.Event(), threading.Event()
        self.copied: list[int] = []

    def _copy(self, copy: Callable[..., bool], number: int, *rest: Any) -> bool:
        if number == self._layer:
            self.reached.set()
            assert self.opened.wait(60)
        self.copied.append(number)
        return copy(number, *rest)

    def load(self, layer: int, *rest: Any) -> bool:
        return self._copy(self._paged.load, layer, *rest)

    def save(self, layer: int, *rest: Any) -> bool:
        return self._copy(self._paged.save, layer, *rest)

    def loading(self) -> Moves:
        return self._paged.loading()

    def saving(self) -> Moves:
        return self._paged.saving()

    def stream(self) -> int | None:
        return self._paged.stream()


def namespace_of(layers: list[LayerPages]) -> Namespace:
    groups = tuple(KVGroup(1, dtype="float32", layout="opaque", page_bytes=PAGE_BYTES) for _ in layers)
    return Namespace("m", KVSpec(BLOCK_TOKENS, groups))


def test_a_save_that_is_cancelled_touches_nothing_more_and_is_not_visible(daemon: DaemonProcess) -> None:
    layers = layers_of("LBHNC")
    namespace = namespace_of(layers)
    gate = Gate(on_host(layers), layer=1)
    ids = np.array(tokens(16, 1), np.uint32)
    with daemon.client() as client:
        handle = client.open(namespace)
        job = SaveJob(SaveOrder("r", ids, Root(), (), 0, ((3, 4),)), "", layers)
        saving = threading.Thread(target=job.run, args=(lambda _: handle, gate, 30.0))
        saving.start()
        assert gate.reached.wait(60)
        assert not job.wait_copied(time.monotonic())
        cancelling = threading.Thread(target=job.cancel, args=("preempted",))
        cancelling.start()
        # A piece that is being copied is finished first.
        assert cancelling.is_alive()
        gate.opened.set()
        cancelling.join(60)
        saving.join(60)
        assert (job.over, job.reason, job.n_stored) == (True, "preempted", 0)
        assert gate.copied == [0, 1]
        assert handle.match(ids).n_blocks == 0
        again = SaveJob(SaveOrder("r", ids, Root(), (), 0, ((3, 4),)), "", layers)
        again.run(lambda _: handle, gate, 30.0)
        assert (again.reason, again.n_stored, handle.match(ids).n_blocks) == ("", 2, 2)


def test_a_load_is_good_only_if_its_lease_still_holds_at_the_end(daemon: DaemonProcess) -> None:
    layers = layers_of("LBHNC")
    namespace = namespace_of(layers)
    paged = on_host(layers)
    ids = np.array(tokens(16, 1), np.uint32)
    with daemon.client() as client, daemon.client() as scheduler:
        family = scheduler.open_family([namespace])
        client.open(namespace).put(ids, np.zeros((2, namespace.spec.block_bytes), np.uint8))
        for ends in (False, True):
            gate = Gate(paged, layer=2)
            with family.lease(ids) as lease:
                job = LoadJob(LoadOrder("r", lease.id, 0, ((5, 6),)), "", layers, 60.0)
                attached = client.attach(lease.id, shard=namespace)
                thread = threading.Thread(target=job.run, args=(lambda _, it=attached: it, gate))
                thread.start()
                assert job.wait_layer(1, time.monotonic() + 60)
                assert gate.reached.wait(60)
                assert not job.wait_layer(2, time.monotonic())
                if ends:
                    attached.end("its time was up")
                gate.opened.set()
                thread.join(60)
                assert job.wait(time.monotonic() + 60) is not ends
                assert bool(job.reason) is ends


# Small ones --------------------------------------------------------------------------------------


def test_a_slow_daemon_is_left_alone_ever_longer() -> None:
    clock = ManualClock()
    breaker = Breaker(clock, 0.1)
    for _ in range(SLOW_MAX - 1):
        breaker.took(0.2)
    breaker.took(0.01)
    assert not breaker.is_open()
    rests: list[float] = []
    for _ in range(SLOW_MAX):
        breaker.took(0.2)
    for _ in range(8):
        assert breaker.is_open()
        begin_s = clock.now_s()
        while breaker.is_open():
            clock.advance(0.5)
        rests.append(clock.now_s() - begin_s)
        breaker.took(0.2)
    assert rests == [1, 2, 4, 8, 16, 30, 30, 30]
    clock.advance(60)
    breaker.took(0.01)
    breaker.took(0.2)
    assert not breaker.is_open()


def test_errors_are_counted_and_kept() -> None:
    counters = SharedCounters()
    guard = Guard(counters)
    for _ in range(3):
        with guard("it"):
            raise ValueError("no")
    assert counters.snapshot() == {"errors": 3}
    with pytest.raises(KeyboardInterrupt), guard("it"):
        raise KeyboardInterrupt


def test_stats_are_what_was_counted_since_the_last_time() -> None:
    reporter = Reporter()
    first = reporter.since({"loads": 2.0, "load_seconds": 0.5, "load_bytes": 2e9})
    assert first is not None
    assert reporter.since({"loads": 2.0, "load_seconds": 0.5, "load_bytes": 2e9}) is None
    second = reporter.since({"loads": 3.0, "load_seconds": 0.5, "load_bytes": 2e9})
    assert second is not None
    assert second.data == {"loads": 1.0}
    both = first.aggregate(second)
    assert both.reduce() == {"loads": 3.0, "load_seconds": 0.5, "load_bytes": 2e9, "load_gb_per_s": 4.0}
    both.reset()
    assert KVStoreStats().is_empty()
    assert both.is_empty()


def test_reports_of_workers_add_up() -> None:
    one = WorkerReport(3, {"a": 1, "b": 2}, {"a": 64, "b": 32})
    two = WorkerReport(3, {"a": 1}, {"a": 96})
    assert one.aggregate(two) == WorkerReport(3, {"a": 2, "b": 2}, {"a": 64})
