"""The bench of codecs: every codec and backend gets a row, other bytes are not timed, limits are told."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kvstore.bench import codecs
from kvstore.bench.codecs import CodecBenchOptions, missed, run
from kvstore.compression import quantize_numpy
from kvstore.compression.codec import CodecId
from kvstore.compression.quantize import NUMPY, backends
from kvstore.errors import BadInputError, IntegrityError
from kvstore.native.mapping import bytes_at

SMALL = CodecBenchOptions(pairs=1, batch_bytes=64 << 10, heads=2, dim=16, tokens=16, threads=2)


def test_every_codec_has_a_row_for_each_backend() -> None:
    rows = run(SMALL)
    assert {row["codec"] for row in rows} == {number.name for number in CodecId} - {"RAW"}
    assert {row["backend"] for row in rows} == {NUMPY, backends()[-1], "zstd"}
    for row in rows:
        assert 1 < row["ratio"] < 8
        assert row["encode_of_copy"] > 0
        assert row["decode_gb_per_s"] > 0
    sizes: dict[str, set[float]] = {}
    for row in rows:
        sizes.setdefault(row["codec"], set()).add(row["ratio"])
    assert all(len(ratios) == 1 for ratios in sizes.values())


@pytest.mark.skipif(len(backends()) == 1, reason="the C part is not built here")
def test_a_backend_of_other_bytes_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = quantize_numpy.quantize

    def wrong(*arguments: Any) -> Any:
        result = plain(*arguments)
        codes = arguments[2]
        bytes_at(int(codes[0]), 1)[0] ^= 1
        return result

    monkeypatch.setattr(quantize_numpy, "quantize", wrong)
    with pytest.raises(IntegrityError, match="codec Q8 gives other bytes than numpy"):
        run(dataclasses.replace(SMALL, codecs=(CodecId.Q8,), backends=(backends()[-1],)))


def test_what_is_below_its_limit_is_told() -> None:
    row = {"codec": "Q8", "backend": "avx512", "threads": 1, "encode_of_copy": 0.2, "decode_of_copy": 0.9}
    assert missed([row]) == ["Q8 encode is 0.20 x a copy, not 0.35"]
    assert not missed([row | {"backend": "avx2"}, row | {"threads": 2}, row | {"codec": "Q2"}])
    assert set(codecs.LIMITS) == {
        (number, what) for number in (CodecId.Q8, CodecId.Q4) for what in ("encode", "decode")
    }


def test_too_small_a_batch_is_named() -> None:
    with pytest.raises(BadInputError, match="too small to measure; give 65536 or more"):
        run(dataclasses.replace(SMALL, batch_bytes=1000))
