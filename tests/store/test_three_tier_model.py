"""Copies in HBM against what a plain dictionary says of them, while everything below moves.

Clients put prompts, lease them with and without HBM, let leases run out, and leave; jobs are run and taken in at any
time; frames on NVMe break, namespaces are cleared. After each step: what lies in HBM are the bytes that were stored for
these tokens; every slot that a client may still read has the bytes it was leased for; who is in HBM is below, too; all
that HBM holds, slots that are filled or held back included, is within its capacity; index, tiers and claims agree.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from numpy.typing import NDArray

from kvstore.lease import Lease
from kvstore.prefix_index.block_table import DRAM, HBM, NVME, STORED
from kvstore.promote import Promotion
from kvstore.store.requests import LeaseLimits, Prompt
from tests.store.model import DICE
from tests.store.three_tier import BLOCK_BYTES, HBM_BLOCKS, ThreeTierRig
from tests.store.two_tier import Settings
from tests.tiers.dram_scene import region_file_bytes
from tests.tiers.hbm_harness import DEVICE_FILES

READERS = (11, 12, 13)
WRITER = 1
N_TAGS, ROWS_MAX = 4, 8


class Reading(NamedTuple):
    """What a client may still look at in HBM: slots, and the bytes that it was told lie there."""

    session: int
    lease: Lease
    slots: NDArray[np.int64]
    contents: list[bytes]


class ThreeTierMachine(RuleBasedStateMachine):
    base: ClassVar[Path]
    n_made: ClassVar = 0

    @initialize(dice=DICE)
    def begin(self, dice: random.Random) -> None:
        type(self).n_made += 1
        self.others_bytes = region_file_bytes(DEVICE_FILES)
        queue_bytes = dice.choice([2, 16]) * BLOCK_BYTES
        limits = Settings(limits=LeaseLimits(5.0, 50.0))
        self.rig = ThreeTierRig(
            self.base / f"nvme{type(self).n_made}", limits, promotion=Promotion(dice.choice([1, 2]), queue_bytes)
        )
        self.contents: dict[bytes, bytes] = {}
        """Block keys, and the bytes that belong to them, of all that was ever put."""
        self.readings: list[Reading] = []

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            for session in READERS:
                self.rig.store.forget_session(session)
            self.readings.clear()
            self.rig.settle()
            self.check()
            facts = self.rig.hbm.stats()
            assert [facts[name] for name in ("reserved_bytes", "quarantined_bytes", "retired_mapped_bytes")] == [
                0,
                0,
                0,
            ]
            assert not self.rig.store.index.table.refs.any()
            self.rig.close()

    # Steps ---------------------------------------------------------------------------------------

    def prompt(self, dice: random.Random) -> Prompt:
        namespace = self.rig.namespace(dice.choice([BLOCK_BYTES] * 4 + [2 * BLOCK_BYTES]), dice.choice(["a", "a", "b"]))
        return self.rig.rows(dice.randrange(1, ROWS_MAX), dice.randrange(N_TAGS), namespace=namespace)

    def put(self, dice: random.Random) -> None:
        prompt = self.prompt(dice)
        keys = prompt.path.chain(prompt.root_key, 0, prompt.path.n_rows)
        for row, key in enumerate(keys):
            self.contents[key.tobytes()] = self.rig.pattern(prompt, row).tobytes()
        self.rig.put(WRITER, prompt)

    def read(self, dice: random.Random) -> None:
        session, prompt = dice.choice(READERS), self.prompt(dice)
        if dice.random() < 0.2:
            self.rig.store.lease(session, prompt)  # who does not read HBM
            return
        lease = (
            self.rig.use(session, prompt)
            if dice.random() < 0.5
            else self.rig.store.lease(session, prompt, reads_hbm=True)
        )
        if lease.id and lease.hbm_slots is not None and (lease.hbm_slots >= 0).any():
            slots = self.rig.hbm_slots(lease)
            self.rig.open_regions(session, slots)
            size = prompt.namespace.block_bytes
            expected = self.rig.expected(prompt, lease.n_blocks + (lease.partial_tokens > 0))
            mine = [expected[at] for at in np.flatnonzero(lease.hbm_slots >= 0).tolist()]
            assert self.rig.hbm_bytes_at(slots, size) == mine
            self.readings.append(Reading(session, lease, slots, mine))

    def release(self, dice: random.Random) -> None:
        if self.readings:
            reading = self.readings.pop(dice.randrange(len(self.readings)))
            self.rig.store.release(reading.session, reading.lease.id)

    def time_passes(self, dice: random.Random) -> None:
        """Rights end. What clients may look at does not change: they have not said that they stopped."""
        self.rig.clock.advance(dice.choice([0.1, 6.0]))
        self.rig.store.expire()
        self.rig.store.tick()

    def leave(self, dice: random.Random) -> None:
        session = dice.choice(READERS)
        self.readings = [reading for reading in self.readings if reading.session != session]
        self.rig.store.forget_session(session)

    def work(self, dice: random.Random) -> None:
        for _ in range(dice.randrange(1, 6)):
            self.rig.jobs.step(dice)

    def evict(self, dice: random.Random) -> None:
        index, n = self.rig.store.index, dice.randrange(1, 8)
        if dice.random() < 0.7:
            self.rig.dram.free(index.evict(n).slots)
        else:
            self.rig.nvme.free(index.evict_nvme(n).slots)

    def break_frame(self, dice: random.Random) -> None:
        index = self.rig.store.index
        there = index.table.alive()
        there = there[index.resident(there, NVME) & (index.table.state[there] == STORED)]
        if len(there):
            block = np.array([dice.choice(there.tolist())], np.uint32)
            self.rig.nvme.quarantine(index.break_nvme(block))

    def clear(self, dice: random.Random) -> None:
        self.rig.store.clear({self.prompt(dice).namespace.ordinal})

    def unmap(self, dice: random.Random) -> None:  # noqa: ARG002 - as all steps
        """Every client closes what the daemon asks it to, but for what it reads."""
        in_use = {int(slot) >> 20 for reading in self.readings for slot in reading.slots}
        for client, region_ids in self.rig.store.mapped.pending_unmaps().items():
            for region_id in region_ids:
                assert region_id not in in_use
                self.rig.store.mapped.remove_mapper(region_id, client)

    @rule(dice=DICE)
    def many_steps(self, dice: random.Random) -> None:
        weights = {
            self.put: 20, self.read: 30, self.release: 25, self.work: 40, self.time_passes: 4, self.leave: 1,
            self.evict: 5, self.break_frame: 4, self.clear: 0.3, self.unmap: 4,
        }  # fmt: skip
        for _ in range(50):
            dice.choices(list(weights), list(weights.values()))[0](dice)
            self.check()

    # What holds ----------------------------------------------------------------------------------

    def check(self) -> None:
        self.rig.store.check()
        index, hbm = self.rig.store.index, self.rig.hbm
        table = index.table
        here = np.flatnonzero(table.hbm_slot[: table.n_used] >= 0)
        assert (index.resident(here, DRAM) | index.resident(here, NVME)).all()
        for size in (BLOCK_BYTES, 2 * BLOCK_BYTES):
            ids = here[table.size_bytes[here] == size]
            expected = [self.contents[table.key[block].tobytes()] for block in ids.tolist()]
            assert self.rig.hbm_bytes_at(table.hbm_slot[ids], size) == expected
        for reading in self.readings:
            assert self.rig.hbm_bytes_at(reading.slots, len(reading.contents[0])) == reading.contents
        facts = hbm.stats()
        held = sum(int(facts[f"{name}_bytes"]) for name in ("used", "reserved", "quarantined", "retired_mapped"))
        assert held <= hbm.capacity_bytes == HBM_BLOCKS * BLOCK_BYTES
        assert region_file_bytes(DEVICE_FILES) - self.others_bytes <= hbm.capacity_bytes
        assert index.tenants.used_bytes[HBM].sum() == facts["used_bytes"]


def test_hbm_is_what_a_dictionary_says(tmp_path: Path) -> None:
    run_state_machine_as_test(
        type("Machine", (ThreeTierMachine,), {"base": tmp_path}),
        settings=settings(
            max_examples=6,
            stateful_step_count=8,
            deadline=None,
            derandomize=True,
            # A failing run has hundreds of steps: shrinking takes too long.
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )
