"""Which KV is the same: the namespace of a model, from its weights, its config and what computes it."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedModel

from kvstore.engine_adapter.transformers.shapes import KVShapes
from kvstore.engine_adapter.transformers.weights import adapters_digest, weights_digest
from kvstore.errors import BadInputError
from kvstore.types import Namespace, Root, canonical_digest

LAYOUT_VERSION = 2
"""Raised when KV of this adapter is laid out or cut in another way."""

BLOCK_TOKENS = 64

_SAYS_NOTHING = frozenset(
    (
        "_name_or_path", "architectures", "bos_token_id", "dtype", "eos_token_id", "id2label", "initializer_range",
        "label2id", "output_attentions", "output_hidden_states", "pad_token_id", "problem_type", "return_dict",
        "torch_dtype", "transformers_version", "use_cache",
    )
)  # fmt: skip
"""Fields of a config that don't change what a model computes (its dtype is in the spec)."""


def base_of(model: Any) -> PreTrainedModel:
    """The transformers model itself, without what PEFT put around it. Raises BadInputError for something else."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not isinstance(inner, PreTrainedModel):
        raise BadInputError(f"model is a {type(model).__name__}; give a transformers model")
    learned = getattr(model, "active_peft_config", None)
    if getattr(learned, "is_prompt_learning", False):
        raise BadInputError("a learned prompt (prefix tuning, p-tuning) can't be combined with stored KV")
    return inner


def namespace_of(
    model: Any,
    *,
    tenant: str = "default",
    block_tokens: int = BLOCK_TOKENS,
    name: str | None = None,
    revision: str | None = None,
    shapes: KVShapes | None = None,
) -> Namespace:
    """The namespace of a model's KV.

    ``revision`` names the weights; without it they are read, once, and their digest is the name. ``name`` is the
    model's (default: its id on the hub; one loaded from a folder has its class as name, so that it is the same wherever
    the folder is). ``shapes`` are the model's, if they are known. Raises BadInputError for a model whose KV can't be
    stored.
    """
    inner = base_of(model)
    weights = f"named {revision}" if revision is not None else weights_digest(inner)
    return Namespace(
        model=name or _name_of(inner),
        revision=f"{weights} {inner.dtype} config {_config_digest(inner)}",
        spec=(shapes or KVShapes.of(inner)).spec(block_tokens),
        engine=_engine(),
        tenant=tenant,
    )


def root_of(model: Any, *, salt: str = "", lora: str | None = None) -> Root:
    """Salt, and the adapters that are active (``lora`` overrides what is found)."""
    return Root(salt=salt, lora=adapters_digest(base_of(model)) if lora is None else lora)


@cache
def _engine() -> str:
    major, minor = transformers.__version__.split(".")[:2]
    return f"transformers {major}.{minor} kv {LAYOUT_VERSION}"


def _name_of(model: PreTrainedModel) -> str:
    name = model.config.name_or_path
    return name if name and not Path(name).exists() else type(model).__name__


def _config_digest(model: PreTrainedModel) -> str:
    config = model.config.get_text_config(decoder=True).to_dict()
    facts = {field: value for field, value in config.items() if field not in _SAYS_NOTHING}
    return canonical_digest("kvstore.config.1", _plain(facts)).hex()


def _plain(value: Any) -> Any:
    """As JSON has it, whatever a config holds."""
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(each) for each in (sorted(value, key=repr) if isinstance(value, set) else value)]
    return value if isinstance(value, str | int | bool | None) else repr(value)
