"""Blocks into a device's pages and back, by every route, for random layouts, tables and token ranges, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.engine_adapter.block_layout import BlockLayout
from kvstore.engine_adapter.gpu.choice import Route
from kvstore.engine_adapter.gpu.lane import LaneSizes
from kvstore.engine_adapter.moving import Copy
from kvstore.engine_adapter.runs import plan_runs
from kvstore.errors import DeviceError
from kvstore.types import KVSpec
from tests.engine_adapter.gpu.scene import Bytes, gpu, region, scene
from tests.engine_adapter.oracle import as_blocks, random_kv
from tests.engine_adapter.strategies import EnginePlane, specs

ORDERS = [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)]
TINY = LaneSizes(piece_bytes=256, pieces=2, table_runs=7)


@pytest.fixture(params=["simulated", "cuda"], scope="module")
def kind(request: pytest.FixtureRequest) -> str:
    """The devices; a GPU where there is one."""
    if request.param == "cuda":
        try:
            gpu()
        except DeviceError as error:
            pytest.skip(str(error))
    return str(request.param)


@pytest.mark.parametrize("route", list(Route))
@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(
    spec=specs(),
    seed=st.integers(0, 2**32),
    order=st.sampled_from(ORDERS),
    page_tokens=st.integers(1, 6),
    padding=st.integers(0, 3),
    registered=st.sampled_from(["all", "some", "none"]),
    data=st.data(),
)
def test_blocks_into_pages_and_back_equal_numpy(
    kind: str,
    route: Route,
    spec: KVSpec,
    seed: int,
    order: tuple[int, ...],
    page_tokens: int,
    padding: int,
    registered: str,
    data: st.DataObject,
) -> None:
    rng = np.random.default_rng(seed)
    n_tokens = data.draw(st.integers(1, 3 * spec.block_tokens))
    first = data.draw(st.integers(0, n_tokens - 1))
    n_moved = data.draw(st.integers(0, n_tokens - first))
    engine_first = data.draw(st.integers(0, 2 * page_tokens))
    kv = random_kv(rng, spec, n_tokens)
    blocks = as_blocks(spec, kv)
    layout = BlockLayout.of(spec)
    # Slots lie anywhere, in two regions.
    half = len(blocks) + 1
    places = rng.permutation(2 * half)[: len(blocks)]
    n_bytes = half * spec.block_bytes
    regions = [region(n_bytes), region(n_bytes)]
    for mapping in regions:
        mapping.array()[:] = rng.integers(0, 256, mapping.length_bytes, dtype=np.uint8)
    starts = np.array([regions[p // half].address + p % half * spec.block_bytes for p in places.tolist()], np.int64)
    n_pages = -(-(engine_first + n_moved) // page_tokens)
    table = (rng.permutation(n_pages + 2)[:n_pages] + 1).astype(np.int64)
    with scene(kind, seed=seed) as on_device:
        for mapping in regions[: {"all": 2, "some": 1, "none": 0}[registered]]:
            on_device.registered(mapping)
        reader, writer = on_device.reader(route, TINY), on_device.writer(route, TINY)

        def fill(values: Bytes) -> None:
            for start, block in zip(starts.tolist(), values, strict=True):
                mapping = next(each for each in regions if each.address <= start < each.address + each.length_bytes)
                at = start - mapping.address
                mapping.array()[at : at + len(block)] = block

        fill(blocks)
        loading = reader.begin()
        planes = []
        for layer, place in enumerate(layout.layers):
            for plane, offset in enumerate(place.planes):
                engine = EnginePlane(rng, order, n_pages + 2, page_tokens, place.heads, place.unit_bytes, padding)
                inside = engine.address - engine.memory.ctypes.data
                there = on_device.upload(engine.memory.reshape(-1))
                runs = plan_runs(
                    engine.pages(table, engine_first), layout.pages(layer, starts, first), n_moved,
                    place.heads, place.unit_bytes,
                )  # fmt: skip
                assert loading.copy([Copy(runs, there + inside, offset)])
                planes.append((layer, plane, offset, engine, there, inside))
        loading.settle()
        for layer, plane, _, engine, there, _ in planes:
            unit_bytes = engine.array.shape[3]
            expected = engine.memory.copy()
            view = expected[..., :unit_bytes].transpose(*np.argsort(order), 3)
            for i in range(n_moved):
                page, token = divmod(engine_first + i, page_tokens)
                view[table[page], token] = kv[layer][plane, first + i]
            assert (on_device.download(there, expected.size) == expected.reshape(-1)).all()
        fill(np.full_like(blocks, 0xAA))
        before = [mapping.array().copy() for mapping in regions]
        storing = writer.begin()
        for layer, _, offset, engine, there, inside in planes:
            place = layout.layers[layer]
            runs = plan_runs(
                layout.pages(layer, starts, first), engine.pages(table, engine_first), n_moved,
                place.heads, place.unit_bytes,
            )  # fmt: skip
            assert storing.copy([Copy(runs, offset, there + inside)])
        storing.settle()
        stored = [mapping.array().copy() for mapping in regions]
        untouched = [np.full_like(layer, 0xAA) for layer in kv]
        for mine, full in zip(untouched, kv, strict=True):
            mine[:, first : first + n_moved] = full[:, first : first + n_moved]
        fill(as_blocks(spec, untouched, filler=0xAA))
        for mapping, mine, old in zip(regions, stored, before, strict=True):
            assert (mine == mapping.array()).all(), f"{(mine != old).sum()} bytes were written"
