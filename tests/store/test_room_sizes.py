"""One writer with blocks of several sizes: each size has the share of the tier that the policy gives it."""

from __future__ import annotations

from tests.store.rig import KIB, Rig

WRITER = 1
SMALL, LARGE = 4 * KIB, 16 * KIB


def found(rig: Rig, tags: range, block_bytes: int) -> list[int]:
    return [tag for tag in tags if rig.found(rig.rows(1, tag=tag, namespace=rig.namespace(block_bytes)))]


def put(rig: Rig, tag: int, block_bytes: int) -> None:
    rig.clock.advance(1.0)
    assert rig.put(WRITER, rig.rows(1, tag=tag, namespace=rig.namespace(block_bytes))).n_committed == 1
    rig.unmap_retired()


def test_old_blocks_of_another_size_make_room_for_young_ones() -> None:
    rig = Rig(512 * KIB, 64 * KIB, 64 * KIB)
    for tag in range(100):
        put(rig, tag, SMALL)
    for tag in range(100, 107):
        put(rig, tag, LARGE)
    assert (len(found(rig, range(100), SMALL)), len(found(rig, range(100, 107), LARGE))) == (100, 7)
    for tag in range(107, 140):
        put(rig, tag, LARGE)
    large, small = found(rig, range(100, 140), LARGE), found(rig, range(100), SMALL)
    assert len(large) >= 20, "they are younger than all of the others, so most of the tier is theirs"
    assert len(small) <= 40
    assert large == list(range(140 - len(large), 140))
    assert min(small) >= 50, "the oldest have gone"
    rig.store.forget_session(WRITER)
    rig.close()


def test_young_blocks_of_another_size_stay() -> None:
    rig = Rig(512 * KIB, 64 * KIB, 64 * KIB)
    for tag in range(100, 124):
        put(rig, tag, LARGE)
    for tag in range(30):
        put(rig, tag, SMALL)
    for tag in range(200, 232):
        put(rig, tag, LARGE)
        for young in range(30):
            prompt = rig.rows(1, tag=young, namespace=rig.namespace(SMALL))
            rig.store.release(WRITER, rig.store.lease(WRITER, prompt).id)
    assert found(rig, range(30), SMALL) == list(range(30)), "all are in use again and again"
    large = found(rig, range(200, 232), LARGE)
    assert large == list(range(232 - len(large), 232))
    rig.store.forget_session(WRITER)
    rig.close()
