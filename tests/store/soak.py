"""The two-tier model for hours: ``python -m tests.store.soak --seeds 1000``. Prints how to repeat what it finds."""

from __future__ import annotations

import argparse
import logging
import random
import sys
import tempfile
import traceback
from pathlib import Path

from kvstore.offload import WritePolicy
from tests.store.test_two_tier_model import TwoTierMachine


def one_run(policy: WritePolicy, seed: int, n_steps: int, folder: Path) -> str:
    """One history; an empty string, or where and how it failed."""
    kind = type("Machine", (TwoTierMachine,), {"policy": policy, "base": folder})
    machine: TwoTierMachine = kind()
    dice = random.Random(seed)
    step = -1
    try:
        machine.begin(dice)
        for step in range(n_steps):
            machine.one_step(dice)
            if step % 40 == 0:
                machine.check_disk()
        machine.teardown()
    except Exception:  # any, as it is what this looks for
        machine.rig.abandon()
        return f"policy {policy}, seed {seed}, step {step}:\n{traceback.format_exc(limit=-4)}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="how many histories per policy")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--steps", type=int, default=400, help="steps of each history")
    parser.add_argument("--policy", choices=list(WritePolicy), action="append", help="all unless given")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    n_failed = 0
    for seed in range(options.first, options.first + options.seeds):
        for policy in options.policy or list(WritePolicy):
            with tempfile.TemporaryDirectory() as folder:
                if found := one_run(WritePolicy(policy), seed, options.steps, Path(folder)):
                    n_failed += 1
                    sys.stdout.write(found)
    sys.stdout.write(f"{options.seeds} seeds, {n_failed} failures\n")
    return int(n_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
