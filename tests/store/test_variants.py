"""Many namespaces in one store at once: models, revisions, dtypes, block sizes and tenants, in both tiers, under
pressure; switched between again and again."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvstore.store.namespaces import OpenNamespace
from kvstore.store.requests import Prompt
from kvstore.types import KVGroup, KVSpec, Namespace
from tests.store.two_tier import KIB, MIB, Settings, Sizes, TwoTierRig

GROUP = KVGroup(layers=2, kv_heads=2, head_dim=64)


def spec(block_tokens: int = 4, dtype: str = "bfloat16") -> KVSpec:
    return KVSpec(block_tokens, (replace(GROUP, dtype=dtype),))


BASE = Namespace("llama", spec())
VARIANTS = [
    BASE,
    Namespace("qwen", spec()),
    replace(BASE, revision="2"),
    replace(BASE, spec=spec(dtype="float16")),
    replace(BASE, spec=spec(dtype="int8")),
    replace(BASE, spec=spec(block_tokens=8)),
    replace(BASE, spec=spec(block_tokens=2)),
    replace(BASE, tenant="other"),
    replace(BASE, engine="vllm 1"),
]
N_TOKENS = 64


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[TwoTierRig]:
    rigs = [TwoTierRig(tmp_path / "nvme", Settings(Sizes(2 * MIB, 64 * KIB, 16 * KIB, 6 * MIB, 256 * KIB)))]
    yield rigs[0]
    if not rigs[0].ended:
        rigs[0].close()


def opened(rig: TwoTierRig) -> list[OpenNamespace]:
    return [rig.store.namespaces.open(variant) for variant in VARIANTS]


def prompt_of(rig: TwoTierRig, space: OpenNamespace, tag: int) -> Prompt:
    """The same tokens in every variant: nothing but the namespace tells them apart."""
    return rig.prompt([tag * 1000 + i for i in range(N_TOKENS)], space)


def session_of(space: OpenNamespace) -> int:
    """A process of the engine runs one variant."""
    return 1 + VARIANTS.index(space.namespace)


def check(rig: TwoTierRig, prompt: Prompt) -> int:
    """Leases what is found, compares every byte, and returns how many blocks that were."""
    lease = rig.read(99, prompt)
    size = prompt.namespace.block_bytes
    assert rig.bytes_at(rig.slots_of(lease), size) == rig.expected(prompt, lease.n_blocks)
    rig.store.release(99, lease.id)
    return lease.n_blocks


def store(rig: TwoTierRig, prompt: Prompt) -> None:
    rig.put(session_of(prompt.namespace), prompt)
    rig.unmap_retired()
    rig.settle()


def forget_all(rig: TwoTierRig) -> None:
    for session in (*range(1, len(VARIANTS) + 1), 99):
        rig.store.forget_session(session)


def test_variants_never_see_each_other_and_all_keep_what_they_have(rig: TwoTierRig) -> None:
    for done, space in enumerate(opened(rig)):
        for other in opened(rig)[done:]:
            assert rig.found(prompt_of(rig, other, 1)) == 0, "the same tokens of another variant"
        store(rig, prompt_of(rig, space, 1))
    for space in opened(rig):
        assert check(rig, prompt_of(rig, space, 1)) == N_TOKENS // space.namespace.spec.block_tokens
    forget_all(rig)


def test_switching_back_and_forth_needs_no_flush(rig: TwoTierRig) -> None:
    """Two revisions of a model in turn: each finds all that it stored before, as long as there is room for both."""
    first, second = opened(rig)[0], opened(rig)[2]
    for turn in range(4):
        for space in (first, second):
            for tag in range(1, turn + 1):
                assert check(rig, prompt_of(rig, space, tag)) == 16, (turn, tag)
            store(rig, prompt_of(rig, space, turn + 1))
    assert rig.count("dropped_blocks") == 0
    forget_all(rig)


def test_under_pressure_bytes_stay_right_and_a_restart_finds_every_namespace(rig: TwoTierRig, tmp_path: Path) -> None:
    dice, n_found = random.Random(5), 0
    for _ in range(120):
        space = dice.choice(opened(rig))
        prompt = prompt_of(rig, space, dice.randrange(1, 40))
        check(rig, prompt)
        store(rig, prompt)
        n_found += check(rig, prompt) > 0
    assert n_found > 110, "what was just stored is there, but where nobody's memory could be had in time"
    assert rig.count("evicted_blocks") > 0
    rig.store.check()
    before: dict[tuple[int, int], int] = {}
    for number, space in enumerate(opened(rig)):
        for tag in range(1, 40):
            prompt = prompt_of(rig, space, tag)
            persist = rig.store.begin_persist(prompt)
            if persist is not None:
                before[number, tag] = rig.store.n_durable(persist)
                rig.store.end_persist(persist)
    assert len({number for number, _ in before}) == len(VARIANTS)
    forget_all(rig)
    after = rig.killed()
    spaces = opened(after)
    for (number, tag), n_durable in before.items():
        prompt = prompt_of(after, spaces[number], tag)
        assert after.found(prompt) >= n_durable
        assert check(after, prompt) >= min(n_durable, 1)
    forget_all(after)
    after.close()


@pytest.mark.parametrize("n_spaces", [300])
def test_hundreds_of_namespaces_at_once(tmp_path: Path, n_spaces: int, make_rig: Any) -> None:
    rig = make_rig(capacity_bytes=8 * MIB, region_bytes=64 * KIB, starter_bytes=16 * KIB)
    spaces = [rig.namespace(revision=str(i), tenant=f"t{i % 7}") for i in range(n_spaces)]
    for i, space in enumerate(spaces):
        rig.put(1 + i % 7, rig.rows(3, tag=1, namespace=space))
        rig.unmap_retired()
    for space in spaces:
        prompt = rig.rows(3, tag=1, namespace=space)
        lease = rig.store.lease(99, prompt)
        assert lease.n_blocks == 3
        assert rig.bytes_at(rig.slots_of(lease)) == rig.expected(prompt, 3)
        rig.store.release(99, lease.id)
    rig.store.check()
