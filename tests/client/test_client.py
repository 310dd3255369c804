"""The client against a real daemon: what was put is found, leased, copied, and nothing else is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvstore.client import Client, NamespaceHandle
from kvstore.errors import BadInputError, EndedError
from kvstore.types import KVGroup, KVSpec, Namespace
from tests.client.scene import BLOCK_BYTES, BLOCK_TOKENS, blocks_of, tokens_of


def test_what_was_put_is_found_and_comes_back(ns: NamespaceHandle) -> None:
    tokens, blocks = tokens_of(10, extra=3), blocks_of(10)
    assert ns.match(tokens).n_blocks == 0
    result = ns.put(tokens, blocks)
    assert (result.n_stored, result.n_present, result.n_skipped) == (10, 0, 0)
    found = ns.match(tokens)
    assert (found.n_blocks, found.n_tokens, found.partial_tokens) == (10, 160, 0)
    out = np.zeros_like(blocks)
    got = ns.get_into(tokens, out)
    assert (got.n_blocks, got.n_tokens) == (10, 160)
    np.testing.assert_array_equal(out, blocks)


def test_a_second_put_copies_nothing_and_keeps_the_first_bytes(ns: NamespaceHandle) -> None:
    tokens, blocks = tokens_of(4), blocks_of(4)
    ns.put(tokens, blocks)
    again = ns.put(tokens, blocks_of(4, seed=9))
    assert (again.n_present, again.n_stored) == (4, 0)
    with ns.lease(tokens) as lease:
        np.testing.assert_array_equal(lease[0], blocks[0])


def test_a_prefix_is_extended_from_the_middle(ns: NamespaceHandle) -> None:
    tokens, blocks = tokens_of(6), blocks_of(6)
    ns.put(tokens[: 2 * BLOCK_TOKENS], blocks[:2])
    assert ns.put(tokens, blocks[2:], first_block=2).n_stored == 4
    assert ns.match(tokens).n_blocks == 6
    gap = ns.put(tokens_of(6, seed=5), blocks[2:], first_block=2)
    assert gap.n_stored == 0
    assert gap.n_skipped == 4
    assert "not stored" in gap.reason


@pytest.mark.needs("shared_memory", reason="what it shows is the store's own memory")
def test_a_lease_reads_in_place_and_read_only(ns: NamespaceHandle, client: Client) -> None:
    tokens, blocks = tokens_of(8), blocks_of(8)
    ns.put(tokens, blocks)
    with ns.lease(tokens) as lease:
        assert len(lease) == lease.n_blocks == 8
        for i in range(8):
            view = lease.view(i)
            np.testing.assert_array_equal(view, blocks[i])
            assert view.ctypes.data == lease.addresses[i]
            with pytest.raises(ValueError, match="read-only"):
                view[0] = 1
            with pytest.raises(ValueError, match="WRITEABLE"):
                view.flags.writeable = True
        del view
        assert client.stats()["leases"] == 1
    assert client.stats()["leases"] == 0
    with pytest.raises(EndedError, match=r"^this lease has ended: it was released \(id \d+\)$"):
        lease.view(0)


def test_a_reservation_that_has_ended_says_so_in_words(ns: NamespaceHandle) -> None:
    slots = ns.reserve(tokens_of(1), n_blocks=1)
    slots.abort()
    with pytest.raises(EndedError, match=r"^this write reservation has ended: "):
        slots.view(0)


def test_first_block_and_max_blocks_choose_a_part(ns: NamespaceHandle) -> None:
    tokens, blocks = tokens_of(8), blocks_of(8)
    ns.put(tokens, blocks)
    with ns.lease(tokens, first_block=2, max_blocks=5) as lease:
        assert lease.n_blocks == 5
        assert len(lease) == 3
        np.testing.assert_array_equal(lease[0], blocks[2])
        np.testing.assert_array_equal(lease[-1], blocks[4])
        with pytest.raises(IndexError):
            lease[3]
    out = np.zeros((3, BLOCK_BYTES), np.uint8)
    assert ns.get_into(tokens, out, first_block=4).n_blocks == 3
    np.testing.assert_array_equal(out, blocks[4:7])
    assert not ns.lease(tokens, max_blocks=0)
    assert not ns.lease(tokens, first_block=8)


def test_a_partial_block_is_leased_with_its_tokens(ns: NamespaceHandle) -> None:
    tokens, blocks = tokens_of(3), blocks_of(3)
    ns.put(tokens, blocks)
    prompt = tokens.copy()
    prompt[2 * BLOCK_TOKENS + 5] += 1
    with ns.lease(prompt) as lease:
        assert (lease.n_blocks, lease.partial_tokens, lease.n_tokens, len(lease)) == (2, 5, 37, 3)
        np.testing.assert_array_equal(lease[2], blocks[2])
        out = np.zeros((3, BLOCK_BYTES), np.uint8)
        assert lease.copy_into(out) == 2


def test_a_short_last_block_is_stored_as_a_leaf(ns: NamespaceHandle) -> None:
    tokens, blocks = tokens_of(2, extra=7), blocks_of(3)
    assert ns.put(tokens, blocks).n_stored == 3
    found = ns.match(tokens)
    assert (found.n_blocks, found.partial_tokens) == (2, 7)
    longer = np.concatenate([tokens, tokens_of(1, seed=3)])
    assert ns.match(longer).n_tokens == 2 * BLOCK_TOKENS + 7


def test_reservations_are_invisible_until_committed(ns: NamespaceHandle, client: Client, wait_until: Any) -> None:
    tokens, blocks = tokens_of(4), blocks_of(4)
    with ns.reserve(tokens, n_blocks=4) as reservation:
        assert len(reservation) == 4
        for i in range(4):
            reservation[i][:] = blocks[i]
        assert ns.match(tokens).n_blocks == 0
        assert reservation.commit(3) == (3, 0)
    assert ns.match(tokens).n_blocks == 3
    with ns.reserve(tokens, n_blocks=4) as reservation:
        assert reservation.n_present == 3
        assert len(reservation) == 1
    assert ns.match(tokens).n_blocks == 3
    wait_until(lambda: client.stats()["dram_reserved_bytes"] == 0, "the reservation is aborted")


@pytest.mark.needs("shared_memory", reason="a tensor over the store's own memory")
def test_torch_tensors_share_the_memory(client: Client) -> None:
    torch = pytest.importorskip("torch")
    group = KVGroup(layers=1, kv_heads=2, head_dim=8, dtype="bfloat16")
    ns = client.open(Namespace("t", KVSpec(BLOCK_TOKENS, (group,))))
    values = torch.arange(2 * 16 * 2 * 8, dtype=torch.float32).to(torch.bfloat16).reshape(1, 2, 16, 2, 8)
    ns.put(tokens_of(1), values.view(torch.uint16).numpy())
    with ns.lease(tokens_of(1)) as lease:
        tensor = lease.tensor(0, "bfloat16", (2, 16, 2, 8))
        assert torch.equal(tensor, values[0])
        assert tensor.data_ptr() == int(lease.addresses[0])
        assert torch.equal(lease.tensor(0, torch.bfloat16, (2, 16, 2, 8)), tensor)
        with pytest.raises(BadInputError, match="shape"):
            lease.tensor(0, "bfloat16", (7,))
        with pytest.raises(BadInputError, match="float64"):
            lease.tensor(0, torch.float64)
        with pytest.raises(BadInputError, match="float64"):
            lease.tensor(0, "float64")
        del tensor
