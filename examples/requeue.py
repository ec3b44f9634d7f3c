"""A program that saves its state after a number of steps, and asks to be run again.

The state is a file in the run folder. The exit code 42 tells the launcher to run the program again:
`restarts.codes` in requeue.yaml.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import jax
from jax.experimental import multihost_utils

import jaxlaunch

# The exit code that asks for another attempt.
REQUEUE = 42


def main() -> None:
    """Run the steps of one attempt."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6, help="steps of the whole run")
    parser.add_argument("--limit", type=int, default=2, help="steps of one attempt")
    options = parser.parse_args()
    jax.distributed.initialize()
    state = Path(os.environ["JAXLAUNCH_RUN_DIR"]) / "step.txt"
    first = int(state.read_text()) if state.exists() else 0
    for step in range(first + 1, options.steps + 1):
        multihost_utils.sync_global_devices(f"step {step}")
        jaxlaunch.report(step=step)
        if step == options.steps or step - first == options.limit:
            if jax.process_index() == 0:
                state.write_text(str(step))
            multihost_utils.sync_global_devices("saved")
            jaxlaunch.report(committed=step)
            if step < options.steps:
                print(f"saved at step {step}: run me again", flush=True)
                sys.exit(REQUEUE)
    print(f"done at step {options.steps}", flush=True)


if __name__ == "__main__":
    main()
