"""Which tokens a model computes with a cache: told to the cache before each ``generate`` and each forward.

A cache of transformers only gets keys and values, and trusts that they belong to what it holds. Ours must know: for
another prompt than the one it was made for it would give wrong answers, and store wrong blocks. Only ``generate`` is
given the whole sequence; a forward gets what the cache lacks. ``generate`` has no hooks, so it is wrapped in the
model's class: in the model itself it would be copied with it, and run the model that it was copied from.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, Protocol, runtime_checkable

import torch
from transformers.generation.utils import ALL_CACHE_NAMES

CACHE_NAMES = ("cache", "past_key_values")
"""What a forward calls its cache: the first from transformers 5.24 on, which still takes the second."""

CACHE_NAME: str = ALL_CACHE_NAMES[0]
"""The one of these that this version of transformers prefers."""


@runtime_checkable
class Watcher(Protocol):
    """A cache that wants to be told."""

    def before_generate(self, inputs: dict[str, Any]) -> None:
        """``inputs``: the arguments of the model's ``generate`` by name."""
        ...

    def before_forward(self, inputs: dict[str, Any]) -> None:
        """``inputs``: the arguments of the model's forward by name."""
        ...


def watch(model: torch.nn.Module) -> None:
    """Have the caches that are passed to ``model`` told what for. Idempotent; other caches see nothing of it."""
    if _tell not in model._forward_pre_hooks.values():  # noqa: SLF001 - there is no other way to ask
        model.register_forward_pre_hook(_tell, with_kwargs=True)
    kind: Any = type(model)
    generate = getattr(kind, "generate", None)
    if generate is not None and not hasattr(generate, _TELLS):
        kind.generate = _telling(generate)


_TELLS = "_tells_watchers"


def _telling(generate: Callable[..., Any]) -> Callable[..., Any]:
    """``generate`` of a class of models, which tells the cache that it is given first.

    A cache that is told may have either name in any version: 5.24 warns of the older one, 5.23 does not know the newer.
    """

    @wraps(generate)
    def tell_and_generate(model: Any, *args: Any, **kwargs: Any) -> Any:
        given = _by_name(generate, args, kwargs)
        if (watcher := _watcher(given)) is not None:
            watcher.before_generate(given)
            named = {key: value for key, value in kwargs.items() if key not in CACHE_NAMES}
            kwargs = {**named, CACHE_NAME: watcher}
        return generate(model, *args, **kwargs)

    setattr(tell_and_generate, _TELLS, True)
    return tell_and_generate


def _tell(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    kind: Any = type(model)
    given = _by_name(kind.forward, args, kwargs)
    if (watcher := _watcher(given)) is not None:
        watcher.before_forward(given)


def _watcher(given: dict[str, Any]) -> Watcher | None:
    found = (given.get(name) for name in CACHE_NAMES)
    return next((each for each in found if isinstance(each, Watcher)), None)


def _by_name(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a method by name."""
    return {**dict(zip(_parameters(function), args, strict=False)), **kwargs} if args else kwargs


@cache
def _parameters(function: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)[1:]
