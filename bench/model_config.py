"""What KV of a model takes, from the ``config.json`` that models on Hugging Face come with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvstore.errors import BadInputError
from kvstore.types import DTYPE_BYTES, GroupKind, KVGroup

CONFIG_NAME = "config.json"
CONFIG_BYTES_MAX = 1 << 20

_ATTENTION = ("full_attention", "sliding_attention", "chunked_attention", "attention")


def kv_group_of(path: Path) -> KVGroup:
    """The KV of all layers of the model that a ``config.json``, or the folder with one, describes.

    Layers with a window count as all others; those without attention have no KV for each token and are left out. The
    dtype is that of the weights; 16 bits where the file names none, or one that KV is not kept in. Raises BadInputError
    that names the file and the field. Blocks for the file.
    """
    if path.is_dir():
        path /= CONFIG_NAME
    config = _read(path)
    config = config.get("text_config", config)  # of a model with other inputs besides text
    if not isinstance(config, Mapping):
        raise BadInputError(f"{path}: text_config is {config!r:.60}; it must be an object")
    fields = _Fields(path, config)
    layers = _layers(fields)
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    dtype = dtype if dtype in DTYPE_BYTES else "bfloat16"
    rank = config.get("kv_lora_rank")
    if rank is not None:
        dims = fields.count("kv_lora_rank") + fields.count("qk_rope_head_dim")
        return KVGroup(layers, 1, dims, dtype, GroupKind.MLA)
    heads = fields.count("num_attention_heads")
    kv_heads = heads if config.get("num_key_value_heads") is None else fields.count("num_key_value_heads")
    if config.get("head_dim") is not None:
        return KVGroup(layers, kv_heads, fields.count("head_dim"), dtype)
    return KVGroup(layers, kv_heads, fields.count("hidden_size") // heads, dtype)


class _Fields:
    """The fields of a config, as numbers."""

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        self.path = path
        self.config = config

    def count(self, name: str) -> int:
        value = self.config.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 24:
            what = "missing" if value is None else f"{value!r:.60}, which is no count"
            raise BadInputError(f"{self.path}: {name} is {what}: give --bytes-per-token in place of --model")
        return value


def _layers(fields: _Fields) -> int:
    """Layers with attention."""
    kinds = fields.config.get("layer_types")
    if kinds is None:
        return fields.count("num_hidden_layers")
    n = sum(kind in _ATTENTION for kind in kinds) if isinstance(kinds, list) else 0
    if not n:
        raise BadInputError(f"{fields.path}: layer_types {kinds!r:.60} has no layer with attention")
    return n


def _read(path: Path) -> Mapping[str, Any]:
    try:
        with path.open("rb") as file:
            data = file.read(CONFIG_BYTES_MAX + 1)
    except OSError as error:
        raise BadInputError(f"{path} can't be read: {error.strerror or error}") from error
    if len(data) > CONFIG_BYTES_MAX:
        raise BadInputError(f"{path} has more than {CONFIG_BYTES_MAX} bytes: that is no config.json of a model")
    try:
        plain = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadInputError(f"{path}: not JSON ({error})") from None
    if not isinstance(plain, dict):
        raise BadInputError(f"{path}: {plain!r:.60} is no object with fields")
    return plain
