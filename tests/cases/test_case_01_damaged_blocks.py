"""Case 1: one byte of a block on disk is flipped, its file is cut, blocks are exchanged. A miss, a counter, the block
quarantined; never wrong bytes; and whoever stores the block again has it again."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest

from kvstore.store.requests import Prompt
from tests.cases.scenes import WRITER, again, frame_of, read, stored_below
from tests.store.two_tier import CATALOG, TwoTierRig

N, BAD = 6, 3
HEADER_BYTES, FRAME_BYTES = 4096, 8192


def flip(at: int) -> Callable[[TwoTierRig, Prompt], None]:
    return lambda rig, prompt: frame_of(rig, prompt, BAD).flip(at)


def overwrite(start: int, content: bytes) -> Callable[[TwoTierRig, Prompt], None]:
    def act(rig: TwoTierRig, prompt: Prompt) -> None:
        frame = frame_of(rig, prompt, BAD)
        with frame.path.open("r+b") as file:
            file.seek(frame.offset + start)
            file.write(content)

    return act


def take_place_of(rig: TwoTierRig, prompt: Prompt) -> None:
    """Another block's frame, whole and intact, lies where this one should."""
    other, frame = frame_of(rig, prompt, BAD + 1), frame_of(rig, prompt, BAD)
    with frame.path.open("r+b") as file:
        file.seek(other.offset)
        content = file.read(FRAME_BYTES)
        file.seek(frame.offset)
        file.write(content)


def cut(into: int) -> Callable[[TwoTierRig, Prompt], None]:
    def act(rig: TwoTierRig, prompt: Prompt) -> None:
        frame = frame_of(rig, prompt, BAD)
        with frame.path.open("r+b") as file:
            file.truncate(frame.offset + into)

    return act


DAMAGE = {
    "magic": flip(0),
    "version": flip(8),
    "codec": flip(10),
    "flags": flip(11),
    "header length": flip(12),
    "payload length": flip(40),
    "frame length": flip(57),
    "namespace": flip(64),
    "incarnation": flip(80),
    "key": flip(88),
    "parent": flip(104),
    "row": flip(300),
    "header checksum": flip(HEADER_BYTES - 1),
    "first byte": flip(HEADER_BYTES),
    "in the middle": flip(HEADER_BYTES + 2222),
    "last byte": flip(FRAME_BYTES - 1),
    "header zeroed": overwrite(0, bytes(HEADER_BYTES)),
    "payload zeroed": overwrite(HEADER_BYTES, bytes(512)),
    "payload of ones": overwrite(HEADER_BYTES + 1024, b"\xff" * 1024),
    "another's frame": take_place_of,
    "cut before it": cut(0),
    "cut in its header": cut(100),
    "cut behind its header": cut(HEADER_BYTES),
    "cut before its end": cut(FRAME_BYTES - 1),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_block_is_a_miss_and_no_more(
    damage: Callable[[TwoTierRig, Prompt], None], make_store: Callable[..., TwoTierRig]
) -> None:
    first = make_store()
    prompt = first.rows(N, tag=1)
    rig = stored_below(first, prompt)
    prompt = again(rig, prompt)
    damage(rig, prompt)
    served = read(rig, prompt)
    assert served == rig.expected(prompt, N)[: len(served)]
    assert len(served) == BAD
    assert rig.count("onboard_corrupt_blocks") + rig.count("onboard_unreadable_blocks") >= 1
    assert rig.stat("nvme_quarantined_frames") >= 1

    # It isn't tried again, and a restart doesn't bring it back.
    tried = rig.stat("nvme_read_frames") + rig.stat("nvme_failed_reads")
    assert len(read(rig, prompt)) == BAD
    assert rig.stat("nvme_read_frames") + rig.stat("nvme_failed_reads") == tried
    rig = rig.killed()
    prompt = again(rig, prompt)
    assert rig.found(prompt) == BAD
    assert len(read(rig, prompt)) == BAD

    # Who computes it again stores it again.
    assert rig.put(WRITER, prompt, BAD).n_committed == N - BAD
    assert read(rig, prompt) == rig.expected(prompt, N)
    assert rig.persist(prompt) == N
    rig.store.forget_session(WRITER)
    rig = rig.killed()
    prompt = again(rig, prompt)
    assert read(rig, prompt) == rig.expected(prompt, N)
    rig.close()


def test_a_block_that_is_damaged_while_it_is_in_dram_too_is_served_from_there(rig: TwoTierRig) -> None:
    prompt = rig.rows(N, tag=1)
    rig.put(WRITER, prompt)
    assert rig.persist(prompt) == N
    frame_of(rig, prompt, BAD).flip(5000)
    assert read(rig, prompt) == rig.expected(prompt, N)


@pytest.mark.parametrize("recovery", ["normal", "strict"])
def test_files_that_are_gone_or_cut_when_a_daemon_starts_cost_their_blocks(
    recovery: str, make_store: Callable[..., TwoTierRig]
) -> None:
    first = make_store()
    prompts = [first.rows(N, tag=tag) for tag in (1, 2, 3)]
    rig = stored_below(first, *prompts)
    rig.abandon()
    frames = [[frame_of(rig, prompt, row) for row in range(N)] for prompt in prompts]
    gone, cut_at = frames[0][0].path, frames[2][N - 2]
    assert cut_at.path != gone
    gone.unlink()
    with cut_at.path.open("r+b") as file:
        file.truncate(cut_at.offset + 100)
    rig = rig.reopened(rig.directory, recovery)
    lengths = []
    for prompt, lie in zip(prompts, frames, strict=True):
        intact = [f.path != gone and (f.path != cut_at.path or f.offset < cut_at.offset) for f in lie]
        served = read(rig, again(rig, prompt))
        assert served == rig.expected(prompt, N)[: [*intact, False].index(False)]
        lengths.append(len(served))
    assert lengths[0] == 0
    assert 0 < lengths[2] < N
    rig.close()


def test_a_strict_start_reads_everything_and_keeps_what_is_intact(make_store: Callable[..., TwoTierRig]) -> None:
    first = make_store()
    prompt = first.rows(N, tag=1)
    rig = stored_below(first, prompt)
    frame_of(rig, prompt, BAD).flip(5000)
    rig = rig.killed("strict")
    assert rig.stat("nvme_dropped_corrupt") == 1
    assert rig.found(again(rig, prompt)) == BAD
    assert read(rig, again(rig, prompt)) == rig.expected(prompt, BAD)
    rig.close()


def test_a_lost_catalog_is_rebuilt_and_damaged_frames_stay_misses(make_store: Callable[..., TwoTierRig]) -> None:
    first = make_store()
    prompt, other = first.rows(N, tag=1), first.rows(N, tag=2)
    rig = stored_below(first, prompt, other)
    rig.abandon()
    shutil.rmtree(rig.directory / CATALOG)
    frame_of(rig, prompt, BAD).flip(90)
    frame_of(rig, other, BAD).flip(5000)
    rig = rig.reopened(rig.directory)
    assert rig.stat("nvme_rebuilt") == 1
    assert read(rig, again(rig, prompt)) == rig.expected(prompt, BAD)
    assert read(rig, again(rig, other)) == rig.expected(other, BAD)
    rig.close()
