"""Evaluates a checkpoint as its training does: `python -m jaxlaunch.trainer.evaluation FOLDER`.

This is a separate process, because the launcher never imports jax. It prints one JSON object and
exits with a code of the contract.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from jaxlaunch import contract, programs
from jaxlaunch.contract import Key
from jaxlaunch.runs.journal import replace_non_finite
from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.evaluation.task_model import load_task_model
from jaxlaunch.trainer.start.process import print_result


def main() -> int:
    """Evaluate a checkpoint, print the result as JSON, and return the exit code."""
    options = programs.read_options(programs.Evaluate, "jaxlaunch.trainer.evaluation", __doc__)

    def evaluate_checkpoint() -> dict[str, Any]:
        if (train := os.environ.get(contract.TRAIN_SPEC)) is None:
            raise SpecError(f"{contract.TRAIN_SPEC} is not set; `launcher eval` sets it")
        notes: list[str] = []
        step, ema = options.step, options.ema
        model = load_task_model(options.folder, train, step=step, ema=ema, note=notes.append)
        means, classification = model.report()
        examples = int(means.pop(Key.EXAMPLES))
        result: dict[str, Any] = {"step": model.step, "metrics": replace_non_finite(means)}
        result |= {"examples": examples, "notes": notes}
        return result if classification is None else result | {"classification": classification}

    return print_result(evaluate_checkpoint)


if __name__ == "__main__":
    sys.exit(main())
