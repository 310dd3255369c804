"""Which of the packages that a GPU needs are installed."""

from __future__ import annotations

from importlib import metadata

PACKAGES = ("nvidia-ml-py", "cuda-bindings", "nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12", "triton", "torch")


def installed_packages() -> dict[str, str]:
    """Versions by distribution; an empty text for what is not installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = ""
    return found
