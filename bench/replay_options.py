"""What a replay or a simulation is asked for: the requests, the tiers' room, the clients."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from kvstore.bench import workload as work
from kvstore.bench.generate import ConversationOptions, generate_trace
from kvstore.bench.trace import load_trace
from kvstore.bench.workload import Workload
from kvstore.config import DEFAULT_POLICY, MIB, WRITE_POLICIES
from kvstore.errors import BadInputError
from kvstore.recompute import checked_doubling_tokens
from kvstore.types import MAX_BLOCK_BYTES

MAX_CLIENTS = 256
DEFAULT_CAPACITY_PERCENT = 5.0
DEFAULT_HBM_PERCENT = 1.0
DEFAULT_DURABLE_EVERY = 16


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """What to replay and how. Without ``trace`` the conversations are generated.

    ``capacity_percent`` and ``capacity_blocks`` are the room in DRAM, in % of the unique blocks or in blocks, not
    both. When neither is given it is 5%, but at least what the smallest daemon holds. ``nvme_percent`` and
    ``nvme_blocks`` are the same for NVMe, ``hbm_percent`` and ``hbm_blocks`` for copies in HBM, on ``hbm_device``;
    without them there is no such tier, but with ``hbm`` one of 1%, or what the smallest daemon holds.

    ``policy``: the daemon's default if it is empty, with ``kill_at`` LRU.
    ``durable_every``: after so many requests a client waits until their blocks are durable (0: never; None: 16 with
    NVMe). It paces the clients, who replay far faster than an engine would compute, to what the disk can take.
    ``tenants``: so many share the daemon; conversations are dealt to them, each has clients and blocks of its own.
    ``kill_at``: SIGKILL the daemon and start it again when this share of the requests is done.
    ``attention_doubling_tokens``: of the model (``kvstore.recompute``), 0 if unknown.
    """

    trace: Path | None = None
    conversations: ConversationOptions = field(default_factory=ConversationOptions)
    policy: str = ""
    capacity_percent: float | None = None
    capacity_blocks: int | None = None
    nvme_percent: float | None = None
    nvme_blocks: int | None = None
    hbm: bool = False
    hbm_percent: float | None = None
    hbm_blocks: int | None = None
    hbm_device: str = "simulated"
    write_policy: str = "through"
    block_bytes: int = 64 << 10
    block_tokens: int | None = None
    clients: int = 1
    tenants: int = 1
    limit: int | None = None
    seed: int = 0
    timeout_s: float = 10.0
    durable_every: int | None = None
    kill_at: float | None = None
    attention_doubling_tokens: float = 0.0

    def __post_init__(self) -> None:
        if not self.policy:
            object.__setattr__(self, "policy", DEFAULT_POLICY if self.kill_at is None else "lru")
        for tier, option in (("capacity", "dram"), ("nvme", "nvme"), ("hbm", "hbm")):
            percent, blocks = getattr(self, f"{tier}_percent"), getattr(self, f"{tier}_blocks")
            if percent is not None and blocks is not None:
                raise BadInputError(f"give --{option}-percent or --{option}-blocks, not both")
            if percent is not None:
                work.capacity_blocks(1, percent, f"--{option}-percent")
        for name, most in (("block_bytes", MAX_BLOCK_BYTES), ("clients", MAX_CLIENTS)):
            if not 1 <= getattr(self, name) <= most:
                raise BadInputError(f"{name} ({_option(name)}) is {getattr(self, name)}; it must be from 1 to {most}")
        for name in ("capacity_blocks", "nvme_blocks", "hbm_blocks", "limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise BadInputError(f"{name} is {value}; {_option(name)} must be at least 1")
        checked_doubling_tokens(self.attention_doubling_tokens)
        self._check_durability()
        self._check_tenants()
        if self.has_hbm and self.kill_at is not None:
            raise BadInputError("--kill-at looks for what outlives the daemon, and HBM does not: leave one of them out")

    def _check_tenants(self) -> None:
        if not 1 <= self.tenants <= MAX_CLIENTS:
            raise BadInputError(f"tenants (--tenants) is {self.tenants}; it must be from 1 to {MAX_CLIENTS}")
        if self.n_clients % self.tenants:
            raise BadInputError(
                f"{self.clients} clients (--clients) can't be dealt to {self.tenants} tenants (--tenants): give a "
                f"multiple of {self.tenants}"
            )
        if self.tenants > 1 and self.kill_at is not None:
            raise BadInputError("--kill-at checks what one tenant must find again: leave out --tenants, or --kill-at")

    @property
    def n_clients(self) -> int:
        """Processes that replay: at least one for each tenant."""
        return max(self.clients, self.tenants)

    def _check_durability(self) -> None:
        if self.write_policy not in WRITE_POLICIES:
            raise BadInputError(f"write_policy is {self.write_policy!r}; known are {', '.join(WRITE_POLICIES)}")
        if self.durable_every is not None and self.durable_every < 0:
            raise BadInputError(
                f"durable_every is {self.durable_every}; --durable-every must be at least 1, or 0 for never"
            )
        if self.kill_at is None:
            return
        if not 0 < self.kill_at < 1:
            raise BadInputError(f"kill_at (--kill-at) is {self.kill_at!r}; it must be between 0 and 1")
        if not self.has_nvme:
            raise BadInputError("--kill-at needs a tier that outlives the daemon: give --nvme-percent or --nvme-blocks")
        if self.policy != "lru":
            raise BadInputError(
                f"--kill-at checks what LRU must have kept, the policy is {self.policy!r}: use --policy lru"
            )
        if not self.waits_every:
            raise BadInputError("--kill-at checks what was acknowledged durable: give --durable-every 1 or more")

    @property
    def has_nvme(self) -> bool:
        """Whether there is an NVMe tier."""
        return self.nvme_percent is not None or self.nvme_blocks is not None

    @property
    def has_hbm(self) -> bool:
        """Whether there is an HBM tier."""
        return self.hbm or self.hbm_percent is not None or self.hbm_blocks is not None

    @property
    def waits_every(self) -> int:
        """``durable_every`` in force."""
        if self.durable_every is None:
            return DEFAULT_DURABLE_EVERY if self.has_nvme else 0
        return self.durable_every

    def load(self) -> Workload:
        """Read or generate the requests; blocks. Raises TraceError for a file that can't be used."""
        if self.trace is not None:
            return load_trace(self.trace, self.limit, self.block_tokens)
        return generate_trace(self.conversations, self.limit)

    def capacity(self, workload: Workload) -> int:
        """Room in DRAM, in blocks."""
        if self.capacity_blocks is not None:
            return self.capacity_blocks
        if self.capacity_percent is not None:
            return work.capacity_blocks(workload.unique_blocks, self.capacity_percent)
        return self._at_least_a_tier(work.capacity_blocks(workload.unique_blocks, DEFAULT_CAPACITY_PERCENT))

    def nvme_capacity(self, workload: Workload) -> int | None:
        """Room on NVMe, in blocks; None without such a tier."""
        if self.nvme_percent is not None:
            return work.capacity_blocks(workload.unique_blocks, self.nvme_percent)
        return self.nvme_blocks

    def hbm_capacity(self, workload: Workload) -> int | None:
        """Room in HBM, in blocks; None without such a tier."""
        if self.hbm_percent is not None:
            return work.capacity_blocks(workload.unique_blocks, self.hbm_percent)
        if self.hbm and self.hbm_blocks is None:
            return self._at_least_a_tier(work.capacity_blocks(workload.unique_blocks, DEFAULT_HBM_PERCENT))
        return self.hbm_blocks

    def hbm_bytes(self, workload: Workload) -> int:
        """What the HBM tier of the daemon must be given for that room, 0 without one; raises as ``dram_bytes``."""
        blocks = self.hbm_capacity(workload)
        return 0 if blocks is None else self._tier_bytes(blocks, "--hbm-blocks")

    def dram_bytes(self, workload: Workload) -> int:
        """What the DRAM tier of the daemon must be given for that room.

        Raises BadInputError if that is less than a daemon can have.
        """
        return self._tier_bytes(self.capacity(workload), "--capacity-blocks")

    def _at_least_a_tier(self, blocks: int) -> int:
        """So many blocks, or what the smallest tier of a daemon holds."""
        return max(blocks, -(-MIB // work.dram_capacity_bytes(1, self.block_bytes)))

    def _tier_bytes(self, blocks: int, option: str) -> int:
        n_bytes = work.dram_capacity_bytes(blocks, self.block_bytes)
        if n_bytes < MIB:
            least = -(-MIB * blocks // n_bytes)
            raise BadInputError(
                f"a capacity of {blocks} blocks of {self.block_bytes} bytes is below a daemon's least, 1 MiB"
                f": replay more requests, or give {option} {least} or more"
            )
        return n_bytes


def _option(name: str) -> str:
    """The command line's word for a field."""
    return "--" + {"capacity_blocks": "dram_blocks"}.get(name, name).replace("_", "-")
