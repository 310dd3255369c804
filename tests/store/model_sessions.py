"""Steps of the model: sessions come and go, rights end, time passes."""

from __future__ import annotations

import random

from tests.store.model import Session, StoreModel

SESSIONS_MAX = 5


class SessionSteps(StoreModel):
    """See ``StoreModel``."""

    def connect_some(self, dice: random.Random) -> None:
        """Two sessions of the first tenant and one of each other, as a run begins."""
        self.prompt_clients = dice.random() < 0.7
        tenants = list(dict.fromkeys(space.tenant for space in self.spaces))
        for tenant in (tenants[0], *tenants):
            self.add_session(tenant)

    def add_session(self, tenant: str) -> None:
        self.n_sessions += 1
        self.sessions[self.n_sessions] = Session(tenant)

    def connect(self, dice: random.Random) -> None:
        if len(self.sessions) < SESSIONS_MAX:
            self.add_session(dice.choice([space.tenant for space in self.spaces]))

    def cut_off(self, dice: random.Random) -> None:
        if not self.live():
            return
        number = dice.choice(self.live())
        self.store.end_rights(number)
        self.sessions[number].live = False
        for held in self.leases + self.writes:
            if number in held.rights:
                held.rights[number] = False
        self.pins = [held for held in self.pins if number not in held.rights]

    def come_back(self, dice: random.Random) -> None:
        away = [number for number, session in self.sessions.items() if not session.live]
        if away:
            self.sessions[dice.choice(away)].live = True

    def process_gone(self, dice: random.Random) -> None:
        if len(self.sessions) < 2:
            return
        number = dice.choice(list(self.sessions))
        self.store.forget_session(number)
        del self.sessions[number]
        for held in self.leases:
            held.rights.pop(number, None)
        self.leases = [held for held in self.leases if held.rights]
        self.writes = [held for held in self.writes if number not in held.rights]
        self.pins = [held for held in self.pins if number not in held.rights]

    def all_gone(self) -> None:
        """Every process ends: nothing is held any more, but for what the store itself has under way."""
        for session in list(self.sessions):
            self.store.forget_session(session)
        self.rig.unmap_retired()
        if self.moving is not None:
            self.store.cancel_reclaim(self.moving[1])
            self.store.finish_reserve(self.moving[0])
        self.sessions.clear()
        self.leases, self.writes, self.pins, self.moving = [], [], [], None

    def unmap(self, _dice: random.Random) -> None:
        self.rig.unmap_retired()

    def time_passes(self, dice: random.Random) -> None:
        self.rig.clock.advance(dice.choice([0.5, 1.0, 3.0, 10.0]))
        if dice.random() < 0.3:
            return
        due = {held.id for held in self.leases + self.writes if not held.ended and held.deadline_s <= self.now_s}
        ended = {claim.id for claim in self.store.expire() if claim.holders}
        if self.moving is not None:
            ended.discard(self.moving[0].id)
        assert ended == due
        for held in self.leases + self.writes:
            if held.id in due:
                held.rights = dict.fromkeys(held.rights, False)
        self.pins = [held for held in self.pins if held.deadline_s > self.now_s]
