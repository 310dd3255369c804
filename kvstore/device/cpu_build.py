"""Compiles the CUDA kernels for this CPU, once for each version of their source, into the user's cache.

Needs g++, no CUDA. What was compiled is found again by a digest of the sources, the flags and the compiler's version.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from kvstore.device.kernel_cache import digest_of, kept
from kvstore.device.kernels import KERNELS, SOURCE
from kvstore.errors import DeviceError

_SHIM = SOURCE.parent / "shim"
_SHIM_SOURCES = (_SHIM / "driver.cpp", _SHIM / "cuda_on_cpu.hpp")
_FLAGS = (
    "-x", "c++", "-std=c++17", "-O2", "-g1", "-shared", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off",
    "-Wall", "-Wextra", "-Wno-unknown-pragmas",
)  # fmt: skip
_SANITIZE_FLAGS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")
_COMPILE_TIMEOUT_S = 120.0


def compiled(source: Path = SOURCE, *, sanitize: bool = False) -> Path:
    """The shared object of a source with all kernels; blocks for seconds where it must be compiled first.

    ``sanitize`` adds AddressSanitizer and UndefinedBehaviorSanitizer. Raises DeviceError if there is no g++, it fails,
    or the cache (``$XDG_CACHE_HOME``) can't be used.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        raise DeviceError(
            "g++ is missing: running the kernels without a GPU needs it; install g++ (Debian: apt-get install g++)"
        )
    names = " ".join(f"KV_KERNEL({name})" for name in KERNELS)
    flags = [*_FLAGS, *(_SANITIZE_FLAGS if sanitize else ()), f"-DKV_KERNELS={names}"]
    digest = digest_of(
        *(path.read_bytes() for path in (source, *_SHIM_SOURCES)),
        _version(compiler),
        *(each.encode() for each in flags),
    )
    command = [compiler, *flags, f'-DKV_SOURCE="{source.absolute()}"', str(_SHIM / "driver.cpp"), "-o"]
    return kept(f"kernels-{digest}.so", lambda path: _run([*command, str(path)]))


def sanitizer_runtime() -> Path:
    """What must be in ``LD_PRELOAD`` of a process that loads a sanitized library. Raises DeviceError without g++."""
    compiler = shutil.which("g++")
    if compiler is None:
        raise DeviceError("g++ is missing: it has the run-time library of AddressSanitizer; install g++")
    return Path(_run([compiler, "-print-file-name=libasan.so"]).stdout.decode().strip()).resolve()


def _version(compiler: str) -> bytes:
    return _run([compiler, "-dumpfullversion", "-dumpmachine"]).stdout


def _run(command: list[str]) -> subprocess.CompletedProcess[bytes]:
    environment = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}
    try:
        return subprocess.run(command, check=True, capture_output=True, timeout=_COMPILE_TIMEOUT_S, env=environment)  # noqa: S603
    except subprocess.CalledProcessError as error:
        told = error.stderr.decode(errors="replace").strip()
        raise DeviceError(
            f"g++ could not compile the kernels for this CPU (exit {error.returncode}): {told[:2000]}"
        ) from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DeviceError(f"g++ could not be run to compile the kernels for this CPU: {error}") from error
