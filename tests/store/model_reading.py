"""Steps of the model: leases and pins, their holders and their ends."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvstore.errors import BadInputError, EndedError
from tests.store.model import TTL_DEFAULT_S, TTL_MAX_S, TTLS_S, Held, StoreModel
from tests.store.oracle import WIDTH, Key, keys_of


class ReadingSteps(StoreModel):
    """See ``StoreModel``."""

    def lease(self, dice: random.Random) -> None:
        prompt = self.draw_prompt(dice)
        readers = self.live(prompt[0])
        if readers:
            first, most = dice.choice([0, 0, 1, 2]), dice.choice([0, 0, 1, 3])
            self.take_lease(dice.choice(readers), prompt, first, most, dice.choice(TTLS_S))

    def take_lease(self, reader: int, prompt: Key, first: int, most: int, ttl_s: float, load: object = None) -> None:
        """Lease and compare the outcome, and the bytes, with the model's."""
        n_matched = self.depth(prompt)
        partials, candidates = self.partial(prompt)
        if most and n_matched >= most:
            n_matched, partials = most, {0}
        keys = keys_of(prompt)[first:n_matched]
        n_there = next((i for i, key in enumerate(keys) if key not in self.copies.dram), len(keys))
        lease = self.store.lease(reader, self.ask(prompt), first, most, ttl_s, load=load)
        if n_there < len(keys):
            assert (lease.n_blocks, lease.partial_tokens) == (first + n_there, 0)
            assert lease.n_pending - (len(keys) - n_there) in {int(n > 0) for n in partials}
        else:
            assert lease.n_blocks == n_matched
            assert lease.partial_tokens in partials | {0}
            may_be_below = not all(key in self.copies.dram for key in candidates)
            assert lease.partial_tokens in partials or (may_be_below and lease.n_pending == 1)
        assert lease.n_tokens == lease.n_blocks * WIDTH + lease.partial_tokens
        keys = keys[:n_there]
        with_partial = lease.partial_tokens > 0 and first <= n_matched
        assert len(lease.ids) == len(keys) + with_partial
        if not len(lease.ids):
            assert lease.id == 0
            return
        held = Held(lease.id, prompt[0], self.now_s + min(ttl_s or TTL_DEFAULT_S, TTL_MAX_S), {reader: True}, keys)
        self.snapshot(held, self.rig.slots_of(lease))
        if with_partial:
            held.keys = (*keys, self.partial_key(held.content[-1], candidates))
        for key, content in zip(held.keys, held.content, strict=True):
            self.recorder.verify(key, content)
        self.rig.map_regions(reader, np.array(held.slots), writable=False)
        self.leases.append(held)

    def partial_key(self, content: bytes, candidates: list[Key]) -> Key:
        """Which of the blocks that begin alike came back."""
        return next(key for key in candidates if self.recorder.may_be(key, content))

    def attach(self, dice: random.Random) -> None:
        if not self.leases or not self.live():
            return
        held = dice.choice(self.leases)
        number = dice.choice(self.live())
        tenant = self.sessions[number].tenant
        space = self.spaces[held.space]
        digest = self.rig.namespace(space.block_bytes, space.tenant).digest
        if held.ended or held.deadline_s <= self.now_s or tenant != space.tenant:
            with pytest.raises(EndedError):
                self.store.attach(number, tenant, held.id)
            return
        if held.rights.get(number):
            with pytest.raises(BadInputError, match="holds lease"):
                self.store.attach(number, tenant, held.id, namespace=digest)
            return
        with pytest.raises(BadInputError, match="another namespace"):
            self.store.attach(number, tenant, held.id, namespace=bytes(16))
        lease = self.store.attach(number, tenant, held.id, namespace=digest)
        assert self.rig.slots_of(lease).tolist() == held.slots
        held.rights[number] = True

    def renew(self, dice: random.Random) -> None:
        if not self.leases or not self.sessions:
            return
        ttl_s = dice.choice(TTLS_S)
        held = dice.choice(self.leases)
        number = dice.choice(list(self.sessions))
        if not held.rights.get(number) or held.deadline_s <= self.now_s:
            with pytest.raises(EndedError):
                self.store.renew(number, held.id, ttl_s)
            return
        granted_s = min(ttl_s or TTL_DEFAULT_S, TTL_MAX_S)
        held.deadline_s = max(held.deadline_s, self.now_s + granted_s)
        assert self.store.renew(number, held.id, ttl_s) == pytest.approx(held.deadline_s - self.now_s)

    def release(self, dice: random.Random) -> None:
        if not self.leases:
            return
        held = dice.choice(self.leases)
        number = dice.choice(list(self.sessions))
        assert self.store.release(number, held.id) == (number in held.rights)
        held.rights.pop(number, None)
        if not held.rights:
            self.leases.remove(held)

    def pin(self, dice: random.Random) -> None:
        prompt, ttl_s = self.draw_prompt(dice), dice.choice(TTLS_S)
        if not self.live(prompt[0]) or len(self.pins) > 1:
            return
        number = dice.choice(self.live(prompt[0]))
        keys = keys_of(prompt)[: self.depth(prompt)]
        pin = self.store.pin(number, self.ask(prompt), ttl_s)
        assert len(pin.ids) == len(keys)
        assert bool(pin.id) == bool(keys)
        if keys:
            deadline_s = self.now_s + min(ttl_s or TTL_DEFAULT_S, TTL_MAX_S)
            self.pins.append(Held(pin.id, prompt[0], deadline_s, {number: True}, keys))

    def unpin(self, dice: random.Random) -> None:
        if not self.pins:
            return
        held = dice.choice(self.pins)
        self.pins.remove(held)
        (number,) = held.rights
        assert self.store.unpin(number, held.id)
        assert not self.store.unpin(number, held.id)
