"""A device without room for what copies pass through: they go on by a way that needs none."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from kvstore.engine_adapter.gpu import lane
from kvstore.engine_adapter.gpu.choice import Route
from kvstore.engine_adapter.moving import Copy
from tests.engine_adapter.gpu.scene import Bytes, region, runs_of, scene

TOTAL_BYTES, RUN_BYTES, N_RUNS = 1 << 20, 512, 64


@pytest.mark.parametrize("registered", [True, False])
@pytest.mark.parametrize("route", [Route.KERNEL, Route.STAGED])
def test_a_full_device_loads_and_stores_directly_until_there_is_room(
    route: Route, registered: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    n_bytes = N_RUNS * RUN_BYTES
    values: Bytes = np.random.default_rng(1).integers(0, 256, n_bytes, dtype=np.uint8)
    order = np.random.default_rng(2).permutation(N_RUNS)
    offsets, mixed = np.arange(N_RUNS) * RUN_BYTES, order * RUN_BYTES
    expected = values.reshape(N_RUNS, RUN_BYTES)[order].reshape(-1)
    now_s = [0.0]
    monkeypatch.setattr(lane, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    with scene(total_bytes=TOTAL_BYTES) as on_device:
        device = on_device.device
        mapping, back = region(n_bytes, values), region(n_bytes)
        if registered:
            on_device.registered(mapping)
            on_device.registered(back)
        reader, writer = on_device.reader(route), on_device.writer(route)
        there = on_device.upload(np.zeros(n_bytes, np.uint8))
        hog = device.malloc(TOTAL_BYTES - n_bytes - 256)

        def there_and_back() -> dict[str, float]:
            """What was counted meanwhile, besides what was bounced."""
            before = on_device.counters.snapshot()
            back.array()[:] = 0
            sizes = [RUN_BYTES] * N_RUNS
            moves = reader.begin()
            moves.copy([Copy(runs_of(offsets, mixed, sizes), there, mapping.address)])
            assert moves.finish() == ""
            moves = writer.begin()
            moves.copy([Copy(runs_of(offsets, offsets, sizes), back.address, there)])
            assert moves.finish() == ""
            assert (back.array()[:n_bytes] == expected).all()
            counted = on_device.counters.snapshot()
            grown = {name: count - before.get(name, 0) for name, count in counted.items()}
            return {
                name: count for name, count in grown.items() if count and "bounced" not in name and "pin" not in name
            }

        direct = {f"{way}_{kind}_bytes": n_bytes for way in ("load", "store") for kind in ("direct", "no_room")}
        assert there_and_back() == direct
        said = [record for record in caplog.records if record.__dict__.get("event") == "device_full"]
        assert len(said) == 2, "once a lane"
        device.free(hog)
        assert there_and_back() == direct, "the device is not asked again at once"
        now_s[0] += lane.NO_ROOM_S
        assert there_and_back() == {f"{way}_{route}_bytes": n_bytes for way in ("load", "store")}
