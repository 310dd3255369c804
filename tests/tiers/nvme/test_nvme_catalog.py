"""The catalog alone: durable transactions, bounded size, and damage that is noticed before it hurts."""

from __future__ import annotations

import shutil
from pathlib import Path

import lmdb
import numpy as np
import pytest

from kvstore.tiers.nvme.catalog import Catalog, CatalogError, read_names
from kvstore.tiers.nvme.names import RECORD, Records, items, place_keys, seal

ROOM = 1 << 20


def some_names(n: int, start: int = 0) -> Records:
    records = np.zeros(n, RECORD)
    at = start + np.arange(n)
    records["place"]["log_seq"], records["place"]["page"] = 1 + at // 300, 2 + at % 300
    records["value"]["key"] = np.random.default_rng(start).integers(0, 256, (n, 16), dtype=np.uint8)
    records["value"]["pages"], records["value"]["age"] = 1, at
    seal(records)
    return records


def keys_of(records: Records) -> list[bytes]:
    return place_keys(records["place"]["log_seq"].astype(np.int64), records["place"]["page"].astype(np.int64))


def pieces(records: Records) -> set[bytes]:
    raw = records.tobytes()
    return {raw[at : at + RECORD.itemsize] for at in range(0, len(raw), RECORD.itemsize)}


def made(path: Path, records: Records, room_bytes: int = ROOM) -> Catalog:
    return Catalog(path, room_bytes, records)


def test_what_was_committed_is_read_in_order(tmp_path: Path) -> None:
    records = some_names(1000)
    catalog = made(tmp_path / "catalog", records[:100])
    catalog.commit(items(records[100:]), [])
    catalog.commit([], keys_of(records[::3]))
    catalog.close()
    kept = np.delete(records, np.arange(0, 1000, 3))
    found = read_names(tmp_path / "catalog")
    assert found is not None
    assert found.tobytes() == kept.tobytes()
    again = made(tmp_path / "catalog", found)
    assert again.n_names == len(kept)
    assert again.read() == dict(items(kept))
    again.close()


def test_a_name_that_is_not_there_may_be_removed(tmp_path: Path) -> None:
    catalog = made(tmp_path / "catalog", some_names(3))
    catalog.commit([], [*keys_of(some_names(2)), *keys_of(some_names(5, 100))])
    assert catalog.n_names == 1
    catalog.close()


def test_missing_or_unfinished_is_unreadable(tmp_path: Path) -> None:
    assert read_names(tmp_path / "nothing") is None
    (tmp_path / "empty").mkdir()
    assert read_names(tmp_path / "empty") is None
    made(tmp_path / "catalog", some_names(10)).close()
    with lmdb.open(str(tmp_path / "catalog"), max_dbs=2) as env, env.begin(write=True) as writing:
        writing.delete(b"complete", db=env.open_db(b"facts", txn=writing))
    assert read_names(tmp_path / "catalog") is None


def test_making_it_anew_replaces_what_was_there(tmp_path: Path) -> None:
    made(tmp_path / "catalog", some_names(50)).close()
    made(tmp_path / "catalog", some_names(5, 1000)).close()
    found = read_names(tmp_path / "catalog")
    assert found is not None
    assert found.tobytes() == some_names(5, 1000).tobytes()


def test_damage_gives_what_was_there_or_nothing(tmp_path: Path) -> None:
    """Any byte changed, the file cut anywhere: never other names, never the end of this process."""
    records = some_names(400)
    made(tmp_path / "catalog", records).close()
    data = tmp_path / "catalog" / "data.mdb"
    whole = data.read_bytes()
    rng = np.random.default_rng(5)
    n_noticed = 0
    for i in range(60):
        bad = bytearray(whole)
        if i % 6 == 5:
            bad = bad[: int(rng.integers(0, len(bad)))]
        elif i % 6 == 4:
            at = int(rng.integers(0, len(bad) // 4096)) * 4096
            bad[at : at + 4096] = rng.bytes(4096)
        else:
            bad[int(rng.integers(0, len(bad)))] ^= 1 << int(rng.integers(0, 8))
        data.write_bytes(bad)
        found = read_names(tmp_path / "catalog")
        n_noticed += found is None
        if found is not None:
            assert pieces(found) <= pieces(records)
    assert n_noticed > 10


def test_full_of_names_it_still_takes_names_out(tmp_path: Path) -> None:
    catalog = made(tmp_path / "catalog", some_names(0), 256 << 10)
    live: list[bytes] = []
    start = 0
    with pytest.raises(CatalogError) as caught:  # noqa: PT012 - one of many fails
        while start < 20_000:
            records = some_names(20, start)
            catalog.commit(items(records), [])
            live += keys_of(records)
            start += 20
    assert caught.value.full
    assert len(live) > 200
    rng = np.random.default_rng(6)
    for _ in range(20):  # random ones: most pages change
        gone = [live.pop(int(rng.integers(len(live)))) for _ in range(len(live) // 2)]
        catalog.commit([], gone)
    assert catalog.n_names == len(live)
    assert sorted(catalog.read()) == sorted(live)
    for _ in range(5):
        catalog.commit(items(some_names(20, start)), [])
        start += 20
    assert (tmp_path / "catalog" / "data.mdb").stat().st_size <= 256 << 10
    catalog.close()


def test_it_can_be_written_again_after_a_failure(tmp_path: Path) -> None:
    catalog = made(tmp_path / "catalog", some_names(10))
    catalog.close()
    (tmp_path / "catalog").rename(tmp_path / "away")
    (tmp_path / "catalog").write_text("no folder")
    with pytest.raises(CatalogError) as caught:
        catalog.commit(items(some_names(10, 50)), [])
    assert not caught.value.full
    (tmp_path / "catalog").unlink()
    (tmp_path / "away").rename(tmp_path / "catalog")
    catalog.commit(items(some_names(10, 50)), [])
    assert catalog.n_names == 20
    catalog.close()


@pytest.mark.parametrize("batch", [16, 512, 4096])
def test_at_most_400_bytes_a_name_on_the_disk(tmp_path: Path, batch: int) -> None:
    """Names come and go, the oldest first with survivors, at the size of a tier that is full."""
    catalog = made(tmp_path / "catalog", some_names(0), 16 << 20)
    rng = np.random.default_rng(7)
    n_live, live, start = 4096, list[bytes](), 0
    while start < 4 * n_live:
        records = some_names(batch, start)
        start += batch
        keys = keys_of(records)
        n_gone = max(len(live) + batch - n_live, 0)
        gone = {int(i) for i in rng.permutation(min(2 * n_gone, len(live)))[:n_gone]}
        catalog.commit(items(records), [live[i] for i in gone])
        live = [key for i, key in enumerate(live) if i not in gone] + keys
    assert len(live) == n_live
    assert catalog.file_bytes / n_live <= 400
    catalog.close()
    shutil.rmtree(tmp_path / "catalog")
