"""Sizes: what is promised fits, at any capacity."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import BadInputError, ConfigError
from kvstore.tiers.nvme.layout import ENTRY_BYTES, FRAME_BYTES_MIN, PAGE_BYTES, Geometry, capacity_for

MIB = 1 << 20
CAPACITIES = st.one_of(st.integers(8 * MIB, 1 << 31), st.integers(8 * MIB, 1 << 44))
FRAMES = st.one_of(st.integers(2, 300), st.integers(2, 6000)).map(lambda pages: pages * PAGE_BYTES)


@settings(deadline=None)
@given(CAPACITIES)
def test_the_parts_fit_the_capacity(capacity_bytes: int) -> None:
    geometry = Geometry.of(capacity_bytes)
    segments_bytes = geometry.n_segments * geometry.segment_bytes
    others_bytes = geometry.catalog_bytes + 2 * geometry.namespaces_bytes + (64 << 10)
    assert segments_bytes + others_bytes <= capacity_bytes
    assert segments_bytes > 0.8 * capacity_bytes or capacity_bytes < 16 * MIB
    assert geometry.live_capacity_bytes < segments_bytes
    assert 6 <= geometry.n_segments <= 600
    assert geometry.segment_bytes % PAGE_BYTES == 0
    assert (
        geometry.index_pages - 1
    ) * PAGE_BYTES // ENTRY_BYTES >= geometry.frame_pages * PAGE_BYTES // FRAME_BYTES_MIN


@settings(deadline=None)
@given(CAPACITIES, FRAMES)
def test_as_many_frames_fit_as_are_charged_for(capacity_bytes: int, frame_bytes: int) -> None:
    geometry = Geometry.of(capacity_bytes)
    pages = frame_bytes // PAGE_BYTES
    if pages > geometry.frame_pages:
        with pytest.raises(BadInputError, match="doesn't fit"):
            geometry.check_frame(frame_bytes)
        return
    n_segments = geometry.n_segments - geometry.reserve_segments(geometry.n_segments)
    n_placed = n_segments * (geometry.frame_pages // pages)
    n_frames = geometry.n_frames(frame_bytes)
    assert n_frames <= n_placed
    assert n_frames * 256 <= max(geometry.catalog_bytes, 256)
    assert n_frames >= min(0.99 * n_placed, 0.99 * geometry.catalog_bytes // 256) - 1
    charges = geometry.charged_bytes(np.array([pages, 2, geometry.frame_pages], np.int64))
    assert (charges >= np.array([pages, 2, geometry.frame_pages]) * PAGE_BYTES).all()


@settings(deadline=None)
@given(st.integers(0, 1 << 36), FRAMES)
def test_capacity_for_gives_room_for_what_is_asked(live_bytes: int, frame_bytes: int) -> None:
    capacity_bytes = capacity_for(live_bytes, frame_bytes)
    geometry = Geometry.of(capacity_bytes)
    assert geometry.live_capacity_bytes >= live_bytes
    assert geometry.n_frames(frame_bytes) * frame_bytes >= live_bytes
    if live_bytes > 100 * MIB and 5 * PAGE_BYTES <= frame_bytes < live_bytes // 400:
        assert capacity_bytes < 1.45 * live_bytes


def test_a_hundred_megabytes_are_used_well() -> None:
    geometry = Geometry.of(100_000_000)
    for frame_bytes in (36 << 10, 68 << 10, 260 << 10):
        assert geometry.n_frames(frame_bytes) * frame_bytes > 70_000_000


@pytest.mark.parametrize("bad", [4096, 100_000, 15 * 4096])
def test_segments_of_odd_sizes_are_refused(bad: int) -> None:
    with pytest.raises(ConfigError, match="segment_bytes"):
        Geometry.of(1 << 30, bad)


def test_too_many_files_are_refused() -> None:
    with pytest.raises(ConfigError, match="larger segments"):
        Geometry.of(1 << 40, MIB)


@pytest.mark.parametrize(("live_bytes", "frame_bytes"), [(-1, 8192), (1, 4096), (1, 9000)])
def test_capacity_for_refuses_nonsense(live_bytes: int, frame_bytes: int) -> None:
    with pytest.raises(BadInputError):
        capacity_for(live_bytes, frame_bytes)
