"""The event log: everything that comes and goes is told once, in order, to whoever watches."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore.hints import Hints
from kvstore.prefix_index.block_table import DRAM, NVME
from kvstore.prefix_index.copies import Loss
from kvstore.store.events import EVENTS_MAX, IDLE_S, Batch, Events, Kind
from kvstore.store.requests import Prompt
from tests.store.rig import Rig
from tests.store.two_tier import Settings, Sizes, TwoTierRig
from tests.tiers.segment_files import frames_in

KIB = 1 << 10


@pytest.fixture
def two(tmp_path: Path) -> Iterator[TwoTierRig]:
    rig = TwoTierRig(tmp_path / "nvme", Settings(Sizes(dram_bytes=64 * KIB)))
    yield rig
    rig.close()


def start(rig: Rig) -> int:
    """Watch from now on; the number to go on from."""
    rig.store.events.watched(rig.clock.now_s())
    return rig.store.events.last_seq


def told(rig: Rig, seq: int) -> list[tuple[Kind, int, Loss | None, bytes, bool | None]]:
    """Kind, tier, reason, key and whether it was the last copy, of each event behind a number."""
    out = []
    rig.store.events.watched(rig.clock.now_s())
    got = rig.store.events.after(seq, EVENTS_MAX)
    assert (got.n_lost, got.gap) == (0, False)
    numbers = []
    for i, batch in enumerate(got.batches):
        for at in range(got.skip if i == 0 else 0, len(batch)):
            last = None if batch.last is None else bool(batch.last[at])
            out.append((batch.kind, batch.tier, batch.reason, batch.keys[at].tobytes(), last))
            numbers.append(batch.first_seq + at)
    assert numbers == list(range(seq + 1, got.next_seq + 1))
    return out


def keys(prompt: Prompt) -> list[bytes]:
    return [key.tobytes() for key in prompt.path.keys(prompt.root_key)]


def test_nothing_is_recorded_while_nobody_watches(rig: Rig) -> None:
    rig.put(1, rig.rows(3, 1))
    assert rig.store.index.witness is None
    assert rig.store.events.last_seq == 0


def test_stored_blocks_are_told_with_their_parents_and_tokens(rig: Rig) -> None:
    seq = start(rig)
    prompt = rig.prompt([1, 2, 3, 4, 5])
    rig.put(1, prompt)
    (batch,) = rig.store.events.after(seq, 10).batches
    assert (batch.kind, batch.tier, batch.reason) == (Kind.STORED, DRAM, None)
    assert [key.tobytes() for key in batch.keys] == keys(prompt)
    assert batch.parents is not None
    assert [key.tobytes() for key in batch.parents] == [prompt.root_key, *keys(prompt)[:-1]]
    assert batch.row_bytes is not None
    assert batch.row_bytes.tolist() == [0, 0, 4]
    assert batch.namespaces.tolist() == [prompt.namespace.ordinal] * 3


def test_each_change_of_a_block_is_told_once(two: TwoTierRig) -> None:
    seq = start(two)
    prompt = two.rows(2, 1)
    first, second = keys(prompt)
    two.put(1, prompt)
    two.settle()
    assert told(two, seq) == [
        (Kind.STORED, DRAM, None, first, None),
        (Kind.STORED, DRAM, None, second, None),
        (Kind.MOVED, NVME, None, first, None),
        (Kind.MOVED, NVME, None, second, None),
    ]
    seq = two.store.events.last_seq
    two.dram.free(two.store.index.evict(2).slots)
    assert told(two, seq) == [
        (Kind.REMOVED, DRAM, Loss.EVICTED, second, False),
        (Kind.REMOVED, DRAM, Loss.EVICTED, first, False),
    ]
    seq = two.store.events.last_seq
    two.store.release(1, two.read(1, prompt).id)
    assert told(two, seq) == [(Kind.MOVED, DRAM, None, first, None), (Kind.MOVED, DRAM, None, second, None)]
    seq = two.store.events.last_seq
    two.store.clear({prompt.namespace.ordinal})
    while two.store.clearing.step():
        pass
    cleared = told(two, seq)
    assert sorted(cleared[:2]) == sorted((Kind.REMOVED, NVME, Loss.CLEARED, key, False) for key in (first, second))
    assert cleared[2:] == [(Kind.REMOVED, DRAM, Loss.CLEARED, key, True) for key in (second, first)]


def test_a_frame_with_bad_bytes_is_told_as_corrupt(two: TwoTierRig) -> None:
    prompt = two.rows(1, 1)
    two.put(1, prompt)
    two.settle()
    two.dram.free(two.store.index.evict(1).slots)
    seq = start(two)
    (frame,) = frames_in(two.directory)
    frame.flip(frame.payload_offset)
    two.read(1, prompt)
    assert [(kind, tier, reason, last) for kind, tier, reason, _, last in told(two, seq)] == [
        (Kind.REMOVED, NVME, Loss.CORRUPT, True)
    ]


def test_what_is_told_adds_up_to_what_is_there(two: TwoTierRig) -> None:
    """Whatever happens: events from the beginning on give exactly the copies that the index has."""
    dice = random.Random(7)
    seq = start(two)
    copies: set[tuple[int, bytes]] = set()
    prompts = [two.rows(dice.randint(1, 5), tag) for tag in range(8)]
    for step in range(300):
        prompt = dice.choice(prompts)
        kind = dice.randrange(10)
        if kind < 4:
            two.put(1, prompt)
        elif kind < 6:
            two.store.release(1, two.read(1, prompt).id)
        elif kind < 9:
            two.settle(dice)
        elif step % 50 == 0:
            two.store.clear({prompt.namespace.ordinal})
        two.store.tick()
        for kind_, tier, _, key, last in told(two, seq):
            if kind_ is Kind.REMOVED:
                copies.remove((tier, key))
                assert last == ((1 - tier, key) not in copies)
            else:
                assert (kind_ is Kind.STORED) == ((1 - tier, key) not in copies)
                assert (tier, key) not in copies
                copies.add((tier, key))
        seq = two.store.events.last_seq
        table = two.store.index.table
        alive = table.alive()
        assert copies == {
            (tier, key.tobytes()) for tier in (DRAM, NVME) for key in table.key[alive[table.resident(alive, tier)]]
        }


def fill(rig: Rig, n: int) -> None:
    """So many events, of no blocks at all."""
    log = rig.store.events
    while n > 0:
        part = min(n, 1000)
        log._add(Kind.REMOVED, DRAM, Loss.EVICTED, np.zeros(part, np.intp), last=np.zeros(part, np.bool_))
        n -= part


def test_who_falls_behind_is_told_how_many_are_lost(rig: Rig) -> None:
    seq = start(rig)
    fill(rig, EVENTS_MAX + 5000)
    got = rig.store.events.after(seq, EVENTS_MAX)
    n_kept = sum(map(len, got.batches))
    assert n_kept <= EVENTS_MAX
    assert got.n_lost == EVENTS_MAX + 5000 - n_kept
    assert not got.gap
    assert got.next_seq == rig.store.events.last_seq


def test_any_part_can_be_asked_for(rig: Rig) -> None:
    seq = start(rig)
    fill(rig, 2500)

    def numbers(got: Events) -> list[int]:
        spans: list[Batch] = got.batches
        return [n for batch in spans for n in range(batch.first_seq, batch.first_seq + len(batch))][got.skip :]

    for start_at in (0, 1, 999, 1000, 1001, 2499):
        got = rig.store.events.after(seq + start_at, 1)
        assert numbers(got)[0] == seq + start_at + 1
        assert numbers(got)[-1] == got.next_seq
        assert len(got.batches) == 1
    assert rig.store.events.after(seq + 2500, 10).batches == []


@pytest.mark.parametrize("known", [0, 10**9])
def test_a_number_that_was_never_given_is_a_gap(rig: Rig, known: int) -> None:
    start(rig)
    rig.put(1, rig.rows(1, 1))
    got = rig.store.events.after(known, 10)
    assert got.gap
    assert got.next_seq == rig.store.events.last_seq


def recording(rig: Rig) -> bool:
    return rig.store.events.recording


def test_recording_ends_a_while_after_the_last_question_and_that_leaves_a_gap(rig: Rig) -> None:
    seq = start(rig)
    rig.put(1, rig.rows(1, 1))
    rig.clock.advance(IDLE_S / 2)
    rig.store.tick()
    assert recording(rig)
    forget = rig.store.events.on_event(lambda: None)
    rig.clock.advance(IDLE_S)
    rig.store.tick()
    assert recording(rig)  # somebody waits
    forget()
    rig.store.tick()
    assert not recording(rig)
    rig.put(1, rig.rows(1, 2))
    start(rig)
    assert rig.store.events.after(seq, 10).gap
    assert not rig.store.events.after(rig.store.events.last_seq, 10).gap


def test_who_waits_is_called_once(rig: Rig) -> None:
    start(rig)
    calls: list[str] = []

    def note(name: str) -> Callable[[], None]:
        return lambda: calls.append(name)

    rig.store.events.on_event(note("a"))
    rig.store.events.on_event(note("b"))()
    rig.put(1, rig.rows(1, 1))
    rig.put(1, rig.rows(1, 2))
    assert calls == ["a"]


def test_blocks_whose_time_was_over_are_told_as_expired(rig: Rig) -> None:
    short, long = rig.rows(2, 1), rig.rows(2, 2)
    rig.put(1, short)
    rig.put(1, long)
    seq = start(rig)
    index = rig.store.index
    ids, now_s = index.match(short.root_key, short.path).ids, rig.clock.now_s()
    index.hints.stored(ids, np.ones(2, np.bool_), short.root_key, Hints(ttl_s=5.0), now_s, now_s)
    rig.clock.advance(6.0)
    rig.store.tick()
    rig.dram.free(index.evict(4).slots)
    assert {(reason, key) for _, _, reason, key, _ in told(rig, seq)} == {
        *((Loss.EXPIRED, key) for key in keys(short)),
        *((Loss.EVICTED, key) for key in keys(long)),
    }
