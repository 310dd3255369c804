"""Puts a store together from a configuration, and takes it apart."""

from __future__ import annotations

import logging
from contextlib import ExitStack

from kvstore.clock import Clock
from kvstore.compression.frame import inspect, verify_frame
from kvstore.config import PAGE_BYTES, DaemonConfig, HbmOptions
from kvstore.config.here import check_numa_node, check_nvme_place
from kvstore.logs import about
from kvstore.native import numa
from kvstore.offload import WritePolicy
from kvstore.plan.placement import place
from kvstore.prefix_index.index import PrefixIndex
from kvstore.prefix_index.policies import make_tier_policies
from kvstore.prefix_index.policy_time import TimedPolicy
from kvstore.promote import Promotion
from kvstore.server.hbm_device import open_hbm_device
from kvstore.server.succession import Succession
from kvstore.store.hbm import HbmSetup
from kvstore.store.hierarchy import WriteBehind
from kvstore.store.requests import LeaseLimits
from kvstore.store.store import Store
from kvstore.tiers.dram import DramTier
from kvstore.tiers.hbm import HbmTier
from kvstore.tiers.nvme.files import Files
from kvstore.tiers.nvme.tier import NvmeTier

GPU_PAGE_BYTES = 2 << 20
"""What a GPU shares is whole pages of its own."""

log = logging.getLogger("kvstore.server")


def make_store(
    config: DaemonConfig, clock: Clock, files: Files | None = None, succession: Succession | None = None
) -> Store:
    """The store of a daemon with these settings. ``files`` replaces the device of the NVMe tier.

    ``succession`` is told of all its memory, and says what to take over. Blocks while an NVMe tier reads its
    catalog. Raises ConfigError if a tier can't be used as it is.
    """
    with ExitStack() as opened:
        nvme = _open_nvme(config, clock, files)
        if nvme is not None:
            opened.callback(nvme.close)
        dram = DramTier(
            config.dram_bytes,
            region_bytes=config.region_bytes_effective,
            starter_bytes=config.starter_bytes,
            prefault=config.prefault,
            ledger=succession.keeper if succession is not None else None,
            former=succession.former if succession is not None else None,
            numa_node=_dram_node(config),
            unsealed=config.isolation == "tenant",
        )
        opened.callback(dram.close)
        hbm = _open_hbm(config.hbm, opened)
        policy = make_tier_policies(
            config.policy, config.nvme_policy, learn_aside=config.policy_clock == "system", hbm=hbm is not None
        )
        index = PrefixIndex(TimedPolicy(policy), nvme=nvme is not None, tenants=config.tenants, hbm=hbm is not None)
        limits = LeaseLimits(config.lease_s_default, config.lease_s_max)
        write = WriteBehind(
            WritePolicy(config.write_policy),
            config.selective_hits,
            config.write_behind_bytes_effective,
            config.io_timeout_s,
        )
        spare_bytes = config.region_bytes_effective
        store = Store(
            index, dram, clock, limits, spare_bytes=spare_bytes, nvme=nvme, write=write,
            skips_generated=config.generated_tokens == "skip",
            history_blocks=config.explain_history_blocks, knows_idle=config.policy_clock == "system",
            pins=config.pins, hbm=hbm,
        )  # fmt: skip
        if succession is not None:
            store.counters.add("taken_over_blocks", succession.adopt_blocks(store))
        opened.pop_all()
        return store


def close_store(store: Store) -> None:
    """Give back memory, files and descriptors. No job may be running: their memory would go under them."""
    store.index.policy.close()
    if store.hbm is not None:
        store.hbm.close()
    store.dram.close()
    if store.hierarchy is not None:
        store.hierarchy.nvme.close()


def leave_store_to_parent(store: Store) -> None:
    """In a forked child: memory and the lock of the directory don't outlive the parent's use of them here."""
    store.dram.after_fork()
    if store.hbm is not None:
        store.hbm.tier.after_fork()
    if store.hierarchy is not None:
        store.hierarchy.nvme.after_fork()


def _dram_node(config: DaemonConfig) -> int | None:
    """The NUMA node of the DRAM tier, if there is a choice."""
    check_numa_node(config.numa_node)
    placement = place(config.numa_node)
    log.log(
        logging.INFO if len(numa.nodes()) > 1 else logging.DEBUG,
        "NUMA node of the DRAM tier: %s (%s)", "any" if placement.node is None else placement.node, placement.reason,
        extra=about("placement", node=placement.node, reason=placement.reason),
    )  # fmt: skip
    return placement.node


def _open_hbm(options: HbmOptions, opened: ExitStack) -> HbmSetup | None:
    """Raises ConfigError where there is no such device, or it is smaller than that."""
    if not options.device:
        return None
    device = open_hbm_device(options)
    opened.callback(device.close)
    grain_bytes = GPU_PAGE_BYTES if device.facts.kind == "cuda" else PAGE_BYTES
    tier = HbmTier(device, options.capacity_bytes, options.region_bytes, grain_bytes)
    opened.callback(tier.close)
    return HbmSetup(device, tier, Promotion(options.promote_hits))


def _open_nvme(config: DaemonConfig, clock: Clock, files: Files | None) -> NvmeTier | None:
    if config.nvme_dir is None:
        return None
    check_nvme_place(config.nvme_dir, config.nvme_bytes)
    return NvmeTier(
        config.nvme_dir,
        config.nvme_bytes,
        inspect,
        files,
        recovery=config.recovery,
        clock=clock,
        verify=verify_frame,
    )
