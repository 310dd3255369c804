"""What a user may set in ``kv_connector_extra_config``, checked once at the start of the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, Self, get_args

from kvstore.errors import ConfigError
from kvstore.types import Namespace

LoadFailure = Literal["recompute", "fail"]


@dataclass(frozen=True, slots=True)
class Options:
    """Times in seconds. Raises ConfigError, naming the option, for what can't be used."""

    socket: str = ""
    """The daemon's socket; empty for the default one. ``grpc://`` and ``grpcs://`` addresses are not taken: KV is
    read in place."""
    tenant: str = "default"
    model: str = ""
    """Name of the model in namespaces; empty for the engine's own."""
    weights_id: str = ""
    """What names the weights. Empty: the commit of a model from the hub, the digest of the files of a local one."""
    load_async: bool = True
    """Whether requests wait outside of the batch while their blocks load, or inside of it, layer by layer."""
    save_generated: bool = False
    """Whether blocks of generated tokens are stored too, not only those of prompts."""
    min_hit_blocks: int = 1
    """Shorter hits are not worth a load."""
    lookup_timeout_s: float = 0.1
    """What a lookup may take, on the scheduler's thread, before it counts as a miss."""
    pending_wait_s: float = 2.0
    """How long a request waits outside of the batch for blocks that are on their way from NVMe."""
    transfer_timeout_s: float = 1.0
    """What one call to the daemon may take when blocks are loaded or saved, on threads of their own."""
    load_timeout_s: float = 5.0
    """After this a load has failed, and its blocks are computed."""
    lease_s: float = 30.0
    """How long blocks that were found are held for a request that the engine has no room for yet."""
    save_queue_max: int = 256
    """Saves that may wait; more are skipped and counted."""
    copy_threads: int = 1
    on_load_failure: LoadFailure = "recompute"
    """What the engine does with a request whose load failed; replaces its own ``kv_load_failure_policy``."""

    def __post_init__(self) -> None:
        for name in ("socket", "model", "weights_id"):
            if not isinstance(getattr(self, name), str):
                raise _wrong(name, getattr(self, name), "a text")
        Namespace.check_tenant(self.tenant)
        for name in ("load_async", "save_generated"):
            if not isinstance(getattr(self, name), bool):
                raise _wrong(name, getattr(self, name), "true or false")
        for name, most in (("min_hit_blocks", 1 << 20), ("save_queue_max", 1 << 16), ("copy_threads", 16)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
                raise _wrong(name, value, f"a whole number from 1 to {most}")
        for name in ("lookup_timeout_s", "pending_wait_s", "transfer_timeout_s", "load_timeout_s", "lease_s"):
            value = getattr(self, name)
            least = 0 if name == "pending_wait_s" else 0.001
            if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= 3600:
                raise _wrong(name, value, f"a number of seconds from {least} to 3600")
        if self.on_load_failure not in get_args(LoadFailure):
            raise _wrong("on_load_failure", self.on_load_failure, "'recompute' or 'fail'")
        if "://" in self.socket:
            raise _wrong("socket", self.socket, "the path of a Unix socket: blocks are read in place, on this machine")

    @classmethod
    def of(cls, extra_config: Mapping[str, Any]) -> Self:
        """From ``kv_connector_extra_config``."""
        known = [field.name for field in fields(cls)]
        unknown = [name for name in extra_config if name not in known]
        if unknown:
            raise ConfigError(
                f"kv_connector_extra_config has {unknown[0]!r}, which is no option; "
                f"known are {', '.join(sorted(known))}"
            )
        return cls(**extra_config)


def _wrong(name: str, value: object, what: str) -> ConfigError:
    return ConfigError(f"kv_connector_extra_config: {name} is {value!r:.80}; give {what}")
