"""The process that learns: a parcel of episodes comes in, a parcel with a model goes out, and it ends."""

from __future__ import annotations

import os
import sys

from kvstore.prefix_index.policies.hazard_model import fit
from kvstore.prefix_index.policies.hazard_parcel import pack_answer, unpack_request
from kvstore.prefix_index.policies.hazard_worth import worth_table

_NICE = 10


def main() -> None:
    """Read all of standard input, write to standard output. Anything wrong ends it with a traceback and code 1."""
    os.nice(_NICE)
    model = fit(*unpack_request(sys.stdin.buffer.read()))
    sys.stdout.buffer.write(pack_answer(model, worth_table(model)))
    sys.stdout.buffer.flush()
