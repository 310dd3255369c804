"""The store over DRAM alone against plain dictionaries that share no code with it; see ``model``."""

from __future__ import annotations

import random
from typing import ClassVar

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from kvstore.store.requests import LeaseLimits
from tests.store.model import DICE, TTL_DEFAULT_S, TTL_MAX_S, Space
from tests.store.model_reading import ReadingSteps
from tests.store.model_sessions import SessionSteps
from tests.store.model_writing import WritingSteps
from tests.store.rig import Rig

KIB = 1 << 10


class StoreMachine(SessionSteps, WritingSteps, ReadingSteps, RuleBasedStateMachine):
    spaces: ClassVar = [Space("a", 4 * KIB), Space("a", 12 * KIB), Space("b", 4 * KIB)]

    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig(144 * KIB, 24 * KIB, 8 * KIB, LeaseLimits(TTL_DEFAULT_S, TTL_MAX_S))

    def teardown(self) -> None:
        self.all_gone()
        self.store.check()
        facts = self.rig.dram_bytes()
        assert [facts[name] for name in ("reserved", "quarantined", "retired_mapped")] == [0, 0, 0]
        assert not self.store.index.table.refs.any()
        self.rig.dram.close()

    @initialize(dice=DICE)
    def begin(self, dice: random.Random) -> None:
        self.connect_some(dice)

    @rule(dice=DICE)
    def one_step(self, dice: random.Random) -> None:
        weights = {
            self.reserve: 8, self.commit: 8, self.lease: 6, self.release: 5, self.end_move: 4,
            self.come_back: 1, self.connect: 0.5, self.time_passes: 0.7, self.renew: 0.5, self.attach: 0.5,
            self.pin: 0.5, self.unpin: 0.3, self.write_late: 0.3, self.abort: 0.2, self.cut_off: 0.2,
            self.process_gone: 0.2, self.unmap: 1,
        }  # fmt: skip
        dice.choices(list(weights), list(weights.values()))[0](dice)
        if self.prompt_clients:
            self.rig.unmap_retired()
        self.observe()
        self.check_all()

    @rule(dice=DICE)
    def many_steps(self, dice: random.Random) -> None:
        """So that the tier is full, and stays so, in most runs."""
        for _ in range(25):
            self.one_step(dice)


def test_the_store_is_what_plain_dictionaries_say() -> None:
    run_state_machine_as_test(
        StoreMachine,
        settings=settings(
            max_examples=12,
            stateful_step_count=12,
            deadline=None,
            derandomize=True,
            # A failing run has hundreds of steps: shrinking takes too long.
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )
