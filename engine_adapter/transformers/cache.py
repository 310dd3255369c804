"""``KVStoreCache``: what ``generate`` takes as ``past_key_values`` to begin where a stored prompt ends.

It begins with what is stored of the prompt, and stores what is computed beyond that while it is computed. A daemon that
is down, slow or gone makes a miss by the client's deadline; nothing of it reaches ``generate``.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np
import torch
from transformers.cache_utils import Cache, DummyLayer, DynamicCache

from kvstore.client import Client, Wait
from kvstore.engine_adapter.attention_cost import doubling_tokens_of_config
from kvstore.engine_adapter.block_layout import BlockLayout
from kvstore.engine_adapter.block_writer import BlockWriter
from kvstore.engine_adapter.counters import SharedCounters
from kvstore.engine_adapter.parts import Handle, open_namespace
from kvstore.engine_adapter.transformers.checks import (
    Ids,
    is_whole_prompt,
    wrong_dtype,
    wrong_kind,
    wrong_mask,
    wrong_positions,
    wrong_tokens,
)
from kvstore.engine_adapter.transformers.held import HeldTokens
from kvstore.engine_adapter.transformers.identity import BLOCK_TOKENS, base_of, namespace_of, root_of
from kvstore.engine_adapter.transformers.keeping import BatchKeeper, RowKeeper
from kvstore.engine_adapter.transformers.layers import StoredLayer, StoredSlidingLayer
from kvstore.engine_adapter.transformers.loading import BatchPrefix
from kvstore.engine_adapter.transformers.rows import Rows
from kvstore.engine_adapter.transformers.shapes import KVShapes
from kvstore.engine_adapter.transformers.watching import watch
from kvstore.errors import BadInputError
from kvstore.types import ExtraKey, Root

COUNTERS = SharedCounters()
"""What all caches of this process did; docs/engines/transformers.md explains the names."""

_LOG = logging.getLogger(__name__)


class KVStoreCache(DynamicCache):
    """See the module. One prompt (or batch), one cache: make it with ``for_prompt``, give it to ``generate``, and to
    that of the next turn with the whole conversation.

    ``n_hit_tokens`` says how many leading tokens of the batch's columns need not be computed.
    """

    def __init__(
        self,
        shapes: KVShapes,
        rows: Rows,
        prefix: BatchPrefix,
        new_keeper: Callable[[BatchPrefix | None, Sequence[Any]], BatchKeeper] | None,
        *,
        device: torch.device,
        generated: bool,
    ) -> None:
        self.n_hit_tokens = prefix.n_columns
        self.reason = prefix.reason
        """Why nothing was found out about the prompt, if the daemon could not be asked."""
        self._shapes, self._rows, self._generated = shapes, rows, generated
        self._new_keeper = new_keeper
        self._by_index = {layer.index: layer for layer in shapes.layers}
        self._first_index, self._last_index = shapes.layers[0].index, shapes.layers[-1].index
        self._ids: Ids | None = None
        self._held = HeldTokens(rows, prefix.n_columns)
        layers: list[Any] = []
        for index in range(shapes.n_layers):
            layer = self._by_index.get(index)
            if layer is None:
                layers.append(DummyLayer())
            elif layer.window_tokens is None:
                layers.append(StoredLayer())
            else:
                layers.append(StoredSlidingLayer(layer.window_tokens))
            if layer is not None and prefix.n_columns:
                start = prefix.start(layer, shapes.dtype, device)
                if layer.window_tokens is None:
                    layers[-1].begin_with(start)
                else:
                    layers[-1].begin_with(start, prefix.n_columns)
        self._keeper = new_keeper(prefix, layers) if new_keeper is not None else None
        Cache.__init__(self, layers=layers)

    @classmethod
    def for_prompt(
        cls,
        store: Client | Handle,
        model: Any,
        input_ids: Any,
        attention_mask: Any = None,
        *,
        extras: Sequence[ExtraKey] = (),
        salt: str = "",
        lora: str | None = None,
        block_tokens: int = BLOCK_TOKENS,
        name: str | None = None,
        revision: str | None = None,
        wait: Wait = "wait",
        save: bool = True,
        generated: bool = True,
        threads: int = 1,
    ) -> Self:
        """A cache that begins with what is stored of a prompt, and stores the rest as it is computed.

        ``input_ids`` and ``attention_mask``: what ``generate`` will be given, [batch, tokens], padded on the left. A
        batch begins where its row with the least stored tokens needs to. At least one token is left to compute.
        ``extras`` says what images or sounds placeholder tokens stand for (for a batch of one). ``salt`` and
        ``lora`` are part of the identity; PEFT adapters that are active are found. ``name`` and ``revision``: see
        ``namespace_of``. ``save=False`` stores nothing, ``generated=False`` only the prompt.

        Blocks for a round trip for each different row, in a batch of a model with windows for a few, and as long as
        ``wait`` allows for what lies on NVMe; the first time for a model until its weights are read, unless
        ``revision`` names them. Raises BadInputError for a model or arguments that can't be used, never because of the
        daemon.
        """
        base = base_of(model)
        shapes = KVShapes.of(base)
        handle = _handle(store, model, block_tokens=block_tokens, name=name, revision=revision, shapes=shapes)
        rows = Rows.of(input_ids, attention_mask, getattr(base.generation_config, "pad_token_id", None))
        if extras and len(rows.ids) > 1:
            raise BadInputError("extras go with one prompt; make a batch of one")
        root = root_of(model, salt=salt, lora=lora)
        layout = BlockLayout.by_part(handle.namespace.spec)
        prefix = BatchPrefix.find(
            handle, layout, rows, root=root, extras=extras, wait=wait, threads=threads, counters=COUNTERS
        )

        def new_keeper(prefix: BatchPrefix | None, held: Sequence[Any]) -> BatchKeeper:
            keepers = _row_keepers(handle, layout, rows, prefix, root, extras)
            return BatchKeeper(keepers, shapes.layers, layout.block_tokens, held)

        watch(base)
        made = cls(shapes, rows, prefix, new_keeper if save else None, device=base.device, generated=generated)
        made._with_extras = bool(extras)
        return made

    _with_extras = False

    @property
    def n_stored_blocks(self) -> int:
        """Blocks that this cache has made visible to others."""
        return self._keeper.n_stored if self._keeper is not None else 0

    @property
    def save_reason(self) -> str:
        """Why nothing is stored any more, where that is so."""
        return self._keeper.reason if self._keeper is not None else "save=False"

    def save(self) -> int:
        """Store the last tokens too, those that don't fill a block; returns the blocks stored by this cache in all.

        Whole blocks are stored without this. Never raises because of the daemon; see ``save_reason``.
        """
        if self._keeper is not None:
            self._guarded(self._keeper.finish)
        return self.n_stored_blocks

    def before_generate(self, inputs: dict[str, Any]) -> None:
        """Called before the model's ``generate``, which alone has the whole sequence.

        Raises BadInputError if it does not begin with what the cache holds, or with the prompt that it was made for:
        then nothing more is stored. Where only what follows is given (the mask says so), or embeddings, ``generate``
        does not know the beginning either: forwards are checked, but not what came before.
        """
        input_ids = inputs.get("input_ids")
        if input_ids is None:
            input_ids = inputs.get("inputs")
        if not isinstance(input_ids, torch.Tensor) or input_ids.ndim != 2:
            return
        n_held = self.get_seq_length()
        n_rows, n_columns = input_ids.shape
        repeats = self._repeats(n_rows)
        mask = inputs.get("attention_mask")
        if isinstance(mask, torch.Tensor) and mask.ndim == 2:
            if n_held and mask.shape[1] == n_held + n_columns:
                return
            self._refuse_if(wrong_mask(self._rows, mask, 0, n_columns, repeats))
        self._refuse_if(self._held.wrong(_host_ids(input_ids), n_held, repeats))

    def before_forward(self, inputs: dict[str, Any]) -> None:
        """Called by the model's hook. Raises BadInputError if this is not what the cache was made for."""
        self._ids = None
        if not self._with_extras:
            self._refuse_if(wrong_kind(inputs))
        input_ids = inputs.get("input_ids")
        if input_ids is None:
            self._stop("the tokens are not known, only their embeddings")
            return
        first, end = self.get_seq_length(), self.get_seq_length() + input_ids.shape[1]
        repeats = self._repeats(input_ids.shape[0])
        ids = _host_ids(input_ids)
        if first and self._fresh and is_whole_prompt(self._rows, ids, repeats):
            self._forget_hit()
            first, end = 0, ids.shape[1]
        self._fresh = False
        self._refuse_if(
            wrong_dtype(input_ids.device.type)
            or wrong_tokens(self._rows, ids, first, repeats)
            or wrong_mask(self._rows, inputs.get("attention_mask"), first, end, repeats)
            or wrong_positions(self._rows, inputs.get("position_ids"), end, repeats)
        )
        self._expand(repeats)
        self._held.add(first, ids)
        self._ids = ids

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As transformers' own; also stores what is new."""
        if layer_idx == self._first_index:
            self._guarded(self._begin_pass, key_states)
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if self._in_pass and self._keeper is not None:
            if self._keeper.layer_by_layer:
                n_new = key_states.shape[-2]
                layer = self._by_index[layer_idx]
                self._guarded(self._keeper.write, layer, keys[:, :, -n_new:], values[:, :, -n_new:])
            if layer_idx == self._last_index:
                self._guarded(self._end_pass)
        return keys, values

    def _guarded(self, step: Callable[..., None], *args: Any) -> None:
        """A step of storing: whatever goes wrong there ends the storing, and ``generate`` goes on."""
        try:
            step(*args)
        except Exception as error:
            COUNTERS.add("errors")
            _LOG.exception("KV is not stored any further; generate goes on")
            self._stop(f"{type(error).__name__}: {error}")

    _in_pass = False

    def _begin_pass(self, key_states: torch.Tensor) -> None:
        ids, self._ids = self._ids, None
        self._in_pass = False
        keeper = self._keeper
        if keeper is None or not keeper.active:
            return
        layer = self._shapes.layers[0]
        if ids is None:
            self._stop("the model did not say which tokens these are")
        elif key_states.dtype != self._shapes.dtype:
            self._stop(f"keys are {key_states.dtype}, but the cache was made for {self._shapes.dtype}")
        elif tuple(key_states.shape) != (len(ids), layer.kv_heads, ids.shape[1], layer.head_dim):
            self._stop(f"keys have shape {tuple(key_states.shape)}, which is not what the model's config says")
        else:
            keeper.begin(self.get_seq_length(layer.index), ids)
            self._in_pass = True

    def _end_pass(self) -> None:
        keeper = self._keeper
        assert keeper is not None  # noqa: S101 - there is no pass without
        keeper.end()
        self._in_pass = False
        if self.get_seq_length(self._last_index) >= self._rows.n_columns and (
            not self._generated or keeper.repeats > 1
        ):
            keeper.finish()
            keeper.stop(
                "only the prompt is stored" if not self._generated else "the rows of the batch go their own ways"
            )

    # What changes the rows or the length: stored blocks stay, what comes can't be told apart any more.

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Rows change places: nothing more is stored, and this ``generate`` is the last."""
        self._stop("beams were reordered")
        self._held.forget()
        super().reorder_cache(beam_idx)

    def crop(self, tokens_to_remove: int) -> None:
        """Tokens are taken back (assisted decoding): nothing more is stored."""
        if tokens_to_remove:
            self._stop("tokens were taken back")
        super().crop(tokens_to_remove)
        self._held.cut(self.get_seq_length())

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Rows change: nothing more is stored, and this ``generate`` is the last."""
        self._stop("rows were selected")
        self._held.forget()
        super().batch_select_indices(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """As transformers' own."""
        super().batch_repeat_interleave(repeats)
        self._held.repeat(repeats)

    def reset(self) -> None:
        """Forget everything; nothing more is stored."""
        self._stop("the cache was reset")
        super().reset()
        self._held = HeldTokens(self._rows, 0)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy to go on from, as of a prompt that several requests share: it stores nothing."""
        for layer in self.layers:
            getattr(layer, "keys", None)  # loads what the layer begins with
        copied = copy.copy(self)
        vars(copied).update(_keeper=None, _new_keeper=None, _in_pass=False, _held=self._held.copy())
        copied.layers = copy.deepcopy(self.layers, memo)
        return copied

    def _repeats(self, n_rows: int) -> int:
        """How often each row of the batch stands in ``n_rows``. Raises BadInputError if that is no whole number."""
        batch = len(self._rows.ids)
        if n_rows % batch:
            self._refuse_if(f"a batch of {n_rows} rows was given, but the cache was made for {batch}")
        return n_rows // batch

    def _expand(self, repeats: int) -> None:
        """``generate`` computes each row several times (beams, several answers): have the stored part as often."""
        if self._keeper is not None and self._keeper.repeats != repeats:
            self._keeper.repeats = repeats
        if repeats > 1 and not self._expanded:
            self._expanded = True
            self.batch_repeat_interleave(repeats)

    _expanded = False

    def _stop(self, reason: str) -> None:
        self._in_pass = False
        if self._keeper is not None and self._keeper.active:
            self._keeper.stop(reason)

    def _refuse_if(self, wrong: str) -> None:
        if wrong:
            self._stop(wrong)
            raise BadInputError(f"{wrong}; make another with KVStoreCache.for_prompt")

    def _forget_hit(self) -> None:
        COUNTERS.add("unused_hit_tokens", self.n_hit_tokens)
        self.n_hit_tokens = 0
        super().reset()
        self._held = HeldTokens(self._rows, 0)
        if self._new_keeper is not None:
            self._keeper = self._new_keeper(None, self.layers)

    _fresh = True
    """Nothing was computed with this cache yet."""


def _host_ids(input_ids: torch.Tensor) -> Ids:
    """Token ids as uint32 [rows, columns]."""
    return input_ids.detach().cpu().numpy().astype(np.uint32)


def _handle(store: Client | Handle, model: Any, **identity: Any) -> Handle:
    if isinstance(store, Client):
        told = doubling_tokens_of_config(model.config.get_text_config(decoder=True))
        return open_namespace(store, namespace_of(model, tenant=store.tenant, **identity), told)
    if not isinstance(store, Handle):
        raise BadInputError(f"store is {store!r:.80}; give a kvstore.Client, or what open() or open_hybrid() returned")
    given = store.namespace
    identity["block_tokens"] = given.spec.block_tokens
    expected = namespace_of(model, tenant=given.tenant, **identity)
    if given != expected:
        raise BadInputError("the namespace is not that of this model: " + "; ".join(given.differences(expected)))
    return store


def _row_keepers(
    handle: Handle,
    layout: BlockLayout,
    rows: Rows,
    prefix: BatchPrefix | None,
    root: Root,
    extras: Sequence[ExtraKey],
) -> list[RowKeeper]:
    """Writers for what follows the prefix: one for rows that are the same."""
    keepers: dict[bytes, RowKeeper] = {}
    for i, (ids, pad) in enumerate(zip(rows.ids, rows.pads, strict=True)):
        n_known = max(prefix.n_columns - pad, 0) if prefix is not None else 0
        if ids.tobytes() not in keepers:
            writer = BlockWriter(
                handle, layout, ids[:n_known], tails=prefix.found[i].last_blocks() if prefix is not None else None,
                root=root, extras=extras, counters=COUNTERS,
            )  # fmt: skip
            keepers[ids.tobytes()] = RowKeeper(i, pad, writer)
    return list(keepers.values())
