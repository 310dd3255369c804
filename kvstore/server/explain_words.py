"""What is told of a prompt that is no hit, or not as far as it could be, in words for operators; and what to do."""

from __future__ import annotations

import math

from kvstore.facts import NearRoot
from kvstore.prefix_index.block_table import DRAM
from kvstore.prefix_index.explain import Content, End
from kvstore.prefix_index.history import Departure, Left, Unwritten
from kvstore.server.admin_handlers import in_words
from kvstore.store.explaining import Explained, NearNamespace, Reason, State
from kvstore.store.requests import Prompt
from kvstore.store.store import Store
from kvstore.types import RowKind

FIELDS_MAX = 4
"""Differing fields of a namespace that a line names."""

_COUNTED: dict[Reason, str] = {
    Left.EVICTED: "evicted",
    Left.UNWANTED: "evicted as not wanted any more",
    Left.EXPIRED: "expired",
    Left.CORRUPT: "lost by damage",
    Left.CLEARED: "cleared",
    Left.NO_ROOM: "not stored for want of room",
    Left.QUOTA: "not stored for the tenant's quota",
    Left.TOO_LARGE: "too large to be stored",
    Left.TOO_LONG: "not stored, as the prompt is longer than the tier",
    Left.DECLINED: "declined by the policy",
    Left.GENERATED: "not stored as generated",
    Left.UNCOMMITTED: "not committed",
    State.BEING_WRITTEN: "being written",
    State.UNREACHABLE: "stored behind a missing one",
    State.NEVER_STORED: "never stored as far as is known",
}
_UNWRITTEN = {
    Unwritten.QUEUE_FULL: "it had not been written to NVMe, as too much was waiting to be written",
    Unwritten.SUSPENDED: "it had not been written to NVMe, which was full, failing or stuck",
    Unwritten.UNSUITABLE: "blocks of this namespace can't lie on NVMe",
    Unwritten.DECLINED: "it had not been written to NVMe, as it was taken for worth less than what is there",
}
_CONTENT = {
    Content.OTHER: "the same tokens are stored with another image or sound behind them",
    Content.NONE: "the same tokens are stored without an image or sound behind them",
    Content.SOME: "the same tokens are stored with an image or sound behind them, the prompt has none",
}


class Wording:
    """Over one store, which it asks for what policies and settings are called."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def lines(self, prompt: Prompt, told: Explained) -> list[str]:
        """What is so, the most important first; never empty."""
        lines = [_hit(prompt, told)]
        if told.reason is State.STORED:
            return lines
        lines.append(f"{_which(prompt, told)} {self._what(told)}")
        if told.reason is State.NEVER_STORED and not told.groups:
            lines += self._nearest(prompt, told)
        if sum(told.missing.values()) > 1:
            lines.append(_counts(prompt, told))
        return lines + [_near_root(each) for each in told.roots] + [_near_space(each) for each in told.namespaces]

    def advice(self, told: Explained) -> list[str]:
        """What an operator can do about it; empty if there is nothing to be done."""
        if told.reason is State.NEVER_STORED:
            return _advice_for_unknown(told)
        left = told.departure
        if told.reason is State.STORED:
            return ["ask with a wait, or prefetch: blocks on NVMe are read into DRAM then"] if told.n_on_nvme else []
        if told.reason is Left.EVICTED and left is not None and left.unwritten is Unwritten.QUEUE_FULL:
            return ["the disk does not keep up: raise --write-behind, or write less with --write-policy selective"]
        if told.reason is Left.EVICTED and left is not None and left.unwritten is Unwritten.SUSPENDED:
            return ["look at the NVMe tier's health: kvstore status"]
        return {
            Left.EVICTED: [
                "the tiers are small for how late prompts come back: `kvstore plan` says what more DRAM or NVMe gives"
            ],
            Left.UNWANTED: ["leave out no_reuse, and the end of the session, where prompts do come back"],
            Left.EXPIRED: ["give a longer ttl_s, or none"],
            Left.CORRUPT: ["check the disk: `kvstore verify`, and the daemon's log"],
            Left.NO_ROOM: ["see who holds blocks for long (`kvstore inspect claims`), or give the daemon more DRAM"],
            Left.QUOTA: [
                "give the tenant more with --tenant-dram-max, or see what it has in use: `kvstore inspect claims`"
            ],
            Left.TOO_LARGE: ["give the daemon more DRAM (--dram), or open the namespace with fewer block_tokens"],
            Left.TOO_LONG: ["give the daemon more DRAM (--dram): a put can't be longer than that tier"],
            Left.DECLINED: [
                "nothing, if such prompts do not come back; if they do, it learns so, and --policy lru stores them all"
            ],
            Left.GENERATED: ["to keep those blocks: store='all', and --generated-tokens store"],
            Left.UNCOMMITTED: ["see the client's log: it ended, or was slower than its reservation allowed (ttl_s)"],
            State.BEING_WRITTEN: ["ask again in a moment"],
        }.get(told.reason, [])

    def _what(self, told: Explained) -> str:
        """What became of the block."""
        left = told.departure
        ago = f" {span(left.ago_s)} ago" if left is not None else ""
        if told.reason in (Left.EVICTED, Left.UNWANTED) and left is not None:
            return self._evicted(told, left)
        if told.reason is Left.EXPIRED:
            return f"went{ago}, as its time was over (ttl_s)" if ago else "is there, but its time is over (ttl_s)"
        if told.reason is Left.CORRUPT:
            return f"was lost{ago}: its frame on NVMe was damaged, or could not be read"
        return {
            Left.CLEARED: f"was cleared{ago} with its namespace",
            Left.NO_ROOM: f"was not stored{ago}: the DRAM tier was full of blocks in use",
            Left.QUOTA: f"was not stored{ago}: its tenant's quota of DRAM (--tenant-dram-max) had no room for it",
            Left.TOO_LARGE: f"was not stored{ago}: one block of this namespace is larger than the DRAM tier",
            Left.TOO_LONG: f"was not stored{ago}: the DRAM tier has not room for so many blocks at once",
            Left.DECLINED: f"was not stored{ago}: {self._policy(DRAM)} took it for worth less than what is stored",
            Left.GENERATED: f"was not stored{ago}: it holds generated tokens, which were not to be stored",
            Left.UNCOMMITTED: f"was reserved by a client, whose right ended{ago} before it was committed",
            State.BEING_WRITTEN: "is just being written by a client",
        }.get(told.reason, f"was never stored, {self._as_far_as(told)}")

    def _evicted(self, told: Explained, left: Departure) -> str:
        tier = "DRAM" if left.tier == DRAM else "NVMe"
        policy = self._policy(left.tier)
        unused = "" if math.isnan(left.idle_s) else f", {span(left.idle_s)} after its last use"
        text = f"was evicted from {tier} by {policy} {span(left.ago_s)} ago{unused}"
        if told.reason is Left.UNWANTED:
            text += "; a request had said that it would not be used again"
        if left.unwritten is not None:
            return f"{text}; {_UNWRITTEN[left.unwritten]}"
        return f"{text}; it was not on NVMe" if left.tier == DRAM and self._store.hierarchy is not None else text

    def _policy(self, tier: int) -> str:
        return self._store.index.policy.of(tier).name

    def _as_far_as(self, told: Explained) -> str:
        """How far back the daemon remembers."""
        history = self._store.index.history
        if not history:
            return "or has left: the daemon remembers nothing that left (--explain-history-blocks 0)"
        if history.has_forgotten:
            text = f"or left more than {span(history.reach_s)} ago ({len(history):,} blocks have left since)"
        else:
            text = f"since the daemon started {span(history.reach_s)} ago; what left before is not known"
        if told.cleared_ago_s is not None:
            text += f"; the namespace, with {told.n_cleared} blocks, was cleared {span(told.cleared_ago_s)} ago"
        return text

    def _nearest(self, prompt: Prompt, told: Explained) -> list[str]:
        """What is stored instead, in the same root."""
        if told.found.end is End.WHOLE:
            return []
        lines = [in_words(told.found, prompt)]
        return [*lines, _CONTENT[told.found.content]] if told.found.content else lines


def span(seconds: float) -> str:
    """A time span for people, two digits of it at least: 0.4 s, 12 s, 3 min, 5 h, 2 d."""
    for unit_s, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:.0f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def _advice_for_unknown(told: Explained) -> list[str]:
    if told.groups:
        return ["store the parts of these groups with the blocks, as a hit is to end there"]
    if told.namespaces and told.namespaces[0].n_matching:
        return ["another namespace has it: make the fields equal that differ, if the KV is the same"]
    if told.roots:
        return ["it is stored under another salt or LoRA identity: blocks are never shared between these"]
    if told.found.content:
        return ["give the same digest for the same image or sound (ExtraKey), each time"]
    if told.found.end is End.DIFFERS:
        return ["hits need equal tokens from the first on: put what changes (dates, ids, tool lists) behind the rest"]
    if told.found.end is End.OPEN and told.n_hit:
        return ["nothing, if the rest is new or shorter than a block; else see that whoever computed it stores it, too"]
    return []


def _hit(prompt: Prompt, told: Explained) -> str:
    n_rows = prompt.path.n_rows
    partly = f", and {told.partial_tokens} tokens of one more" if told.partial_tokens else ""
    where = ""
    if told.n_hit:
        where = f": {told.n_hit - told.n_on_nvme} in DRAM, {told.n_on_nvme} on NVMe only"
        if told.n_in_hbm:
            where += f"; {told.n_in_hbm} of all have a copy in HBM"
    return f"{told.n_hit} of {n_rows} blocks can be used{partly}{where}"


def _which(prompt: Prompt, told: Explained) -> str:
    """The block that is missing first, as the subject of a sentence."""
    name = f"block {told.block}"
    if prompt.namespace.namespace.row_kind is RowKind.TOKENS:
        path = prompt.path
        first = told.block * path.block_tokens
        name += f" (tokens {first} to {min(first + path.block_tokens, prompt.n_tokens) - 1})"
    if not told.groups:
        return name
    whose = f"group {told.groups[0]} has" if len(told.groups) == 1 else f"groups {told.groups[0]} and others have"
    return f"what {whose} of {name}"


def _counts(prompt: Prompt, told: Explained) -> str:
    n = sum(told.missing.values())
    n_missing = prompt.path.n_rows - told.n_hit
    is_cut = n < n_missing and not told.groups
    if len(told.missing) == 1:
        if is_cut:
            return f"so it is with all of the first {n} of the {n_missing} missing blocks"
        return f"so it is with {'the one missing block' if n == 2 else f'{n - 1} missing blocks'} behind it"
    each = ", ".join(f"{n} {_COUNTED[reason]}" for reason, n in told.missing.most_common())
    of = f"of the first {n} of the {n_missing} missing blocks" if is_cut else f"of the {n_missing} missing blocks"
    return f"{of}: {each}"


def _near_root(near: NearRoot) -> str:
    lora = f"LoRA {near.lora!r}" if near.lora else "no LoRA"
    what = " and ".join(["another salt"] * near.salt_differs + [lora] * near.lora_differs)
    return f"with {what} {near.n_matching} blocks of the prompt are stored"


def _near_space(near: NearNamespace) -> str:
    fields = "; ".join(near.differences[:FIELDS_MAX])
    more = f"; and {n} more" if (n := len(near.differences) - FIELDS_MAX) > 0 else ""
    has = f"has {near.n_matching} blocks of the prompt" if near.n_matching else f"has {near.n_blocks} other blocks"
    return f"namespace {near.known.digest.hex()[:12]} {has} (here != there): {fields}{more}"
