"""What is recommended, and that it never contradicts the facts."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.clock import ManualClock
from kvstore.errors import BadInputError
from kvstore.plan.bandwidth import BandwidthTable, make_curve
from kvstore.plan.calibration import Calibration
from kvstore.plan.links import GpuLink
from kvstore.plan.prefill import Prefill
from kvstore.plan.regime import Action, Advisor, Case, Facts, Option
from kvstore.plan.ways import MAPPED, STAGED, Direction, Way

KIB, MIB = 1 << 10, 1 << 20
SIZES = [4 * KIB, 64 * KIB, MIB]
LLAMA_8B = Prefill.of_flops(8.03e9, layers=32, query_heads=32, head_dim=128, flops_per_s=4e14)
PCIE = {
    Way.COPY: [1.0, 12.0, 24.0],
    Way.BATCH: [4.0, 18.0, 25.0],
    Way.KERNEL: [19.0, 20.0, 20.0],
    Way.ZERO_COPY: [20.0, 21.0, 21.0],
}
C2C = {
    Way.COPY: [1.5, 30.0, 200.0],
    Way.BATCH: [8.0, 100.0, 210.0],
    Way.KERNEL: [150.0, 160.0, 160.0],
    Way.ZERO_COPY: [260.0, 300.0, 300.0],
}


def calibration(rates: dict[Way, list[float]], clock: ManualClock | None = None) -> Calibration:
    curves = {(Direction.LOAD, way): make_curve(SIZES, each, 1e-5) for way, each in rates.items()}
    return Calibration(BandwidthTable(curves), clock or ManualClock())


def advise(
    rates: dict[Way, list[float]], case: Case, facts: Facts | None = None, prefill: Prefill | None = None
) -> Option:
    said = Advisor(calibration(rates), facts or Facts(gpu_gb_per_s=2000.0), prefill).recommend(case)
    assert said.option is not None
    assert said.reasons[0].startswith(said.option.name)
    return said.option


def test_over_pcie_what_is_read_often_is_staged_and_the_piece_decides_how() -> None:
    small = advise(PCIE, Case(64 * MIB, 8 * KIB, reads_per_byte=50))
    large = advise(PCIE, Case(64 * MIB, 2 * MIB, reads_per_byte=50))
    assert (small.action, small.way) == (Action.STAGED, Way.KERNEL)
    assert (large.action, large.way) == (Action.STAGED, Way.BATCH)


def test_over_pcie_what_is_read_once_may_be_read_in_place() -> None:
    assert advise(PCIE, Case(64 * MIB, 8 * KIB, reads_per_byte=1)).action is Action.ZERO_COPY
    assert advise(PCIE, Case(64 * MIB, 2 * MIB, reads_per_byte=1)).action is Action.STAGED


def test_over_pcie_reading_in_place_adds_capacity_where_there_is_no_room() -> None:
    case = Case(64 * MIB, 2 * MIB, reads_per_byte=50, room_bytes=MIB)
    assert advise(PCIE, case).action is Action.ZERO_COPY


def test_over_a_chip_to_chip_link_a_few_reads_in_place_are_cheaper_than_bringing_it() -> None:
    coherent = Facts.of(GpuLink(0, "", "", c2c=True), gpu_gb_per_s=3000.0)
    assert advise(C2C, Case(64 * MIB, 64 * KIB, reads_per_byte=1.5), coherent).action is Action.ZERO_COPY
    assert advise(C2C, Case(64 * MIB, 64 * KIB, reads_per_byte=100), coherent).action is Action.STAGED
    assert not Facts.of(GpuLink(0, "", "", c2c=None)).coherent
    assert not Facts.of(None).coherent


def test_what_is_computed_faster_than_loaded_is_computed() -> None:
    slow = {way: [rate / 100 for rate in rates] for way, rates in PCIE.items()}
    case = Case(512 * 131072, 2 * MIB, reads_per_byte=10, tokens=512, start=0)
    assert advise(slow, case, prefill=LLAMA_8B).action is Action.RECOMPUTE
    assert advise(PCIE, case, prefill=LLAMA_8B).action is Action.STAGED
    untold = Case(512 * 131072, 2 * MIB, reads_per_byte=10)
    assert advise(slow, untold, prefill=LLAMA_8B).action is Action.STAGED


def test_it_says_why_not_the_others() -> None:
    case = Case(64 * MIB, 2 * MIB, reads_per_byte=50)
    said = Advisor(calibration({Way.BATCH: PCIE[Way.BATCH], Way.ZERO_COPY: PCIE[Way.ZERO_COPY]}), Facts()).recommend(
        case
    )
    words = "\n".join(said.reasons)
    assert "not zero-copy: each byte is read 50 times" in words
    assert "not staged by kernel: not measured" in words
    assert "not recompute: the engine's prefill rate is unknown" in words
    assert "pieces of 2.0 MiB over the link at 25 GB/s" in words
    assert "on the device" not in words


def test_what_reading_on_the_device_takes_is_told_apart_from_the_link() -> None:
    case = Case(1 << 30, 2 * MIB, reads_per_byte=256)
    (told, *_) = Advisor(calibration(PCIE), Facts(gpu_gb_per_s=2.0)).recommend(case).reasons
    assert told.endswith("GB/s; 137 s of it to read each byte 256 times on the device")
    in_place = Advisor(calibration({Way.ZERO_COPY: PCIE[Way.ZERO_COPY]}), Facts(coherent=True)).recommend(case)
    assert in_place.reasons[0].endswith("GB/s, each byte 256 times")


def test_who_shares_the_link_is_said_where_it_is_used() -> None:
    facts = Facts.of(GpuLink(0, "", "", same_switch=(1, 2)))
    said = Advisor(calibration(PCIE), facts).recommend(Case(64 * MIB, MIB))
    assert any("GPU 1, 2 shares" in reason for reason in said.reasons)


def test_nothing_possible_is_said_with_reasons() -> None:
    facts = Facts(can_map=False, cannot_map_reason="mappings are read-only and the device can't register those")
    said = Advisor(calibration(PCIE), facts).recommend(Case(64 * MIB, MIB, room_bytes=0))
    assert said.option is None
    assert any("read-only" in reason for reason in said.reasons)
    assert any("has room for 0 B" in reason for reason in said.reasons)


def test_a_choice_is_kept_until_another_is_clearly_better() -> None:
    clock = ManualClock()
    rates = calibration({Way.BATCH: [20.0] * 3, Way.KERNEL: [19.9] * 3}, clock)
    advisor, case = Advisor(rates, Facts()), Case(64 * MIB, MIB, reads_per_byte=5)

    def chosen() -> Way | None:
        option = advisor.recommend(case).option
        assert option is not None
        return option.way

    def slow_down(share: float) -> None:
        curve = rates.table.curve(Direction.LOAD, Way.BATCH)
        assert curve is not None
        rates.observe(Direction.LOAD, Way.BATCH, MIB, 64, curve.expected_s(MIB, 64) / share)

    assert chosen() is Way.BATCH
    slow_down(0.7)
    assert rates.rate(Direction.LOAD, Way.BATCH, MIB) < rates.rate(Direction.LOAD, Way.KERNEL, MIB)
    assert chosen() is Way.BATCH
    assert any("not enough better" in reason for reason in advisor.recommend(case).reasons)
    for _ in range(20):
        slow_down(0.3)
    assert chosen() is Way.KERNEL
    clock.advance(45.0)
    assert chosen() is Way.KERNEL, "back within the margin is no reason to change either"


def test_a_choice_that_became_impossible_is_not_kept() -> None:
    advisor = Advisor(calibration(PCIE), Facts())
    plenty, none = (Case(64 * MIB, 2 * MIB, reads_per_byte=5, room_bytes=room) for room in (math.inf, 0))
    first, second = advisor.recommend(plenty, "job").option, advisor.recommend(none, "job").option
    assert first is not None
    assert second is not None
    assert (first.action, second.action) == (Action.STAGED, Action.ZERO_COPY)


@pytest.mark.parametrize(
    "wrong",
    [
        {"total_bytes": -1}, {"piece_bytes": 0}, {"reads_per_byte": -1.0}, {"reads_per_byte": math.inf},
        {"reads_per_byte": math.nan}, {"room_bytes": -1}, {"tokens": -1}, {"start": -1},
    ],
)  # fmt: skip
def test_cases_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(BadInputError):
        Case(**({"total_bytes": 1, "piece_bytes": 1} | wrong))  # type: ignore[arg-type]


rates = st.dictionaries(
    st.sampled_from(list(Way)), st.lists(st.floats(0.01, 1000.0), min_size=3, max_size=3), max_size=4
)
facts = st.builds(
    Facts, coherent=st.booleans(), can_map=st.booleans(), gpu_gb_per_s=st.sampled_from([0.0, 500.0, 4000.0])
)
cases = st.builds(
    Case,
    total_bytes=st.integers(0, 1 << 36),
    piece_bytes=st.integers(1, 1 << 26),
    reads_per_byte=st.floats(0, 1e4),
    room_bytes=st.one_of(st.just(math.inf), st.integers(0, 1 << 36)),
    tokens=st.integers(0, 1 << 20),
    start=st.integers(0, 1 << 20),
)
prefills = st.one_of(
    st.none(), st.builds(Prefill, first_token_s=st.floats(1e-6, 1e-1), doubling_tokens=st.just(30_000.0))
)


@given(rates, facts, cases, prefills)
def test_it_never_recommends_what_the_facts_exclude_nor_what_takes_longer(
    rates: dict[Way, list[float]], facts: Facts, case: Case, prefill: Prefill | None
) -> None:
    said = Advisor(calibration(rates), facts, prefill).recommend(case)
    room = case.room_bytes >= case.total_bytes
    usable = [way for way in rates if facts.can_map or way not in MAPPED]
    around = room and any(way in usable for way in STAGED)
    in_place = Way.ZERO_COPY in usable and (facts.coherent or case.reads_per_byte <= 1 or not around)
    computable = room and prefill is not None and case.tokens > 0
    if said.option is None:
        assert not around
        assert not in_place
        assert not computable
        return
    option = said.option
    if option.action is Action.STAGED:
        assert room
        assert option.way in usable
    elif option.action is Action.ZERO_COPY:
        assert in_place
    else:
        assert computable
    assert option.expected_s < math.inf
    assert all(option.expected_s <= each.expected_s for each in said.options if not each.excluded)


@given(rates, facts, cases, prefills, st.floats(1.0, 50.0))
def test_a_faster_link_never_speaks_for_computing(
    rates: dict[Way, list[float]], facts: Facts, case: Case, prefill: Prefill | None, faster: float
) -> None:
    quick = {way: [rate * faster for rate in each] for way, each in rates.items()}
    slow_link, fast_link = (Advisor(calibration(each), facts, prefill).recommend(case) for each in (rates, quick))
    assert (slow_link.option is None) == (fast_link.option is None)
    if slow_link.option is not None and fast_link.option is not None:
        assert fast_link.option.expected_s <= slow_link.option.expected_s
        if slow_link.option.action is not Action.RECOMPUTE:
            assert fast_link.option.action is not Action.RECOMPUTE


@given(facts, cases, st.floats(1.0, 1e3))
def test_more_reads_never_speak_for_reading_in_place(facts: Facts, case: Case, more: float) -> None:
    often = Case(
        case.total_bytes, case.piece_bytes, case.reads_per_byte * more, case.room_bytes, case.tokens, case.start
    )
    quick = Facts(facts.coherent, facts.can_map, "", 4000.0)
    few_reads, many_reads = (Advisor(calibration(C2C), quick).recommend(each).option for each in (case, often))
    if few_reads is not None and few_reads.action is Action.STAGED:
        assert many_reads is not None
        assert many_reads.action is Action.STAGED


def test_noise_around_a_tie_does_not_make_it_flap() -> None:
    """Two ways of the same rate, transfers off by up to a tenth: whatever was chosen first stays."""
    clock, dice = ManualClock(), random.Random(3)
    rates = calibration({Way.BATCH: [20.0] * 3, Way.KERNEL: [20.0] * 3}, clock)
    advisor, case, chosen = Advisor(rates, Facts()), Case(64 * MIB, MIB, reads_per_byte=5), []
    for _ in range(500):
        option = advisor.recommend(case).option
        assert option is not None
        assert option.way is not None
        chosen.append(option.way)
        curve = rates.table.curve(Direction.LOAD, option.way)
        assert curve is not None
        rates.observe(Direction.LOAD, option.way, MIB, 64, curve.expected_s(MIB, 64) * dice.uniform(0.9, 1.1))
        clock.advance(0.5)
    assert len(set(chosen)) == 1
