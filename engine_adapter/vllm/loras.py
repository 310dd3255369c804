"""LoRA adapters by what they do: their name and the digest of their files, as the engine read them.

vLLM keys its own cache by name and path, which tells nothing once the files behind them are replaced.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvstore.engine_adapter.vllm.guard import Guard
from kvstore.engine_adapter.vllm.weights import files_digest
from kvstore.errors import KVStoreError

_Stamp = tuple[tuple[str, int, int, int], ...]


class LoraIdentities:
    """Digests of adapters, each read once, at the first request with it. For one thread.

    An adapter whose files changed since, one that is loaded in place of another, or one that lies in no folder can't be
    told from others: its requests are neither looked up nor stored.
    """

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._known: dict[tuple[str, str, int], tuple[_Stamp, str]] = {}

    def of(self, lora: Any) -> str | None:
        """Name and digest; empty without an adapter, None if it can't be told. Reads its files the first time."""
        if lora is None:
            return ""
        key = lora.lora_name, lora.lora_path, lora.lora_int_id
        folder = Path(lora.lora_path)
        try:
            if getattr(lora, "load_inplace", False):
                raise KVStoreError("it is loaded in place of what was there before")
            stamp = _stamp(folder)
            if key not in self._known:
                self._known[key] = stamp, files_digest([folder / name for name, *_ in stamp], folder)
            known_stamp, digest = self._known[key]
            if stamp != known_stamp:
                raise KVStoreError("its files have changed since the engine read them")
        except (OSError, KVStoreError) as error:
            self._guard.say_once(f"lora {key}", f"requests with the LoRA {lora.lora_name!r} are not cached: {error}")
            return None
        return f"{lora.lora_name[:512]} {digest}"


def _stamp(folder: Path) -> _Stamp:
    if not folder.is_dir():
        raise KVStoreError(f"{folder} is no folder")
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix != ".md"]
    stats = [(path, path.stat()) for path in files]
    return tuple((path.relative_to(folder).as_posix(), at.st_size, at.st_mtime_ns, at.st_ino) for path, at in stats)
