"""Compiling for the CPU: once, into a folder of the user's own, and a clear word where that can't be."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.device.cpu_build import compiled, sanitizer_runtime
from kvstore.device.kernels import SOURCE
from kvstore.errors import DeviceError

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is missing: kernels can't be compiled")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "kvstore" / "kernels"


@needs_compiler
def test_a_source_is_compiled_once_wherever_it_lies(cache: Path, tmp_path: Path) -> None:
    first = compiled()
    written = first.stat().st_mtime_ns
    copied = Path(shutil.copy(SOURCE, tmp_path / "other.cu"))
    assert compiled() == compiled(copied) == first
    assert first.stat().st_mtime_ns == written
    assert list(cache.iterdir()) == [first]
    assert cache.stat().st_mode & 0o077 == 0
    copied.write_text(SOURCE.read_text() + "// changed\n")
    assert compiled(copied) != first


@needs_compiler
def test_processes_that_compile_at_once_get_the_same(cache: Path) -> None:
    program = "from kvstore.device.on_cpu import load_kernels; load_kernels(); print('loaded')"
    processes = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) for _ in range(2)]
    assert [process.communicate(timeout=120)[0] for process in processes] == [b"loaded\n"] * 2
    assert [each.suffix for each in cache.iterdir()] == [".so"]


@needs_compiler
def test_what_the_compiler_says_is_told_and_nothing_left(cache: Path, tmp_path: Path) -> None:
    source = tmp_path / "wrong.cu"
    source.write_text(SOURCE.read_text() + "\nint wrong = missing;\n")
    with pytest.raises(DeviceError, match=r"could not compile the kernels for this CPU \(exit 1\): (?s:.*)missing"):
        compiled(source)
    assert list(cache.iterdir()) == []


def test_no_compiler_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        DeviceError, match=r"g\+\+ is missing: running the kernels without a GPU needs it; install g\+\+"
    ):
        compiled()
    with pytest.raises(DeviceError, match=r"g\+\+ is missing"):
        sanitizer_runtime()


def test_a_compiler_that_does_not_run_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "g++").write_text("#!/nonexistent\n")
    (tmp_path / "g++").chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DeviceError, match=r"g\+\+ could not be run"):
        compiled()


@needs_compiler
def test_a_folder_that_others_can_write_is_not_trusted(cache: Path) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    with pytest.raises(DeviceError, match=r"others than this user can write to .*chmod 700"):
        compiled()


@needs_compiler
def test_no_folder_for_the_cache_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(DeviceError, match=r"no folder for the compiled kernels: .*; set XDG_CACHE_HOME"):
        compiled()


def test_import_of_the_package_compiles_nothing(tmp_path: Path) -> None:
    program = "import kvstore.device.copy_kernels, kvstore.device.page_kernels, kvstore.device.on_cpu"
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment, timeout=60)
    assert list(tmp_path.iterdir()) == []
