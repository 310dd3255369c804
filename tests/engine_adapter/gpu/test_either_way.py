"""Stored KV for attention kernels, in place or brought, as measured rates say: from one client's put to the answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvstore.client import Client, Lease
from kvstore.engine_adapter.attention import KVPages, PageLayout, block_pages, decode_attention, merge
from kvstore.engine_adapter.block_layout import BlockLayout
from kvstore.engine_adapter.gpu.choice import Choice
from kvstore.engine_adapter.gpu.either_way import BlockReader, Brought, Room
from kvstore.engine_adapter.gpu.mover import DeviceMover
from kvstore.engine_adapter.gpu.zero_copy import Pointers
from kvstore.engine_adapter.page_table import PageTable
from kvstore.errors import BadInputError, DeviceError, EndedError
from kvstore.native.mapping import bytes_at
from kvstore.plan.bandwidth import BandwidthTable, make_curve
from kvstore.plan.calibration import Calibration
from kvstore.plan.regime import Action, Case, Facts
from kvstore.plan.ways import Direction, Way
from kvstore.types import KVGroup, KVSpec, Namespace
from tests.engine_adapter.attention.scenes import attend
from tests.engine_adapter.gpu.scene import Scene, far, scene
from tests.engine_adapter.oracle import as_blocks
from tests.engine_adapter.places import SMALL

LAYERS, HEADS, DIM, Q_HEADS = 2, 2, 64, 6
SPEC = KVSpec(16, (KVGroup(layers=LAYERS, kv_heads=HEADS, head_dim=DIM, dtype="bfloat16"),), 8)
N_BLOCKS = 3
TOKENS = np.arange(N_BLOCKS * SPEC.block_tokens, dtype=np.uint32)
NAMESPACE = Namespace("m", SPEC)
RATES = {Way.COPY: 10.0, Way.BATCH: 20.0, Way.KERNEL: 18.0, Way.ZERO_COPY: 22.0}
ROOM_BYTES = N_BLOCKS * SPEC.block_bytes


def measured(rates: dict[Way, float]) -> Choice:
    curves = {
        (to, way): make_curve((4096, 1 << 20), (rate, rate), 1e-5) for way, rate in rates.items() for to in Direction
    }
    return Choice(Calibration(BandwidthTable(curves)))


class Reading:
    """What one client stored, leased by another one, whose mappings a device has registered."""

    def __init__(self, on_device: Scene, client: Client, choice: Choice, facts: Facts | None) -> None:
        rng = np.random.default_rng(3)
        self.rng, self.on_device, self.client = rng, on_device, client
        shape = (2, len(TOKENS), HEADS, DIM)
        self.kv = [torch.from_numpy(rng.standard_normal(shape)).bfloat16() for _ in range(LAYERS)]
        self.mover = DeviceMover(on_device.device, client, choice=choice, sizes=SMALL, facts=facts)
        self.reader = BlockReader(self.mover)
        self.stream = on_device.device.stream()

    @property
    def blocks(self) -> Any:
        return as_blocks(SPEC, [layer.view(torch.uint8).numpy() for layer in self.kv])

    def lease(self) -> Lease:
        """Its memory is registered by now, if it can be."""
        lease = self.client.open(NAMESPACE).lease(TOKENS)
        assert len(lease) == N_BLOCKS
        if self.on_device.device.facts.can_register_read_only:
            self.mover.pinned.use_all(lease.addresses, np.full(N_BLOCKS, SPEC.block_bytes, np.uint64), far()).end()
        return lease

    def room(self) -> Room:
        return Room(self.on_device.upload(np.zeros(ROOM_BYTES, np.uint8)), ROOM_BYTES)

    def check_attention(self, addresses: Any) -> None:
        """Attention over stored pages and the engine's own newer ones, against that over the stored values."""
        n_tokens, n_newer = len(TOKENS) - 3, 11
        places = BlockLayout.of(SPEC)
        for layer in range(LAYERS):
            q = torch.from_numpy(self.rng.standard_normal((1, Q_HEADS, DIM))).bfloat16()
            own = torch.from_numpy(self.rng.standard_normal((2, 4, 8, HEADS, DIM))).bfloat16()
            newer = KVPages.of_tensors(own[0], own[1], PageTable.of([0, 2], [3, 1], n_pages=4), [n_newer])
            stored = KVPages.of(PageLayout.of_block(SPEC, layer), [block_pages(places, layer, addresses)], [n_tokens])
            parts = [decode_attention(q, pages) for pages in (stored, newer)]
            found = merge([part.output for part in parts], [part.lse for part in parts])
            mine = own[:, [3, 1]].reshape(2, 16, HEADS, DIM)
            keys, values = torch.cat((self.kv[layer][:, :n_tokens], mine[:, :n_newer]), 1).double().numpy()
            output, lse = attend(q[0].double().numpy(), keys, values, np.ones(n_tokens + n_newer, bool))
            np.testing.assert_allclose(found.output[0].numpy(), output, rtol=1e-3, atol=1e-5)
            np.testing.assert_allclose(found.lse[0].numpy(), lse, rtol=1e-4)

    def close(self) -> None:
        self.reader.close()
        self.mover.close()


@contextmanager
def reading(
    client: Client, choice: Choice | None = None, facts: Facts | None = None, **device: Any
) -> Iterator[Reading]:
    """``client`` stores."""
    with (
        # Unguarded, so that what stands for a GPU's kernels here, torch, reads where these would.
        scene(guarded=False, **device) as on_device,
        Client(client._session._link.address, timeout_s=5.0) as other,
    ):
        made = Reading(on_device, other, choice or measured(RATES), facts)
        assert not client.open(NAMESPACE).put(TOKENS, made.blocks).n_skipped
        yield made
        made.close()


def test_attention_over_blocks_of_another_client_where_they_lie(client: Client) -> None:
    with reading(client) as made, made.lease() as lease:
        blocks = made.reader.open(lease, reads_per_byte=1, room=made.room())
        assert isinstance(blocks, Pointers)
        assert (blocks.addresses != lease.addresses).all(), "a GPU sees them elsewhere"
        blocks.let_wait(made.stream)
        made.check_attention(blocks.addresses)
        assert blocks.unchanged()
        with pytest.raises(BadInputError, match="still read from by a device"):
            lease.release()
        blocks.close()
        assert made.mover.counters.snapshot()["load_in_place_bytes"] == ROOM_BYTES


def test_attention_over_blocks_that_were_brought_as_each_byte_is_read_often(client: Client) -> None:
    with reading(client) as made:
        room, lease = made.room(), made.lease()
        blocks = made.reader.open(lease, reads_per_byte=100, room=room, stream=made.stream)
        assert isinstance(blocks, Brought)
        assert blocks.addresses.tolist() == [room.address + i * SPEC.block_bytes for i in range(N_BLOCKS)]
        assert not bytes_at(room.address, ROOM_BYTES).any(), "copies go on behind the caller"
        blocks.let_wait(made.stream)
        made.on_device.device.sync_stream(made.stream)
        made.check_attention(blocks.addresses)
        assert blocks.unchanged()
        blocks.close()
        lease.release()
        assert blocks.unchanged(), "what was brought is the caller's"
        made.check_attention(blocks.addresses)
        assert "load_in_place_bytes" not in made.mover.counters.snapshot()


def test_what_is_brought_comes_after_what_the_stream_was_doing(client: Client) -> None:
    with reading(client) as made, made.lease() as lease:
        room = made.room()
        made.on_device.device.fill(room.address, 1, ROOM_BYTES, made.stream)
        blocks = made.reader.open(lease, reads_per_byte=100, room=room, stream=made.stream)
        assert blocks.unchanged()
        made.on_device.device.sync_stream(made.stream)
        assert (made.on_device.download(room.address, ROOM_BYTES) == made.blocks.reshape(-1)).all()


def test_what_has_no_room_is_read_in_place_however_often(client: Client) -> None:
    with reading(client) as made, made.lease() as lease:
        room = made.room()
        for too_small in (Room(room.address, ROOM_BYTES - 1), None):
            more = {"room": too_small} if too_small else {}
            with made.reader.open(lease, reads_per_byte=100, **more) as blocks:  # type: ignore[arg-type, attr-defined]
                assert isinstance(blocks, Pointers)


def test_what_can_not_be_read_in_place_is_brought_if_there_is_room(client: Client) -> None:
    """The facts say that it can be, and the device refuses."""
    with reading(client, facts=Facts(), can_register_read_only=False) as made, made.lease() as lease:
        room = made.room()
        blocks = made.reader.open(lease, reads_per_byte=1, room=room)
        assert isinstance(blocks, Brought)
        assert blocks.unchanged()
        assert (made.on_device.download(room.address, ROOM_BYTES) == made.blocks.reshape(-1)).all()
        with pytest.raises(DeviceError, match="can't register memory that is mapped read-only"):
            made.reader.open(lease, reads_per_byte=1)


def test_a_lease_released_too_early_does_not_count(client: Client) -> None:
    with reading(client) as made:
        lease = made.lease()
        blocks = made.reader.open(lease, reads_per_byte=100, room=made.room())
        lease.release()
        assert not blocks.unchanged()
        assert not blocks.unchanged(), "nor later"


def test_a_lease_of_nothing_is_refused(client: Client) -> None:
    with reading(client) as made, pytest.raises(EndedError, match="it holds nothing"):
        made.reader.open(made.client.open(NAMESPACE).lease(TOKENS + 1), reads_per_byte=1)


def test_a_mover_recommends_by_the_rates_that_its_copies_teach(client: Client) -> None:
    choice = measured(RATES)
    with reading(client, choice) as made:
        once = Case(64 << 20, 1 << 20, reads_per_byte=1)

        def said(case: Case) -> Action:
            option = made.mover.recommend(case).option
            assert option is not None
            return option.action

        assert said(once) is Action.ZERO_COPY
        assert said(replace(once, reads_per_byte=2)) is Action.STAGED
        for _ in range(20):  # copies that are twice as fast as measured
            choice.calibration.observe(Direction.LOAD, Way.BATCH, 1 << 20, 64, (64 << 20) / 40e9)
        assert said(once) is Action.STAGED
    unmeasured = dict(RATES)
    del unmeasured[Way.ZERO_COPY]
    with reading(client, measured(unmeasured)) as made:
        told = made.mover.recommend(once)
        assert "not zero-copy: not measured" in told.reasons
    with reading(client, can_register_read_only=False) as made:
        told = made.mover.recommend(once)
        assert told.option is not None
        assert told.option.action is Action.STAGED
        assert "not zero-copy: this device can't register sealed regions" in told.reasons
