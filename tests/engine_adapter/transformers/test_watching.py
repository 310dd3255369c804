"""Caches are told what a forward computes, whatever the model's version calls them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from kvstore.engine_adapter.transformers.watching import CACHE_NAME, watch


class Told:
    """A cache that remembers what it was told."""

    def __init__(self) -> None:
        self.inputs: list[dict[str, Any]] = []
        self.generated: list[dict[str, Any]] = []

    def before_generate(self, inputs: dict[str, Any]) -> None:
        self.generated.append(inputs)

    def before_forward(self, inputs: dict[str, Any]) -> None:
        self.inputs.append(inputs)


class Older(torch.nn.Module):
    """As models are up to transformers 5.23."""

    def forward(self, input_ids: Any, attention_mask: Any = None, past_key_values: Any = None) -> Any:
        return input_ids, attention_mask, past_key_values


class Newer(torch.nn.Module):
    """As models are from transformers 5.24 on."""

    def forward(self, input_ids: Any, attention_mask: Any = None, cache: Any = None) -> Any:
        return input_ids, attention_mask, cache


@pytest.mark.parametrize(("model", "name"), [(Older(), "past_key_values"), (Newer(), "cache")])
def test_a_cache_is_told_once_for_each_forward(model: torch.nn.Module, name: str) -> None:
    watch(model)
    watch(model)
    told, ids = Told(), torch.zeros(1, 3)
    model(ids, **{name: told})
    model(ids, None, told)
    assert len(told.inputs) == 2
    assert all(inputs["input_ids"] is ids and inputs[name] is told for inputs in told.inputs)
    model(ids)
    assert len(told.inputs) == 2


def test_a_newer_model_that_is_given_the_old_name_tells_it_too() -> None:
    """The models rename it inside of forward, so the hook still sees the old one."""

    class Renames(Newer):
        def forward(self, input_ids: Any, attention_mask: Any = None, cache: Any = None, **more: Any) -> Any:
            return super().forward(input_ids, attention_mask, more.get("past_key_values", cache))

    model = Renames()
    watch(model)
    told = Told()
    model(torch.zeros(1, 3), past_key_values=told)
    assert len(told.inputs) == 1


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_generate_tells_the_cache_it_is_given_whatever_model_of_the_class(name: str) -> None:
    class Says(Older):
        def generate(self, inputs: Any = None, generation_config: Any = None, **more: Any) -> Any:
            return inputs, generation_config, more

    watched = Says()
    watch(watched)
    watch(Says())
    told, ids = Told(), torch.zeros(1, 3)
    for model in (watched, copy.deepcopy(watched), Says()):
        # It comes by the name that transformers knows and does not warn of.
        assert model.generate(ids, top_k=1, **{name: told}) == (ids, None, {"top_k": 1, CACHE_NAME: told})
        assert told.generated.pop() == {"inputs": ids, "top_k": 1, name: told}
        assert not told.generated
    assert watched.generate(ids, **{name: 3}) == (ids, None, {name: 3})
    assert "generate" not in vars(watched)
