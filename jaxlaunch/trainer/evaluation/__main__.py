"""Evaluates a checkpoint as its training does: `python -m jaxlaunch.trainer.evaluation FOLDER`, with TRAIN_SPEC.

A process of its own, because the launcher never imports jax. Prints one JSON object; exits with a code of the contract.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from jaxlaunch import contract, programs
from jaxlaunch.contract import Key
from jaxlaunch.runs.journal import finite
from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.evaluation.trained import load
from jaxlaunch.trainer.start.process import print_result


def main() -> int:
    """Evaluates as the arguments say and prints the means as JSON; returns the exit code."""
    asked = programs.read(programs.Evaluate, "jaxlaunch.trainer.evaluation", __doc__)

    def find() -> dict[str, Any]:
        if (train := os.environ.get(contract.TRAIN_SPEC)) is None:
            raise SpecError(f"{contract.TRAIN_SPEC} is not set; `launcher eval` sets it")
        notes: list[str] = []
        found = load(asked.folder, train, step=asked.step, ema=asked.ema, note=notes.append)
        means, told = found.report()
        examples = means.pop(Key.EXAMPLES)
        return {"step": found.step, "metrics": finite(means), "examples": int(examples), "notes": notes} | (
            {} if told is None else {"classification": told}
        )

    return print_result(find)


if __name__ == "__main__":
    sys.exit(main())
