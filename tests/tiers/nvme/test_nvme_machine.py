"""The tier against a dict: any order of steps of several jobs, ends of the process included, gives what was written.

The model knows which keys are live, which may be found again, and what each was written with. It shares no code
with the tier; bytes follow from keys.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

PAGE = 4096
ROOT = b"r" * 16
CAPACITY = 2 << 20
SEEDS = st.integers(0, 1 << 16)
PAGES = st.sampled_from([2, 2, 3, 5, 9])


def allocated_bytes(directory: Path) -> int:
    return sum(path.lstat().st_blocks * 512 for path in [directory, *directory.rglob("*")])


class TierMachine(RuleBasedStateMachine):
    make_rig: Callable[..., Any]

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="kvstore-machine-"))
        self.rig = self.make_rig(self.folder / "nvme", capacity_bytes=CAPACITY, segment_bytes=24 * PAGE)
        self.ever: dict[bytes, bytes] = {}  # parent by key, of all frames that were begun
        self.in_flight: list[Any] = []
        self.unwanted: set[int] = set()
        self.n_named = 0
        self.compaction: Any = None
        self.n_steps = 0

    def teardown(self) -> None:
        self.rig.abandon()
        shutil.rmtree(self.folder)

    # -- the model

    def closed(self, keys: set[bytes]) -> set[bytes]:
        """Those whose ancestors are all among them."""
        kept: set[bytes] = set()
        for key in keys:
            chain, at = [], key
            while at in keys and at not in kept:
                chain.append(at)
                at = self.ever[at]
            if at == ROOT or at in kept:
                kept |= set(chain)
        return kept

    def pick(self, seed: int, share: float) -> list[bytes]:
        keys = sorted(self.rig.known)
        n = round(len(keys) * share)
        return [keys[i] for i in np.random.default_rng(seed).permutation(len(keys))[:n]]

    # -- writing

    @rule(pages=PAGES, n=st.integers(1, 12), chain=st.booleans(), seed=SEEDS)
    def begin(self, pages: int, n: int, chain: bool, seed: int) -> None:
        if len(self.in_flight) == 3:
            return
        rng = np.random.default_rng(seed)
        flying = [k for p in self.in_flight for k, s in zip(p.keys, p.slots, strict=True) if s not in self.unwanted]
        parents = [ROOT, *sorted(self.rig.known), *flying]
        parent = parents[int(rng.integers(len(parents)))]
        keys = [self.rig.new_key() for _ in range(n)]
        promised = self.rig.tier.free_slots(pages * PAGE)
        pending = self.rig.begin(keys, [parent, *keys[:-1]] if chain else [parent] * n, pages)
        assert (0 if pending is None else len(pending.slots)) == min(n, promised)
        if pending is not None:
            self.in_flight.append(pending)
            self.ever.update(zip(pending.keys, pending.parents, strict=True))

    @rule(which=st.integers(0, 2))
    def write(self, which: int) -> None:
        if which < len(self.in_flight) and not self.in_flight[which].written:
            self.in_flight[which].job.write()
            self.in_flight[which].written = True

    @precondition(lambda self: len(self.in_flight) > self.n_named and self.in_flight[self.n_named].written)
    @rule()
    def name(self) -> None:
        self.in_flight[self.n_named].job.name()
        self.n_named += 1

    @precondition(lambda self: self.n_named)
    @rule()
    def finish(self) -> None:
        pending = self.in_flight.pop(0)
        self.n_named -= 1
        live = set(self.rig.finish(pending))
        assert live == {k for k, s in zip(pending.keys, pending.slots, strict=True) if s not in self.unwanted}

    @rule(pages=PAGES, n=st.integers(5, 40), chain=st.booleans(), seed=SEEDS)
    def put(self, pages: int, n: int, chain: bool, seed: int) -> None:
        """A whole write with as much room made for it as the tier asks for."""
        n_short = self.rig.tier.short_of(pages * PAGE, n)
        if n_short:
            self.rig.free(self.pick(seed, 1.0)[:n_short])
        self.begin(pages, n, chain, seed)
        self.land()

    @rule(pages=PAGES, rounds=st.integers(4, 16), seed=SEEDS)
    def churn(self, pages: int, rounds: int, seed: int) -> None:
        """The tier runs full: what is oldest or random goes, what stays is moved while more is written."""
        for i in range(rounds):
            self.put(pages, 12, i % 2 == 0, seed + i)
            if self.compaction is None:
                self.begin_compact()
            elif i % 3:
                self.step_compact()

    # -- reading and leaving

    @rule(seed=SEEDS)
    def read(self, seed: int) -> None:
        keys = self.pick(seed, 0.3)
        assert self.rig.read(keys) == [True] * len(keys)

    @rule(seed=SEEDS, share=st.sampled_from([0.05, 0.2, 0.6]))
    def free(self, seed: int, share: float) -> None:
        keys = self.pick(seed, share)
        self.rig.free(keys)

    @rule(seed=SEEDS)
    def quarantine_one(self, seed: int) -> None:
        for key in self.pick(seed, 1.0)[:1]:
            self.rig.tier.quarantine(self.rig.slots([key]))
            del self.rig.known[key]

    @precondition(lambda self: self.in_flight)
    @rule(seed=SEEDS)
    def unwant(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        slots = [s for p in self.in_flight for s in p.slots.tolist() if s not in self.unwanted]
        chosen = [s for s in slots if rng.random() < 0.3]
        self.rig.tier.free(np.array(chosen, np.int64))
        self.unwanted |= set(chosen)

    # -- compaction

    @precondition(lambda self: self.compaction is None)
    @rule()
    def begin_compact(self) -> None:
        self.compaction = self.rig.tier.begin_compact()
        self.ran = False

    @precondition(lambda self: self.compaction is not None)
    @rule()
    def step_compact(self) -> None:
        if not self.ran:
            self.compaction.run()
            self.ran = True
            return
        assert not len(self.rig.tier.finish_compact(self.compaction))
        self.compaction = None

    # -- ends

    def land(self) -> None:
        while self.in_flight:
            for which in range(len(self.in_flight)):
                self.write(which)
            if len(self.in_flight) > self.n_named:
                self.name()
            self.finish()

    def settle(self) -> None:
        self.land()
        while self.compaction is not None:
            self.step_compact()

    @precondition(lambda self: self.n_steps > 12)
    @rule(lose_catalog=st.booleans())
    def reopen(self, lose_catalog: bool) -> None:
        self.settle()
        expected = self.closed(set(self.rig.known))
        self.rig.tier.close()
        if lose_catalog:
            shutil.rmtree(self.folder / "nvme" / "catalog")
        self.rig.open()
        found = set(self.rig.take_recovered())
        # Without a catalog the dead may come back, whole, if nothing was written over them.
        assert found >= expected if lose_catalog else found == expected
        assert found <= self.closed(set(self.ever))
        self.unwanted.clear()
        self.n_steps = 0

    @precondition(lambda self: self.n_steps > 12)
    @rule()
    def end_of_the_process(self) -> None:
        expected = self.closed(set(self.rig.known))
        self.rig.abandon()
        self.in_flight, self.n_named, self.compaction = [], 0, None
        self.rig.open()
        found = set(self.rig.take_recovered())
        assert expected <= found <= self.closed(set(self.ever))
        assert self.rig.read(sorted(found)) == [True] * len(found)
        self.unwanted.clear()
        self.n_steps = 0

    @invariant()
    def holds(self) -> None:
        self.n_steps += 1
        self.rig.tier.check()
        assert allocated_bytes(self.folder / "nvme") <= CAPACITY
        assert self.rig.tier.n_live == len(self.rig.known)


def test_tier_machine(rig_at: Callable[..., Any]) -> None:
    class Machine(TierMachine):
        make_rig = staticmethod(rig_at)

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=25, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
