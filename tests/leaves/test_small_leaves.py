"""Tokens, hashes, sizes, settings, clocks, counters and the tree of errors."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import errors
from kvstore.clock import ManualClock, SystemClock
from kvstore.config import DaemonConfig, default_socket_path, format_size, parse_size
from kvstore.errors import BadInputError, ConfigError, KVStoreError
from kvstore.metrics import Counters
from kvstore.tokens import hash_array, token_array

# Tokens ------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, (1 << 32) - 1), max_size=20),
    st.sampled_from(["<u4", ">u4", "<i8", "<u8", ">i8"]),
)
def test_token_ids_keep_their_values(ids: list[int], dtype: str) -> None:
    for tokens in (ids, tuple(ids), np.array(ids, dtype), np.repeat(np.array(ids, dtype), 2)[::2]):
        array = token_array(tokens)
        assert array.tolist() == ids
        assert array.dtype == np.dtype("<u4")
        assert array.flags.c_contiguous


def test_tokens_that_are_right_already_are_not_copied() -> None:
    tokens = np.arange(5, dtype=np.uint32)
    assert token_array(tokens) is tokens


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.uint8, np.uint16])
def test_narrow_types_are_widened(dtype: Any) -> None:
    assert token_array(np.array([0, 100], dtype)).tolist() == [0, 100]


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        ([-1], "token id -1 is out of range"),
        (np.array([3, -7], np.int8), "token id -7"),
        ([1 << 32], "token id 4294967296 is out of range"),
        (np.array([1 << 63], np.uint64), "token id 9223372036854775808"),
        ([1 << 70], "object"),
        ([1.0], "float64"),
        ([True], "bool"),
        (["a"], "text"),
        ([None], "object"),
        ("abc", "text"),
        (b"abcd", "text"),
        (5, r"shape \(\)"),
        (None, r"shape \(\)"),
        ([[1, 2]], r"shape \(1, 2\)"),
        ([[1], [2, 3]], "no array of integers"),
        ({"a": 1}, r"shape \(\)"),
    ],
)
def test_other_tokens_are_bad_input(tokens: Any, says: str) -> None:
    with pytest.raises(BadInputError, match=says):
        token_array(tokens)


def test_no_tokens_are_tokens() -> None:
    none: list[Any] = [[], (), np.empty(0), np.empty(0, np.int64)]
    for tokens in none:
        assert (token_array(tokens).shape, token_array(tokens).dtype) == ((0,), np.dtype("<u4"))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.binary(min_size=8, max_size=8), max_size=6))
def test_hashes_keep_their_bytes(hashes: list[bytes]) -> None:
    array = np.array([list(item) for item in hashes], np.uint8).reshape(-1, 8)
    views = [memoryview(item) for item in hashes]
    kinds: list[Any] = [hashes, map(bytearray, hashes), views, list(array), array, array.repeat(2, 0)[::2]]
    for given_as in kinds:
        taken = hash_array(given_as, 8)
        assert taken.shape == (len(hashes), 8)
        assert taken.dtype == np.uint8
        assert taken.tobytes() == b"".join(hashes)
        assert taken.flags.c_contiguous


@pytest.mark.parametrize(
    ("hashes", "says"),
    [
        ([b"1234567"], "a hash has 7 bytes; this namespace has hash_bytes 8"),
        ([b"12345678", b""], "a hash has 0 bytes"),
        ([8, 8], "one is 8, a int"),
        ([1 << 62], "a int"),
        ([-1], "a int"),
        (b"\x08\x08", "one is 8, a int"),
        (["12345678"], "a str"),
        ([None], "a NoneType"),
        ([np.int64(8)], "a int64"),
        ([np.array([1], np.int64)], "a ndarray"),
        (5, "no sequence of bytes"),
        (None, "no sequence of bytes"),
        (np.zeros((2, 7), np.uint8), r"uint8 of shape \(2, 7\)"),
        (np.zeros(8, np.uint8), r"uint8 of shape \(8,\)"),
        (np.zeros((2, 8), np.int8), "int8 of shape"),
    ],
)
def test_other_hashes_are_bad_input(hashes: Any, says: str) -> None:
    with pytest.raises(BadInputError, match=says):
        hash_array(hashes, 8)


# Sizes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0), (4096, 4096), ("4096", 4096), ("64KiB", 65536), ("64k", 65536), ("1.5GiB", 3 << 29),
        ("2GB", 2 * 10**9), (" 10 MiB ", 10 << 20), ("1mb", 10**6), ("1T", 1 << 40), ("3tb", 3 * 10**12),
        ("7 b", 7), ("0.5k", 512), (9007199254740993, 9007199254740993), ("1.1kB", 1100),
    ],
)  # fmt: skip
def test_sizes_are_read(text: str | int, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    "text",
    ["", "MiB", "-1", "1e9", "1,5G", "1.", ".5", "1 2", "5 bananas", "0x10", "inf", "nan", "9" * 400,
     "\u0663", "1KiBs", None, True, 1e300],
)  # fmt: skip
def test_what_is_no_size_is_named(text: Any) -> None:
    with pytest.raises(ConfigError, match="is not a size; write for example"):
        parse_size(text)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.text("0123456789.kKmMgGtTiIbB +-eE", max_size=9) | st.text(max_size=9))
def test_any_text_is_a_size_or_a_config_error(text: str) -> None:
    try:
        size_bytes = parse_size(text)
    except ConfigError:
        return
    assert size_bytes >= 0


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(0, 10**12), st.integers(0, 999), st.sampled_from([("KiB", 1 << 10), ("GB", 10**9)]))
def test_sizes_are_exact(whole: int, thousandths: int, unit: tuple[str, int]) -> None:
    value = Fraction(whole * 1000 + thousandths, 1000)
    assert parse_size(f"{whole}.{thousandths:03}{unit[0]}") == int(value * unit[1])


def test_sizes_are_written_for_people() -> None:
    sizes = [0, 1023, 1536, 5 << 20, 3 << 29, 1 << 41, 1 << 60]
    assert [format_size(size) for size in sizes] == [
        "0 B", "1023 B", "1.5 KiB", "5.0 MiB", "1.5 GiB", "2.0 TiB", "1048576.0 TiB",
    ]  # fmt: skip


# Settings ----------------------------------------------------------------------------------------

SOCKET = Path("/run/x.sock")
MIB = 1 << 20


@pytest.mark.parametrize(
    ("settings_", "says"),
    [
        ({"socket_path": Path("/" + "x" * 107)}, "longer than the 107 bytes"),
        ({"socket_path": Path("/" + "\u00e9" * 54)}, "longer than the 107 bytes"),
        ({"socket_path": Path("/a\0b")}, "names no file"),
        ({"dram_bytes": MIB - 1}, "1048575 bytes is too small"),
        ({"dram_bytes": 1 << 60}, "does not fit this machine"),
        ({"region_bytes": 4096}, "--region-bytes is 4096"),
        ({"region_bytes": 2 * MIB, "dram_bytes": MIB}, "more than the tier's 1048576"),
        ({"socket_path": Path()}, "names no file"),
        ({"region_bytes": -1}, "--region-bytes is -1"),
        ({"policy_clock": "sundial"}, "--policy-clock is 'sundial'; known are system, client"),
        ({"lease_s_default": 0.0}, "--lease-default is 0.0"),
        ({"lease_s_max": 1e9}, "--lease-max is 1000000000.0"),
        ({"heartbeat_s": float("nan")}, "--heartbeat is nan"),
        ({"hello_s": -1.0}, "--hello-timeout is -1.0"),
        ({"lease_s_default": 700.0}, "--lease-default 700.0 is above --lease-max 600.0"),
        ({"max_clients": 0}, "--max-clients is 0"),
        ({"max_clients": 65537}, "--max-clients is 65537"),
        ({"lease_s_default": "60s"}, "^lease_s_default is '60s'; it must be a number$"),
        ({"region_bytes": "4MiB"}, "^region_bytes is '4MiB'; it must be a whole number$"),
        ({"dram_bytes": float(MIB)}, r"^dram_bytes is 1048576\.0; it must be a whole number$"),
        ({"max_clients": True}, "^max_clients is True; it must be a whole number$"),
        ({"selective_hits": "2"}, "^selective_hits is '2'; it must be a whole number$"),
        ({"poll_us": None}, "^poll_us is None; it must be a number$"),
        ({"prefault": "yes"}, "^prefault is 'yes'; it must be True or False$"),
        ({"policy": 1}, "^policy is 1; it must be a text$"),
        ({"socket_path": "d.sock"}, r"^socket_path is 'd\.sock'; it must be a pathlib\.Path or None$"),
        ({"grpc": "unix:/s"}, r"^grpc is 'unix:/s'; it must be GrpcOptions\(\.\.\.\)$"),
    ],
)
def test_settings_that_can_not_work_are_refused(settings_: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        DaemonConfig(**{"socket_path": SOCKET, **settings_})


def test_settings_at_their_limits_work() -> None:
    DaemonConfig(Path("/" + "x" * 106), dram_bytes=MIB, region_bytes=MIB, max_clients=65536)
    DaemonConfig(SOCKET, lease_s_default=0.01, lease_s_max=0.01, heartbeat_s=86400)


@pytest.mark.parametrize(
    ("dram_bytes", "region_bytes", "effective"),
    [
        (MIB, 0, 2 * MIB),
        (64 * MIB, 0, 4 * MIB),
        (100 * MIB, 0, 6 * MIB),
        (2048 * MIB, 0, 64 * MIB),
        (8 * MIB, 5 * MIB + 1, 5 * MIB),
        (8 * MIB, 3 * MIB + 8192, 3 * MIB + 8192),
    ],
)
def test_the_region_size_fits_the_tier(dram_bytes: int, region_bytes: int, effective: int) -> None:
    config = DaemonConfig(SOCKET, dram_bytes=dram_bytes, region_bytes=region_bytes)
    assert config.region_bytes_effective == effective


def test_where_the_socket_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    monkeypatch.setenv("KVSTORE_SOCKET", "/elsewhere/s")
    assert default_socket_path() == Path("/elsewhere/s")
    monkeypatch.delenv("KVSTORE_SOCKET")
    assert default_socket_path() == Path("/run/user/7/kvstore/kvstored.sock")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert default_socket_path().parent.name.startswith("kvstore-")


# Clocks, counters, errors ------------------------------------------------------------------------


def test_a_manual_clock_moves_only_when_told_to_and_never_back() -> None:
    clock = ManualClock(5.0)
    assert clock.now_s() == clock.now_s() == 5.0
    clock.advance(0.0)
    clock.advance(2.5)
    assert clock.now_s() == 7.5
    with pytest.raises(ValueError, match=r"can't go back by 1.0 s"):
        clock.advance(-1.0)
    assert clock.now_s() == 7.5


def test_the_systems_clock_never_goes_back() -> None:
    clock = SystemClock()
    times = [clock.now_s() for _ in range(100)]
    assert times == sorted(times)


def test_counters_sum_up_and_snapshots_are_copies() -> None:
    counters = Counters()
    counters.add("a")
    counters.add("a", 2.5)
    counters.add("b", 0)
    before = counters.snapshot()
    counters.add("a")
    assert before == {"a": 3.5, "b": 0}
    assert (counters["a"], counters["never"]) == (4.5, 0.0)
    assert "never" not in counters.snapshot()


def test_all_errors_have_one_root_and_bad_input_is_a_value_error() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    assert len(kinds) == 16
    assert all(issubclass(kind, KVStoreError) for kind in kinds)
    bad = {kind.__name__ for kind in kinds if issubclass(kind, ValueError)}
    assert bad == {"BadInputError", "ConfigError", "InUseError", "SpecMismatchError", "TraceError"}
    for child, parent in (
        (errors.VersionError, errors.ProtocolError),
        (errors.SocketInUseError, errors.UnavailableError),
        (errors.SessionEndedError, errors.EndedError),
        (errors.DeviceMemoryError, errors.DeviceError),
    ):
        assert issubclass(child, parent)
