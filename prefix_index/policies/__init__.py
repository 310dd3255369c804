"""Eviction policies by name. To add one, put its class in a module here and in ``POLICIES``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from kvstore.errors import ConfigError
from kvstore.prefix_index.policies.fifo import FifoPolicy
from kvstore.prefix_index.policies.gdsf import GdsfPolicy
from kvstore.prefix_index.policies.hazard import HazardPolicy
from kvstore.prefix_index.policies.hazard_refit import RefitInChild
from kvstore.prefix_index.policies.lfu import LfuPolicy
from kvstore.prefix_index.policies.lru import LruPolicy
from kvstore.prefix_index.policies.s3fifo import S3FifoPolicy
from kvstore.prefix_index.policies.tiered import TieredPolicy
from kvstore.prefix_index.policies.workload import WorkloadPolicy
from kvstore.prefix_index.policy import EvictionPolicy

POLICIES: dict[str, Callable[..., EvictionPolicy]] = {
    "lru": LruPolicy,
    "fifo": FifoPolicy,
    "lfu": LfuPolicy,
    "s3fifo": S3FifoPolicy,
    "gdsf": GdsfPolicy,
    "hazard": HazardPolicy,
    "workload": WorkloadPolicy,
    "workload_pw": partial(WorkloadPolicy, reuse_share=True),
}


def make_policy(name: str, **options: Any) -> EvictionPolicy:
    """A fresh policy. Raises ConfigError for an unknown name or an option it doesn't have."""
    factory = POLICIES.get(name)
    if factory is None:
        raise ConfigError(f"policy is {name!r}; known are {', '.join(sorted(POLICIES))}", ("policy",))
    try:
        return factory(**options)
    except TypeError:
        given = ", ".join(sorted(options))
        raise ConfigError(f"policy {name!r} does not take these options: {given}") from None


def make_tier_policies(dram: str, nvme: str = "", *, learn_aside: bool = False, hbm: bool = False) -> EvictionPolicy:
    """Fresh policies for a table with or without an NVMe tier; ``nvme`` is the one of DRAM if it is empty.

    With ``hbm`` there is an order for such a tier, too: see ``with_hbm``.

    With ``learn_aside`` those that learn do so in a process beside this one, so that no call waits for it; otherwise in
    the calls, which makes the same calls give the same order. Raises ConfigError for an unknown name.
    """

    def make(name: str) -> EvictionPolicy:
        return HazardPolicy(RefitInChild()) if learn_aside and name == HazardPolicy.name else make_policy(name)

    policy = make(dram)
    own_nvme = nvme not in ("", dram)
    if not own_nvme and not hbm:
        return policy
    try:
        policy = TieredPolicy(policy, make(nvme)) if own_nvme else policy
    except ConfigError as error:
        raise ConfigError(f"on NVMe, {error}", ("nvme_policy",)) from None
    return with_hbm(policy) if hbm else policy


def with_hbm(policy: EvictionPolicy) -> EvictionPolicy:
    """The same order of the other tiers, and that of LRU for HBM: what is there was used several times lately, and can
    be had again for one copy."""
    return TieredPolicy(policy, hbm=LruPolicy())
