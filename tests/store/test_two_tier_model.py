"""The whole two-tier store against plain dictionaries that share no code with it; see ``model``.

Sessions of two tenants put, lease, wait and persist; the store's jobs are run and taken in at any time; both tiers
are small; disks fail, bytes rot, daemons die and the power goes. After each step: the bytes in DRAM are those that
were committed for these tokens, what is found is what was stored, every copy that came or went may have done so,
both tiers are within their capacity, and index, tiers and claims agree.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from kvstore.offload import WritePolicy
from kvstore.store.hierarchy import WriteBehind
from kvstore.store.requests import LeaseLimits
from tests.store.model import DICE, TTL_DEFAULT_S, TTL_MAX_S, Space
from tests.store.model_disasters import DisasterSteps
from tests.store.model_writing import WritingSteps
from tests.store.oracle import keys_of
from tests.store.two_tier import Settings, Sizes, nvme_bytes_for

KIB = 1 << 10


class TwoTierMachine(WritingSteps, DisasterSteps, RuleBasedStateMachine):
    spaces: ClassVar = [
        Space("a", 4 * KIB),
        Space("a", 4 * KIB, salt="s"),
        Space("a", 12 * KIB, lora="l"),
        Space("b", 4 * KIB),
    ]
    policy: WritePolicy

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        self.all_gone()
        self.settle(random.Random(0))
        self.all_gone()
        self.check_all()
        self.check_disk()
        facts = self.rig.dram_bytes()
        assert [facts[name] for name in ("reserved", "quarantined", "retired_mapped")] == [0, 0, 0]
        assert not self.store.index.table.refs.any()
        self.rig.close()
        self.remove_folder()

    @initialize(dice=DICE)
    def begin(self, dice: random.Random) -> None:
        write = WriteBehind(self.policy, queue_bytes_max=dice.choice([40, 400]) * KIB, io_timeout_s=5.0)
        sizes = Sizes(96 * KIB, 24 * KIB, 8 * KIB, nvme_bytes_for(dice.choice([6, 8])))
        limits = LeaseLimits(TTL_DEFAULT_S, TTL_MAX_S)
        self.first_rig(Settings(sizes, write, limits, durability=True))
        self.connect_some(dice)

    @rule(dice=DICE)
    def one_step(self, dice: random.Random) -> None:
        weights = {
            self.reserve: 24, self.commit: 24, self.lease: 5, self.release: 14, self.end_move: 10,
            self.come_back: 1, self.connect: 0.5, self.time_passes: 0.5, self.renew: 0.3, self.attach: 0.3,
            self.pin: 0.4, self.unpin: 0.4, self.write_late: 0.2, self.abort: 0.2, self.cut_off: 0.2,
            self.process_gone: 0.2, self.unmap: 1,
            self.begin_load: 8, self.take_load: 8, self.give_up_load: 1, self.begin_persist: 2,
            self.look_at_persist: 3, self.work: 12, self.work_much: 8, self.tick: 2, self.settle: 0.3,
            self.rot: 0.4, self.order_fault: 0.5, self.die: 0.05, self.cut_power: 0.08,
        }  # fmt: skip
        dice.choices(list(weights), list(weights.values()))[0](dice)
        if self.prompt_clients:
            self.rig.unmap_retired()
        self.observe()
        self.check_all()
        self.the_disk_holds_its_cap()

    @rule(dice=DICE)
    def many_steps(self, dice: random.Random) -> None:
        """So that the tiers are full, and stay so, in most runs."""
        for _ in range(40):
            self.one_step(dice)
        self.check_disk()

    def what_is_found_is_what_was_stored(self) -> None:
        # A question shows the store the rows of what it finds: blocks known by key only are to stay so for a while.
        for key in self.copies.stored | {key for held in self.writes for key in held.writes}:
            if self.cold.isdisjoint(keys_of(key)):
                self.found_as_stored(key)


@pytest.mark.parametrize("policy", WritePolicy)
def test_two_tiers_are_what_plain_dictionaries_say(policy: WritePolicy, tmp_path: Path) -> None:
    run_state_machine_as_test(
        type("Machine", (TwoTierMachine,), {"policy": policy, "base": tmp_path}),
        settings=settings(
            max_examples=6,
            stateful_step_count=12,
            deadline=None,
            derandomize=True,
            # A failing run has hundreds of steps: shrinking takes too long.
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )
