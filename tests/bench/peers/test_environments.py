"""Environments of peers, made for real with what needs no network."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path

import pytest

from kvstore.bench.peers import environments
from kvstore.bench.peers.environments import Debian, Environment, ready
from kvstore.errors import UnavailableError


def package(folder: Path, name: str, needs: str = "") -> str:
    """A wheel of a tiny distribution."""
    place = folder / f"{name}-1-py3-none-any.whl"
    info = f"{name}-1.dist-info"
    with zipfile.ZipFile(place, "w") as wheel:
        wheel.writestr(f"{name}.py", "WHAT = 'installed'\n")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n{needs}")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return str(place)


@pytest.mark.slow
def test_an_environment_is_made_once_and_anew_when_its_description_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = Environment("small", (package(tmp_path, "kvpeerone"),))
    place = ready(environment, tmp_path / "cache")
    code = "import kvpeerone, sys; print(kvpeerone.WHAT, sys.prefix)"
    said = subprocess.run([place.python, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert said == ["installed", str(tmp_path / "cache" / "small")]
    assert place.variables["PATH"].startswith(f"{tmp_path}/cache/small/bin:")

    with monkeypatch.context() as patch:
        patch.setattr(environments, "_make", lambda *_: pytest.fail("made again"))
        assert ready(environment, tmp_path / "cache") == place
    other = Environment("small", (package(tmp_path, "kvpeertwo"),))
    ready(other, tmp_path / "cache")
    assert subprocess.run([place.python, "-c", "import kvpeerone"], capture_output=True, check=False).returncode == 1


@pytest.mark.slow
def test_what_is_installed_bare_brings_what_it_names_but_for_what_is_left_out(tmp_path: Path) -> None:
    needed = package(tmp_path, "kvpeerneeded")
    needs = (
        f"Requires-Dist: kvpeerneeded @ file://{needed}\nRequires-Dist: kvpeerhuge\n"
        "Requires-Dist: kvpeernot; extra == 'x'\n"
    )
    bare = f"kvpeerbare @ file://{package(tmp_path, 'kvpeerbare', needs)}"
    place = ready(Environment("bare", ("pip",), bare=(bare,), left_out=("kvpeerhuge",)), tmp_path / "cache")
    subprocess.run([place.python, "-c", "import kvpeerbare, kvpeerneeded"], check=True)


@pytest.mark.slow
def test_one_that_can_not_be_made_says_why_and_is_tried_again(tmp_path: Path) -> None:
    environment = Environment("none", (str(tmp_path / "there-is-no-such-folder"),))
    for _ in range(2):
        with pytest.raises(UnavailableError, match=r"pip install .*there-is-no-such-folder"):
            ready(environment, tmp_path / "cache")


def test_what_debian_has_already_is_not_fetched() -> None:
    assert environments._is_there(Debian("libc6", "libc.so.6").provides)
    assert environments._is_there("sh")
    assert not environments._is_there("libthereisnosuch.so.1")
    assert not environments._is_there("there-is-no-such-program")


def test_without_debians_tools_the_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UnavailableError, match=r"librare, libother must be installed: there is no apt-get"):
        environments._unpack(["librare", "libother"], tmp_path)
