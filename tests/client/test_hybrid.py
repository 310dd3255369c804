"""Hybrid namespaces through the client: groups of layers that are stored, found and read each by itself."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.client import Client, HybridHandle
from kvstore.clock import ManualClock
from kvstore.errors import BadInputError, EndedError
from kvstore.hybrid import MARK_BYTES, parts_of, place_of
from kvstore.types import GroupKind, KVGroup, KVSpec, Namespace, Root
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.framing import Method

BLOCK_TOKENS = 16
FULL, SLIDING, STATE, MLA = range(4)
SPEC = KVSpec(
    BLOCK_TOKENS,
    (
        KVGroup(layers=2, kv_heads=2, head_dim=16),
        KVGroup(layers=3, kv_heads=2, head_dim=16, kind=GroupKind.SLIDING, window_tokens=40),
        KVGroup(layers=2, dtype="uint8", layout="opaque", page_bytes=5000, kind=GroupKind.STATE),
        KVGroup(layers=1, head_dim=72, kind=GroupKind.MLA),
    ),
)
"""A window of 3 blocks, and one that starts inside a block."""

SIZES = [place_of(SPEC, group)[2] for group in range(len(SPEC.groups))]
Blocks = NDArray[np.uint8]


def namespace(spec: KVSpec = SPEC, **more: Any) -> Namespace:
    return Namespace("hybrid", spec, **more)


def tokens_of(n_blocks: int, seed: int = 0, extra: int = 0) -> NDArray[np.uint32]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 50_000, n_blocks * BLOCK_TOKENS + extra, dtype=np.uint32)


def blocks_of(group: int, n_blocks: int, seed: int = 0, size: int = 0) -> Blocks:
    rng = np.random.default_rng((seed, group))
    return rng.integers(0, 256, (n_blocks, size or SIZES[group]), dtype=np.uint8)


def put(hybrid: HybridHandle, n: int, states: tuple[int, ...] = (), seed: int = 0, **more: Any) -> dict[int, Blocks]:
    """Everything of a prompt of ``n`` blocks, but states only behind these blocks; returns what was stored."""
    content = {group: blocks_of(group, n, seed) for group in range(len(SIZES))}
    given: dict[int, Any] = {group: content[group] for group in (FULL, SLIDING, MLA)}
    done = hybrid.put(tokens_of(n, seed), given, **more)
    assert (done.n_skipped, done.reason) == (0, "")
    for at in states:
        assert hybrid.put(tokens_of(n, seed), {STATE: (at, content[STATE][at : at + 1])}).n_skipped == 0
    return content


def assert_bytes(lease: Any, content: dict[int, Blocks]) -> None:
    for group, blocks in content.items():
        view = lease.group(group)
        for i in range(len(view)):
            assert (view[i] == blocks[view.first_block + i]).all(), f"group {group}, block {view.first_block + i}"


@pytest.fixture
def hybrid(client: Client) -> HybridHandle:
    return client.open_hybrid(namespace())


def test_a_hit_ends_where_every_group_has_what_it_needs(hybrid: HybridHandle) -> None:
    content = put(hybrid, 9, states=(3, 6))
    found = hybrid.match(tokens_of(9))
    assert (found.n_blocks, found.n_tokens, found.partial_tokens, found.n_dram_blocks) == (7, 112, 0, 7)
    assert found.by_group == (9, 9, 7, 9)
    assert hybrid.match(tokens_of(9)[: 6 * BLOCK_TOKENS]).n_blocks == 4
    with hybrid.lease(tokens_of(9)) as lease:
        held = [(lease.group(group).first_block, len(lease.group(group))) for group in range(4)]
        assert (lease.n_blocks, held) == (7, [(0, 7), (4, 3), (6, 1), (0, 7)])
        assert_bytes(lease, content)
    with hybrid.lease(tokens_of(9), first_block=5, max_blocks=6) as lease:
        assert not lease
        assert lease.n_blocks == 4
    with hybrid.lease(tokens_of(9), first_block=2, max_blocks=6) as lease:
        held = [(lease.group(group).first_block, len(lease.group(group))) for group in range(4)]
        assert (lease.n_blocks, held) == (4, [(2, 2), (2, 2), (3, 1), (2, 2)])
        assert_bytes(lease, content)


def test_a_group_that_is_missing_makes_the_hit_shorter_and_never_wrong(hybrid: HybridHandle) -> None:
    tokens = tokens_of(6)
    full = {FULL: blocks_of(FULL, 6), MLA: blocks_of(MLA, 6)}
    assert hybrid.put(tokens, full).n_skipped == 0
    assert hybrid.match(tokens).by_group == (6, 0, 0, 6)
    assert hybrid.put(tokens, {STATE: blocks_of(STATE, 6)}).n_skipped == 0
    assert hybrid.match(tokens).n_blocks == 0
    assert hybrid.put(tokens, {SLIDING: (4, blocks_of(SLIDING, 2))}).n_skipped == 0
    assert hybrid.match(tokens).n_blocks == 0
    assert hybrid.put(tokens, {SLIDING: (3, blocks_of(SLIDING, 1))}).n_skipped == 0
    assert hybrid.match(tokens).n_blocks == 6
    assert hybrid.match(tokens[: 5 * BLOCK_TOKENS]).n_blocks == 0


def test_what_is_there_already_is_not_stored_again(hybrid: HybridHandle) -> None:
    put(hybrid, 5, states=(4,))
    tokens = tokens_of(5)
    done = hybrid.put(tokens, {FULL: blocks_of(FULL, 5), MLA: blocks_of(MLA, 5), STATE: (3, blocks_of(STATE, 2))})
    assert (done.by_group[FULL].n_present, done.by_group[FULL].n_stored) == (5, 0)
    assert done.by_group[FULL] is done.by_group[MLA]
    assert (done.by_group[STATE].n_stored, done.by_group[STATE].n_duplicate) == (1, 1)
    with hybrid.lease(tokens) as lease:
        assert (lease.group(STATE)[0] == blocks_of(STATE, 5)[4]).all()


def test_parts_of_blocks_that_are_not_stored_are_skipped_with_a_reason(hybrid: HybridHandle) -> None:
    tokens = tokens_of(4)
    done = hybrid.put(tokens, {SLIDING: blocks_of(SLIDING, 4)})
    assert done.n_skipped == 4
    assert "store part 0 first" in done.reason
    put(hybrid, 2)
    done = hybrid.put(tokens, {SLIDING: blocks_of(SLIDING, 4)})
    assert done.n_skipped == 2
    assert "stored up to 2" in done.reason
    done = hybrid.put(tokens, {STATE: (3, blocks_of(STATE, 1))})
    assert done.n_skipped == 1
    assert "blocks before are not stored" in done.reason


def test_all_parts_of_a_block_can_be_filled_at_once(hybrid: HybridHandle) -> None:
    tokens = tokens_of(4)
    reserved = [hybrid.reserve(tokens, part, n_blocks=4, ahead=part > 0) for part in range(len(hybrid.parts))]
    assert [(len(each), each.reason) for each in reserved] == [(4, "")] * len(hybrid.parts)
    for part, each in enumerate(reserved):
        each.fill(np.full((4, hybrid.parts[part].block_bytes), part + 1, np.uint8))
    assert [each.commit() for each in reserved] == [(4, 0)] * len(hybrid.parts)
    with hybrid.lease(tokens) as lease:
        assert lease.n_blocks == 4
        for part in range(len(hybrid.parts)):
            view = lease.part(part)
            assert all((view[i] == part + 1).all() for i in range(len(view)))


def test_parts_that_are_ahead_of_their_blocks_are_stored_with_them_only(hybrid: HybridHandle, client: Client) -> None:
    tokens = tokens_of(4)
    ahead = hybrid.reserve(tokens, 1, n_blocks=4, ahead=True)
    ahead.fill(np.zeros((4, hybrid.parts[1].block_bytes), np.uint8))
    assert ahead.commit() == (0, 0)
    assert "lost its parent block (blocks up to 0 are stored, parts up to 4 were to be)" in ahead.reason
    stats = client.stats()
    assert (stats["reservations"], stats.get("committed_blocks", 0)) == (0, 0)
    # Without the word such a part is skipped at once, and so it is behind blocks that nobody has.
    assert hybrid.reserve(tokens, 1, n_blocks=4).n_skipped == 4
    put(hybrid, 2)
    assert hybrid.reserve(tokens, 1, n_blocks=2, first_block=2, ahead=True).n_skipped == 0


def test_get_into_copies_what_a_hit_needs_of_the_groups_asked_for(hybrid: HybridHandle) -> None:
    content = put(hybrid, 8, states=(7,))
    out = {group: np.zeros((rows, SIZES[group]), np.uint8) for group, rows in ((FULL, 8), (SLIDING, 4), (STATE, 1))}
    got = hybrid.get_into(tokens_of(8), out)
    assert (got.n_blocks, got.n_tokens) == (8, 128)
    assert got.by_group == {FULL: (0, 8), SLIDING: (5, 3), STATE: (7, 1)}
    assert (out[FULL] == content[FULL]).all()
    assert (out[STATE] == content[STATE][7:]).all()
    assert (out[SLIDING][:3] == content[SLIDING][5:]).all()
    assert not out[SLIDING][3].any()
    latent = {MLA: np.zeros((6, SIZES[MLA]), np.uint8)}
    assert hybrid.get_into(tokens_of(8), latent, first_block=2).by_group == {MLA: (2, 6)}
    assert (latent[MLA] == content[MLA][2:]).all()
    assert hybrid.get_into(tokens_of(8), {MLA: latent[MLA][:5]}, first_block=2).n_blocks == 0
    with pytest.raises(BadInputError, match=r"out\[1\] has room for 2 blocks; a hit may need 3"):
        hybrid.get_into(tokens_of(8), {SLIDING: np.zeros((2, SIZES[SLIDING]), np.uint8)})


def test_a_hit_ends_inside_a_block_only_where_there_is_no_state(client: Client) -> None:
    spec = KVSpec(BLOCK_TOKENS, SPEC.groups[:2])
    hybrid = client.open_hybrid(namespace(spec))
    tokens = tokens_of(4, extra=10)
    content = {FULL: blocks_of(FULL, 5), SLIDING: blocks_of(SLIDING, 5)}
    assert hybrid.put(tokens, {FULL: content[FULL], SLIDING: (1, content[SLIDING][1:])}).n_skipped == 0
    other = np.concatenate([tokens[:70], tokens_of(1, seed=9)])
    for prompt, n_tokens in ((tokens, 74), (other, 70)):
        found = hybrid.match(prompt)
        assert (found.n_blocks, found.partial_tokens, found.n_tokens) == (4, n_tokens - 64, n_tokens)
        with hybrid.lease(prompt) as lease:
            assert (len(lease.group(FULL)), len(lease.group(SLIDING)), lease.group(SLIDING).first_block) == (5, 4, 1)
            assert_bytes(lease, content)
            room = np.zeros((5, SIZES[SLIDING]), np.uint8)
            assert lease.group(SLIDING).copy_into(room) == 3
            assert (room[:3] == content[SLIDING][1:4]).all()
    assert hybrid.put(tokens_of(2, seed=5, extra=5), {FULL: blocks_of(FULL, 3)}).n_skipped == 0
    assert hybrid.match(tokens_of(2, seed=5, extra=5)).n_tokens == 0
    with_state = client.open_hybrid(namespace())
    with pytest.raises(BadInputError, match="a state is there behind whole blocks only: store the 4 whole blocks"):
        with_state.put(tokens, {FULL: blocks_of(FULL, 5), MLA: blocks_of(MLA, 5)})


def test_a_spec_without_full_groups_has_marks_for_blocks(client: Client) -> None:
    spec = KVSpec(BLOCK_TOKENS, SPEC.groups[1:3])
    hybrid = client.open_hybrid(namespace(spec))
    assert [part.block_bytes for part in hybrid.parts] == [MARK_BYTES, SIZES[SLIDING], SIZES[STATE]]
    tokens = tokens_of(7)
    sliding, state = blocks_of(SLIDING, 3), blocks_of(STATE, 1)
    assert hybrid.put(tokens, {0: (4, sliding), 1: (6, state)}).n_skipped == 0
    assert hybrid.match(tokens).by_group == (7, 7)
    with hybrid.lease(tokens) as lease:
        assert lease.n_blocks == 7
        assert [lease.group(0)[i].tobytes() for i in range(3)] == [block.tobytes() for block in sliding]
        assert lease.group(1)[0].tobytes() == state[0].tobytes()


def test_equal_prompts_of_other_specs_roots_and_shapes_never_hit(client: Client) -> None:
    put(client.open_hybrid(namespace()), 4, states=(3,))
    tokens = tokens_of(4)
    group = SPEC.groups[SLIDING]
    longer = KVGroup(group.layers, group.kv_heads, group.head_dim, kind=group.kind, window_tokens=41)
    other = client.open_hybrid(namespace(KVSpec(BLOCK_TOKENS, (SPEC.groups[0], longer, *SPEC.groups[2:]))))
    assert other.match(tokens).by_group == (0, 0, 0, 0)
    assert client.open_hybrid(namespace()).match(tokens, root=Root("salt")).n_blocks == 0
    only_full = client.open(namespace(parts_of(SPEC)[0].spec))
    assert only_full.match(tokens).n_blocks == 0
    assert client.open_hybrid(namespace()).match(tokens).n_blocks == 4


def test_a_view_keeps_its_block_and_ends_with_the_lease(client: Client) -> None:
    hybrid = client.open_hybrid(namespace())
    content = put(hybrid, 4, states=(3,))
    lease = hybrid.lease(tokens_of(4))
    view = lease.group(STATE)
    kept = view[0]
    assert len(view.addresses) == 1
    assert not kept.flags.writeable
    with pytest.raises(IndexError):
        view[1]
    lease.release()
    with pytest.raises(EndedError):
        view.view(0)
    assert view.copy_into(np.zeros((1, SIZES[STATE]), np.uint8)) == 0
    assert (kept == content[STATE][3]).all()
    del kept, view
    gc.collect()
    assert client.stats()["leases"] == 0


def test_another_client_attaches_and_reads_every_group(connect: Callable[..., Client]) -> None:
    with connect() as one, connect() as two:
        hybrid = one.open_hybrid(namespace())
        content = put(hybrid, 4, states=(3,))
        lease = hybrid.lease(tokens_of(4), first_block=1)
        with lease, two.open_hybrid(namespace()).attach(lease.id) as attached:
            assert (attached.first_block, attached.n_blocks) == (1, 4)
            assert_bytes(attached, content)


def test_a_lease_of_another_namespace_is_not_read_as_of_this_one(
    hybrid: HybridHandle, connect: Callable[..., Client]
) -> None:
    """Not of another model of the same shape, nor of one with other sizes, nor of one that is not hybrid."""
    put(hybrid, 4, states=(3,))
    smaller = KVSpec(BLOCK_TOKENS, (KVGroup(layers=1, kv_heads=2, head_dim=16), *SPEC.groups[1:]))
    with hybrid.lease(tokens_of(4)) as lease, connect() as other:
        for wrong in (namespace(revision="2"), namespace(smaller)):
            with pytest.raises(BadInputError, match=f"lease {lease.id} is over another namespace"):
                other.open_hybrid(wrong).attach(lease.id)
        with pytest.raises(BadInputError, match="attach with open_hybrid"):
            other.attach(lease.id, namespace=namespace())
        plain = other.open(Namespace("plain", KVSpec.opaque(BLOCK_TOKENS, 4096)))
        plain.put(tokens_of(1), np.zeros((1, 4096), np.uint8))
        with plain.lease(tokens_of(1)) as theirs, pytest.raises(BadInputError, match="is over another namespace"):
            hybrid.attach(theirs.id)


def test_a_part_can_be_reserved_and_filled_in_place(hybrid: HybridHandle) -> None:
    tokens, full, latent = tokens_of(2), blocks_of(FULL, 2), blocks_of(MLA, 2)
    with hybrid.reserve(tokens, n_blocks=2) as reservation:
        for i in range(2):
            reservation[i][:] = np.concatenate([full[i], latent[i]])
        assert reservation.commit() == (2, 0)
    assert hybrid.match(tokens).by_group == (2, 0, 0, 2)
    with hybrid.reserve(tokens, part=2, n_blocks=1, first_block=1) as reservation:
        reservation[0][:] = blocks_of(STATE, 1)[0]
        reservation.commit()
    assert hybrid.match(tokens).by_group == (2, 0, 2, 2)
    with pytest.raises(BadInputError, match="has parts 0 to 2"):
        hybrid.reserve(tokens, part=3, n_blocks=1)


def test_pins_keep_what_the_hit_needs(serve: Callable[..., Any]) -> None:
    with serve(dram_bytes=2 << 20).connect() as client:
        hybrid = client.open_hybrid(namespace())
        put(hybrid, 8, states=(7,))
        assert hybrid.pin(tokens_of(8)).n_blocks == 8
        for seed in range(1, 40):
            put(hybrid, 8, states=(7,), seed=seed)
        assert client.stats()["evicted_blocks"] > 0
        assert hybrid.match(tokens_of(8)).n_blocks == 8
        # Of what isn't pinned, what no hit needs has gone first.
        assert hybrid.match(tokens_of(8)[: 3 * BLOCK_TOKENS]).n_blocks == 0


def test_everything_comes_back_from_nvme_after_a_restart(
    start_daemon: Callable[..., Any], nvme: dict[str, Any]
) -> None:
    daemon = start_daemon(**nvme)
    with Client(daemon.config.socket_path, timeout_s=5.0) as client:
        hybrid = client.open_hybrid(namespace())
        content = put(hybrid, 9, states=(8,))
        done = hybrid.persist(tokens_of(9), 5.0)
        assert (done.n_blocks, done.n_durable, done.n_pending, done.reason) == (9, 9, 0, "")
        assert hybrid.put(tokens_of(9), {STATE: (5, content[STATE][5:6])}, durable_within_s=5.0).n_durable == 6
    daemon.stop()
    daemon = start_daemon(**nvme)
    with Client(daemon.config.socket_path, timeout_s=5.0) as client:
        hybrid = client.open_hybrid(namespace())
        found = hybrid.match(tokens_of(9))
        assert (found.n_blocks, found.n_dram_blocks) == (9, 0)
        ahead = hybrid.prefetch(tokens_of(9), wait="wait")
        assert (ahead.n_blocks, ahead.n_ready, ahead.n_pending) == (9, 9, 0)
        with hybrid.lease(tokens_of(9)) as lease:
            assert (lease.n_blocks, lease.n_pending, len(lease.group(SLIDING))) == (9, 0, 3)
            assert_bytes(lease, content)


def test_without_waiting_a_lease_has_the_longest_hit_that_is_there(
    start_daemon: Callable[..., Any], nvme: dict[str, Any]
) -> None:
    daemon = start_daemon(**nvme)
    with Client(daemon.config.socket_path, timeout_s=5.0) as client:
        content = put(client.open_hybrid(namespace()), 6, states=(2, 5))
        assert client.open_hybrid(namespace()).persist(tokens_of(6), 5.0).n_durable == 6
        assert client.open_hybrid(namespace()).persist(tokens_of(6)[: 3 * BLOCK_TOKENS], 5.0).n_durable == 3
    daemon.stop()
    daemon = start_daemon(**nvme)
    with Client(daemon.config.socket_path, timeout_s=5.0) as client:
        hybrid = client.open_hybrid(namespace())
        with hybrid.lease(tokens_of(6), max_blocks=3) as lease:
            assert lease.n_blocks == 3
            assert lease.n_nvme == 3
            with hybrid.lease(tokens_of(6), wait="best_effort") as other:
                assert (other.n_blocks, other.n_pending) == (3, 3)
                assert_bytes(other, content)


def test_what_is_wrong_is_said(client: Client, hybrid: HybridHandle) -> None:
    tokens = tokens_of(2)
    with pytest.raises(BadInputError, match="use open_hybrid"):
        client.open(namespace())
    with pytest.raises(BadInputError, match=r"open it with Client\.open"):
        client.open_hybrid(namespace(KVSpec(BLOCK_TOKENS, (SPEC.groups[0], SPEC.groups[3]))))
    with pytest.raises(BadInputError, match="groups 0, 3 are needed of every block"):
        hybrid.put(tokens, {FULL: blocks_of(FULL, 2)})
    with pytest.raises(BadInputError, match="groups 0, 3 are needed of every block"):
        hybrid.put(tokens, {FULL: blocks_of(FULL, 2), MLA: (1, blocks_of(MLA, 1))})
    with pytest.raises(BadInputError, match="group 7 is not there"):
        hybrid.put(tokens, {7: blocks_of(FULL, 2)})
    with pytest.raises(BadInputError, match="does not hold whole blocks"):
        hybrid.put(tokens, {STATE: blocks_of(STATE, 2, size=999)})
    with pytest.raises(BadInputError, match="group 4 is not there"):
        hybrid.lease(tokens).group(4)
    with pytest.raises(BadInputError, match="hybrid namespaces can't be asked together"):
        client.open_family([namespace()])


def test_a_windows_blocks_without_their_place_are_refused(hybrid: HybridHandle) -> None:
    """They would count as the first blocks, and a later hit there would read the KV of other positions."""
    tokens = tokens_of(8, extra=5)
    full = {FULL: blocks_of(FULL, 8), MLA: blocks_of(MLA, 8)}
    with pytest.raises(BadInputError, match=r"blocks\[1\] has 3 blocks.* 0 to 2.*a pair, such as \{1: \(5, array\)\}"):
        hybrid.put(tokens, {**full, SLIDING: blocks_of(SLIDING, 3)})
    with pytest.raises(BadInputError, match=r"the full groups given with it end with block 9: .*\{2: \(9, array\)\}"):
        hybrid.put(tokens_of(12), {FULL: (2, full[FULL]), MLA: (2, full[MLA]), STATE: blocks_of(STATE, 1)})
    with pytest.raises(BadInputError, match=r"the prompt's whole blocks end with block 7: .*\{1: \(5, array\)\}"):
        hybrid.put(tokens, {SLIDING: blocks_of(SLIDING, 3)})
    assert hybrid.match(tokens).by_group == (0, 0, 0, 0)
    windows = {SLIDING: (5, blocks_of(SLIDING, 3)), STATE: (7, blocks_of(STATE, 1))}
    assert hybrid.put(tokens, {**full, **windows}).n_skipped == 0
    assert hybrid.match(tokens).by_group == (8, 8, 8, 8)
    longer = tokens_of(10, seed=1)
    first = {FULL: blocks_of(FULL, 3), MLA: blocks_of(MLA, 3), SLIDING: blocks_of(SLIDING, 3)}
    assert hybrid.put(longer, first).n_skipped == 0, "of the same blocks as the full groups"
    more = {FULL: blocks_of(FULL, 7), MLA: blocks_of(MLA, 7)}
    assert hybrid.put(longer, more, first_block=3).n_skipped == 0
    assert hybrid.put(longer, {SLIDING: blocks_of(SLIDING, 3)}, first_block=7).n_skipped == 0


def test_requests_that_no_client_makes_are_refused(client: Client, hybrid: HybridHandle) -> None:
    request = pb.ReserveRequest(n_blocks=1)
    request.prompt.rows = tokens_of(1).tobytes()
    request.prompt.namespace, request.prompt.part = hybrid.ensure_open(), 3
    with pytest.raises(BadInputError, match="part is 3; blocks of this namespace have parts below 3"):
        client._session.call(Method.RESERVE, request, pb.ReserveReply)
    question = pb.MatchRequest()
    question.prompt.rows, question.prompt.shards = tokens_of(1).tobytes(), hybrid.ensure_open()
    with pytest.raises(BadInputError, match="hybrid namespaces can't be asked together"):
        client._session.call(Method.MATCH, question, pb.MatchReply)


def test_lookups_of_a_hybrid_namespace_are_counted(client: Client, hybrid: HybridHandle) -> None:
    put(hybrid, 4, states=(3,))
    hybrid.lease(tokens_of(4)).release()
    stats = client.stats()
    assert (stats["lookups"], stats["lookup_blocks"], stats["hit_blocks"], stats["hit_tokens"]) == (1, 4, 4, 64)
    assert (stats["blocks"], stats["block_parts"]) == (4, 5)


def test_a_lease_past_its_deadline_gives_nothing(serve: Callable[..., Any]) -> None:
    clock = ManualClock(1000.0)
    with serve(clock).connect() as client:
        hybrid = client.open_hybrid(namespace())
        put(hybrid, 4, states=(3,))
        lease = hybrid.lease(tokens_of(4), ttl_s=0.2)
        lease._deadline_s = 0.0
        assert not lease.valid
        with pytest.raises(EndedError):
            _ = lease.group(SLIDING).addresses
        lease.release()


def test_a_cleared_namespace_loses_all_its_groups(client: Client, wait_until: Callable[..., None]) -> None:
    hybrid = client.open_hybrid(namespace())
    put(hybrid, 6, states=(5,))
    before = client.stats()
    cleared = client.clear(model="hybrid")
    assert len(cleared.namespaces) == 1
    assert hybrid.match(tokens_of(6)).by_group == (0, 0, 0, 0)
    content = put(hybrid, 6, states=(5,))
    with hybrid.lease(tokens_of(6)) as lease:
        assert_bytes(lease, content)

    def is_as_before() -> bool:
        now = client.stats()
        return all(now[name] == before[name] for name in ("blocks", "block_parts", "hidden_blocks", "dram_used_bytes"))

    wait_until(is_as_before, "what was cleared leaves memory")
