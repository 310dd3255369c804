"""The public function on the CPU: every layout against the definition, parts in two memories, and what is refused."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvstore.engine_adapter.attention import KVPages, PageLayout, Part, decode_attention, merge
from kvstore.engine_adapter.page_table import PageTable
from kvstore.errors import BadInputError, DeviceError
from tests.engine_adapter.attention.conftest import ROOT
from tests.engine_adapter.attention.scenes import DTYPES, make_scene, mapped_elsewhere

DIMS = [64, 80, 128, 256]


@given(
    seed=st.integers(0, 1 << 30),
    n_tokens=st.lists(st.integers(0, 90), min_size=1, max_size=4),
    dtype=st.sampled_from(sorted(DTYPES)),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 16),
    key_dim=st.sampled_from(DIMS),
    page_tokens=st.integers(1, 40),
    order=st.sampled_from(["NHD", "HND"]),
    alignment=st.sampled_from([4, 16]),
)
def test_random_shapes(seed: int, n_tokens: list[int], **shape: Any) -> None:
    scene = make_scene(seed, n_tokens, **shape)
    assert not scene.disagreement(decode_attention(scene.q, scene.pages))


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_latents(dtype: str) -> None:
    scene = make_scene(1, [70, 0, 33], dtype=dtype, kv_heads=1, group=128, key_dim=576, latent_value_dim=512)
    assert not scene.disagreement(decode_attention(scene.q, scene.pages))


def test_more_tokens_than_are_gathered_at_a_time() -> None:
    scene = make_scene(2, [1700, 512, 513], memory=mapped_elsewhere, strong=True)
    assert not scene.disagreement(decode_attention(scene.q, scene.pages))


def test_whole_chunks_of_logits_that_are_minus_infinity() -> None:
    scene = make_scene(4, [1700, 512, 600, 3], n_excluded=512)
    assert not scene.disagreement(decode_attention(scene.q, scene.pages))


def test_tokens_that_are_not_there_are_not_looked_at() -> None:
    scene = make_scene(3, [64], page_tokens=64)
    fewer = replace(scene.pages, n_tokens=torch.tensor([40], dtype=torch.int32))
    scene.visible[0][40:] = False
    assert not scene.disagreement(decode_attention(scene.q, fewer))
    assert scene.disagreement(decode_attention(scene.q, scene.pages))


@pytest.mark.parametrize(("window", "sinks"), [(20, 0), (20, 4), (1, 64), (500, 3)])
def test_windows_and_sinks(window: int, sinks: int) -> None:
    lengths = [200, 21, 70, 1]
    scene = make_scene(4, lengths)
    for visible in scene.visible:
        visible[sinks : max(len(visible) - window, sinks)] = False
    pages = scene.pages.windowed(torch.tensor(lengths) - 1, window, sink_tokens=sinks)
    assert not scene.disagreement(decode_attention(scene.q, pages))


def test_a_window_over_parts_of_a_prompt() -> None:
    """Of 100 tokens the first 60 in one memory, the others in another; both know where the query is."""
    whole = make_scene(5, [100], page_tokens=10)
    first, second = _cut(whole.pages, 6)
    window, sinks, position = 50, 3, torch.tensor([99])
    parts = [
        decode_attention(whole.q, first.windowed(position, window, sink_tokens=sinks)),
        decode_attention(whole.q, second.windowed(position, window, sink_tokens=sinks, first_positions=60)),
    ]
    whole.visible[0][sinks:50] = False
    assert not whole.disagreement(merge(*zip(*parts, strict=True)))


def test_an_engines_tensors_and_stored_pages_are_merged() -> None:
    """The first 32 tokens lie in the store's pages, the other 9 in an engine's, K and V in tensors of their own."""
    scene = make_scene(6, [41], dtype="bfloat16")
    first, _ = _cut(scene.pages, 2)
    keys, values = torch.full((2, 5, 4, 2, 64), torch.nan, dtype=torch.bfloat16)
    table = PageTable.of([0, 3], [4, 0, 2], n_pages=5)
    for tensor, rows in ((keys, scene.keys[0][32:]), (values, scene.values[0][32:])):
        for i, page in enumerate(table.row(0).tolist()):
            tokens = torch.from_numpy(rows[4 * i : 4 * i + 4])
            tensor[page, : len(tokens)] = tokens
    own = KVPages.of_tensors(keys, values, table, [9])
    parts = [decode_attention(scene.q, pages) for pages in (first, own)]
    assert not scene.disagreement(merge(*zip(*parts, strict=True)))
    assert scene.disagreement(parts[0])


def test_an_engines_latents() -> None:
    rng = np.random.default_rng(7)
    latents = torch.from_numpy(rng.standard_normal((3, 8, 1, 576))).half()
    pages = KVPages.of_tensors(latents, latents[..., :512], PageTable.of([0, 2], [2, 1], n_pages=3), [13])
    q = torch.from_numpy(rng.standard_normal((1, 4, 576))).half()
    keys = torch.cat([latents[2], latents[1]])[:13, 0].double()
    weights = torch.softmax(q[0].double() @ keys.T * 0.1, 1)
    found = decode_attention(q, pages, scale=0.1)
    torch.testing.assert_close(found.output[0].double(), weights @ keys[:, :512], rtol=1e-4, atol=1e-5)


def test_no_requests_at_all() -> None:
    pages = KVPages.of(make_scene(12, [20]).pages.layout, [], [])
    part = decode_attention(torch.empty(0, 8, 64, dtype=torch.float16), pages)
    assert part.output.shape == (0, 8, 64)
    assert part.lse.shape == (0, 8)


def test_out_is_written() -> None:
    scene = make_scene(8, [20, 0])
    out = Part(torch.full((2, 8, 64), 7.0), torch.full((2, 8), 7.0))
    assert decode_attention(scene.q, scene.pages, out=out) is out
    assert not scene.disagreement(out)


def test_what_does_not_fit_is_refused() -> None:
    scene = make_scene(9, [20, 5])
    q, pages = scene.q, scene.pages
    wrong: list[tuple[torch.Tensor, dict[str, Any], str]] = [
        (q[:1], {}, "requests"),
        (q[..., :32], {}, "64"),
        (q.transpose(1, 2).contiguous().transpose(1, 2), {}, "contiguous"),
        (q[:, :3], {}, "evenly"),
        (q.float(), {}, "float16"),
        (q, {"n_splits": 0}, "n_splits"),
        (q, {"backend": "cuda"}, "known are triton, torch"),
        (q, {"out": Part(torch.empty(2, 8, 64, dtype=torch.float16), torch.empty(2, 8))}, "out.output"),
        (q, {"out": Part(torch.empty(2, 8, 64), torch.empty(2, 9))}, "out.lse"),
    ]
    for query, options, message in wrong:
        with pytest.raises(BadInputError, match=message):
            decode_attention(query, pages, **options)


def test_no_triton_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = make_scene(10, [20])
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(DeviceError, match="pip install triton"):
        decode_attention(scene.q, scene.pages, backend="triton")


def test_latents_of_float32_are_refused_by_triton() -> None:
    pytest.importorskip("triton", reason="needs triton")
    scene = make_scene(11, [20], dtype="float32", kv_heads=1, key_dim=576, latent_value_dim=512)
    with pytest.raises(BadInputError, match="16 bits"):
        decode_attention(scene.q, scene.pages, backend="triton")


def test_layouts_that_are_none() -> None:
    good = {"page_tokens": 4, "kv_heads": 2, "key_dim": 8, "value_dim": 8, "token_stride": 16, "head_stride": 8}
    for wrong, message in (({"page_tokens": 0}, "page_tokens is 0"), ({"value_dim": 9}, "beginning of a key")):
        with pytest.raises(BadInputError, match=message):
            PageLayout(torch.float16, **good | wrong, value_offset=0)
    with pytest.raises(BadInputError, match="float8"):
        PageLayout(torch.float8_e4m3fn, **good, value_offset=64)


def test_the_cpu_needs_no_triton() -> None:
    program = (
        "import sys; sys.modules['triton'] = None\n"
        "from tests.engine_adapter.attention.scenes import make_scene\n"
        "from kvstore.engine_adapter.attention import decode_attention\n"
        "scene = make_scene(12, [30])\n"
        "assert not scene.disagreement(decode_attention(scene.q, scene.pages))\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], cwd=ROOT, check=True, timeout=120)


def _cut(pages: KVPages, n_pages: int) -> tuple[KVPages, KVPages]:
    """The pages of the only request in two."""
    rows, n_tokens = pages.addresses.numpy(), int(pages.n_tokens[0])
    head_tokens = n_pages * pages.layout.page_tokens
    return (
        KVPages.of(pages.layout, [rows[:n_pages]], [head_tokens]),
        KVPages.of(pages.layout, [rows[n_pages:]], [n_tokens - head_tokens]),
    )
