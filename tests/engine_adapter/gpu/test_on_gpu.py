"""What only a GPU shows: the daemon's regions registered by CUDA, torch's streams and views. Skipped without one."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from kvstore.client import Client
from kvstore.engine_adapter.engine_layout import EngineKV
from kvstore.engine_adapter.gpu.mover import DeviceMover
from kvstore.engine_adapter.gpu.zero_copy import ZeroCopyReader
from kvstore.engine_adapter.page_table import PageTable
from kvstore.engine_adapter.paged import PagedStore, RowRequest
from kvstore.errors import DeviceError
from tests.engine_adapter.gpu.scene import far, gpu
from tests.engine_adapter.gpu.test_leases import BLOCK_BYTES, N, content, opened, prompt
from tests.engine_adapter.paged_engines import DENSE, DIM, HEADS, LAYERS, PAGES, handle_for

pytestmark = pytest.mark.cuda


@pytest.fixture
def mover(client: Client) -> Iterator[DeviceMover]:
    try:
        device = gpu()
    except DeviceError as error:
        pytest.skip(str(error))
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    made = DeviceMover(device, client)
    yield made
    made.close()


def test_pages_of_torch_are_saved_and_loaded_beside_its_stream(client: Client, mover: DeviceMover) -> None:
    tensors = [torch.randn(2, PAGES, 4, HEADS, DIM, device="cuda") for _ in range(LAYERS)]
    store = PagedStore(handle_for(client, DENSE), EngineKV.of(tensors, "2PTHD"), mover=mover)
    row, stream = np.arange(21), torch.cuda.current_stream()
    table = PageTable.of([0, 6], [3, 1, 7, 2, 9, 4], PAGES)
    request = RowRequest(row)
    writer = store.writer(request, store.find([request])[0])
    job = store.save([writer], [row], table, deadline_s=far())
    for layer, tensor in enumerate(tensors):
        tensor.mul_(2)
        job.layer_ready(layer, stream.cuda_stream)
    assert job.wait(far()), job.reason
    writer.finish()
    saved = [tensor.clone() for tensor in tensors]
    there = PageTable.of([0, 5], [10, 11, 12, 13, 14], PAGES)
    load = store.load(store.find([request]), there, deadline_s=far(), stream=stream.cuda_stream)
    came = []
    for layer, tensor in enumerate(tensors):
        assert load.let_wait(layer, stream.cuda_stream, far())
        came.append(tensor[:, 10:15].clone())
    assert load.wait(far()), load.reason
    for mine, theirs in zip(came, saved, strict=True):
        assert torch.equal(mine, theirs[:, [3, 1, 7, 2, 9]])
    store.close()


def test_torch_reads_leased_blocks_in_place(client: Client, mover: DeviceMover) -> None:
    cache = opened(client)
    assert cache.put(prompt(1), content(1)).n_stored == N
    reader = ZeroCopyReader(mover.device, mover.pinned)
    with cache.lease(prompt(1)) as lease, reader.open(lease) as pointers:
        for i in range(N):
            tensor = pointers.tensor(i, "bfloat16", (2, BLOCK_BYTES // 4))
            assert torch.equal(tensor.cpu().view(torch.uint8).reshape(-1), torch.from_numpy(content(1)[i]))
            del tensor
    reader.close()
