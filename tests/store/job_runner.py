"""The workers of a store, played by a test: each job is run and taken in when the test says so, in any legal order."""

from __future__ import annotations

import random
from collections.abc import Iterator

from kvstore.jobs import Job, Lane
from kvstore.store.store import Store


class JobRunner:
    """Jobs that were handed out: ``waiting`` for a worker, or ``ran`` and not yet taken in by the store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.waiting: list[Job] = []
        self.ran: list[Job] = []

    def __len__(self) -> int:
        self.take()
        return len(self.waiting) + len(self.ran)

    def take(self) -> None:
        """Fetch what the store has handed out."""
        self._store.pump()
        while self._store.jobs:
            self.waiting.append(self._store.jobs.popleft())

    def runnable(self) -> list[Job]:
        """Jobs that a worker could take now: of the catalog's lane only the first, and one at a time."""
        self.take()
        busy = any(job.lane is Lane.CATALOG for job in self.ran)
        first = next((job for job in self.waiting if job.lane is Lane.CATALOG), None)
        return [job for job in self.waiting if job.lane is not Lane.CATALOG or (job is first and not busy)]

    def run(self, job: Job) -> None:
        """The worker's part."""
        self.waiting.remove(job)
        self.ran.append(job)
        job.run()

    def finish(self, job: Job) -> None:
        """The store's part."""
        self.ran.remove(job)
        self._store.finish(job)

    def step(self, dice: random.Random) -> Job | None:
        """Run a job or take one in, whichever; the job, or None if there is none."""
        choices = self.runnable() + self.ran
        if not choices:
            return None
        job = dice.choice(choices)
        if job in self.ran:
            self.finish(job)
        else:
            self.run(job)
        return job

    def each(self, dice: random.Random | None = None) -> Iterator[Job]:
        """Run and finish all jobs and those that follow from them; yields after each, for a look in between.

        With dice in any legal order, and then a job comes twice: when it ran and when it was taken in.
        """
        while len(self):
            if dice is not None:
                job = self.step(dice)
            else:
                job = self.ran[0] if self.ran else self.runnable()[0]
                if job not in self.ran:
                    self.run(job)
                self.finish(job)
            if job is not None:
                yield job

    def all(self, dice: random.Random | None = None) -> int:
        """As ``each``, without a look; returns how many."""
        return sum(1 for _ in self.each(dice))
