"""The model of durability against scripts whose outcome is plain, and against a shadow kept by the test."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.tiers.nvme.crash import MODES, Crashed, CrashFiles, Mode
from kvstore.tiers.nvme.direct import DirectFiles
from kvstore.tiers.nvme.files import SECTOR_BYTES
from kvstore.tiers.nvme.memory import TORN_BYTES, Bytes, aligned, extent_of

S = SECTOR_BYTES


def random_bytes(length: int, seed: int = 0) -> Bytes:
    return aligned(np.random.default_rng(seed).integers(1, 256, length, dtype=np.uint8))


class After:
    """Directories as a power cut now would leave them."""

    def __init__(self, files: CrashFiles, folder: Path) -> None:
        self.files = files
        self.folder = folder
        self.n = 0

    def __call__(self, mode: Mode = "drop_unsynced", seed: int = 0) -> dict[str, bytes]:
        self.n += 1
        target = self.folder / str(self.n)
        self.files.materialize(target, mode, seed)
        return {path.name: path.read_bytes() for path in target.iterdir() if path.is_file()}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "live"
    path.mkdir()
    return path


@pytest.fixture
def files(directory: Path) -> CrashFiles:
    return CrashFiles(directory, DirectFiles(directory))


@pytest.fixture
def after(files: CrashFiles, tmp_path: Path) -> After:
    return After(files, tmp_path)


def put(files: CrashFiles, handle: int, sector: int, data: Bytes) -> None:
    assert files.write(handle, [extent_of(sector * S, data)]).tolist() == [len(data)]


def test_bytes_are_durable_with_their_sync_and_names_with_the_directory(files: CrashFiles, after: After) -> None:
    data = random_bytes(2 * S)
    handle = files.create("a", 4 * S)
    put(files, handle, 1, data)
    files.sync(handle)
    assert after() == {}, "bytes without a name"
    files.sync_directory()
    whole = bytes(S) + data.tobytes() + bytes(S)
    assert after() == {"a": whole}
    put(files, handle, 0, data)
    assert after() == {"a": whole}
    files.sync(handle)
    assert after() == {"a": data.tobytes() + data[S:].tobytes() + bytes(S)}
    files.close(handle)


def test_a_name_may_be_durable_before_the_bytes(files: CrashFiles, after: After) -> None:
    handle = files.create("a", 2 * S)
    put(files, handle, 0, random_bytes(2 * S))
    files.sync_directory()
    assert after() == {"a": b""}
    files.close(handle)


def test_sync_covers_one_file_only(files: CrashFiles, after: After) -> None:
    a, b = files.create("a", S), files.create("b", S)
    files.sync(a)
    files.sync(b)
    files.sync_directory()
    put(files, a, 0, random_bytes(S, 1))
    put(files, b, 0, random_bytes(S, 2))
    files.sync(b)
    assert after() == {"a": bytes(S), "b": random_bytes(S, 2).tobytes()}
    files.close(a)
    files.close(b)


def test_renames_and_removals_need_the_directory_too(files: CrashFiles, after: After) -> None:
    for name, seed in (("a", 1), ("b", 2), ("c", 3)):
        handle = files.create(name, S)
        put(files, handle, 0, random_bytes(S, seed))
        files.sync(handle)
        files.close(handle)
    files.sync_directory()
    a, b, c = (random_bytes(S, seed).tobytes() for seed in (1, 2, 3))
    files.remove("c")
    files.rename("a", "b")
    assert files.names() == ["b"]
    assert after() == {"a": a, "b": b, "c": c}
    possible = [{"a": a, "b": b, "c": c}, {"a": a, "b": b}, {"b": a, "c": c}, {"b": a}]
    found = [after("reordered", seed) for seed in range(40)]
    assert all(state in possible for state in found)
    assert all(state in found for state in possible)
    files.sync_directory()
    assert all(after(mode, seed) == {"b": a} for mode in MODES for seed in range(5))


def test_a_file_renamed_before_its_name_is_durable_has_one_name_or_none(files: CrashFiles, after: After) -> None:
    handle = files.create("a", S)
    files.sync(handle)
    files.rename("a", "b")
    assert {tuple(after("reordered", seed)) for seed in range(40)} == {(), ("a",), ("b",)}
    files.close(handle)


def test_a_recycled_file_keeps_its_old_bytes_until_sync(files: CrashFiles, after: After) -> None:
    old, new = random_bytes(S, 1), random_bytes(S, 2)
    handle = files.create("a", S)
    put(files, handle, 0, old)
    files.sync(handle)
    files.sync_directory()
    files.rename("a", "b")
    put(files, handle, 0, new)
    files.sync_directory()
    assert after() == {"b": old.tobytes()}
    files.sync(handle)
    assert after() == {"b": new.tobytes()}
    files.close(handle)


def test_small_files_are_old_or_new(files: CrashFiles, after: After) -> None:
    files.write_small("a", b"old")
    assert after() == {"a": b"old"}
    states: list[list[dict[str, bytes]]] = []
    files.at_point = lambda _: states.append([after(mode, seed) for mode in MODES for seed in range(12)])
    files.write_small("a", b"new, longer")
    assert files.points[-2:] == ["write_small: data", "write_small: name"]
    assert all(state == {"a": b"old"} for state in states[0])
    assert states[1][0] == {"a": b"old"}
    assert {state["a"] for state in states[1]} == {b"old", b"new, longer"}
    assert after() == {"a": b"new, longer"} == {"a": files.read_small("a")}


def test_what_was_there_before_is_durable(directory: Path, tmp_path: Path) -> None:
    data = random_bytes(2 * S)
    (directory / "a").write_bytes(data.tobytes())
    files = CrashFiles(directory, DirectFiles(directory))
    handle = files.open("a")
    put(files, handle, 0, random_bytes(S, 1))
    assert After(files, tmp_path)() == {"a": data.tobytes()}
    files.close(handle)


def test_a_torn_write_comes_after_whole_ones_and_before_none(files: CrashFiles, after: After) -> None:
    n_writes = 4
    handle = files.create("a", n_writes * 8 * S)
    files.sync(handle)
    files.sync_directory()
    for i in range(n_writes):
        put(files, handle, i * 8, random_bytes(8 * S, i))
    expected = np.concatenate([random_bytes(8 * S, i) for i in range(n_writes)]).reshape(n_writes, -1, TORN_BYTES)
    torn_at, leading, scattered = set(), 0, 0
    for seed in range(60):
        image = np.frombuffer(after("torn_last_write", seed)["a"], dtype=np.uint8).reshape(expected.shape)
        is_new = (image == expected).all(axis=2)
        assert (is_new | (image == 0).all(axis=2)).all(), "a piece is there wholly or not at all"
        whole = is_new.all(axis=1)
        cut = int(whole.argmin())
        assert not whole[cut], "the write at the cut is never whole"
        assert whole[:cut].all()
        assert not is_new[cut + 1 :].any()
        torn_at.add(cut)
        pieces = is_new[cut]
        is_prefix = bool((np.diff(pieces.astype(np.int8)) <= 0).all())
        leading += is_prefix and bool(pieces.any())
        scattered += not is_prefix
    assert torn_at == set(range(n_writes))
    assert leading
    assert scattered
    files.close(handle)


def test_reordered_keeps_any_part(files: CrashFiles, after: After) -> None:
    handle = files.create("a", 4 * S)
    files.sync(handle)
    files.sync_directory()
    data = random_bytes(4 * S)
    for i in range(4):
        put(files, handle, i, data[i * S : (i + 1) * S])
    seen = set()
    for seed in range(200):
        image = np.frombuffer(after("reordered", seed)["a"], dtype=np.uint8).reshape(4, S)
        is_new = (image == data.reshape(4, S)).all(axis=1)
        assert (is_new | (image == 0).all(axis=1)).all()
        seen.add(tuple(is_new.tolist()))
    assert len(seen) == 16
    files.close(handle)


def test_a_cut_before_the_size_is_durable_leaves_a_shorter_file(files: CrashFiles, after: After) -> None:
    handle = files.create("a", 8 * S)
    files.sync_directory()
    data = random_bytes(S)
    put(files, handle, 2, data)
    lengths = {len(after("reordered", seed)["a"]) for seed in range(20)}
    assert lengths == {0, 3 * S}
    files.close(handle)


def test_a_write_under_way_may_be_there_and_is_not_covered_by_a_sync(directory: Path, tmp_path: Path) -> None:
    inside, let_go = threading.Event(), threading.Event()

    class Slow(DirectFiles):
        def write(self, handle: int, extents: object) -> object:  # type: ignore[override]
            inside.set()
            assert let_go.wait(20)
            return super().write(handle, extents)  # type: ignore[arg-type]

    files = CrashFiles(directory, Slow(directory))
    after = After(files, tmp_path)
    handle = files.create("a", S)
    files.sync(handle)
    files.sync_directory()
    data = random_bytes(S)
    thread = threading.Thread(target=put, args=(files, handle, 0, data))
    thread.start()
    try:
        assert inside.wait(20)
        files.sync(handle)
        assert after() == {"a": bytes(S)}
        assert data.tobytes() in {after("reordered", seed)["a"] for seed in range(20)}
    finally:
        let_go.set()
        thread.join(20)
    assert after() == {"a": bytes(S)}
    files.sync(handle)
    assert after() == {"a": data.tobytes()}
    files.close(handle)


def test_the_catalog_is_durable_as_of_its_last_commit(files: CrashFiles, directory: Path, tmp_path: Path) -> None:
    lmdb = pytest.importorskip("lmdb")

    def catalog(n: int) -> dict[bytes, bytes] | None:
        files.materialize(tmp_path / str(n), "drop_unsynced")
        if not (tmp_path / str(n) / "catalog").exists():
            return None
        with lmdb.open(str(tmp_path / str(n) / "catalog")) as copy, copy.begin() as reading:
            return dict(reading.cursor())

    with lmdb.open(str(directory / "catalog")) as environment:
        files.set_catalog_copier(environment.copy)
        assert catalog(0) is None
        with environment.begin(write=True) as writing:
            writing.put(b"a", b"1")
        assert catalog(1) is None
        files.catalog_committed()
        assert catalog(2) == {b"a": b"1"}
        with environment.begin(write=True) as writing:
            writing.put(b"b", b"2")
        files.crash_at = len(files.points) + 1
        with pytest.raises(Crashed):
            files.catalog_committed()
        assert catalog(3) == {b"a": b"1"}
    again = CrashFiles(tmp_path / "2", DirectFiles(tmp_path / "2"))
    again.materialize(tmp_path / "4", "reordered")
    with lmdb.open(str(tmp_path / "4" / "catalog")) as copy, copy.begin() as reading:
        assert dict(reading.cursor()) == {b"a": b"1"}


def workload(files: CrashFiles) -> None:
    """Seven sync points."""
    handle = files.create("a", 4 * S)
    put(files, handle, 0, random_bytes(S, 1))
    files.sync(handle)
    files.sync_directory()
    files.write_small("small", b"1")
    put(files, handle, 1, random_bytes(S, 2))
    files.sync(handle)
    files.catalog_committed()
    files.rename("a", "b")
    files.sync_directory()
    files.close(handle)


def test_a_crash_freezes_what_is_durable_and_all_that_follows(directory: Path, tmp_path: Path) -> None:
    """Crashing at N leaves what ``at_point`` shows at N; afterwards every call says that the power is gone."""
    shown: list[list[dict[str, bytes]]] = []
    watched = CrashFiles(directory, DirectFiles(directory))
    watch = After(watched, tmp_path / "watched")
    watched.at_point = lambda _: shown.append([watch(mode, 3) for mode in MODES])
    workload(watched)
    assert len(shown) == len(watched.points) == 7
    assert shown[0][0] == {}
    assert watch() != shown[-1][0]

    for n in range(1, 8):
        folder = tmp_path / f"crash {n}"
        (folder / "live").mkdir(parents=True)
        files = CrashFiles(folder / "live", DirectFiles(folder / "live"), crash_at=n)
        with pytest.raises(Crashed, match=f"sync point {n} "):
            workload(files)
        after = After(files, folder)
        frozen = [after(mode, 3) for mode in MODES]
        assert frozen == shown[n - 1]
        calls: list[Callable[[], object]] = [
            lambda files=files: files.create("x", S),  # type: ignore[misc]
            lambda files=files: files.open("a"),  # type: ignore[misc]
            lambda files=files: files.remove("a"),  # type: ignore[misc]
            lambda files=files: files.rename("a", "x"),  # type: ignore[misc]
            lambda files=files: files.size_bytes(0),  # type: ignore[misc]
            lambda files=files: files.read(0, []),  # type: ignore[misc]
            lambda files=files: files.write(0, []),  # type: ignore[misc]
            lambda files=files: files.write_small("small", b"x"),  # type: ignore[misc]
            lambda files=files: files.read_small("small"),  # type: ignore[misc]
            files.names,
            files.sync_directory,
            files.disk_free_bytes,
            files.on_disk_bytes,
            files.catalog_committed,
        ]
        for call in calls:
            with pytest.raises(Crashed):
                call()
        assert len(files.points) == n
        assert [after(mode, 3) for mode in MODES] == frozen
    assert not issubclass(Crashed, Exception)


def test_the_same_seed_gives_the_same_directory(files: CrashFiles, after: After) -> None:
    workload(files)
    handle = files.open("b")
    for i in range(4):
        put(files, handle, i, random_bytes(S, i + 10))
    for mode in MODES:
        assert after(mode, 1) == after(mode, 1)
    assert len({after("reordered", seed)["b"] for seed in range(10)}) > 1
    files.close(handle)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_random_histories_agree_with_a_shadow(seed: int) -> None:
    """Sectors carry the number of their write. Dropped: exactly the synced numbers. Otherwise: synced or later."""
    rng = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as folder:
        live = Path(folder) / "live"
        live.mkdir()
        files = CrashFiles(live, DirectFiles(live))
        after = After(files, Path(folder))
        n_sectors = 6
        handles = {name: files.create(name, n_sectors * S) for name in "ab"}
        for handle in handles.values():
            files.sync(handle)
        files.sync_directory()
        durable = {name: [0] * n_sectors for name in "ab"}
        written: dict[str, list[list[int]]] = {name: [[] for _ in range(n_sectors)] for name in "ab"}
        for number in range(1, 30):
            name = "ab"[int(rng.integers(0, 2))]
            if rng.random() < 0.2:
                files.sync(handles[name])
                durable[name] = [
                    later[-1] if later else old for old, later in zip(durable[name], written[name], strict=True)
                ]
                written[name] = [[] for _ in range(n_sectors)]
            else:
                low = int(rng.integers(0, n_sectors))
                n = int(rng.integers(1, n_sectors - low + 1))
                put(files, handles[name], low, aligned(np.full(n * S, number, dtype=np.uint8)))
                for sector in range(low, low + n):
                    written[name][sector].append(number)
        for name, data in after().items():
            assert data == b"".join(bytes([number]) * S for number in durable[name])
        for mode in MODES[1:]:
            for name, data in after(mode, seed).items():
                for sector in range(n_sectors):
                    found = set(data[sector * S : (sector + 1) * S])
                    assert found <= {durable[name][sector], *written[name][sector]}
        for handle in handles.values():
            files.close(handle)
