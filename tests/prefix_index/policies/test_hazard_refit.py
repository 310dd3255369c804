"""A model from a process beside: the same as from here; and whatever becomes of that process, the old one stays."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from kvstore.prefix_index.policies.hazard_features import N_FEATURES, N_STRATA
from kvstore.prefix_index.policies.hazard_model import Episodes, first_model
from kvstore.prefix_index.policies.hazard_parcel import (
    ParcelError,
    pack_answer,
    pack_request,
    unpack_answer,
    unpack_request,
)
from kvstore.prefix_index.policies.hazard_refit import RefitHere, RefitInChild
from kvstore.prefix_index.policies.hazard_worth import worth_table

ENDS_S = 60.0


def some_episodes() -> Episodes:
    dice = np.random.default_rng(3)
    n = 500
    return Episodes(
        dice.integers(0, N_STRATA, n).astype(np.uint8),
        dice.integers(0, 1 << 4 * N_FEATURES, n, np.uint64),
        dice.exponential(100.0, n), dice.integers(1, 20, n).astype(np.float64), dice.random(n) < 0.5,
    )  # fmt: skip


def test_a_child_learns_what_would_be_learnt_here() -> None:
    here, child = RefitHere(), RefitInChild()
    here.begin(first_model(), some_episodes())
    child.begin(first_model(), some_episodes())
    assert child.wait(ENDS_S)
    expected, got = here.take(), child.take()
    assert expected is not None
    assert got is not None
    assert (expected[0].rates == got[0].rates).all()
    assert (expected[0].betas == got[0].betas).all()
    assert expected[0].split == got[0].split == got[1].split
    assert (expected[1].logs == got[1].logs).all()
    assert child.take() is None
    assert child.n_made == 1
    assert child.n_failed == 0


def test_a_child_imports_nothing_from_the_folder_it_is_started_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("numpy", "xxhash", "kvstore"):
        (tmp_path / f"{name}.py").write_text(f"open('ran', 'w')\nraise ImportError('not the real {name}')\n")
    monkeypatch.chdir(tmp_path)
    child = RefitInChild()
    child.begin(first_model(), some_episodes())
    assert child.wait(ENDS_S)
    assert child.n_made == 1
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("command", "timeout_s"),
    [
        (("sh", "-c", "kill -9 $$"), ENDS_S),
        (("sh", "-c", "cat > /dev/null; kill -9 $$"), ENDS_S),
        (("sleep", "1000"), 0.05),
        (("sh", "-c", "cat > /dev/null; echo nonsense"), ENDS_S),
        (("cat",), ENDS_S),
        ((sys.executable, "-c", "raise SystemExit(3)"), ENDS_S),
        (("/nowhere/at/all",), ENDS_S),
    ],
    ids=["killed at once", "killed later", "too slow", "nonsense", "the question as answer", "fails", "not there"],
)
def test_a_child_that_fails_makes_no_model(command: tuple[str, ...], timeout_s: float) -> None:
    child = RefitInChild(timeout_s, command)
    child.begin(first_model(), some_episodes())
    assert child.wait(ENDS_S)
    assert child.take() is None
    assert child.n_failed == 1
    assert child.n_made == 0


def test_closing_ends_the_child_and_its_thread() -> None:
    child = RefitInChild(ENDS_S, ("sleep", "1000"))
    child.begin(first_model(), some_episodes())
    child.close()
    assert child.wait(0.0)
    assert not child.is_free
    assert child.take() is None
    assert child.n_failed == 0


def test_a_question_comes_through_as_it_was() -> None:
    model, seen = unpack_request(pack_request(first_model(), some_episodes()))
    assert (model.rates == first_model().rates).all()
    assert model.split == first_model().split
    for name in ("strata", "features", "ages_s", "blocks", "hits"):
        assert (getattr(seen, name) == getattr(some_episodes(), name)).all()


def test_no_flipped_missing_or_additional_byte_makes_a_model() -> None:
    whole = pack_answer(first_model(), worth_table(first_model()))
    assert unpack_answer(whole)[0].split == first_model().split
    for at in (0, 7, 8, 11, 12, 40, 5000, len(whole) - 1):
        broken = bytearray(whole)
        broken[at] ^= 1
        with pytest.raises(ParcelError):
            unpack_answer(bytes(broken))
    for other in (b"", whole[:4], whole[:10], whole[:-1], whole + b"\0"):
        with pytest.raises(ParcelError):
            unpack_answer(other)


def test_numbers_that_are_none_make_no_model() -> None:
    model = first_model()
    table = worth_table(model)
    model.rates[0, 0] = np.nan
    with pytest.raises(ParcelError, match="rates"):
        unpack_answer(pack_answer(model, table))
