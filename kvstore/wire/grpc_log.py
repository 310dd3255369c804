"""What gRPC's own library writes to standard error by itself: nothing, unless somebody wants it.

Its lines are in no log format, among JSON lines for example, and what they say is in the errors, too.
"""

from __future__ import annotations

import os

VERBOSITY_VARIABLE = "GRPC_VERBOSITY"
"""gRPC's: ``ERROR``, ``INFO`` or ``DEBUG`` bring its lines back."""


def quieten() -> None:
    """Call it before grpc is imported, which is when it looks."""
    os.environ.setdefault(VERBOSITY_VARIABLE, "NONE")
