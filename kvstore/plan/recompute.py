"""Load KV, or compute it again: arithmetic of FLOPs against bytes.

A token at position ``p`` costs ``2 N + 4 L Hq dh p`` FLOPs: the weights, and attention over what is before it. Loading
costs the same at every position. So loading pays from some position on, or always.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvstore.errors import BadInputError


@dataclass(frozen=True, slots=True)
class Model:
    """What matters of a model: parameters used for a token (of a mixture of experts the active ones), layers with full
    attention, query heads, head dimension."""

    parameters: float
    layers: int
    query_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        if not (0 < self.parameters < math.inf and self.layers >= 0 and self.query_heads > 0 and self.head_dim > 0):
            raise BadInputError(f"{self} can't be: give the parameters, layers, query heads and head dimension")

    @property
    def flops_per_position(self) -> float:
        """By how much a token costs more than the one before it."""
        return 4.0 * self.layers * self.query_heads * self.head_dim

    @property
    def knee_tokens(self) -> float:
        """D: the position from which on attention costs more than the weights; infinite without attention."""
        return 2.0 * self.parameters / self.flops_per_position if self.layers else math.inf

    def flops(self, start: float, end: float) -> float:
        """Of computing positions ``start`` to ``end``, everything before them being there."""
        return (end - start) * (2.0 * self.parameters + self.flops_per_position * (start + end) / 2.0)


@dataclass(frozen=True, slots=True)
class Prefill:
    """How fast the engine computes: ``flops_per_s`` is what it reaches (F times MFU, over all ranks of the model)."""

    model: Model
    flops_per_s: float

    def __post_init__(self) -> None:
        if not 0 < self.flops_per_s < math.inf:
            raise BadInputError(f"flops_per_s is {self.flops_per_s}; it must be positive: measure a prefill")

    @classmethod
    def measured(cls, model: Model, tokens: int, took_s: float, start: int = 0) -> Prefill:
        """Of an engine that took so long for ``tokens`` tokens from position ``start`` on."""
        if tokens <= 0 or start < 0 or not 0 < took_s < math.inf:
            raise BadInputError(f"{tokens} tokens from {start} on in {took_s} s tell no rate; measure a real prefill")
        return cls(model, model.flops(start, start + tokens) / took_s)

    def expected_s(self, start: float, end: float) -> float:
        """Seconds for positions ``start`` to ``end``."""
        return self.model.flops(start, end) / self.flops_per_s


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether to load positions ``start`` to ``end``, and the figures that say so."""

    load: bool
    load_s: float
    recompute_s: float
    kappa: float
    """How many times as long computing the first token takes as loading one."""
    pays_from_token: float
    """P*: from this position on a token is loaded faster than computed; 0 if all are, infinite if none."""
    pays_from_prefix_tokens: float
    """2 P*: from this length on a whole prefix is."""
    reason: str


def load_or_recompute(prefill: Prefill, load_token_s: float, start: int, end: int, load_start_s: float = 0.0) -> Verdict:
    """Compare for positions ``start`` to ``end``; ``load_token_s`` is what loading a token takes at the measured rate,
    ``load_start_s`` what it takes before the first."""
    if not 0 <= start <= end:
        raise BadInputError(f"positions {start} to {end} are no range; give 0 <= start <= end")
    if not (load_token_s >= 0 and load_start_s >= 0) or math.isnan(load_token_s + load_start_s):
        raise BadInputError(f"loading can't take {load_token_s} s a token and {load_start_s} s to begin with")
    recompute_s = prefill.expected_s(start, end)
    load_s = load_start_s + load_token_s * (end - start)
    first_s = prefill.expected_s(0, 1) - prefill.model.flops_per_position / 2.0 / prefill.flops_per_s
    kappa = first_s / load_token_s if load_token_s > 0 else math.inf
    pays_from = break_even_tokens(prefill.model.knee_tokens, kappa)
    load = load_s <= recompute_s
    return Verdict(
        load, load_s, recompute_s, kappa, pays_from, 2.0 * pays_from, _words(load, load_s, recompute_s, kappa, pays_from)
    )


def break_even_tokens(knee_tokens: float, kappa: float) -> float:
    """P* = D (1 / kappa - 1), or 0 where every token is loaded faster than computed."""
    if kappa >= 1.0:
        return 0.0
    return knee_tokens * (1.0 / kappa - 1.0) if kappa > 0 else math.inf


def _words(load: bool, load_s: float, recompute_s: float, kappa: float, pays_from: float) -> str:
    times = f"loading takes {load_s * 1e3:.3g} ms, computing {recompute_s * 1e3:.3g} ms"
    if kappa >= 1:
        words = f"{times}: a token is loaded {kappa:.3g} times as fast as the first one is computed"
        return words if load else f"{words}, but so few are not worth a transfer"
    if math.isinf(pays_from):
        return f"{times}: at this rate loading never pays"
    verb = "loading pays" if load else "loading would pay"
    return f"{times}: {verb} from a prefix of {2 * pays_from:,.0f} tokens on"
