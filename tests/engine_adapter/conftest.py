"""Paged stores that a test closes at its end, and the places where engines have their pages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvstore.client import Client
from kvstore.engine_adapter.paged import PagedStore
from tests.engine_adapter.places import HERE, PLACES, DevicePlace, Place, only


@pytest.fixture(params=list(PLACES))
def place(request: pytest.FixtureRequest, client: Client) -> Iterator[Place]:
    """Host memory, and device memory by every route."""
    chosen = PLACES[request.param]
    if chosen is None:
        yield HERE
        return
    route, registered = chosen
    made = DevicePlace(client, only(route) if route is not None else None, registered=registered)
    yield made
    made.close()


@pytest.fixture
def closing(request: pytest.FixtureRequest) -> Iterator[list[PagedStore]]:
    if "place" in request.fixturenames:
        request.getfixturevalue("place")  # which is closed after the stores
    stores: list[PagedStore] = []
    yield stores
    for store in stores:
        store.close()
