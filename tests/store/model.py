"""A model of the store in plain dictionaries: what every part of it shares.

The model knows which blocks are stored in which tier, who holds what, and through the recorder what every
byte must be. The one thing that it takes from the store is which copies came and went; that those were free
to go, and could come, is checked (see ``copies``).
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
from hypothesis import strategies as st

from kvstore.prefix_index.block_table import DRAM, NVME
from kvstore.store.requests import Prompt
from tests.store.copies import Copies, CopyBook, Event
from tests.store.oracle import Key, depth, keys_of, partial
from tests.store.recorder import Recorder
from tests.store.rig import Rig

DICE = st.integers(0, (1 << 32) - 1).map(random.Random)
TTLS_S = [0.0, 3.0, 900.0]
TTL_DEFAULT_S, TTL_MAX_S = 10.0, 40.0


class Space(NamedTuple):
    """A namespace and a root in it: what never hits another."""

    tenant: str
    block_bytes: int
    salt: str = ""
    lora: str = ""


@dataclass
class Held:
    """A lease, reservation or pin as the model knows it."""

    id: int
    space: int
    deadline_s: float
    rights: dict[int, bool]
    keys: tuple[Key, ...]
    """Leased or pinned blocks; for a reservation the ancestors that it keeps."""
    slots: list[int] = field(default_factory=list)
    generations: list[int] = field(default_factory=list)
    content: list[bytes] = field(default_factory=list)
    writes: tuple[Key, ...] = ()
    """For a reservation: the block that each of its slots is for."""

    @property
    def ended(self) -> bool:
        return not any(self.rights.values())


@dataclass
class Session:
    tenant: str
    live: bool = True


class StoreModel:
    """State, questions and answers of the model; steps are in the classes built on it.

    Made to be combined: with classes of steps, and with a state machine that chooses among them.
    """

    spaces: ClassVar[Sequence[Space]]
    rig: Rig

    def __init__(self) -> None:
        super().__init__()
        self.recorder = Recorder()
        self.copies = CopyBook()
        self.sessions: dict[int, Session] = {}
        self.leases: list[Held] = []
        self.writes: list[Held] = []
        self.pins: list[Held] = []
        self.moving: tuple[Any, Any, Key, tuple[Key, ...]] | None = None
        self.n_sessions = 0
        self.prompt_clients = True
        """Whether clients unmap retired regions at once, or now and then."""
        self._asked: dict[Key, Prompt] = {}
        self._known: dict[bytes, Key] = {}

    @property
    def store(self) -> Any:
        return self.rig.store

    @property
    def now_s(self) -> float:
        return self.rig.clock.now_s()

    # Questions -----------------------------------------------------------------------------------

    def draw_prompt(self, dice: random.Random) -> Key:
        """Few different tokens: prompts share prefixes, part within blocks and end in short rows."""
        return dice.randrange(len(self.spaces)), tuple(dice.randrange(2) for _ in range(dice.randrange(1, 14)))

    def live(self, space: int | None = None) -> list[int]:
        return [
            number
            for number, session in self.sessions.items()
            if session.live and (space is None or session.tenant == self.spaces[space].tenant)
        ]

    def ask(self, prompt: Key) -> Prompt:
        if prompt not in self._asked:
            space = self.spaces[prompt[0]]
            namespace = self.rig.namespace(space.block_bytes, space.tenant)
            made = self.rig.prompt(prompt[1], namespace, space.salt, space.lora)
            self._asked[prompt] = made
            for key, name in zip(keys_of(prompt), made.path.keys(made.root_key), strict=True):
                self._known[name.tobytes()] = key
        return self._asked[prompt]._replace(time_s=self.now_s)

    def forget_prompts(self) -> None:
        """The daemon they were made for is gone."""
        self._asked.clear()

    def depth(self, prompt: Key) -> int:
        return depth(prompt, self.copies.stored)

    def partial(self, prompt: Key) -> tuple[set[int], list[Key]]:
        """How many tokens may match in one more block, and all blocks that may be the one."""
        n, keys = partial(prompt, self.copies.stored)
        return {n}, keys

    def protected(self) -> set[Key]:
        kept = {key for held in self.leases + self.writes + self.pins for key in held.keys}
        if self.moving is not None and not self.moving[0].ended:
            kept.update(self.moving[3])
        return kept

    # What the store did --------------------------------------------------------------------------

    def observe(self, event: Event | None = None) -> None:
        """Learn what came and went since the last look; check that it could."""
        self.copies.observe(self.look(), event or Event(), self.counts(), self.protected())

    def counts(self) -> dict[str, int]:
        return {name: int(self.store.counters[name]) for name in CopyBook.COUNTERS}

    def look(self) -> Copies:
        index = self.store.index
        alive = index.table.alive()
        names = [self._known[key.tobytes()] for key in index.table.key[alive]]
        return Copies(*(self._among(names, index.resident(alive, tier)) for tier in (DRAM, NVME)))

    @staticmethod
    def _among(names: list[Key], there: Iterable[Any]) -> frozenset[Key]:
        return frozenset(name for name, yes in zip(names, there, strict=True) if yes)

    # Bytes ---------------------------------------------------------------------------------------

    def write_into(self, held: Held) -> None:
        for slot, content in zip(held.slots, held.content, strict=True):
            self.rig.dram.view(slot)[: len(content)] = np.frombuffer(content, np.uint8)

    def snapshot(self, held: Held, slots: Any) -> None:
        held.slots = slots.tolist()
        held.generations = self.rig.dram.locate(slots).generations.tolist()
        held.content = self.rig.bytes_at(slots, self.spaces[held.space].block_bytes)

    # What must hold after every step -------------------------------------------------------------

    def parts_agree(self) -> None:
        self.store.check()

    def every_byte_is_accounted_for(self) -> None:
        facts = self.rig.dram_bytes()
        parts = [facts[name] for name in ("used", "reserved", "quarantined", "retired_mapped", "free")]
        assert min(parts) >= 0
        assert sum(parts) <= self.rig.dram.capacity_bytes
        assert facts["used"] == sum(self.spaces[space].block_bytes for space, _ in self.copies.dram)
        assert facts["quarantined"] == sum(
            len(held.slots) * self.spaces[held.space].block_bytes for held in self.writes if held.ended
        )
        numbers = self.store.stats()[0]
        assert numbers["leases_ended_unacknowledged"] == sum(held.ended for held in self.leases)
        assert numbers["leases"] == sum(not held.ended for held in self.leases)

    def what_is_found_is_what_was_stored(self) -> None:
        for key in self.copies.stored | {key for held in self.writes for key in held.writes}:
            self.found_as_stored(key)

    def found_as_stored(self, key: Key) -> None:
        prompt = self.ask(key)
        found = self.store.index.match(prompt.root_key, prompt.path)
        assert len(found.ids) == self.depth(key)
        assert found.partial_tokens in self.partial(key)[0]

    def bytes_are_those_that_were_committed(self) -> None:
        index = self.store.index
        alive = index.table.alive()
        alive = alive[index.resident(alive, DRAM)]
        for key, slot in zip(index.table.key[alive], index.slots(alive).tolist(), strict=True):
            name = self._known[key.tobytes()]
            size = self.spaces[name[0]].block_bytes
            self.recorder.verify(name, self.rig.dram.view(slot)[:size].tobytes())

    def held_slots_are_untouched(self) -> None:
        for held in self.leases + self.writes:
            slots = np.array(held.slots, np.int64)
            assert self.rig.bytes_at(slots, self.spaces[held.space].block_bytes) == held.content
            assert self.rig.dram.locate(slots).generations.tolist() == held.generations

    def check_all(self) -> None:
        self.parts_agree()
        self.every_byte_is_accounted_for()
        self.what_is_found_is_what_was_stored()
        self.bytes_are_those_that_were_committed()
        self.held_slots_are_untouched()
