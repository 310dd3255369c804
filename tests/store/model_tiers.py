"""Steps of the model with an NVMe tier: loads, durable blocks, and the store's own work in any order."""

from __future__ import annotations

import random
from dataclasses import dataclass

from kvstore.onboard import Load
from kvstore.persist import Persist
from tests.store.copies import Event
from tests.store.model import TTLS_S
from tests.store.model_reading import ReadingSteps
from tests.store.model_sessions import SessionSteps
from tests.store.oracle import WIDTH, Key, is_whole, keys_of, next_blocks
from tests.store.two_tier import TwoTierRig

WAITING_MAX = 4
TOKENS_MAX = 16


@dataclass(eq=False)
class Loading:
    """A load that was begun, and what the model expects of it."""

    load: Load
    prompt: Key
    first: int
    most: int
    keys: tuple[Key, ...]
    below: frozenset[Key]
    """Those that were not in DRAM."""


@dataclass(eq=False)
class Persisting:
    """A persist that was begun."""

    persist: Persist
    keys: tuple[Key, ...]


class TierSteps(SessionSteps, ReadingSteps):
    """See ``StoreModel``."""

    rig: TwoTierRig

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[Loading] = []
        self.persists: list[Persisting] = []
        self.cold: set[Key] = set()
        """Blocks that no prompt may have shown the rows of since the daemon began."""

    # Questions -----------------------------------------------------------------------------------

    def draw_prompt(self, dice: random.Random) -> Key:
        """Mostly what was stored before, longer or shorter, or going on differently."""
        if not self.copies.stored or dice.random() < 0.3:
            return super().draw_prompt(dice)
        space, tokens = dice.choice(sorted(self.copies.stored))
        kept = tokens[: dice.choice([len(tokens), dice.randint(1, len(tokens))])]
        more = tuple(dice.randrange(2) for _ in range(dice.choice([0, 1, 3, 6])))
        return space, (kept + more)[:TOKENS_MAX]

    def draw_below(self, dice: random.Random) -> Key:
        """Mostly what is on NVMe only."""
        below = sorted(self.copies.nvme - self.copies.dram)
        return dice.choice(below) if below and dice.random() < 0.7 else self.draw_prompt(dice)

    def partial(self, prompt: Key) -> tuple[set[int], list[Key]]:
        """Blocks known by their key only may be found by some of their tokens, or not yet."""
        follow = next_blocks(prompt, self.copies.stored)
        least = max((n for n, key in follow if key not in self.cold or key == prompt), default=0)
        fitting = [(n, key) for n, key in follow if n >= least]
        return {least, *(n for n, _ in fitting)}, [key for n, key in fitting if n]

    def shown(self, prompt: Key) -> None:
        """A prompt was matched: what it found is known by its rows."""
        self.cold -= set(keys_of(prompt)[: self.depth(prompt)])

    def protected(self) -> set[Key]:
        waited_for = {key for keys in self.awaited() for key in keys}
        return super().protected() | waited_for

    def counts(self) -> dict[str, int]:
        return super().counts() | {"unreadable_frames": int(self.rig.nvme.stats()["unreadable_frames"])}

    def awaited(self) -> list[tuple[Key, ...]]:
        """What loads and persists keep from being evicted."""
        return [loading.keys for loading in self.loads] + [persisting.keys for persisting in self.persists]

    # Loads ---------------------------------------------------------------------------------------

    def begin_load(self, dice: random.Random) -> None:
        if len(self.loads) >= WAITING_MAX:
            return
        prompt = self.draw_below(dice)
        first, most = dice.choice([0, 0, 1, 2]), dice.choice([0, 0, 1, 3])
        n_matched = self.depth(prompt)
        may_be_partial = any(self.partial(prompt)[0])
        if most:
            n_matched, may_be_partial = min(n_matched, most), may_be_partial and n_matched < most
        keys = keys_of(prompt)[first:n_matched]
        below = frozenset(keys) - self.copies.dram
        load = self.store.begin_load(self.ask(prompt), first, most)
        if load is None:
            assert not below
            return
        assert below or may_be_partial
        assert load.eta_s >= 0
        self.loads.append(Loading(load, prompt, first, most, keys, below))
        self.observe()

    def take_load(self, dice: random.Random) -> None:
        """Lease what a load has brought; a patient client waits until it is done."""
        if not self.loads:
            return
        loading = dice.choice(self.loads)
        if not loading.load.done and dice.random() < 0.7:
            return
        readers = self.live(loading.prompt[0])
        if readers:
            reader, ttl_s = dice.choice(readers), dice.choice(TTLS_S)
            self.take_lease(reader, loading.prompt, loading.first, loading.most, ttl_s, loading.load)
        self.drop_load(loading)

    def give_up_load(self, dice: random.Random) -> None:
        """A request is cancelled, or only prefetched."""
        if self.loads:
            self.drop_load(dice.choice(self.loads))

    def drop_load(self, loading: Loading) -> None:
        self.loads.remove(loading)
        self.store.end_load(loading.load)
        self.store.end_load(loading.load)
        self.observe()

    # Durable blocks ------------------------------------------------------------------------------

    def begin_persist(self, dice: random.Random) -> None:
        if len(self.persists) >= WAITING_MAX:
            return
        prompt = self.draw_prompt(dice)
        keys = keys_of(prompt)[: self.depth(prompt)]
        if prompt in self.copies.stored and len(keys) == len(prompt[1]) // WIDTH and not is_whole(prompt):
            keys = (*keys, prompt)
        rivals = [key for _, key in next_blocks(prompt, self.copies.stored) if key != prompt]
        persist = self.store.begin_persist(self.ask(prompt))
        n_blocks = 0 if persist is None else len(persist.ids)
        # Where a longer block begins as the short last one does, a match may name that one.
        assert n_blocks == len(keys) or (rivals and prompt in keys and n_blocks == len(keys) - 1)
        if persist is not None:
            self.persists.append(Persisting(persist, keys[:n_blocks]))
        self.observe()

    def look_at_persist(self, dice: random.Random) -> None:
        """What is acknowledged is on NVMe, and nothing else is."""
        if not self.persists:
            return
        persisting = dice.choice(self.persists)
        keys = persisting.keys
        n_durable = next((i for i, key in enumerate(keys) if key not in self.copies.nvme), len(keys))
        assert self.store.n_durable(persisting.persist) == n_durable
        if persisting.persist.done or dice.random() < 0.3:
            self.drop_persist(persisting)

    def drop_persist(self, persisting: Persisting) -> None:
        self.persists.remove(persisting)
        self.store.end_persist(persisting.persist)
        self.store.end_persist(persisting.persist)
        self.observe()

    # The store's own work ------------------------------------------------------------------------

    def work(self, dice: random.Random) -> None:
        """A worker takes a job, or the store takes one in."""
        jobs = self.rig.jobs
        runnable = jobs.runnable()
        if not runnable and not jobs.ran:
            return
        job = dice.choice(runnable + jobs.ran)
        if job in jobs.ran:
            jobs.finish(job)
            self.observe(Event(finished=True))
        else:
            jobs.run(job)

    def work_much(self, dice: random.Random) -> None:
        for _ in range(dice.randrange(1, 12)):
            self.work(dice)

    def tick(self, dice: random.Random) -> None:
        self.rig.clock.advance(dice.choice([0.0, 0.05, 0.2]))
        self.store.tick()
        self.observe()

    def settle(self, dice: random.Random) -> None:
        """All that is under way comes to its end; then nobody waits any more."""
        self.rig.files.release_all()
        for _ in range(60):
            while len(self.rig.jobs):
                self.work(dice)
            if self.at_rest():
                break
            self.rig.unmap_retired()
            self.rig.clock.advance(0.2)
            self.store.tick()
            self.observe()
        assert self.at_rest()
        assert all(each.load.done for each in self.loads)
        assert all(each.persist.done for each in self.persists)

    def at_rest(self) -> bool:
        """Nothing is read or written any more, and nothing waits for that."""
        hierarchy = self.store.hierarchy
        return bool(hierarchy.offloader.idle and not hierarchy.onboarder.stats()["waiting_blocks"])

    def all_gone(self) -> None:
        super().all_gone()
        for loading in list(self.loads):
            self.drop_load(loading)
        for persisting in list(self.persists):
            self.drop_persist(persisting)
