"""Digests of a model's weights: equal weights have equal digests in every process, others never have.

Reading all weights takes about a second for each GB, so a digest is kept with the model as long as nothing speaks
for a change: PyTorch counts changes in place; those made behind its back (``parameter.data += ...``, as adapters are
merged) show in a sample of every parameter.
"""

from __future__ import annotations

import hashlib
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from kvstore.errors import BadInputError
from kvstore.types import canonical_digest

SAMPLES = 16
THREADS = 4

Named = tuple[str, torch.Tensor]


class _Known:
    """What a digest was made of, to see whether it still holds."""

    def __init__(self, sample: bytes, digest: str) -> None:
        self.sample, self.digest = sample, digest


_KNOWN: weakref.WeakKeyDictionary[torch.nn.Module, dict[str, _Known]] = weakref.WeakKeyDictionary()


def weights_digest(model: torch.nn.Module) -> str:
    """32 hex digits for the weights without adapters. Blocks while they are read. Raises BadInputError."""
    base, _ = _split(model)
    return _digest_of(model, "base", base)


def adapters_digest(model: torch.nn.Module) -> str:
    """Names and digest of the PEFT adapters that are active and not merged; empty without any."""
    layers = _tuner_layers(model)
    state = [
        [name, [[adapter, repr(getattr(layer, "scaling", {}).get(adapter))] for adapter in sorted(_active(layer))]]
        for name, layer in layers
        if _active(layer)
    ]
    if not state:
        return ""
    _, adapters = _split(model)
    names = sorted({adapter for _, layer in layers for adapter in _active(layer)})
    digest = canonical_digest("kvstore.lora.1", [state, _digest_of(model, "adapters", adapters)]).hex()
    return f"{'+'.join(names)[:512]} {digest}"


def _active(layer: Any) -> list[str]:
    return [] if layer.disable_adapters or layer.merged else list(layer.active_adapters)


def _tuner_layers(model: torch.nn.Module) -> list[tuple[str, Any]]:
    """Layers that PEFT wrapped. Where it was never imported there are none."""
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    if tuners is None:
        return []
    return [(name, module) for name, module in model.named_modules() if isinstance(module, tuners.BaseTunerLayer)]


def _split(model: torch.nn.Module) -> tuple[list[Named], list[Named]]:
    """The model's own weights, by the names they have without adapters, and those of the active adapters."""
    parts = {
        f"{name}.{part}.": _active(layer)
        for name, layer in _tuner_layers(model)
        for part in (*layer.adapter_layer_names, *layer.other_param_names)
    }
    base: list[Named] = []
    adapters: list[Named] = []
    for name, tensor in _tensors(model):
        part = next((part for part in parts if name.startswith(part)), None)
        if part is not None:
            if name.removeprefix(part).split(".")[0] in parts[part]:
                adapters.append((name, tensor))
        else:
            base.append((name.replace(".base_layer.", "."), tensor))
    return base, adapters


def _tensors(model: torch.nn.Module) -> Iterator[Named]:
    """Parameters, and buffers that are saved with them; those that are shared once."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        passing = module._non_persistent_buffers_set  # noqa: SLF001 - nothing else tells, but a slow state_dict()
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if name not in passing and id(tensor) not in seen:
                seen.add(id(tensor))
                yield f"{prefix}.{name}" if prefix else name, tensor


def _digest_of(model: torch.nn.Module, kind: str, tensors: Sequence[Named]) -> str:
    sample = _sample(tensors)
    known = _KNOWN.setdefault(model, {})
    found = known.get(kind)
    if found is None or found.sample != sample:
        found = known[kind] = _Known(sample, _read_all(tensors))
    return found.digest


def _sample(tensors: Iterable[Named]) -> bytes:
    """What changes with the weights, at little cost: versions, places, and some values of each tensor."""
    facts = []
    values = []
    for name, tensor in tensors:
        if tensor.is_meta:
            raise BadInputError(
                f"the weight {name} is not loaded (device meta); say revision=..., what names the weights"
            )
        flat = tensor.detach().reshape(-1)
        values.append(flat[:: max(1, flat.numel() // SAMPLES)][:SAMPLES].contiguous().view(torch.uint8).reshape(-1))
        facts.append((name, tensor.data_ptr(), tensor._version, tuple(tensor.shape), str(tensor.dtype)))  # noqa: SLF001 - public in all but name
    places = {value.device for value in values}
    taken = b"".join(
        torch.cat([value for value in values if value.device == place]).cpu().numpy().tobytes() for place in places
    )
    return hashlib.blake2b(repr(facts).encode() + taken, digest_size=16).digest()


def _read_all(tensors: Sequence[Named]) -> str:
    def digest(named: Named) -> list[Any]:
        name, tensor = named
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return [
            name,
            str(tensor.dtype),
            list(tensor.shape),
            hashlib.blake2b(data.data, digest_size=16).hexdigest(),
        ]

    with ThreadPoolExecutor(THREADS) as pool:
        return canonical_digest("kvstore.weight.1", sorted(pool.map(digest, tensors))).hex()
