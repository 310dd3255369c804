"""Two tiers of blocks as one plain dictionary: what the index must answer. Shares no code with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tests.prefix_index.prompts import BLOCK_TOKENS, Path, shared_plain

Key = tuple[bytes, Path]


@dataclass(slots=True)
class Block:
    dram: int | None = None
    nvme: int | None = None
    pins: int = 0
    used: int = 0
    hits: int = 0
    cold: bool = False

    @property
    def broken(self) -> bool:
        return self.dram is None and self.nvme is None


class Refused(Exception):  # noqa: N818 - it is no fault
    """What is asked for can't be."""


class Oracle:
    """Every block is one entry, keyed by its whole path. Slow and simple: every question looks at everything."""

    def __init__(self) -> None:
        self.blocks: dict[Key, Block] = {}
        self.clock = 0

    # Questions

    def before(self, key: Key) -> Key | None:
        return (key[0], key[1][:-1]) if len(key[1]) > 1 else None

    def children(self, key: Key) -> list[Key]:
        return [k for k in self.blocks if k[0] == key[0] and k[1][:-1] == key[1]]

    def line(self, key: Key) -> list[Key]:
        """From the first block to this one."""
        return [(key[0], key[1][: i + 1]) for i in range(len(key[1]))]

    def named(self, root: bytes, rows: Path, n_rows: int) -> list[Key]:
        """Blocks of the leading rows, broken or not; from now on their rows are known."""
        out: list[Key] = []
        for i in range(n_rows):
            key = (root, rows[: i + 1])
            if key not in self.blocks:
                break
            self.blocks[key].cold = False
            out.append(key)
        return out

    def match(self, root: bytes, rows: Path) -> tuple[list[Key], int, set[Key]]:
        """Whole blocks, tokens of a partial one, and which blocks may be it."""
        n_full = sum(len(row) == BLOCK_TOKENS for row in rows)
        out = self.named(root, rows, n_full)
        if len(out) == n_full:
            self.named(root, rows, len(rows))
        for i, key in enumerate(out):
            if self.blocks[key].broken:
                out = out[:i]
                break
        n = len(out)
        if n == len(rows):
            return out, 0, set()
        shared = {
            key: shared_plain(key[1][-1], rows[n])
            for key, block in self.blocks.items()
            if key[0] == root and len(key[1]) == n + 1 and key[1][:n] == rows[:n]
            if not block.broken and not block.cold
        }
        best = max(shared.values(), default=0)
        return out, best, {key for key, size in shared.items() if size == best and best}

    def evictable_dram(self, key: Key) -> bool:
        block = self.blocks[key]
        if block.dram is None or block.pins:
            return False
        return all(self.blocks[kid].dram is None for kid in self.children(key))

    def evictable_nvme(self, key: Key) -> bool:
        block, kids = self.blocks[key], self.children(key)
        if block.nvme is None or block.pins or any(self.blocks[kid].nvme is not None for kid in kids):
            return False
        return block.dram is not None or not kids

    def in_order(self, evictable: Callable[[Key], bool]) -> list[Key]:
        return sorted(filter(evictable, self.blocks), key=lambda key: self.blocks[key].used)

    def unpersisted(self, keys: Iterable[Key]) -> list[Key]:
        out: list[Key] = []
        for key in keys:
            line = self.line(key)
            todo = [k for k in line if self.blocks[k].nvme is None]
            if not any(self.blocks[k].dram is None or self.blocks[k].cold for k in todo):
                out += [k for k in todo if k not in out]
        return out

    def durable(self) -> list[Key]:
        """What is on NVMe down from the first block without a gap."""
        return [key for key in self.blocks if all(self.blocks[k].nvme is not None for k in self.line(key))]

    # Changes

    def access(self, keys: list[Key]) -> None:
        for key in reversed(keys):
            self.clock += 1
            self.blocks[key].used = self.clock
            self.blocks[key].hits = min(self.blocks[key].hits + 1, 255)

    def insert(self, root: bytes, rows: Path, first: int, slots: list[int]) -> list[bool]:
        end = first + len(slots)
        if end > first:
            self.named(root, rows, end)
        keys = [(root, rows[: i + 1]) for i in range(end)]
        if end > first and any(key not in self.blocks or self.blocks[key].broken for key in keys[:first]):
            raise Refused
        new: list[Key] = []
        back: list[Key] = []
        taken: list[bool] = []
        for key, slot in zip(keys[first:], slots, strict=True):
            known = key in self.blocks
            block = self.blocks.setdefault(key, Block())
            taken.append(block.dram is None)
            if block.dram is None:
                block.dram = slot
                (back if known else new).append(key)
        self.access(new)
        self.access(back)
        return taken

    def evict_dram(self, key: Key) -> bool:
        self.blocks[key].dram = None
        return self.leave(key)

    def evict_nvme(self, key: Key) -> bool:
        self.blocks[key].nvme = None
        return self.leave(key)

    def leave(self, key: Key | None) -> bool:
        """Whether the block leaves, as it has no copy, no children and no pins; then so may the one before."""
        if key is None or key not in self.blocks:
            return False
        block = self.blocks[key]
        if not block.broken or block.pins or self.children(key):
            return False
        del self.blocks[key]
        self.leave(self.before(key))
        return True

    def reopen(self, order: list[Key], dram: list[Key]) -> None:
        """A new process finds on NVMe the blocks of ``order``, the oldest first, and then in DRAM ``dram``."""
        old, self.blocks, self.clock = self.blocks, {}, 0
        for key in order + [key for key in dram if key not in order]:
            self.clock += 1
            self.blocks[key] = Block(used=self.clock, hits=1, cold=True)
        for key in order:
            self.blocks[key].nvme = old[key].nvme
        for key in dram:
            self.blocks[key].dram = old[key].dram
