"""Who is writing a block of a prompt, and how much of prompts is compared to know it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvstore.lease import Reservation
from kvstore.prefix_index.rows import RowPath
from kvstore.store import being_written
from kvstore.store.being_written import is_written, written_end
from kvstore.store.misses import Ending
from kvstore.store.requests import Prompt
from kvstore.types import ExtraKey
from tests.store.rig import KIB, Rig
from tests.store.test_misses import counts, look

ALICE = 1


def picture(number: int, at_token: int) -> ExtraKey:
    return ExtraKey(at_token, 1, number.to_bytes(16, "little"))


def wanted(rig: Rig, prompt: Prompt, n: int = 1) -> list[Reservation]:
    """So many reservations of the last block of a prompt."""
    last = prompt.path.n_rows - 1
    return [rig.store.begin_reserve(10 + i, prompt, last, 1, 0.0) for i in range(n)]


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows of paths are compared, call by call."""
    calls: list[int] = []
    starts_as = RowPath.starts_as

    def counted(self: RowPath, other: RowPath, n_rows: int) -> bool:
        calls.append(n_rows)
        return starts_as(self, other, n_rows)

    monkeypatch.setattr(RowPath, "starts_as", counted)
    return calls


@pytest.fixture
def wide(make_rig: Callable[..., Rig]) -> Rig:
    return make_rig(capacity_bytes=2048 * KIB, region_bytes=256 * KIB)


def test_the_first_that_is_found_is_enough(wide: Rig, compared: list[int]) -> None:
    tokens = list(range(20))
    wide.put(ALICE, wide.prompt(tokens[:18]))
    wanted(wide, wide.prompt(tokens), 8)
    look(wide, wide.prompt(tokens))
    assert counts(wide) == {Ending.BEING_WRITTEN: 1}
    assert compared == [10]


def test_other_blocks_are_not_compared_with_what_is_before_them(wide: Rig, compared: list[int]) -> None:
    wide.put(ALICE, wide.prompt(range(18)))
    for i in range(8):
        wanted(wide, wide.prompt([*range(18), 100 + i]))
    look(wide, wide.prompt(range(20)))
    assert counts(wide) == {Ending.LONGER: 1}
    assert compared == []


@pytest.mark.parametrize("with_extras", [False, True])
def test_more_than_a_bound_is_not_compared(
    wide: Rig, compared: list[int], monkeypatch: pytest.MonkeyPatch, with_extras: bool
) -> None:
    """The same block behind another beginning, many times over."""
    monkeypatch.setattr(being_written, "COMPARED_BYTES_MAX", 300 if not with_extras else 300 + 3 * 512)
    extras = [picture(i, 2 * i) for i in range(1, 2)] if with_extras else []
    for i in range(6):
        start = [1000 + i, *range(1, 18)]
        wide.put(ALICE, wide.prompt(start, extras=extras))
        wanted(wide, wide.prompt([*start, 18, 19], extras=extras))
    wide.put(ALICE, wide.prompt(range(18), extras=extras))
    look(wide, wide.prompt(range(20), extras=extras))
    assert counts(wide) == {Ending.UNSAMPLED: 1}
    assert compared == [10] * 3
    monkeypatch.setattr(being_written, "COMPARED_BYTES_MAX", 1 << 20)
    look(wide, wide.prompt(range(20), extras=extras))
    assert counts(wide) == {Ending.UNSAMPLED: 1, Ending.LONGER: 1}
    wanted(wide, wide.prompt(range(20), extras=extras))
    look(wide, wide.prompt(range(20), extras=extras))
    assert counts(wide)[Ending.BEING_WRITTEN] == 1


def test_a_prompt_itself_is_not_compared(wide: Rig, compared: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(being_written, "COMPARED_BYTES_MAX", 0)
    wide.put(ALICE, wide.prompt(range(18)))
    prompt = wide.prompt(range(20))
    wanted(wide, prompt)
    assert is_written(wide.store.reservations, prompt, 9) is True
    assert is_written(wide.store.reservations, wide.prompt(range(20)), 9) is None
    assert is_written(wide.store.reservations, prompt, 8) is False
    assert written_end(wide.store.reservations, prompt, 9) == 10
    assert written_end(wide.store.reservations, wide.prompt(range(20)), 9) == 0
    assert compared == []


def starts(one: Prompt, other: Prompt, n_rows: int) -> bool:
    forth, back = one.path.starts_as(other.path, n_rows), other.path.starts_as(one.path, n_rows)
    assert forth == back
    return forth


def test_beginnings_differ_by_tokens_pictures_and_where_they_are(rig: Rig) -> None:
    dice = np.random.default_rng(5)
    tokens = dice.integers(0, 9, 21).tolist()
    plain = rig.prompt(tokens)
    changed = [*tokens[:13], tokens[13] + 1, *tokens[14:]]
    assert [starts(plain, rig.prompt(changed), n) for n in (6, 7, 11)] == [True, False, False]
    one = rig.prompt(tokens, extras=[picture(1, 3), picture(2, 12), picture(3, 20)])
    for other, same_rows in (
        ([], 1),
        ([picture(1, 3)], 6),
        ([picture(1, 2), picture(2, 12)], 1),
        ([picture(9, 3), picture(2, 12)], 1),
        ([picture(1, 3), picture(2, 12)], 10),
        ([picture(1, 3), picture(2, 12), picture(4, 20)], 10),
        ([picture(1, 3), picture(2, 12), picture(3, 20)], 11),
        ([picture(1, 3), picture(2, 12), picture(3, 20), picture(4, 30)], 11),
    ):
        path = rig.prompt(tokens, extras=other)
        assert [starts(one, path, n) for n in range(12)] == [n <= same_rows for n in range(11)] + [same_rows == 11]
    assert starts(plain, rig.prompt(tokens[:20]), 10)
    assert not starts(plain, rig.prompt(tokens[:20]), 11)
