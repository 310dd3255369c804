"""Timing tools and limits: what they compute, not how fast this machine is."""

from __future__ import annotations

import signal
import threading

import numpy as np
import pytest

from kvstore.bench.bandwidth import BandwidthOptions
from kvstore.bench.bandwidth_row import Row, bootstrap_low
from kvstore.bench.limits import (
    Echo,
    measure_copy,
    measure_grpc_aio_echo,
    measure_limits,
    measure_token_compare,
)
from kvstore.bench.measure import Latency, Team, ordinary_array, paired, timed, uninterrupted
from kvstore.errors import BadInputError


def test_latency_is_in_microseconds() -> None:
    latency = Latency.from_seconds([i / 1e6 for i in range(1, 102)])
    assert latency.n == 101
    assert latency.p50_us == pytest.approx(51)
    assert latency.p99_us == pytest.approx(100)
    assert Latency.from_seconds([]) == Latency(0, 0, 0)


def test_pairs_take_turns_in_going_first() -> None:
    order: list[str] = []

    def side(name: str, seconds: float) -> float:
        order.append(name)
        return seconds

    pairs = paired(4, lambda i: side("l", i), lambda i: side("r", 10 + i))
    assert "".join(order) == "lrrllrrl"
    assert pairs.tolist() == [[0, 10], [1, 11], [2, 12], [3, 13]]


@pytest.mark.parametrize("threads", [1, 3])
def test_a_team_runs_one_function_per_thread_at_the_same_time(threads: int) -> None:
    together = threading.Barrier(threads, timeout=30)
    ran: list[int] = []

    def work(index: int) -> None:
        together.wait()
        ran.append(index)

    with Team(threads) as team:
        assert team.time_s([lambda i=i: work(i) for i in range(threads)]) > 0  # type: ignore[misc]
        with pytest.raises(BadInputError, match="functions for"):
            team.time_s([])
    assert sorted(ran) == list(range(threads))


def test_a_team_passes_errors_on() -> None:
    def fail() -> None:
        raise ValueError("broken")

    with Team(2) as team, pytest.raises(ValueError, match="broken"):
        team.time_s([fail, lambda: None])
    with pytest.raises(BadInputError, match="threads is 0"):
        Team(0)


def test_timed_returns_the_result() -> None:
    seconds, result = timed(lambda: 7)
    assert seconds >= 0
    assert result == 7


@pytest.mark.parametrize("alignment", [1, 64, 4096])
def test_arrays_are_aligned(alignment: int) -> None:
    array = ordinary_array(10_000, alignment)
    assert array.shape == (10_000,)
    assert array.ctypes.data % alignment == 0
    assert array.flags.writeable


def test_limits_are_measured() -> None:
    measured = measure_limits(echoes=20, grpc_echoes=5, copy_bytes=1 << 16, compare_tokens=1000)
    assert measured.copy_1_thread_gb_per_s > 0
    assert measured.copy_2_threads_gb_per_s > 0
    assert measured.unix_echo.n == 20
    assert (measured.grpc_aio_echo is None) == bool(measured.notes)
    plain = measured.to_dict()
    assert plain["unix_echo_4k"] == measured.unix_echo.to_dict()


def test_an_echo_comes_back_and_its_server_ends() -> None:
    with Echo(10_000) as echo:
        process = echo._process
        echo._message = bytes(range(250)) * 40
        echo.round_trip()
        assert bytes(echo._reply) == echo._message
        assert process.is_alive()
    with pytest.raises(ValueError, match="closed"):
        process.is_alive()


def test_without_grpc_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    reason = measure_grpc_aio_echo(1)
    assert isinstance(reason, str)
    assert "grpcio is not installed" in reason


def test_small_measurements_work() -> None:
    assert measure_copy(1000, 2, repeats=1) > 0
    assert measure_token_compare(10, repeats=3).n == 3


def test_a_row_is_the_median_of_ratios() -> None:
    # Store 2, 1, 4 seconds; limit 1, 2, 1: ratios .5, 2, .25.
    pairs = np.array([[2.0, 1.0], [1.0, 2.0], [4.0, 1.0]])
    row = Row.from_pairs("put", 64, 2, 10**9, pairs)
    assert row.ratio == 0.5
    assert (row.gb_per_s, row.limit_gb_per_s) == (0.5, 1.0)
    assert row.p50_us == 2e6
    assert not row.cold
    assert row.ratio_low <= row.ratio


def test_the_bootstrap_bound_is_below_the_median_and_tightens() -> None:
    rng = np.random.default_rng(3)
    few, many = rng.normal(1, 0.1, 10), rng.normal(1, 0.1, 1000)
    assert bootstrap_low(few) < np.median(few)
    assert np.median(many) - bootstrap_low(many) < np.median(few) - bootstrap_low(few)
    assert bootstrap_low(np.full(5, 0.7)) == pytest.approx(0.7)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pairs": 0}, "pairs is 0"),
        ({"threads": ()}, r"threads is \(\)"),
        ({"block_sizes": (0,)}, r"block_sizes is \(0,\)"),
        ({"dram_bytes": 1 << 20}, "dram_bytes is 1048576"),
    ],
)
def test_impossible_options_are_named(changes: dict[str, int], message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        BandwidthOptions(**changes)  # type: ignore[arg-type]


def test_an_interrupt_waits_for_what_must_not_be_cut_in_two() -> None:
    done = []

    def work() -> None:
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            done.append("the rest")
        done.append("what follows")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["the rest"]
