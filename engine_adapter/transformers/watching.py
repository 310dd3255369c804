"""Which tokens a model computes with a cache: told to the cache before each forward.

A cache of transformers only gets keys and values, and trusts that they belong to what it holds. Ours must know: for
another prompt than the one it was made for it would give wrong answers, and store wrong blocks.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any, Protocol, runtime_checkable

import torch

CACHE_NAMES = ("cache", "past_key_values")
"""What a forward calls its cache: the first from transformers 5.24 on, which still takes the second."""


@runtime_checkable
class Watcher(Protocol):
    """A cache that wants to be told."""

    def before_forward(self, inputs: dict[str, Any]) -> None:
        """``inputs``: the arguments of the model's forward by name."""
        ...


def watch(model: torch.nn.Module) -> None:
    """Have the caches that are passed to ``model`` told what for. Idempotent."""
    if _tell not in model._forward_pre_hooks.values():  # noqa: SLF001 - there is no other way to ask
        model.register_forward_pre_hook(_tell, with_kwargs=True)


def _tell(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    given = kwargs
    if args:
        kind: Any = type(model)
        given = {**dict(zip(_parameters(kind), args, strict=False)), **kwargs}
    for name in CACHE_NAMES:
        watcher = given.get(name)
        if isinstance(watcher, Watcher):
            watcher.before_forward(given)
            return


@cache
def _parameters(kind: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(kind.forward).parameters)[1:]
