"""Hybrid namespaces in the whole store against a naive account of which part of which block lies where.

Sessions put any parts of any blocks, lease, wait, pin and persist; both tiers are small; jobs run at any time; daemons
die and the power goes. After each step: what is found of every prompt, and what of it a lease would give at once, is
what ``hybrid_oracle`` says of the copies that there are; bytes that are read are those that were committed; index,
tiers and claims agree.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from kvstore.errors import EndedError
from kvstore.offload import WritePolicy
from kvstore.onboard import Load
from kvstore.persist import Persist
from kvstore.store.hierarchy import WriteBehind
from kvstore.store.requests import LeaseLimits
from kvstore.tiers.nvme.crash import MODES
from tests.store.hybrid_oracle import WIDTH, Layout, Tokens, blocks_of, longest, may_end_inside, needed
from tests.store.hybrid_rig import ANY, IN_DRAM, KIB, LAYOUTS, ON_NVME, Entry, HybridRig, Reading, Writing
from tests.store.model import DICE
from tests.store.rig import Rig
from tests.store.two_tier import CATALOG, Settings, Sizes, TwoTierRig, nvme_bytes_for
from tests.tiers.segment_files import frames_in

BLOCKS_MAX = 7
SESSIONS = (1, 2, 3)


class HybridMachine(RuleBasedStateMachine):
    """``policy`` None: without an NVMe tier."""

    policy: WritePolicy | None
    base: Path

    @initialize(dice=DICE)
    def begin(self, dice: random.Random) -> None:
        self.folder = Path(tempfile.mkdtemp(dir=self.base))
        self.n_directories = 0
        limits = LeaseLimits(10.0, 40.0)
        sizes = Sizes(dice.choice([160, 400]) * KIB, 32 * KIB, 16 * KIB, nvme_bytes_for(dice.choice([9, 14])))
        rig: Rig
        if self.policy is None:
            rig = Rig(sizes.dram_bytes, sizes.region_bytes, sizes.starter_bytes, limits)
        else:
            write = WriteBehind(self.policy, queue_bytes_max=dice.choice([60, 600]) * KIB, io_timeout_s=5.0)
            rig = TwoTierRig(self.new_directory(), Settings(sizes, write, limits, durability=True))
        self.it = HybridRig(rig)
        self.rotten: set[Entry] = set()
        """Parts of blocks whose frames have been damaged."""
        self.start_over()

    def start_over(self) -> None:
        self.writes: list[Writing] = []
        self.reads: list[Reading] = []
        self.loads: list[tuple[int, Layout, Tokens, Load]] = []
        self.persists: list[tuple[Layout, Tokens, Persist]] = []

    def new_directory(self) -> Path:
        self.n_directories += 1
        return self.folder / f"disk-{self.n_directories}"

    def teardown(self) -> None:
        if not hasattr(self, "it"):
            return
        for session in SESSIONS:
            self.it.rig.store.forget_session(session)
        for *_, load in self.loads:
            self.it.rig.store.end_load(load)
        for *_, persist in self.persists:
            self.it.rig.store.end_persist(persist)
        if isinstance(self.it.rig, TwoTierRig):
            self.it.rig.settle()
        self.check_all()
        assert not self.it.rig.store.index.table.refs.any()
        self.it.rig.close()
        shutil.rmtree(self.folder)

    # Steps ---------------------------------------------------------------------------------------

    @rule(dice=DICE)
    def one_step(self, dice: random.Random) -> None:
        weights: dict[Any, float] = {
            self.put: 12, self.reserve: 4, self.commit: 4, self.abort: 0.5, self.lease: 8, self.release: 6,
            self.pin: 0.5, self.leave: 0.4, self.time_passes: 0.5,
        }  # fmt: skip
        if self.policy is not None:
            weights |= {
                self.begin_load: 6, self.take_load: 6, self.persist: 2, self.look_at_persist: 3, self.work: 12,
                self.settle: 3, self.die: 0.25, self.cut_power: 0.3, self.rot: 1,
            }  # fmt: skip
        dice.choices(list(weights), list(weights.values()))[0](dice)
        self.it.rig.unmap_retired()
        self.check_all([dice.choice(LAYOUTS)])

    @rule(dice=DICE)
    def many_steps(self, dice: random.Random) -> None:
        """So that the tiers are full, and stay so, in most runs."""
        for _ in range(30):
            self.one_step(dice)

    def some_prompt(self, dice: random.Random) -> tuple[Layout, Tokens]:
        """One of few layouts and tokens, so that prompts share prefixes."""
        layout = dice.choice(LAYOUTS)
        n_blocks = dice.randint(1, BLOCKS_MAX)
        tokens = [t for i in range(n_blocks) for t in (i, 9 if dice.random() < 0.2 else 1)]
        return layout, tuple(tokens)

    def put(self, dice: random.Random) -> None:
        """As an engine does: the blocks that are missing, and some of their other parts."""
        layout, tokens = self.some_prompt(dice)
        session = dice.choice(SESSIONS)
        n = len(tokens) // WIDTH
        self.it.put(session, layout, tokens, 0)
        for part, need in enumerate(layout.needs[1:], 1):
            first = dice.choice([0, max(n - 1 - need // WIDTH, 0), n - 1])
            self.it.put(session, layout, tokens, part, first)

    def reserve(self, dice: random.Random) -> None:
        layout, tokens = self.some_prompt(dice)
        part = dice.randrange(len(layout.needs))
        first = dice.randrange(len(tokens) // WIDTH)
        n = dice.randint(1, len(tokens) // WIDTH - first)
        writing = self.it.reserve(dice.choice(SESSIONS), layout, tokens, part, first, n)
        if writing is not None:
            self.writes.append(writing)

    def commit(self, dice: random.Random) -> None:
        if self.writes:
            writing = self.writes.pop(dice.randrange(len(self.writes)))
            with contextlib.suppress(EndedError):
                self.it.commit(writing)

    def abort(self, dice: random.Random) -> None:
        if self.writes:
            writing = self.writes.pop(dice.randrange(len(self.writes)))
            self.it.rig.store.abort(writing.session, writing.reservation.id)

    def lease(self, dice: random.Random) -> None:
        layout, tokens = self.some_prompt(dice)
        first, most = dice.choice([0, 0, 0, 1, 3]), dice.choice([0, 0, 2, 5])
        self.take(dice.choice(SESSIONS), layout, tokens, None, first, most)

    def take(
        self, session: int, layout: Layout, tokens: Tokens, load: Load | None, first: int = 0, most: int = 0
    ) -> None:
        """A lease gives the longest hit that is in DRAM as far as it is asked for, and all of it."""
        copies = self.it.copies()
        anywhere, in_dram = self.it.has(layout, copies), self.it.has(layout, copies, IN_DRAM)
        head = {tokens[: end * WIDTH] for end in range(1, first + 1)}

        def usable(block: Tokens, part: int) -> bool:
            return anywhere(block, part) if block in head else in_dram(block, part)

        expected = longest(layout, tokens, usable, most or None)
        reading = self.it.hold(session, layout, tokens, load, first_block=first, max_blocks=most)
        if reading is None:
            assert expected <= first
            return
        self.reads.append(reading)
        assert reading.lease.n_blocks == expected
        n_inside, partial = reading.lease.partial_tokens, reading.partial
        assert n_inside or expected > first
        wanted = {entry for entry in needed(layout, tokens, expected) if entry[0] not in head}
        if n_inside:
            assert partial[: expected * WIDTH + n_inside] == tokens[: expected * WIDTH + n_inside]
            assert may_end_inside(layout, partial, expected, n_inside, usable)
            wanted |= {(partial, part) for part in range(len(layout.needs))}
        assert {entry[1:] for entry in reading.entries} == wanted

    def release(self, dice: random.Random) -> None:
        if self.reads:
            self.it.release(self.reads.pop(dice.randrange(len(self.reads))))

    def pin(self, dice: random.Random) -> None:
        layout, tokens = self.some_prompt(dice)
        pin = self.it.rig.store.pin(dice.choice(SESSIONS), self.it.prompt(layout, tokens), 3.0)
        assert pin.n_blocks == longest(layout, tokens, self.it.has(layout, self.it.copies()))

    def leave(self, dice: random.Random) -> None:
        """A process is gone; its regions become nobody's."""
        session = dice.choice(SESSIONS)
        self.writes = [writing for writing in self.writes if writing.session != session]
        for reading in [reading for reading in self.reads if reading.session == session]:
            self.it.release(reading)
            self.reads.remove(reading)
        self.it.rig.store.forget_session(session)

    def time_passes(self, dice: random.Random) -> None:
        self.it.rig.clock.advance(dice.choice([0.1, 4.0]))
        for claim in self.it.rig.store.expire():
            mine = [reading for reading in self.reads if reading.lease is claim]
            for reading in mine:
                self.it.release(reading)
                self.reads.remove(reading)

    # Steps with NVMe -------------------------------------------------------------------------------

    @property
    def two_tiers(self) -> TwoTierRig:
        assert isinstance(self.it.rig, TwoTierRig)
        return self.it.rig

    def begin_load(self, dice: random.Random) -> None:
        layout, tokens = self.some_prompt(dice)
        load = self.it.rig.store.begin_load(self.it.prompt(layout, tokens))
        if load is not None:
            self.loads.append((dice.choice(SESSIONS), layout, tokens, load))

    def take_load(self, dice: random.Random) -> None:
        if self.loads:
            session, layout, tokens, load = self.loads.pop(dice.randrange(len(self.loads)))
            self.take(session, layout, tokens, load)
            self.it.rig.store.end_load(load)

    def persist(self, dice: random.Random) -> None:
        layout, tokens = self.some_prompt(dice)
        persist = self.it.rig.store.begin_persist(self.it.prompt(layout, tokens))
        if persist is not None:
            self.persists.append((layout, tokens, persist))

    def look_at_persist(self, dice: random.Random) -> None:
        if self.persists:
            layout, tokens, persist = self.persists.pop(dice.randrange(len(self.persists)))
            on_nvme = self.it.has(layout, self.it.copies(), ON_NVME)
            n_durable = self.it.rig.store.n_durable(persist)
            assert n_durable == longest(layout, tokens, on_nvme, persist.n_blocks)
            assert (self.it.rig.store.why_not_durable(persist) == "") == (n_durable == persist.n_blocks)
            self.it.rig.store.end_persist(persist)

    def work(self, dice: random.Random) -> None:
        for _ in range(dice.randint(1, 6)):
            self.two_tiers.jobs.step(dice)

    def settle(self, dice: random.Random) -> None:
        self.two_tiers.settle(dice)

    def die(self, dice: random.Random) -> None:
        """Sometimes the catalog is lost with the process."""
        rig = self.two_tiers
        rig.abandon()
        if dice.random() < 0.4:
            shutil.rmtree(rig.directory / CATALOG)
        self.after_death(rig.reopened(rig.directory))

    def cut_power(self, dice: random.Random) -> None:
        """What was on NVMe as far as anybody was told is found afterwards."""
        rig, must, rotten = self.two_tiers, self.it.copies(), self.rotten
        survivor = rig.power_cut(self.new_directory(), dice.choice(MODES), dice.randrange(1000))
        self.after_death(survivor)
        found = self.it.copies()
        lost = {entry for entry, tiers in must.items() if tiers & ON_NVME and not found.get(entry, 0) & ON_NVME}
        assert not {entry for entry in lost if rotten.isdisjoint(self.ancestors(entry))}

    @staticmethod
    def ancestors(entry: Entry) -> set[Entry]:
        """A part of a block, and the blocks that it can't be there without."""
        name, tokens, _part = entry
        return {entry} | {(name, block, 0) for block in blocks_of(tokens)}

    def rot(self, dice: random.Random) -> None:
        """One bit of a frame on the disk is wrong. Not while it may be copied elsewhere."""
        on_nvme = sorted(entry for entry, tiers in self.it.copies().items() if tiers & ON_NVME)
        if not on_nvme or self.two_tiers.jobs.ran:
            return
        entry = dice.choice(on_nvme)
        name = self.it.name_of(self.it.layout(entry[0]), *entry[1:])
        for frame in frames_in(self.two_tiers.directory):
            if frame.key == name and frame.payload():
                frame.flip(frame.payload_offset + dice.randrange(frame.payload_bytes))
                self.rotten.add(entry)

    def after_death(self, survivor: TwoTierRig) -> None:
        self.it.rig = survivor
        self.start_over()

    # Checks ----------------------------------------------------------------------------------------

    def check_all(self, layouts: Sequence[Layout] = LAYOUTS) -> None:
        store = self.it.rig.store
        store.check()
        copies = self.it.copies()
        for (name, tokens, part), tiers in copies.items():
            if part and tiers & ON_NVME and (name, tokens, 0) not in self.rotten:
                assert copies[name, tokens, 0] & ON_NVME, "a part is on NVMe without its block"
        for layout in layouts:
            anywhere, in_dram = self.it.has(layout, copies, ANY), self.it.has(layout, copies, IN_DRAM)
            for tokens in self.it.put_tokens[layout.name]:
                prompt = self.it.prompt(layout, tokens)
                assert len(store.match(prompt).ids) == longest(layout, tokens, anywhere)
                assert store.hybrid_in_dram(prompt) == longest(layout, tokens, in_dram)


@pytest.mark.parametrize("policy", [None, *WritePolicy])
def test_hits_of_hybrid_models_are_what_a_naive_account_says(policy: WritePolicy | None, tmp_path: Path) -> None:
    run_state_machine_as_test(
        type("Machine", (HybridMachine,), {"policy": policy, "base": tmp_path}),
        settings=settings(
            max_examples=5,
            stateful_step_count=10,
            deadline=None,
            derandomize=True,
            # A failing run has hundreds of steps: shrinking takes too long.
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )
