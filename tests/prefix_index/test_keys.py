"""Identity: canonical keys, equal in every process, different for everything that matters."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import BadInputError
from kvstore.prefix_index import keys
from kvstore.prefix_index.index import PrefixIndex
from kvstore.prefix_index.keys import block_key, extra_digest
from kvstore.prefix_index.policies import make_policy
from kvstore.prefix_index.policy import Use
from kvstore.prefix_index.rows import RowPath
from kvstore.types import ExtraKey, KVSpec, Namespace, Root

ROOT = bytes(range(16))

SCRIPT = """
import numpy as np
from kvstore.prefix_index.rows import RowPath
from kvstore.types import ExtraKey, KVSpec, Namespace, Root
namespace = Namespace(model="m", spec=KVSpec.opaque(4, 64))
root = Root(salt="s", lora="l").key(namespace.digest())
tokens = np.arange(10, dtype=np.uint32) * 77777
extras = [ExtraKey(5, 2, b"image"), ExtraKey(1, 1, b"sound")]
print(RowPath.from_tokens(tokens, 4, extras).keys(root).tobytes().hex())
print(RowPath.from_tokens(tokens, 4, ()).keys(root).tobytes().hex())
print(RowPath.from_tokens(tokens, 4, None).keys(root).tobytes().hex())
"""


def test_three_processes_agree_and_empty_extras_are_none() -> None:
    outputs = set()
    for seed in ("0", "1", "4711"):
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        outputs.add(done.stdout)
    assert len(outputs) == 1
    covered, empty, none = outputs.pop().split()
    assert empty == none
    assert covered != empty
    assert len(covered) == 3 * 32


def test_keys_are_pinned_to_these_bytes() -> None:
    # Keys lie on disk and on other hosts: a change here is a new format, not a refactoring.
    assert block_key(ROOT, b"\x01\x00\x00\x00").hex() == "9a1264981564e1e02309880748f401fc"
    assert block_key(ROOT, b"\x01\x00\x00\x00", b"d" * 16).hex() == "6840cfbbab6c5c861d5d20a8e168aca2"
    assert extra_digest([(1, 2, 0, b"image")]).hex() == "d879336f3382fabea093688f6f7de374"


def roots() -> dict[str, bytes]:
    spec = KVSpec.opaque(4, 64)
    base = Namespace(model="m", spec=spec).digest()
    return {
        "base": Root().key(base),
        "salt a": Root(salt="a").key(base),
        "salt b": Root(salt="b").key(base),
        "lora a": Root(lora="a@weights1").key(base),
        "lora a, other weights": Root(lora="a@weights2").key(base),
        "salt is not lora": Root(salt="a@weights1").key(base),
        "other revision": Root().key(Namespace(model="m", spec=spec, revision="2").digest()),
        "other tenant": Root().key(Namespace(model="m", spec=spec, tenant="t").digest()),
    }


def test_salt_lora_and_tenant_never_hit_each_other() -> None:
    all_roots = roots()
    assert len(set(all_roots.values())) == len(all_roots)
    path = RowPath.from_tokens(np.arange(11, dtype=np.uint32), 4)
    for stored in all_roots:
        index = PrefixIndex(make_policy("lru"))
        index.insert(all_roots[stored], path, 0, np.arange(3), 1, Use())
        for asked in all_roots:
            assert index.match(all_roots[asked], path).n_tokens == (11 if asked == stored else 0), (
                stored,
                asked,
            )
    keys = [bytes(key) for root in all_roots.values() for key in path.keys(root)]
    assert len(set(keys)) == len(keys)


@given(
    st.lists(
        st.tuples(
            st.binary(min_size=16, max_size=16),
            st.binary(max_size=6),
            st.sampled_from([b"", b"\x00", b"a", b"aa"]),
        ),
        min_size=2,
        max_size=8,
        unique=True,
    )
)
@settings(derandomize=True, deadline=None)
def test_different_input_never_shares_a_key(triples: list[tuple[bytes, bytes, bytes]]) -> None:
    assert len({block_key(*triple) for triple in triples}) == len(triples)


def test_row_and_digest_can_not_trade_bytes() -> None:
    assert block_key(ROOT, b"ab", b"cd") != block_key(ROOT, b"abcd")
    assert block_key(ROOT, b"ab", b"cd") != block_key(ROOT, b"abc", b"d")
    assert block_key(ROOT, b"abcd\x02") != block_key(ROOT, b"ab", b"cd")


def test_a_key_names_the_whole_prefix() -> None:
    tokens = np.arange(12, dtype=np.uint32)
    other = tokens.copy()
    other[0] = 99
    mine, theirs = (RowPath.from_tokens(t, 4).keys(ROOT) for t in (tokens, other))
    assert not (mine == theirs).all(axis=1).any()
    again = RowPath.from_tokens(tokens, 4).chain(mine[0].tobytes(), 1, 3)
    assert (again == mine[1:]).all()


def test_place_of_an_image_in_the_prompt_and_in_itself_counts() -> None:
    tokens = np.full(12, 5, np.uint32)
    covers = [
        (),
        [ExtraKey(4, 4, b"i")],
        [ExtraKey(4, 3, b"i")],
        [ExtraKey(5, 3, b"i")],
        [ExtraKey(3, 5, b"i")],
    ]
    keys = {RowPath.from_tokens(tokens, 4, cover).keys(ROOT)[1].tobytes() for cover in covers}
    assert len(keys) == len(covers)


def test_one_long_image_is_not_two_short_ones() -> None:
    tokens = np.full(8, 5, np.uint32)
    one = RowPath.from_tokens(tokens, 4, [ExtraKey(3, 5, b"i")]).keys(ROOT)
    two = RowPath.from_tokens(tokens, 4, [ExtraKey(3, 1, b"i"), ExtraKey(4, 4, b"i")]).keys(ROOT)
    assert (one[0] == two[0]).all()
    assert (one[1] != two[1]).any()


def test_keys_do_not_depend_on_what_follows() -> None:
    tokens = np.arange(12, dtype=np.uint32)
    long = RowPath.from_tokens(tokens, 4, [ExtraKey(2, 9, b"i")]).keys(ROOT)
    short = RowPath.from_tokens(tokens[:8], 4, [ExtraKey(2, 9, b"i")]).keys(ROOT)
    assert (long[:2] == short).all()


@pytest.mark.parametrize("parent", [b"", b"x" * 15, b"x" * 17])
def test_a_parent_of_another_length_is_refused(parent: bytes) -> None:
    with pytest.raises(BadInputError, match=f"{len(parent)} bytes"):
        block_key(parent, b"")


def test_a_digest_too_long_is_refused() -> None:
    with pytest.raises(BadInputError, match="256 bytes"):
        block_key(ROOT, b"", bytes(256))


@pytest.fixture(params=["C", "Python"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without the C part."""
    if request.param == "Python":
        monkeypatch.setattr(keys, "chained_keys", lambda *_: None)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("row_bytes", [1, 8, 64, 110, 111, 112, 127, 128, 239, 240, 241, 4096])
def test_a_chain_in_one_call_is_the_one_row_by_row(row_bytes: int) -> None:
    """Around the 128 bytes that BLAKE2b hashes at a time, too."""
    rows = np.random.default_rng(row_bytes).bytes(7 * row_bytes)
    parent, expected = ROOT, []
    for start in range(0, len(rows), row_bytes):
        parent = block_key(parent, rows[start : start + row_bytes])
        expected.append(parent)
    found = keys.block_keys(ROOT, memoryview(rows), row_bytes)
    assert found.shape == (7, 16)
    assert found.tobytes() == b"".join(expected)
    assert keys.block_keys(ROOT, memoryview(b""), row_bytes).shape == (0, 16)
    with pytest.raises(BadInputError, match="parent is 3 bytes"):
        keys.block_keys(b"abc", memoryview(rows), row_bytes)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("first_row", [0, 1, 3, 6])
def test_rows_with_extras_and_a_tail_are_chained_with_the_others(first_row: int) -> None:
    tokens = np.arange(4 * 8 + 3, dtype=np.uint32)
    covers = [
        ExtraKey(start_token=9, n_tokens=2, digest=b"a" * 16),
        ExtraKey(start_token=20, n_tokens=1, digest=b"b" * 16),
    ]
    path = RowPath.from_tokens(tokens, 4, covers)
    parent, expected = ROOT, []
    for i in range(path.n_rows):
        extra = path.extra(i)  # noqa: S610 - not Django's
        parent = block_key(parent, path.row(i), extra.digest if extra else b"")
        expected.append(parent)
    before = expected[first_row - 1] if first_row else ROOT
    for end in range(first_row, path.n_rows + 1):
        found = RowPath.from_tokens(tokens, 4, covers).chain(before, first_row, end)
        assert found.tobytes() == b"".join(expected[first_row:end])
