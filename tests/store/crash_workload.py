"""A workload whose power is cut at every point where something becomes durable: each state that a disk could be
found in is written as a directory of its own, opened by another store, and read."""

from __future__ import annotations

import contextlib
import hashlib
import io
import random
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np

from kvstore.offload import WritePolicy
from kvstore.store.hierarchy import WriteBehind
from kvstore.tiers.nvme import catalog_probe
from kvstore.tiers.nvme.crash import Mode
from kvstore.tiers.nvme.names import RECORD, Records, intact
from tests.store.model import Space
from tests.store.model_tiers import TierSteps
from tests.store.model_writing import WritingSteps
from tests.store.oracle import Key, closed, keys_of, orphans, parent_of
from tests.store.two_tier import Settings, Sizes, TwoTierRig, nvme_bytes_for

KIB = 1 << 10
READER = 1


class CrashWorkload(WritingSteps, TierSteps):
    """``run`` does operations; at every sync point the states of all ``modes`` are judged. ``counts`` says how many."""

    spaces: ClassVar = [Space("a", 4 * KIB), Space("a", 12 * KIB, salt="s"), Space("b", 4 * KIB)]

    def __init__(self, folder: Path, policy: WritePolicy, seed: int, modes: Sequence[Mode]) -> None:
        super().__init__()
        self.folder = folder
        sizes = Sizes(96 * KIB, 24 * KIB, 8 * KIB, nvme_bytes=nvme_bytes_for(7))
        write = WriteBehind(policy, queue_bytes_max=1 << 20)
        self.rig = TwoTierRig(self.folder / "disk", Settings(sizes, write, durability=True))
        self.counts_by_mode: Counter[str] = Counter()
        self._dice = random.Random(seed)
        self._seed = seed
        self._modes = modes
        self._judged: dict[bytes, set[Key]] = {}
        assert self.rig.power is not None
        self.rig.power.at_point = self.at_point

    def run(self, n_operations: int) -> None:
        dice = self._dice
        weights = {
            self.put: 10, self.read: 6, self.begin_persist: 2, self.look_at_persist: 2, self.work_much: 8, self.tick: 1,
        }  # fmt: skip
        self.connect_some(dice)
        for _ in range(n_operations):
            dice.choices(list(weights), list(weights.values()))[0](dice)
            self.rig.unmap_retired()
            self.observe()
        self.settle(dice)
        self.check_all()

    def close(self) -> None:
        self.all_gone()
        self.rig.close()

    # Operations ----------------------------------------------------------------------------------

    def put(self, dice: random.Random) -> None:
        self.reserve(dice)
        while self.moving is not None:
            self.end_move(dice)
        while self.writes:
            self.commit(dice)

    def read(self, dice: random.Random) -> None:
        self.begin_load(dice)
        self.work_much(dice)
        self.take_load(dice)
        while self.leases:
            self.release(dice)

    # Judgement -----------------------------------------------------------------------------------

    def at_point(self, point: int) -> None:
        """The power could go now: what is on NVMe as far as anybody was told must be found."""
        must = closed(self.copies.nvme)
        for mode in self._modes:
            target = self.folder / f"{point}-{mode}"
            assert self.rig.power is not None
            self.rig.power.materialize(target, mode, self._seed)
            state = digest_of(target)
            if state not in self._judged:
                self._judged[state] = self.found_in(target)
                self.counts_by_mode["different states"] += 1
            shutil.rmtree(target)
            lost = must - self._judged[state]
            assert not lost, f"point {point}, {mode}: {len(lost)} durable blocks are lost"
            self.counts_by_mode[mode] += 1

    def found_in(self, directory: Path) -> set[Key]:
        """Blocks that a store finds in a directory, with the bytes of all of them compared."""
        rig = TwoTierRig(directory, Settings(Sizes(1 << 20, 256 * KIB, 64 * KIB, self.rig.nvme.capacity_bytes)))
        try:
            table = rig.store.index.table
            found = {self._known[key.tobytes()] for key in table.key[table.alive()]}
            assert not orphans(found, found), "a block was found without its parent"
            for key in sorted(found - {parent_of(key) for key in found}):
                self.read_back(rig, key)
            assert rig.store.counters["onboarded_blocks"] == len(found)
            return found
        finally:
            rig.abandon()

    def read_back(self, rig: TwoTierRig, key: Key) -> None:
        space = self.spaces[key[0]]
        namespace = rig.namespace(space.block_bytes, space.tenant)
        prompt = rig.prompt(key[1], namespace, space.salt, space.lora)
        load = rig.store.begin_load(prompt)
        rig.jobs.all()
        lease = rig.store.lease(READER, prompt, load=load)
        keys = keys_of(key)
        assert len(lease.ids) == len(keys), f"{key} is found and can't be read"
        for each, content in zip(keys, rig.bytes_at(rig.slots_of(lease), space.block_bytes), strict=True):
            self.recorder.verify(each, content)
        if load is not None:
            rig.store.end_load(load)


def read_names_here(path: Path) -> Records | None:
    """``read_names`` without a process of its own, whose start takes longer than all else; for sound catalogs."""
    if not (path / "data.mdb").is_file():
        return None
    out = io.TextIOWrapper(io.BytesIO())
    with contextlib.redirect_stdout(out):
        code = catalog_probe.main(str(path))
    records = np.frombuffer(out.buffer.getvalue(), RECORD)
    return records if code == 0 and intact(records).all() else None


def digest_of(directory: Path) -> bytes:
    """What a directory holds, names and bytes."""
    state = hashlib.blake2b(digest_size=16)
    for path in sorted(directory.rglob("*")):
        state.update(str(path.relative_to(directory)).encode() + b"\0")
        if path.is_file():
            content = path.read_bytes()
            state.update(len(content).to_bytes(8, "little") + content)
    return state.digest()
