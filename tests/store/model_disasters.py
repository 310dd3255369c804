"""Steps of the model: disks that fail, bytes that rot, processes that die, power that goes."""

from __future__ import annotations

import errno
import random
import shutil
import tempfile
from ctypes import string_at
from pathlib import Path

from kvstore.tiers.nvme.crash import MODES
from kvstore.tiers.nvme.files import Extent
from tests.store.model_tiers import TierSteps
from tests.store.oracle import Key, closed, orphans
from tests.store.two_tier import CATALOG, Settings, TwoTierRig
from tests.tiers.segment_files import SECTOR_BYTES, directory_bytes, frame_at, frames_in, key_in

FAULTS_MAX = 3


class DisasterSteps(TierSteps):
    """See ``StoreModel``."""

    base: Path
    """Where its directories go."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir=self.base))
        self.n_directories = 0
        self.index_pages_sound = True
        """No write was ever damaged in this directory: all frames can be found by what lies beside them."""

    def new_directory(self) -> Path:
        self.n_directories += 1
        return self.folder / f"disk-{self.n_directories}"

    def first_rig(self, settings: Settings) -> None:
        self.rig = TwoTierRig(self.new_directory(), settings)

    def remove_folder(self) -> None:
        shutil.rmtree(self.folder)

    # Bytes that rot ------------------------------------------------------------------------------

    def rot(self, dice: random.Random) -> None:
        """One bit of a block on the disk is wrong. Not while it may be copied elsewhere."""
        if not self.copies.nvme or self.rig.jobs.ran:
            return
        key = dice.choice(sorted(self.copies.nvme))
        name = self.name_of(key)
        for frame in frames_in(self.rig.directory):
            if frame.key == name and frame.payload():
                frame.flip(
                    dice.choice([dice.randrange(160), frame.payload_offset + dice.randrange(frame.payload_bytes)])
                )
                self.copies.suspect.add(key)

    def name_of(self, key: Key) -> bytes:
        prompt = self.ask(key)
        return bytes(prompt.path.keys(prompt.root_key)[-1])

    # Disks that fail -----------------------------------------------------------------------------

    def order_fault(self, dice: random.Random) -> None:
        files = self.rig.files
        if len(files._faults) >= FAULTS_MAX:
            files.release_all()
        code = dice.choice([errno.EIO, errno.ENOSPC])
        after = dice.choice([0, 0, 1, 5])
        orders = [
            lambda: files.fail("read", errno.EIO, after=after, where=self.will_misread),
            lambda: files.shorten("read", after=after, where=self.will_misread),
            lambda: files.flip("read", after=after, where=self.will_misread),
            lambda: files.fail("write", code, after=after),
            lambda: files.shorten("write", after=after),
            lambda: files.flip("write", after=after, where=self.will_miswrite),
            lambda: files.tear(after=after, where=self.will_miswrite),
            lambda: files.hold(after=after, times=dice.choice([1, 4])),
            lambda: files.fail("sync", code, after=after),
            lambda: files.fail("create", code, after=after),
            lambda: files.fail("sync_directory", code, after=after),
        ]
        dice.choice(orders)()

    def will_misread(self, name: str, extent: Extent | None) -> bool:
        """All blocks of the extent may come back wrong, or not at all."""
        assert extent is not None
        path = self.rig.directory / name
        at = extent.offset
        while at < extent.offset + extent.length_bytes:
            frame = frame_at(path, at)
            if frame is not None and frame.key in self._known:
                self.copies.suspect.add(self._known[frame.key])
            at += SECTOR_BYTES
        return True

    def will_miswrite(self, _name: str, extent: Extent | None) -> bool:
        """All blocks of the extent may lie wrong on the disk."""
        assert extent is not None
        self.index_pages_sound = False
        for address, length in extent.buffers:
            for at in range(0, length, SECTOR_BYTES):
                key = key_in(string_at(address + at, SECTOR_BYTES))
                if key in self._known:
                    self.copies.suspect.add(self._known[key])
        return True

    # Ends ----------------------------------------------------------------------------------------

    def die(self, dice: random.Random) -> None:
        """kill -9, and another daemon on the same directory; it may have lost its catalog."""
        must = closed(self.copies.nvme - self.copies.suspect)
        self.forget_all()
        lose_catalog = dice.random() < 0.25
        recovery = dice.choice(["normal", "normal", "strict", "none"])
        if lose_catalog:
            self.rig.abandon()
            shutil.rmtree(self.rig.directory / CATALOG)
            if not self.index_pages_sound:
                must = set()
            self.rig = self.rig.reopened(self.rig.directory, recovery)
        else:
            self.rig = self.rig.killed(recovery)
        self.found_again(must if recovery != "none" else set(), dice)

    def cut_power(self, dice: random.Random) -> None:
        must = closed(self.copies.nvme - self.copies.suspect)
        self.forget_all()
        recovery = dice.choice(["normal", "normal", "strict"])
        mode = dice.choice(MODES)
        self.rig = self.rig.power_cut(self.new_directory(), mode, dice.randrange(1 << 30), recovery)
        self.found_again(must, dice)

    def forget_all(self) -> None:
        """Nobody holds anything in a daemon that is gone."""
        self.sessions.clear()
        self.leases, self.writes, self.pins, self.moving = [], [], [], None
        self.loads, self.persists = [], []
        self.forget_prompts()

    def found_again(self, must: set[Key], dice: random.Random) -> None:
        """What was durable is there; what is there is on the disk, and has its ancestors."""
        now = self.look()
        on_disk = {self._known[frame.key] for frame in frames_in(self.rig.directory) if frame.key in self._known}
        assert not now.dram
        assert must <= now.nvme, "a block that was durable is lost"
        assert now.nvme - self.copies.suspect <= on_disk, "a block was found that is not there"
        assert not orphans(now.nvme, now.nvme), "a block was found without its parent"
        self.copies.restart(now, self.counts())
        self.cold = set(now.nvme)
        self.connect_some(dice)

    # What must hold after every step -------------------------------------------------------------

    def the_disk_holds_its_cap(self) -> None:
        assert directory_bytes(self.rig.directory) <= self.rig.nvme.capacity_bytes

    def check_disk(self) -> None:
        """Each block that is on NVMe lies there, found by hand, with bytes that may come back for it."""
        good = set()
        for frame in frames_in(self.rig.directory):
            key = self._known.get(frame.key)
            if key in self.copies.nvme and self.recorder.may_be(key, frame.payload()):
                good.add(key)
        assert self.copies.nvme - good <= self.copies.suspect
