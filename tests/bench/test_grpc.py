"""The gRPC benchmark on a small daemon: complete, and it finds wrong bytes and lost calls."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.bench import grpc_crowd
from kvstore.bench.grpc_bare import BareClient, bare_server
from kvstore.bench.grpc_crowd import measure_crowd
from kvstore.bench.grpc_stream import GrpcBenchOptions, _Side, run
from kvstore.bench.pictures import draw_grpc
from kvstore.bench.report import grpc_tables, print_tables
from kvstore.client import Client
from kvstore.config import GrpcOptions
from kvstore.errors import BadInputError, IntegrityError

MIB = 1 << 20
SMALL = GrpcBenchOptions(
    block_sizes=(16 << 10, 3 * MIB), pairs=2, batch_bytes=6 * MIB, clients=5, rounds=2, calls=4, seed=3
)


@pytest.fixture
def address(start_daemon: Callable[..., str], tmp_path: Path) -> str:
    listen = f"unix:{tmp_path / 'grpc.sock'}"
    start_daemon(SMALL.dram_bytes, grpc=GrpcOptions(listen=listen))
    return f"grpc+{listen}"


def test_every_figure_is_there_and_can_be_shown(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = run(SMALL, address)
    plain = json.loads(json.dumps(report.to_dict()))
    assert [(row["name"], row["block_bytes"]) for row in plain["rows"]] == [
        (name, size) for size in SMALL.block_sizes for name in ("put", "get_into")
    ]
    assert [(row["name"], row["gb_per_s"]) for row in plain["landed"]] == [
        (row["name"], row["gb_per_s"]) for row in plain["rows"]
    ]
    assert all(row["ratio"] > 0 and row["gb_per_s"] > 0 for row in plain["rows"] + plain["landed"])
    assert {latency["n"] for latency in plain["calls"].values()} == {4}
    crowd = plain["crowd"]
    assert (crowd["clients"], crowd["n_calls"], crowd["n_lost"], crowd["mismatches"]) == (5, 30, 0, 0)
    print_tables(grpc_tables(report))
    shown = capsys.readouterr().out
    assert "5 clients at once" in shown
    assert "bare echo of 1 KiB" in shown
    draw_grpc(tmp_path / "picture.png", report)
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_wrong_bytes_are_found(address: str) -> None:
    with Client(address, timeout_s=20.0) as client:
        side = _Side(client, SMALL, 16 << 10)
        side._put_s(0)
        assert side._get_s(0) > 0
        side._blocks = np.zeros_like(side._blocks)
        with pytest.raises(IntegrityError, match="other bytes"):
            side._get_s(0)


def test_lost_calls_are_counted(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = grpc_crowd._Worker(address, 1, 7)
    monkeypatch.setattr(
        worker._namespace, "match", lambda _: worker._client.open(worker._namespace.namespace).match([])
    )
    worker.run()
    worker.close()
    assert (worker.n_lost, worker.mismatches) == (1, 0)


def test_all_clients_take_part(address: str) -> None:
    crowd = measure_crowd(address, clients=3, rounds=1, seed=0)
    assert {name: latency.n for name, latency in crowd.latency.items()} == {"put": 3, "match": 3, "get_into": 3}


def test_the_bare_server_moves_all_its_chunks(tmp_path: Path) -> None:
    bare = f"unix:{tmp_path / 'bare.sock'}"
    with bare_server(bare, 100_000, 3), BareClient(bare, 100_000, 3) as client:
        assert client.read_s() > 0
        assert client.write_s() > 0
        assert client.echo_s(b"x") > 0
        client.place[:] = 0
        assert client.read_landed_s() > 0
        assert client.place.tobytes() == b"".join(client._chunks)
        assert client.write_landed_s() > 0
        assert client._land(iter([b"abc", b"de"])) == b"5"
        assert [len(chunk) for chunk in client._read(b"")] == [100_000] * 3
        assert client._write(iter([b"abc", b"de"])) == b"5"


@pytest.mark.parametrize(
    ("name", "value"), [("pairs", 0), ("clients", 0), ("block_sizes", ()), ("block_sizes", (1 << 40,))]
)
def test_options_that_measure_nothing_are_refused(name: str, value: Any) -> None:
    with pytest.raises(BadInputError, match=name):
        GrpcBenchOptions(**{name: value})
