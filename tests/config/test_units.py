"""Sizes, durations and addresses as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.config.addresses import is_loopback, split_tcp
from kvstore.config.kinds import MICROSECONDS, SECONDS, SIZE
from kvstore.config.units import parse_duration
from kvstore.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30", 30.0), (30, 30.0), (0.25, 0.25), ("250ms", 0.25), ("30s", 30.0), ("5m", 300.0), ("5 min", 300.0),
     ("1.5h", 5400.0), ("1D", 86400.0), ("200us", 0.0002), (" 7 S ", 7.0)],
)  # fmt: skip
def test_durations_have_units_and_a_bare_number_is_in_seconds(text: str | float, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "5 parsec", "-1s", "1e3", "1,5s", "5m30s", "nan", "inf", "9" * 21])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a duration; write for example 250ms"):
        parse_duration(text)


def test_a_bare_number_can_be_in_another_unit() -> None:
    assert parse_duration("200", "us") == 0.0002
    assert MICROSECONDS.read("200") == MICROSECONDS.read(200) == MICROSECONDS.read("0.2ms") == 200.0


@given(
    st.one_of(st.integers(0, 10**7).map(float), st.floats(0, 86400, allow_subnormal=False).map(lambda s: round(s, 4)))
)
def test_a_duration_that_is_written_reads_as_the_same(seconds: float) -> None:
    assert SECONDS.read(SECONDS.write(seconds).strip('"')) == pytest.approx(seconds, rel=1e-5)


@given(st.integers(0, 1 << 60))
def test_a_size_that_is_written_reads_as_the_same(size_bytes: int) -> None:
    assert SIZE.read(SIZE.write(size_bytes).strip('"')) == size_bytes


@pytest.mark.parametrize(
    ("listen", "host", "port"),
    [("127.0.0.1:9090", "127.0.0.1", 9090), ("[::1]:0", "::1", 0), ("localhost:65535", "localhost", 65535)],
)
def test_addresses_are_split(listen: str, host: str, port: int) -> None:
    assert split_tcp(listen, "--x") == (host, port)


@pytest.mark.parametrize("listen", ["9090", ":9090", "host", "host:", "::1:9090", "h:65536", "h:-1", "h :1", "h:²"])
def test_what_is_no_address_is_refused(listen: str) -> None:
    with pytest.raises(ConfigError, match=r"--x is .* give host:port"):
        split_tcp(listen, "--x")


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), (".".join("0000"), False),
     ("::", False),
     ("10.0.0.1", False), ("example.org", False), ("localhost.example.org", False)],
)  # fmt: skip
def test_only_addresses_of_this_machine_alone_are_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback
