"""Evaluates a checkpoint as its training does: `python -m jaxlaunch.trainer.evaluation FOLDER`, with TRAIN_SPEC.

A process of its own, because the launcher never imports jax. Prints one JSON object; exits with a code of the contract.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from jaxlaunch import contract
from jaxlaunch.contract import Key
from jaxlaunch.trainer.checkpoint import stored_model
from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.evaluation.trained import load
from jaxlaunch.trainer.metrics.progress import finite
from jaxlaunch.trainer.start.process import print_result


def main() -> int:
    """Evaluates as the arguments say and prints the means as JSON; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m jaxlaunch.trainer.evaluation", description=__doc__)
    parser.add_argument("folder", help="folder or URL of checkpoints")
    parser.add_argument("--step", type=stored_model.step, help="the step to evaluate, or best; default: the newest")
    parser.add_argument("--ema", action="store_true", help="the moving average instead of the weights")
    options = parser.parse_args()

    def find() -> dict[str, Any]:
        """The result."""
        if (train := os.environ.get(contract.TRAIN_SPEC)) is None:
            raise SpecError(f"{contract.TRAIN_SPEC} is not set; `launcher eval` sets it")
        notes: list[str] = []
        found = load(options.folder, train, step=options.step, ema=options.ema, note=notes.append)
        means = found.evaluate()
        examples = means.pop(Key.EXAMPLES)
        return {"step": found.step, "metrics": finite(means), "examples": int(examples), "notes": notes}

    return print_result(find)


if __name__ == "__main__":
    sys.exit(main())
