"""The power goes at every sync point while hybrid prompts are stored: no hit that lacks a group, no wrong byte, no
durable part of a block lost."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.offload import WritePolicy
from kvstore.store.hierarchy import WriteBehind
from kvstore.tiers.nvme.crash import MODES, Mode
from tests.store.crash_workload import digest_of, read_names_here
from tests.store.hybrid_oracle import WIDTH, Tokens, longest
from tests.store.hybrid_rig import KIB, LAYOUTS, ON_NVME, Entry, HybridRig
from tests.store.two_tier import Settings, Sizes, TwoTierRig, nvme_bytes_for

WRITER, READER = 1, 2
N_STEPS = 24


class Workload:
    """Stores prompts part by part, has some persisted, and judges every state that the disk could be found in."""

    def __init__(self, folder: Path, policy: WritePolicy, seed: int) -> None:
        self.folder = folder
        sizes = Sizes(200 * KIB, 32 * KIB, 16 * KIB, nvme_bytes_for(9))
        self.settings = Settings(sizes, WriteBehind(policy, queue_bytes_max=1 << 20), durability=True)
        self.rig = TwoTierRig(folder / "disk", self.settings)
        self.it = HybridRig(self.rig)
        self.dice = random.Random(seed)
        self.seed = seed
        self.n_points = 0
        self.n_hits = 0
        self.judged: dict[bytes, dict[Entry, int]] = {}
        assert self.rig.power is not None
        self.rig.power.at_point = self.at_point

    def run(self) -> None:
        for _ in range(N_STEPS):
            layout = self.dice.choice(LAYOUTS)
            tokens = self.some_tokens()
            for part in range(len(layout.needs)):
                self.it.put(WRITER, layout, tokens, part, self.dice.choice([0, max(len(tokens) // WIDTH - 2, 0)]))
            if self.dice.random() < 0.3:
                self.rig.persist(self.it.prompt(layout, tokens))
            else:
                self.rig.jobs.step(self.dice)
            self.rig.unmap_retired()
        self.rig.settle(self.dice)

    def some_tokens(self) -> Tokens:
        n_blocks = self.dice.randint(1, 6)
        return tuple(t for i in range(n_blocks) for t in (9 if self.dice.random() < 0.2 else 1, i))

    def at_point(self, point: int) -> None:
        must = {entry for entry, tiers in self.it.copies().items() if tiers & ON_NVME}
        self.n_points += 1
        for mode in MODES:
            found = self.judge(point, mode)
            assert not must - found.keys(), f"point {point}, {mode}: durable parts of blocks are lost"

    def judge(self, point: int, mode: Mode) -> dict[Entry, int]:
        """What another store finds, if hits and bytes are right."""
        target = self.folder / f"{point}-{mode}"
        assert self.rig.power is not None
        self.rig.power.materialize(target, mode, self.seed)
        state = digest_of(target)
        if state not in self.judged:
            sizes = replace(self.settings.sizes, dram_bytes=2 << 20, region_bytes=256 * KIB, starter_bytes=64 * KIB)
            rig = TwoTierRig(target, Settings(sizes))
            self.judged[state] = self.read_all(rig)
            rig.abandon()
        shutil.rmtree(target)
        return self.judged[state]

    def read_all(self, rig: TwoTierRig) -> dict[Entry, int]:
        other = HybridRig(rig)
        other.recorder, other.put_tokens = self.it.recorder, self.it.put_tokens
        found = other.copies()
        for layout in LAYOUTS:
            has = other.has(layout, found)
            for tokens in sorted(other.put_tokens[layout.name]):
                expected = longest(layout, tokens, has)
                prompt = other.prompt(layout, tokens)
                assert len(rig.store.match(prompt).ids) == expected
                load = rig.store.begin_load(prompt)
                rig.jobs.all()
                reading = other.hold(READER, layout, tokens, load)
                assert (reading.lease.n_blocks if reading is not None else 0) == expected
                self.n_hits += reading is not None
                if reading is not None:
                    other.release(reading)
                if load is not None:
                    rig.store.end_load(load)
        return found


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("policy", [WritePolicy.THROUGH, WritePolicy.BACK])
def test_a_power_cut_at_any_point_leaves_only_hits_that_have_every_group(
    policy: WritePolicy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.tiers.nvme.opening.read_names", read_names_here)
    workload = Workload(tmp_path, policy, seed=5)
    workload.run()
    assert workload.n_points > 10
    assert len(workload.judged) > 10
    assert workload.n_hits > 50
    workload.it.rig.store.forget_session(WRITER)
    workload.rig.close()
