"""The revision of an engine's namespaces: all that decides its KV besides shapes, layout and what computes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvstore.engine_adapter.vllm.weights import config_digest, weights_id
from kvstore.errors import BadInputError


def model_name(vllm_config: Any) -> str:
    """The model's id on the hub; the folder's name of a local one."""
    name: str = vllm_config.model_config.model
    return Path(name).resolve().name if Path(name).exists() else name


def revision_of(vllm_config: Any, given_id: str) -> str:
    """Names weights and config. ``given_id``: the user's name for the weights, instead of reading them.

    Raises BadInputError for settings with which the same tokens may have other KV in every run, ConfigError for weights
    that can't be told from others.
    """
    model, cache, load = vllm_config.model_config, vllm_config.cache_config, vllm_config.load_config
    if getattr(cache, "calculate_kv_scales", False):
        raise BadInputError("calculate_kv_scales makes scales from what comes first: no two runs have the same KV")
    weights = f"named {given_id}" if given_id else weights_id(model.model, model.revision, str(load.load_format))
    also = [("quantization", str(model.quantization)), ("dtype", str(model.dtype))]
    rope = str(getattr(model.hf_config, "rope_scaling", None) or getattr(model.hf_config, "rope_parameters", None))
    if any(kind in rope for kind in ("longrope", "dynamic", "su")):
        also.append(("max_model_len", str(model.max_model_len)))  # these scale with the length that is allowed
    draft = getattr(vllm_config.speculative_config, "draft_model_config", None)
    if draft is not None and draft.model != model.model:
        also.append(("draft", given_id or weights_id(draft.model, draft.revision, str(load.load_format))))
    return f"{weights} config {config_digest(model.hf_config, also)}"
