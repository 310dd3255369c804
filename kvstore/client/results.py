"""What a client's calls return."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Match:
    """The longest stored prefix of a prompt: whole blocks, and tokens of one further block.

    A lease of the same prefix has one entry more than ``n_blocks`` if ``partial_tokens`` > 0.
    """

    n_blocks: int
    n_tokens: int
    """Tokens that match in all: those of the whole blocks, and ``partial_tokens``."""
    partial_tokens: int
    reason: str = ""
    """Why nothing is known, if the daemon could not be asked."""
    n_dram_blocks: int = 0
    """Leading whole blocks that are in DRAM: what a lease gives without waiting."""
    by_group: tuple[int, ...] = ()
    """Of a hybrid namespace, per group: the blocks of the hit if no other but full and MLA groups counted."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """How much of a prompt is stored in which tier, and what it costs to have it: for choosing among replicas.

    The name is that of NVIDIA Dynamo's router, whose overlap blocks these are, in tokens.
    """

    n_tokens: int
    """Tokens that match, partial blocks included: ``n_dram_tokens`` and ``n_nvme_tokens``."""
    n_dram_tokens: int
    n_nvme_tokens: int
    """On NVMe only."""
    n_loading_tokens: int
    """Of those, on their way to DRAM already."""
    load_s: float
    """Expected seconds from asking for a lease until all is in DRAM and copied to its reader by one thread; what waits
    for the disk before it counts. ``inf``: the disk is stuck."""
    load_error: float
    """How far off such times were lately: what was loaded took typically ``load_s`` times or divided by this. 1.0 is
    exact, 4.0 says that ``load_s`` is a guess: nothing was loaded yet."""
    reason: str = ""
    """Why nothing is known, if the daemon could not be asked."""
    n_hbm_tokens: int = 0
    """Of all those that match, those that have a copy in HBM, too."""


@dataclass(frozen=True, slots=True)
class PutResult:
    """What became of the blocks of a put; the first four counts add up to the blocks given."""

    n_present: int
    n_stored: int
    n_duplicate: int
    n_skipped: int
    reason: str = ""
    n_durable: int = 0
    """Leading ones of them that a crash can't take any more; only known with ``durable_within_s``."""


@dataclass(frozen=True, slots=True)
class GetResult:
    """Blocks copied, and how many tokens of the prompt they and the blocks before them cover."""

    n_blocks: int
    n_tokens: int
    reason: str = ""
    n_pending: int = 0
    """Blocks that match too, but were not in DRAM in time."""


@dataclass(frozen=True, slots=True)
class Prefetch:
    """How much of a prompt is stored (whole blocks), in DRAM (leading ones), and on its way there."""

    n_blocks: int
    n_ready: int
    n_pending: int
    eta_s: float
    """A guess when the last of them is there, in seconds from now."""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Persist:
    """How much of a prompt is stored, durable (leading blocks), and still to be written."""

    n_blocks: int
    n_durable: int
    n_pending: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Pinned:
    """Blocks kept from eviction until ``unpin`` or the end of their time."""

    id: int
    n_blocks: int
    ttl_s: float
