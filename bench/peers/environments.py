"""Environments of peers: each a virtual environment in the user's cache folder, made when it is first needed.

Nothing is installed into the system: Debian packages that are missing are downloaded and unpacked beside the
environment's Python, whose programs and libraries then come first for the peer's processes alone.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from kvstore.errors import UnavailableError

_INSTALL_S_MAX = 1800.0
_READY = "ready.json"
_REASON_CHARACTERS = 300

_MISSING_OF_BARE = """
import importlib.metadata, json, sys
from pip._vendor.packaging.requirements import Requirement
parsed = [Requirement(text) for name in sys.argv[1:] for text in importlib.metadata.requires(name) or []]
print(json.dumps([[r.name, str(r).split(";")[0].strip()] for r in parsed
                  if r.marker is None or r.marker.evaluate({"extra": ""})]))
"""


@dataclass(frozen=True, slots=True)
class Debian:
    """A package that is needed unless ``provides``, a program or a shared library, is there already."""

    package: str
    provides: str


@dataclass(frozen=True, slots=True)
class Environment:
    """What goes into it. ``bare``: installed without what it names as needed, which then is, without ``left_out``."""

    name: str
    pip: tuple[str, ...]
    bare: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    debian: tuple[Debian, ...] = ()


@dataclass(frozen=True, slots=True)
class Place:
    """How to run something in an environment."""

    python: str
    variables: Mapping[str, str] = field(default_factory=dict)


def default_folder() -> Path:
    """Where environments are kept: below ``$XDG_CACHE_HOME``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvstore" / "peers"


def own_place() -> Place:
    """This program's own environment."""
    return Place(sys.executable)


def ready(environment: Environment, folder: Path) -> Place:
    """Make the environment, if it is not there as it is described now. Blocks, for minutes the first time.

    Raises UnavailableError with the reason if it can't be had.
    """
    home = folder / environment.name
    recipe = json.loads(json.dumps(asdict(environment)))
    try:
        if _recipe_of(home) != recipe:
            shutil.rmtree(home, ignore_errors=True)
            home.mkdir(parents=True)
            _make(environment, home)
            (home / _READY).write_text(json.dumps(recipe))
    except OSError as error:
        raise UnavailableError(f"{home}: {error.strerror or error}") from error
    return Place(str(_python(home)), _variables(home))


def _recipe_of(home: Path) -> object:
    try:
        return json.loads((home / _READY).read_text())
    except (FileNotFoundError, ValueError):
        return None


def _make(environment: Environment, home: Path) -> None:
    _run([sys.executable, "-m", "venv", str(home)], home)
    pip = [str(_python(home)), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    _run([*pip, *environment.pip], home)
    if environment.bare:
        _run([*pip, "--no-deps", *environment.bare], home)
        names = [re.split(r"[=<>!~ ]", each)[0] for each in environment.bare]
        listed: list[tuple[str, str]] = json.loads(_run([str(_python(home)), "-c", _MISSING_OF_BARE, *names], home))
        _run([*pip, *(text for name, text in listed if name not in environment.left_out)], home)
    missing = [each.package for each in environment.debian if not _is_there(each.provides)]
    if missing:
        _unpack(missing, home)


def _unpack(packages: list[str], home: Path) -> None:
    """Download Debian packages and unpack them below ``home``; as any user, and nothing of the system changes."""
    for program in ("apt-get", "dpkg-deb"):
        if shutil.which(program) is None:
            raise UnavailableError(f"{', '.join(packages)} must be installed: there is no {program} here to fetch them")
    downloads = home / "debian"
    downloads.mkdir()
    _run(["apt-get", "-q", "download", *packages], downloads)
    for package in downloads.glob("*.deb"):
        _run(["dpkg-deb", "-x", str(package), str(downloads)], downloads)
        package.unlink()


def _is_there(provides: str) -> bool:
    if ".so" not in provides:
        return shutil.which(provides) is not None
    listed = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=False)
    return provides in listed.stdout.split()


def _python(home: Path) -> Path:
    return home / "bin" / "python"


def _variables(home: Path) -> dict[str, str]:
    programs = [str(home / "bin"), *(str(home / "debian" / each) for each in ("usr/bin", "usr/sbin"))]
    libraries = [str(each) for each in _library_folders(home / "debian")]
    return {
        "PATH": os.pathsep.join([*programs, os.environ.get("PATH", os.defpath)]),
        **({"LD_LIBRARY_PATH": os.pathsep.join(libraries)} if libraries else {}),
    }


def _library_folders(root: Path) -> Iterator[Path]:
    for base in (root / "usr/lib", root / "lib"):
        yield from sorted({each.parent for each in base.glob("*/*.so*")})


def _run(command: list[str], folder: Path) -> str:
    """Standard output. Raises UnavailableError with the end of what the command had to say."""
    try:
        done = subprocess.run(  # noqa: S603 - commands of this module
            command, cwd=folder, capture_output=True, text=True, timeout=_INSTALL_S_MAX, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnavailableError(f"{command[0]}: {error}") from error
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())
        raise UnavailableError(f"{' '.join(command[:4])} ... failed: {said[-_REASON_CHARACTERS:]}")
    return done.stdout
