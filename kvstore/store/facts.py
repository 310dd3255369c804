"""The numbers of a store, flat, by name."""

from __future__ import annotations

from kvstore.lease import ClaimTable, Lease, Pin, Reservation
from kvstore.metrics import Counters
from kvstore.prefix_index.index import PrefixIndex
from kvstore.store.hbm import Hbm
from kvstore.store.hierarchy import Hierarchy
from kvstore.tiers.dram import DramTier


def store_stats(
    counters: Counters,
    index: PrefixIndex,
    dram: DramTier,
    hierarchy: Hierarchy | None,
    hbm: Hbm | None,
    leases: ClaimTable[Lease],
    reservations: ClaimTable[Reservation],
    pins: ClaimTable[Pin],
    n_namespaces: int,
) -> tuple[dict[str, float], dict[str, str]]:
    """Counters and gauges, and facts in words. Takes time proportional to the claims."""
    numbers, texts = counters.snapshot(), {}
    for name, value in dram.stats().items():
        if isinstance(value, str):
            texts[f"dram_{name}"] = value
        else:
            numbers[f"dram_{name}"] = float(value)
    for part in (hierarchy, hbm):
        if part is not None:
            more_numbers, more_texts = part.stats()
            numbers |= more_numbers
            texts |= more_texts
    numbers["block_parts"] = index.n_parts
    numbers["blocks"] = index.n_blocks - index.n_hidden_blocks - index.n_parts
    numbers["hidden_blocks"] = index.n_hidden_blocks
    numbers["namespaces"] = n_namespaces
    for name, ended, total in (
        ("leases", sum(claim.ended for claim in leases), len(leases)),
        ("reservations", sum(claim.ended for claim in reservations), len(reservations)),
    ):
        numbers[name] = total - ended
        numbers[f"{name}_ended_unacknowledged"] = ended
    numbers["pins"] = len(pins)
    return numbers, texts
