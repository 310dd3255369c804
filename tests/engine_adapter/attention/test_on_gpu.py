"""The Triton kernels on a GPU, where there is one: K and V in its own memory, and in host memory that it maps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvstore.device import Device, PinnedBuffer, open_device
from kvstore.engine_adapter.attention import decode_attention
from kvstore.errors import DeviceError
from tests.engine_adapter.attention.scenes import Bytes, Memory, Scene, make_scene

pytestmark = pytest.mark.cuda

LATENT: dict[str, Any] = {"kv_heads": 1, "key_dim": 576, "latent_value_dim": 512}


@pytest.fixture
def device() -> Iterator[Device]:
    pytest.importorskip("triton", reason="needs triton")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    try:
        opened = open_device("cuda")
    except DeviceError as error:
        pytest.skip(str(error))
    yield opened
    opened.close()


@pytest.fixture
def mapped(device: Device) -> Iterator[Memory]:
    """Host memory, at the address that it has for kernels."""
    buffers: list[PinnedBuffer] = []

    def memory(n_bytes: int) -> tuple[Bytes, int, Any]:
        buffers.append(PinnedBuffer(device, n_bytes))
        return buffers[-1].array, buffers[-1].device_address, buffers[-1]

    yield memory
    torch.cuda.synchronize()
    for buffer in buffers:
        buffer.close()


@pytest.mark.parametrize("splits", [1, 5, None])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("key_dim", [64, 80, 128, 256])
def test_every_head_dim_in_host_memory(mapped: Memory, key_dim: int, dtype: str, splits: int | None) -> None:
    _check(make_scene(1, [1000, 0, 37, 64], dtype=dtype, key_dim=key_dim, memory=mapped, device="cuda"), splits)


@pytest.mark.parametrize("group", [1, 2, 16, 40])
@pytest.mark.parametrize("alignment", [2, 16])
def test_query_heads_and_unaligned_pages(mapped: Memory, group: int, alignment: int) -> None:
    _check(make_scene(2, [300, 1], group=group, alignment=alignment, memory=mapped, device="cuda"), 3)


@pytest.mark.parametrize("group", [16, 128])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_latents_in_host_memory(mapped: Memory, dtype: str, group: int) -> None:
    _check(make_scene(3, [500, 63], dtype=dtype, group=group, memory=mapped, device="cuda", **LATENT), 4)


def test_windows_and_sinks(mapped: Memory) -> None:
    scene = make_scene(4, [200, 21], memory=mapped, device="cuda")
    for visible in scene.visible:
        visible[4 : max(len(visible) - 20, 4)] = False
    pages = scene.pages.windowed(torch.tensor([199, 20], device="cuda"), 20, sink_tokens=4)
    assert not scene.disagreement(decode_attention(scene.q, pages, n_splits=2))


def test_pages_in_the_gpus_memory() -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    pytest.importorskip("triton", reason="needs triton")
    on_host: list[Bytes] = []
    on_gpu: list[torch.Tensor] = []

    def memory(n_bytes: int) -> tuple[Bytes, int, Any]:
        on_gpu.append(torch.empty(n_bytes, dtype=torch.uint8, device="cuda"))
        on_host.append(torch.empty(n_bytes, dtype=torch.uint8).numpy())
        return on_host[0], on_gpu[0].data_ptr(), on_gpu[0]

    scene = make_scene(5, [700, 0, 33], memory=memory, device="cuda")
    on_gpu[0].copy_(torch.from_numpy(on_host[0]))
    _check(scene, None)


def _check(scene: Scene, splits: int | None) -> None:
    assert not scene.disagreement(decode_attention(scene.q, scene.pages, n_splits=splits))
