"""GPUs, and one that is simulated, behind one protocol: ``Device``; ``open_device`` opens one by name."""

from __future__ import annotations

from kvstore.device.choose import open_device
from kvstore.device.pinned import PinnedBuffer
from kvstore.device.seam import Device, DeviceFacts

__all__ = ["Device", "DeviceFacts", "PinnedBuffer", "open_device"]
