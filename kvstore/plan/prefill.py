"""Load KV, or compute it again: what the engine's prefill takes against bytes over a measured link.

A token at position p takes ``1 + p / D`` times as long as a prompt's first one (see ``kvstore.recompute``). Loading
takes as long at every position. So loading pays from some position on, or always.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvstore.errors import BadInputError
from kvstore.recompute import checked_doubling_tokens, doubling_tokens_of, mean_cost


@dataclass(frozen=True, slots=True)
class Prefill:
    """How fast the engine computes. ``doubling_tokens``: D, or 0 where all positions are taken to cost the same."""

    first_token_s: float
    """A prompt's first token, as part of a prefill: over all ranks of the model together."""
    doubling_tokens: float = 0.0

    def __post_init__(self) -> None:
        checked_doubling_tokens(self.doubling_tokens)
        if not 0 < self.first_token_s < math.inf:
            raise BadInputError(f"first_token_s is {self.first_token_s}; it must be positive: measure a prefill")

    @classmethod
    def measured(cls, doubling_tokens: float, tokens: int, took_s: float, start: int = 0) -> Prefill:
        """Of an engine that took so long for ``tokens`` tokens from position ``start`` on."""
        if tokens <= 0 or start < 0 or not 0 < took_s < math.inf:
            raise BadInputError(f"{tokens} tokens from {start} on in {took_s} s tell no rate; measure a real prefill")
        return cls(took_s / (tokens * mean_cost(start, start + tokens, doubling_tokens)), doubling_tokens)

    @classmethod
    def of_flops(cls, n_parameters: float, layers: int, query_heads: int, head_dim: int, flops_per_s: float) -> Prefill:
        """Of a model by its shape, on hardware that reaches ``flops_per_s`` (F times MFU) in prefills."""
        if not (n_parameters > 0 and 0 < flops_per_s < math.inf):
            raise BadInputError(f"{n_parameters} parameters at {flops_per_s} FLOP/s can't be; both must be positive")
        doubling_tokens = doubling_tokens_of(n_parameters, layers, query_heads, head_dim)
        return cls(2.0 * n_parameters / flops_per_s, doubling_tokens)

    def expected_s(self, start: float, end: float) -> float:
        """Seconds for positions ``start`` to ``end``, all before them being there."""
        return self.first_token_s * (end - start) * mean_cost(start, end, self.doubling_tokens)


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


def load_or_recompute(
    prefill: Prefill, load_token_s: float, start: int, end: int, load_start_s: float = 0.0
) -> Verdict:
    """Compare for positions ``start`` to ``end``; ``load_token_s`` is what loading a token takes at the measured rate,
    ``load_start_s`` what it takes before the first."""
    if not 0 <= start <= end:
        raise BadInputError(f"positions {start} to {end} are no range; give 0 <= start <= end")
    if not (load_token_s >= 0 and load_start_s >= 0):
        raise BadInputError(f"loading can't take {load_token_s} s a token and {load_start_s} s to begin with")
    recompute_s = prefill.expected_s(start, end)
    load_s = load_start_s + load_token_s * (end - start)
    kappa = prefill.first_token_s / load_token_s if load_token_s > 0 else math.inf
    pays_from = break_even_tokens(prefill.doubling_tokens, kappa)
    load = load_s <= recompute_s
    words = _words(load, load_s, recompute_s, kappa, pays_from)
    return Verdict(load, load_s, recompute_s, kappa, pays_from, 2.0 * pays_from, words)


def break_even_tokens(doubling_tokens: float, kappa: float) -> float:
    """P* = D (1 / kappa - 1); 0 where every token is loaded faster than computed, infinite where none is."""
    if kappa >= 1.0:
        return 0.0
    return doubling_tokens * (1.0 / kappa - 1.0) if kappa > 0 and doubling_tokens else math.inf


def _words(load: bool, load_s: float, recompute_s: float, kappa: float, pays_from: float) -> str:
    times = f"loading takes {load_s * 1e3:.3g} ms, computing {recompute_s * 1e3:.3g} ms"
    if kappa >= 1:
        words = f"{times}: a token is loaded {kappa:.3g} times as fast as the first one is computed"
        return words if load else f"{words}, but so few are not worth a transfer"
    if math.isinf(pays_from):
        return f"{times}: at this rate loading never pays"
    verb = "loading pays" if load else "loading would pay"
    return f"{times}: {verb} from a prefix of {2 * pays_from:,.0f} tokens on"
